"""Trees that grow level by level: a beam (the default where `tree_width` is above 1), EAGLE-2, and static shapes.

*Point* trees take the `width` most likely tokens of every expanded node and keep the nodes most likely reached. *Drawn*
trees draw `width` tokens of every expanded node without replacement (recursive rejection sampling, arXiv:2402.14160):
how many are drawn where is decided before the draws of the level are made, and nothing is cut afterwards.

*EAGLE-2* (arXiv:2406.16858; 10 children and nodes a level) gives children to the nodes of a level with the most likely
paths; in the end the nodes with the most likely paths of all stay, which always hold their parents. All are points: a
drawn tree that is cut by what came up breaks the output distribution, so above temperature 0 children are chosen by
rank as well, and the verifier's own draw looks whether it is among them.

*Greedy draft sampling* (for `acceptance_method` "greedy_draft_sampling"; Towards optimal multi-draft speculative
decoding, arXiv:2502.18779): all children of a node but one are its likeliest tokens, and one is drawn from the others.

*Static trees* have the same shape at every step, filled with candidates by rank. Shapes are given as vLLM's
`speculative_token_tree`, or (PPD) come with the budget from a controller that has learned which ranks the target takes
and measured what rows cost. Source: Medusa (arXiv:2401.10774); Hardware-Aware Parallel Prompt Decoding
(arXiv:2405.18628).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import torch

from paceline.drafters.common.draft_rows import best_tokens, chances_of, draw_for
from paceline.drafters.growth.base import Growth, Ranked
from paceline.tree import ROOT, Shape, Trial, best_shapes

EAGLE2_WIDTH: Final = 10
"""Of EAGLE-2, by default."""


@dataclass(slots=True)
class TreeDraft(Growth):
    """Grows a tree level by level.

    Attributes:
        width: children of a node, and nodes expanded on a level.
    """

    width: int = 1

    def expand(self, weights_fv: torch.Tensor) -> None:
        """Give the front its children and choose the next front."""
        first = len(self.tokens)
        if self.drawn:
            self._draw(chances_of(weights_fv))
        else:
            for parent, tokens, chances in zip(self.front, *best_tokens(weights_fv, self.width), strict=True):
                for token, chance in zip(tokens, chances, strict=True):
                    if chance > 0.0:
                        self.add(parent, token, chance)
        self.level += 1
        self.front = self._next_front(first)

    def _draw(self, q_fv: torch.Tensor) -> None:
        for parent, row_v in zip(self.front, q_fv, strict=True):
            removed: tuple[int, ...] = ()
            for node in range(len(self.tokens), min(len(self.tokens) + self.width, self.nodes)):
                drawn = draw_for(self.state.context, row_v, removed, node)
                if drawn is None:
                    break
                self.trials.setdefault(parent, []).append(Trial(node, row_v, removed))
                self.add(parent, *drawn)
                removed = (*removed, drawn[0])

    def _next_front(self, first: int) -> list[int]:
        """The nodes of the last level worth expanding, most likely reached first; none when the tree is done."""
        new = sorted(range(first, len(self.tokens)), key=lambda node: -self.reach[node])[: self.width]
        if not new or self.level >= self.depth or (self.drawn and len(self.tokens) >= self.nodes):
            return []
        if not self.drawn and len(self.tokens) >= self.nodes:
            bar = sorted(self.reach, reverse=True)[self.nodes - 1]
            new = [node for node in new if self.reach[node] > bar]
        return new if new and self.go_on(self.level + 1, self.reach[new[0]], None) else []


@dataclass(slots=True)
class GreedyDraft(TreeDraft):
    """Drawn trees of points and one draw at a position: `width` children of each of the `width` likeliest nodes of a
    level.
    """

    def _draw(self, q_fv: torch.Tensor) -> None:
        for parent, row_v in zip(self.front, q_fv, strict=True):
            room = min(self.width, self.nodes - len(self.tokens))
            if room < 1:
                return
            top = row_v.topk(min(room, len(row_v)))
            pairs = list(zip(top.indices.tolist(), top.values.tolist(), strict=True))
            points = [(token, chance) for token, chance in pairs[: room - 1] if chance > 0.0]
            taken = tuple(token for token, _ in points)
            trials = [Trial(self.add(parent, token, min(chance, 1.0))) for token, chance in points]
            drawn = draw_for(self.state.context, row_v, taken, len(self.tokens))
            if drawn is not None:
                trials.append(Trial(self.add(parent, *drawn), row_v, taken))
                self.trials[parent] = trials


@dataclass(slots=True)
class Eagle2Draft(Ranked):
    """A tree that is expanded by levels and ranked again in the end.

    Attributes:
        width: nodes expanded on a level, and children of each.
    """

    width: int = EAGLE2_WIDTH

    def expand(self, weights_fv: torch.Tensor) -> None:
        """Give the front its children.

        The most likely ones come next, unless no child of theirs could be among the best.
        """
        new = sorted(self.enter(weights_fv, self.width), key=lambda node: -self.reach[node])[: self.width]
        new = [node for node in new if self.reach[node] > self.bar]
        self.level += 1
        self.front = (
            new if new and self.level < self.depth and self.go_on(self.level + 1, self.reach[new[0]], None) else []
        )


@dataclass(slots=True)
class StaticDraft(Growth):
    """A tree of a given shape, without what has no token of its rank.

    Attributes:
        shape: nodes and levels within the limits. positions: node -> its place in the shape; ROOT has -1.
    """

    shape: Shape = field(default_factory=lambda: best_shapes([], 0))
    positions: dict[int, int] = field(default_factory=lambda: {ROOT: -1})

    def __post_init__(self) -> None:
        self.shape = self.shape.cut(self.nodes, self.depth)
        self.depth = int(self.shape.depths_n.max(initial=0))
        if not len(self.shape):
            self.front = []

    def expand(self, weights_fv: torch.Tensor) -> None:
        """Give the front its children, and go on with those that have children in the shape."""
        first, shape = len(self.tokens), self.shape
        wanted = {node: (shape.parents_n == self.positions[node]).nonzero()[0].tolist() for node in self.front}
        most = 1 + max(int(shape.ranks_n[position]) for positions in wanted.values() for position in positions)
        for parent, tokens, chances in zip(self.front, *best_tokens(weights_fv, most), strict=True):
            for position in wanted[parent]:
                rank = int(shape.ranks_n[position])
                if rank < len(tokens) and chances[rank] > 0.0:
                    self.positions[self.add(parent, tokens[rank], chances[rank])] = position
        self.level += 1
        inner = set(shape.parents_n.tolist())
        new = [node for node in range(first, len(self.tokens)) if self.positions[node] in inner]
        self.front = new if new and self.go_on(self.level + 1, max(self.reach[node] for node in new), None) else []
