"""Drawn trees of recursive speculative decoding: a constant branching factor, or stochastic beam search.

In: rows of a draft model. Out: trees whose siblings are drawn without replacement. Not here: drawing (`siblings`),
trees of points, which these policies grow as `draft_tree` does, verifying (recursive rejection sampling).

RSD-C draws as many children of every node as the branching factor of its level says. RSD-S keeps the `width` nodes of a
level with the largest perturbed scores. A score psi is minus the logarithm of the time at which the first of the texts
below a node rings, text y at rate q(y): a node's first child rings with it, and the next after a wait that is
exponential at the rate of what the children so far leave of the node. So the places of a level are used in the order of
their scores, each score is made before its token is drawn, and the score of a place depends on earlier tokens alone:
this is the distribution of the paper's perturbed scores, which draws them for the whole vocabulary.

Source: Recursive Speculative Decoding (arXiv:2402.14160); stochastic beam search: Kool et al. 2019 (arXiv:1903.06059).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import torch

from paceline.drafters.common import draft_rows
from paceline.drafters.growth.base import Growth
from paceline.drafters.growth.beam import TreeDraft
from paceline.drafters.growth.siblings import siblings_of
from paceline.utils import need

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
    """RSD-S: stochastic beam search.

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
            negative, place = heapq.heappop(heap)
            parent, family = self.front[place], families[place]
            node = self.take(parent, family)
            if node is None:
                continue
            self.scores.append(-negative)
            rate = self.reach_of(parent) * family.share
            if rate > 0.0:
                heapq.heappush(heap, (-later(-negative, rate, self._luck(node)), place))
        self.level += 1
        self.front = self.last_level(first)

    def _score_of(self, node: int) -> float:
        return 0.0 if node < 0 else self.scores[node]

    def _luck(self, node: int) -> float:
        context = self.state.context
        return draft_rows.uniform(context.seed, len(context.tokens), WAITS + node)


def branching_factors(given: object, most: int) -> tuple[int, ...]:
    """The factors that a user wrote as a list, one per level; none where something else than a list was given.

    Args:
        most: largest factor, and most levels.
    Raises:
        ConfigError: an empty list, a longer one, or a factor that is no integer in 1..`most`.
    """
    if isinstance(given, str) or not isinstance(given, Sequence):
        return ()
    whole = all(isinstance(one, int) and not isinstance(one, bool) and 1 <= one <= most for one in given)
    need(
        whole and 1 <= len(given) <= most,
        "tree_width",
        f"be a list of 1..{most} integers in 1..{most}, one per level",
        given,
    )
    return tuple(given)


def later(score: float, rate: float, luck: float) -> float:
    """The score of the next sibling: after one with `score`, at the `rate` of what is left, by a number in [0, 1)."""
    wait = max(-math.log1p(-luck), 1e-300)
    return -float(np.logaddexp(-score, math.log(wait) - math.log(rate)))
