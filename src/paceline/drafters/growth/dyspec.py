"""DySpec: the node budget goes, one by one, to the positions most likely to be reached and accepted.

Drawn: a heap holds *slots*, positions where a child can be added, with v, the draft's own estimate that the position is
reached. The largest v gets the next node; it leaves two slots, for the next sibling with v times what the token leaves
of the residual it was drawn from, and for the node's first child with v times the token's share of it, so that a node's
reach is the product of the raw q along its path. The choice of a slot looks at v alone; the token is drawn.

Points (temperature 0, and requests with a seed): the same greed with tokens by rank ends with the most likely paths of
the draft. They are found by expanding the most likely nodes whose children may still be among them.

A slot whose row is not known needs a pass of the draft model. With it go others that will probably be needed: rows are
cheap, passes are not. The tree does not depend on that.

The layer-wise variant: every position worth more than a threshold gets a child, and one pass of the draft model serves
a whole level. Siblings are added while v >= c; with c about 1 / nodes the tree comes near the budget. Where the budget
is used up first, the positions of a level with the largest v have come first.

Source: DySpec: Faster Speculative Decoding with Dynamic Token Tree Structure (arXiv:2410.11744), algorithm 1 and the
layer-wise variant.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import Final

import torch

from paceline.drafters.growth.base import Growth, Ranked, Siblings, siblings_of
from paceline.tree import ROOT

ROWS: Final = 8
"""Most rows of one pass of the draft model for one sequence."""

Slot = tuple[float, int, int, int]
"""-v, then what decides among equals: depth and age; the parent."""


@dataclass(slots=True)
class _BestFirst(Growth):
    """What both forms share: levels are asked for when their first node would be drafted."""

    def _may_descend(self, parent: int) -> bool:
        """Whether the level below `parent` is drafted; once denied, it stays so."""
        below = len(self.path_of(parent)) + 1
        if below > self.depth:
            return False
        if below > max(self.level, 1):
            if not self.go_on(below, self.reach_of(parent), None):
                self.depth = below - 1
                return False
            self.level = below
        return True


@dataclass(slots=True)
class DySpecDraft(_BestFirst):
    """A tree of drawn nodes that grows at its most promising position.

    Attributes:
        heap: slots, the largest v first. families: node -> its children, where its row is known.
        popped: v of the nodes so far, in the order in which they were added.
    """

    heap: list[Slot] = field(default_factory=lambda: [(-1.0, 0, 0, ROOT)])
    families: dict[int, Siblings] = field(default_factory=dict)
    popped: list[float] = field(default_factory=list)
    age: int = 0

    def expand(self, weights_fv: torch.Tensor) -> None:
        """Add nodes until a row is missing, the budget is used up, or no slot is left."""
        families = siblings_of(self.state.context, weights_fv, drawn=True, most=self.nodes)
        self.families.update(zip(self.front, families, strict=True))
        self.front = []
        while self.heap and len(self.tokens) < self.nodes:
            parent = self.heap[0][-1]
            if not self._may_descend(parent):
                heapq.heappop(self.heap)
            elif parent not in self.families:
                self.front = self._wanted()
                return
            else:
                self._take(heapq.heappop(self.heap))

    def _take(self, slot: Slot) -> None:
        """Draw one node at a slot, and enter the two slots that it leaves."""
        worth, parent = -slot[0], slot[-1]
        family = self.families[parent]
        node = self.take(parent, family)
        if node is None:
            return
        self.popped.append(worth)
        self._push(self.reach_of(parent) * family.share, parent)
        self._push(self.reach[node], node)

    def _push(self, worth: float, parent: int) -> None:
        depth = len(self.path_of(parent))
        if worth > 0.0 and depth < self.depth:
            self.age += 1
            heapq.heappush(self.heap, (-worth, depth, self.age, parent))

    def _wanted(self) -> list[int]:
        """The nodes whose rows come next: the first slot's, and others that the rest of the budget would reach at
        present.
        """
        likely = heapq.nsmallest(self.nodes - len(self.tokens), self.heap)
        missing = [slot[-1] for slot in likely if slot[-1] not in self.families and slot[1] < max(self.level, 1)]
        return missing[:ROWS]


@dataclass(slots=True)
class DySpecPoints(_BestFirst, Ranked):
    """Grows a tree of the draft's most likely paths.

    Attributes:
        waiting: nodes that were not expanded yet, as a heap of (-reach, number).
    """

    waiting: list[tuple[float, int]] = field(default_factory=list)

    def expand(self, weights_fv: torch.Tensor) -> None:
        """Give the front those children that may be among the best, and choose the next front."""
        for node in self.enter(weights_fv, self.nodes):
            heapq.heappush(self.waiting, (-self.reach[node], node))
        self.front = []
        while self.waiting and len(self.front) < ROWS and -self.waiting[0][0] > self.bar:
            node = heapq.heappop(self.waiting)[1]
            if self._may_descend(node):
                self.front.append(node)


@dataclass(slots=True)
class ThresholdDraft(Growth):
    """A tree whose levels take all that is worth it.

    Attributes:
        threshold: least v of a child; the tree's first child is taken whatever its v.
    """

    threshold: float = 0.0

    def expand(self, weights_fv: torch.Tensor) -> None:
        """Give the front its children, positions with the largest v first.

        Nodes whose children may be worth it come next, most likely reached first.
        """
        first = len(self.tokens)
        families = siblings_of(self.state.context, weights_fv, drawn=self.drawn, most=self.nodes - first)
        heap = [
            (-self.reach_of(p) * family.share, i)
            for i, (p, family) in enumerate(zip(self.front, families, strict=True))
        ]
        heapq.heapify(heap)
        while heap and len(self.tokens) < self.nodes:
            negative, index = heapq.heappop(heap)
            if negative == 0.0 or (-negative < self.threshold and self.tokens):
                break
            parent, family = self.front[index], families[index]
            if self.take(parent, family) is not None:
                heapq.heappush(heap, (-self.reach_of(parent) * family.share, index))
        self.level += 1
        self.front = sorted(self.last_level(first, self.threshold), key=lambda node: -self.reach[node])
