"""Drawn trees of two published methods; trees of points they grow as `levels` does.

*Recursive speculative decoding* (arXiv:2402.14160) draws siblings without replacement. RSD-C draws as many children of
every node as the branching factor of its level says. RSD-S keeps the `width` nodes of a level with the largest
perturbed scores (stochastic beam search: Kool et al. 2019, arXiv:1903.06059). A score psi is minus the logarithm of the
time at which the first of the texts below a node rings, text y at rate q(y): a node's first child rings with it, and
the next after a wait that is exponential at the rate of what the children so far leave of the node. So the positions of
a level are used in the order of their scores, each score is made before its token is drawn, and the score of a position
depends on earlier tokens alone: this is the distribution of the paper's perturbed scores, which draws them for the
whole vocabulary.

*SpecTr* (arXiv:2310.15141; verified by `acceptance_method` "k_seq") draws independent chains from one root, which share
the nodes on which they agree; equal draws of a position count apart. How many draws a position gets is decided by the
chains that reached it, before its tokens are drawn.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import torch

from paceline.drafters.common import draft_rows
from paceline.drafters.common.draft_rows import chances_of, draw_for
from paceline.drafters.growth.base import Growth, siblings_of
from paceline.drafters.growth.levels import TreeDraft
from paceline.tree import GroupTrial

WAITS: Final = 1 << 32
"""Numbers of the draws that are waits, apart from those that are tokens."""


@dataclass(slots=True)
class BranchingDraft(TreeDraft):
    """RSD-C: all nodes of a level have equally many children, as far as the budget goes.

    Attributes:
        factors: children of the root, of each of its children, and so on; none where all levels have `width`.
    """

    factors: tuple[int, ...] = ()

    def expand(self, weights_fv: torch.Tensor) -> None:
        """Give the front its children and choose the next front."""
        if self.factors:
            self.width = self.factors[self.level]
        TreeDraft.expand(self, weights_fv)

    def _next_front(self, first: int) -> list[int]:
        return self.last_level(first)


@dataclass(slots=True)
class BeamDraft(Growth):
    """Grows a tree by stochastic beam search, as RSD-S does.

    Attributes:
        width: nodes of a level.
        scores: psi of each node; the root has 0.
    """

    width: int = 1
    scores: list[float] = field(default_factory=list)

    def expand(self, weights_fv: torch.Tensor) -> None:
        """Give the front its children, largest scores first, and choose the next front."""
        first = len(self.tokens)
        families = siblings_of(self.state.context, weights_fv, drawn=True, most=self.width)
        heap = [(-self._score_of(parent), i) for i, parent in enumerate(self.front)]
        heapq.heapify(heap)
        stop = min(first + self.width, self.nodes)
        while heap and len(self.tokens) < stop:
            negative, index = heapq.heappop(heap)
            parent, family = self.front[index], families[index]
            node = self.take(parent, family)
            if node is None:
                continue
            self.scores.append(-negative)
            rate = self.reach_of(parent) * family.share
            if rate > 0.0:
                heapq.heappush(heap, (-later(-negative, rate, self._luck(node)), index))
        self.level += 1
        self.front = self.last_level(first)

    def _score_of(self, node: int) -> float:
        return 0.0 if node < 0 else self.scores[node]

    def _luck(self, node: int) -> float:
        context = self.state.context
        return draft_rows.uniform(context.seed, len(context.tokens), WAITS + node)


def later(score: float, rate: float, luck: float) -> float:
    """The score of the next sibling: after one with `score`, at the `rate` of what is left, by a number in [0, 1)."""
    wait = max(-math.log1p(-luck), 1e-300)
    return -float(np.logaddexp(-score, math.log(wait) - math.log(rate)))


@dataclass(slots=True)
class ChainsDraft(Growth):
    """Grows several chains that are drawn together.

    Attributes:
        width: chains. on: node -> chains that go through it. draws: draws so far.
    """

    width: int = 1
    on: dict[int, int] = field(default_factory=dict)
    draws: int = 0

    def expand(self, weights_fv: torch.Tensor) -> None:
        """Go on with every chain that reached the front, as far as the budget goes, and choose the next front."""
        first = len(self.tokens)
        left = self.nodes - first
        for parent, row_v in zip(self.front, chances_of(weights_fv), strict=True):
            number = min(self.on.get(parent, self.width), left)
            left -= number
            self._draw(parent, row_v, number)
        self.level += 1
        self.front = self.last_level(first)

    def _draw(self, parent: int, row_v: torch.Tensor, number: int) -> None:
        """Draw with replacement; the trials share the row, by which k-SEQ knows them."""
        children: dict[int, int] = {}
        for _ in range(number):
            drawn = draw_for(self.state.context, row_v, (), self.draws)
            if drawn is None:
                return
            token, chance = drawn
            if token not in children:
                children[token] = self.add(parent, token, chance)
            node = children[token]
            self.on[node] = self.on.get(node, 0) + 1
            self.trials.setdefault(parent, []).append(GroupTrial(node, row_v, order=self.draws, group=number))
            self.draws += 1
