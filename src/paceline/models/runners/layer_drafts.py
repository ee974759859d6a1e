"""Drafting with part of the target's own layers over its own caches: the seam of every method of self-speculation.

The text's keys and values are those of the cache, which every layer of the plan shares with the target. Drafted
positions go to the scratch slots behind it, where the next scoring pass writes again all that it reads: nothing of a
draft is visible to verification. A sequence's cache lacks its last token, the root; so a draft begins by feeding that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from time import perf_counter
from typing import TYPE_CHECKING

import torch

from paceline.errors import CapabilityError
from paceline.models.abilities import LayeredRunner
from paceline.models.base import LayerPlan, PassResult
from paceline.tree import EMPTY_TREE, Scores, TokenTree

if TYPE_CHECKING:
    from paceline.models.base import Runner, SequenceCache

TURNS = 4
MAX_PLANS = 256
"""Plans that things are kept for: methods that go from plan to plan must not grow without end."""


class LayerDrafts:
    """Drafts by part of a model's layers: a pass by `run_layers` for each level of a batch."""

    def __init__(self, runner: LayeredRunner) -> None:
        self.runner = runner
        self._rests: dict[int, LayerPlan] = {}  # what follows an exit

    def head(self, hidden: torch.Tensor, *, norm: bool = True) -> torch.Tensor:
        """(r, v) logits of states (r, hidden) behind any layer, by the final norm (if `norm`) and the head."""
        return self.runner.head(hidden, norm=norm)

    def best(self, hidden: torch.Tensor) -> list[int]:
        """The likeliest tokens of the states (r, hidden) behind any layer; -1 where some logit is not finite."""
        return best_of(self.runner.head(hidden))

    def step(
        self,
        caches: Sequence[SequenceCache],
        fed: Sequence[Sequence[int]],
        plan: LayerPlan,
        *,
        states: bool = False,
        logits: bool = True,
    ) -> PassResult:
        """One more token of every draft.

        Args:
            fed: per sequence the root and what was drafted behind it; all but the last were fed by earlier calls
                with this plan since the last scoring pass.
            plan: which layers run; it begins at layer 0.
            states, logits: whether the hidden states, and whether the logits are wanted.
        Returns:
            Logits (r, v) after each sequence's last input, by the final norm and the head, and states (r, hidden)
            behind the last layer of the plan. Each empty unless wanted.
        """
        trees, done = _chains(fed)
        after = self.runner.run_layers(caches, [chain[0] for chain in fed], trees, plan=plan, computed=done).states
        rows = self.runner.head(after) if logits else after.new_empty(0, self.runner.info.vocab_size)
        return PassResult(rows, after if states else after[:0])

    def stream(
        self,
        caches: Sequence[SequenceCache],
        fed: Sequence[Sequence[int]],
        plans: Sequence[LayerPlan],
        moved: Callable[[int, torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        """(r, hidden) behind the last of several plans, for one more token of every draft.

        Args:
            fed: as of `step`. plans: in turn, the first from layer 0 on; layers between two of them are left out.
            moved: makes, of a plan's number and the states (r, hidden) behind it, what goes on.
        """
        trees, done = _chains(fed)
        roots, states = [chain[0] for chain in fed], None
        for number, plan in enumerate(plans):
            after = self.runner.run_layers(caches, roots, trees, plan=plan, hidden=states, computed=done).states
            states = moved(number, after)
        assert states is not None, "a stream without layers"
        return states

    def score(
        self,
        caches: Sequence[SequenceCache],
        roots: Sequence[int],
        trees: Sequence[TokenTree],
        known: Sequence[torch.Tensor],
        plan: LayerPlan,
    ) -> Scores:
        """`Runner.score` of chains whose first inputs have been through the plan.

        Only the layers behind it run for those.

        Args:
            plan: the first layers, all sub-layers of each.
            known: per sequence (n, hidden) the states of its first n inputs behind the plan's last layer, n from 0 to
                all; their keys and values are in scratch since `step`.
        """
        late = [i for i, (tree, rows) in enumerate(zip(trees, known, strict=True)) if len(rows) <= len(tree)]
        whole = list(known)
        if late:
            left = [1 + len(trees[i]) - len(known[i]) for i in late]
            arguments = [caches[i] for i in late], [roots[i] for i in late], [trees[i] for i in late]
            after = self.runner.run_layers(*arguments, plan=plan, computed=[len(known[i]) for i in late])
            for i, part in zip(late, after.states.split(left), strict=True):
                whole[i] = torch.cat((known[i], part))
        rest, runner = self._rests.setdefault(plan.stop or 0, LayerPlan(first=plan.stop or 0)), self.runner
        states = runner.run_layers(caches, roots, trees, plan=rest, hidden=torch.cat(whole)).states
        rows = tuple(accumulate((1 + len(tree) for tree in trees), initial=0))
        return Scores(runner.head(states), rows)


def _chains(fed: Sequence[Sequence[int]]) -> tuple[list[TokenTree], list[int]]:
    """Drafts as trees behind their roots, and how many inputs of each were fed before."""
    trees = [TokenTree.chain(chain[1:]) if len(chain) > 1 else EMPTY_TREE for chain in fed]
    return trees, [len(chain) - 1 for chain in fed]


def best_of(logits: torch.Tensor) -> list[int]:
    """Per row of (r, v) the token with the largest logit, -1 where some is not finite."""
    best = torch.where(logits.isfinite().all(-1), logits.argmax(-1), -1)
    tokens: list[int] = best.tolist()
    return tokens


def resuming_pays(runner: Runner, drafts: LayerDrafts, plan: LayerPlan) -> bool:
    """Whether scoring a chain takes less time where it goes on behind the layers that drafted; a few passes tell.

    A pass in two parts costs the host more, and layers whose weights must be read for one row are hardly dearer for
    many. In a context that is too short to tell, it does not.
    """
    nodes = 4
    length = min(128, runner.info.max_context - nodes - 2)
    if length < 1:
        return False
    cache = runner.open()
    try:
        runner.extend([cache], [[i % runner.info.vocab_size for i in range(length)]])
        whole, rest = [], []
        for _ in range(TURNS):
            fed, states = [0], list[torch.Tensor]()
            for _ in range(nodes):
                result = drafts.step([cache], [fed], plan, states=True)
                fed.append(int(result.logits.argmax()))
                states.append(result.states)
            trees, known, start = [TokenTree.chain(fed[1:])], torch.cat(states), perf_counter()
            drafts.score([cache], [0], trees, [known], plan)
            middle = perf_counter()
            runner.score([cache], [0], trees)
            rest.append(middle - start)
            whole.append(perf_counter() - middle)
        return min(rest) < min(whole)
    finally:
        runner.release(cache)


def layer_drafts_of(runner: Runner, method: str) -> LayerDrafts:
    """How a runner drafts with part of its layers.

    Raises:
        CapabilityError: it cannot.
    """
    if not isinstance(runner, LayeredRunner):
        raise CapabilityError(
            f"method {method!r} drafts with some of the target's own layers, "
            f"which {runner.info.name} cannot run alone; choose another method"
        )
    return LayerDrafts(runner)
