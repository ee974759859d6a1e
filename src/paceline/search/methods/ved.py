"""VED, the search of V-STAR: short structured texts, where a value of partial texts says which are worth going on with.

A beam makes the first tree. Then the search walks down it, again and again, to the place of the highest value with some
bonus for what the model is unsure about and for what was visited little, and adds a token there, if the place is no
worse than others of its depth. Source: Spend Search Where It Pays: Value-Guided Structured Sampling and Optimization
for Generative Recommendation (arXiv:2602.10699).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from math import log, sqrt
from statistics import fmean
from typing import Final

import torch

from paceline.search.base import Search, Steps
from paceline.search.branch import Branch, Found
from paceline.search.methods.beam import likeliest
from paceline.search.methods.cautious import entropy
from paceline.search.named import Scorer, named, numbers
from paceline.utils import integer, need, number

MOST_TOKENS: Final = 1024
"""Of those that may follow a text, so many of the likeliest can be added to the tree."""


@dataclass(slots=True, eq=False)
class _Node:
    """A text in the tree.

    Attributes:
        worth: its value and the bonus for entropy. tokens: that may follow and are not in the tree, likeliest first;
            logprobs: theirs (t,).
    """

    branch: Branch
    value: float
    worth: float
    tokens: list[int] = field(default_factory=list)
    logprobs: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    children: list[_Node] = field(default_factory=list)
    visits: int = 0

    def take(self, place: int) -> tuple[int, float]:
        """The token at a place, which is then not offered again, and its log-probability."""
        logprob = float(self.logprobs[place])
        self.logprobs = torch.cat([self.logprobs[:place], self.logprobs[place + 1 :]])
        return self.tokens.pop(place), logprob


class Ved(Search):
    """Budgeted tree search by a value of partial texts, among the tokens that the request's rules allow.

    For texts of few tokens from few allowed ones: set `max_tokens`, and `structured_outputs` or `allowed_token_ids`.
    Texts come back by their value. At temperature 0 the likeliest token that is missing is added, above it one is
    sampled.

    Args:
        value: of texts so far (behind the prompt), ended or not, finite numbers, one each: a callable that takes a
            list, or "module:function". It is asked once for every text of the tree.
        beam_width: of the beam that makes the first tree.
        budget_multiplier: the budget is so many times what that beam may cost, 1 + (max_tokens - 1) * beam_width rows;
            a text that is added to the tree later costs one.
        entropy_weight: of the entropy of the next token, in nats, added to the value.
        exploration: of what was visited little.
        gated: go on from no text that is worth less than the mean of those of its length.
    Raises:
        ConfigError: a value outside its range, no value.
    """

    name = "ved"
    drops_dead_ends = True

    def __init__(
        self,
        value: Scorer | str | None = None,
        *,
        beam_width: int = 8,
        budget_multiplier: float = 2.0,
        entropy_weight: float = 0.1,
        exploration: float = 1.0,
        gated: bool = True,
    ) -> None:
        super().__init__()
        integer("beam_width", beam_width, 1, 256)
        number("budget_multiplier", budget_multiplier, 1.0, 1e6, "be in 1..1000000")
        number("entropy_weight", entropy_weight, 0.0, 1e6, "be 0 or more")
        number("exploration", exploration, 0.0, 1e6, "be 0 or more")
        need(isinstance(gated, bool), "gated", "be True or False", gated)
        self.value, self.width, self.multiplier = named("value", value), beam_width, budget_multiplier
        self.entropy_weight, self.exploration, self.gated = entropy_weight, exploration, gated
        self._draws, self.branches = count(), beam_width
        self._depths: dict[int, list[float]] = {}  # worth of the texts that go on, by length

    def steps(self, root: Branch) -> Steps[None]:
        budget = int(self.multiplier * (1 + (root.request.max_tokens - 1) * self.width))
        (start,) = self._nodes([root])
        budget -= yield from self._beam(start)
        while budget > 0 and (path := self._selected(start)):
            budget -= 1
            node = path[-1]
            (child,) = self._nodes([node.branch.child(*node.take(self._drawn(node)))])
            node.children.append(child)
            if not child.branch.ended:
                rows = yield [child.branch]
                self._open(child, rows.logprobs[0])
            for visited in [*path, child]:
                visited.visits += 1
        self.alive = self.kept = []

    def score(self, branch: Branch) -> float:
        return self._values([branch])[0]

    def _beam(self, start: _Node) -> Steps[int]:
        """Make the first tree; the rows that it cost."""
        spent, level = 0, [start]
        while level:
            branches = [node.branch for node in level]
            self.alive = [] if self.found else branches
            rows = yield branches
            spent += len(level)
            for node, logprobs in zip(level, rows.logprobs, strict=True):
                self._open(node, logprobs)
            best = likeliest(branches, rows.logprobs, self.width)
            owners = [level[beam] for _, beam, _ in best]
            pairs = [owner.take(owner.tokens.index(token)) for owner, (_, _, token) in zip(owners, best, strict=True)]
            children = self._nodes([owner.branch.child(*pair) for owner, pair in zip(owners, pairs, strict=True)])
            for owner, child in zip(owners, children, strict=True):
                owner.children.append(child)
            level = [child for child in children if not child.branch.ended]
        return spent

    def _nodes(self, branches: Sequence[Branch]) -> list[_Node]:
        """Their nodes; ended ones are found."""
        nodes = [_Node(branch, value, value) for branch, value in zip(branches, self._values(branches), strict=True)]
        self.found += [Found(node.branch, node.value) for node in nodes if node.branch.ended]
        return nodes

    def _values(self, branches: Sequence[Branch]) -> list[float]:
        return numbers("value", self.value([branch.written() for branch in branches]), len(branches))

    def _open(self, node: _Node, logprobs: torch.Tensor) -> None:
        """Note what may follow a text, log-probabilities (v,)."""
        top = logprobs.topk(min(MOST_TOKENS, int(logprobs.isfinite().sum())))
        node.tokens, node.logprobs = top.indices.tolist(), top.values.clone()
        node.worth = node.value + self.entropy_weight * entropy(logprobs)
        self._depths.setdefault(node.branch.length, []).append(node.worth)
        self.kept.append(node.branch)

    def _drawn(self, node: _Node) -> int:
        return node.branch.draw(node.logprobs.log_softmax(-1), next(self._draws))

    def _selected(self, start: _Node) -> list[_Node]:
        """The way from the prompt to the text that is gone on from; empty where there is none."""
        means = {depth: fmean(worths) for depth, worths in self._depths.items()}
        reach = self._reach(start, means)
        if start not in reach:
            return []
        path = [start]
        while True:
            node = path[-1]
            choices = [child for child in node.children if child in reach]
            if self._expandable(node, means):
                choices.append(node)
            best = max(choices, key=lambda child: self._promise(child, start.visits))
            if best is node:
                return path
            path.append(best)

    def _promise(self, node: _Node, visits: int) -> float:
        return node.worth + self.exploration * sqrt(log(visits + 1) / (node.visits + 1))

    def _expandable(self, node: _Node, means: dict[int, float]) -> bool:
        fine = not self.gated or node.worth >= means[node.branch.length] - 1e-9
        return bool(node.tokens) and fine

    def _reach(self, start: _Node, means: dict[int, float]) -> set[_Node]:
        """Nodes at or below which there is one to go on from."""
        order = [start]
        for node in order:
            order += [child for child in node.children if not child.branch.ended]
        reach: set[_Node] = set()
        for node in reversed(order):
            if self._expandable(node, means) or not reach.isdisjoint(node.children):
                reach.add(node)
        return reach
