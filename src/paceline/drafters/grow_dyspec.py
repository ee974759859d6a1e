"""DySpec: the node budget goes, one by one, to the places most likely to be reached and accepted.

In: rows of a draft model, a number of nodes. Out: a tree grown best place first. Not here: drawing (`siblings`), the variant that
grows by levels (`grow_threshold`).

Drawn: a heap holds *slots*, places where a child can be added, with v, the draft's own estimate that the place is reached. The
largest v gets the next node; it leaves two slots, for the next sibling with v times what the token leaves of the residual it was
drawn from, and for the node's first child with v times the token's share of it, so that a node's reach is the product of the raw q
along its path. The choice of a slot looks at v alone; the token is drawn.

Points (temperature 0, and requests with a seed): the same greed with tokens by rank ends with the most likely paths of the draft.
They are found by expanding the most likely nodes whose children may still be among them.

A slot whose row is not known needs a pass of the draft model. With it go others that will probably be needed: rows are cheap,
passes are not. The tree does not depend on that.

Source: DySpec: Faster Speculative Decoding with Dynamic Token Tree Structure (arXiv:2410.11744), algorithm 1.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import Final

import torch

from paceline.drafters.draft_rows import best
from paceline.drafters.grow import Growth, Ranking
from paceline.drafters.siblings import Siblings, siblings_of
from paceline.tree.select import select
from paceline.tree.token_tree import EMPTY_TREE, ROOT, TokenTree

ROWS: Final = 8
"""Most rows of one pass of the draft model for one sequence."""

Slot = tuple[float, int, int, int]
"""-v, then what decides among equals: depth and age; the parent."""


@dataclass(slots=True)
class _BestFirst(Growth):
    """What both forms share: levels are asked for when their first node would be drafted."""

    def _may_descend(self, parent: int) -> bool:
        """Whether the level below `parent` is drafted; once refused, it stays so."""
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
    """A tree of drawn nodes that grows at its most promising place.

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
        found = siblings_of(self.state.context, weights_fv, drawn=True, most=self.nodes)
        self.families.update(zip(self.front, found, strict=True))
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
        found = family.take(len(self.tokens))
        if found is None:
            return
        token, chance, trial = found
        if trial is not None:
            self.trials.setdefault(parent, []).append(trial)
        node = self.add(parent, token, chance)
        self.popped.append(worth)
        self._push(self.reach_of(parent) * family.share, parent)
        self._push(self.reach[node], node)

    def _push(self, worth: float, parent: int) -> None:
        depth = len(self.path_of(parent))
        if worth > 0.0 and depth < self.depth:
            self.age += 1
            heapq.heappush(self.heap, (-worth, depth, self.age, parent))

    def _wanted(self) -> list[int]:
        """The nodes whose rows come next: the first slot's, and others that the rest of the budget would reach as things stand."""
        likely = heapq.nsmallest(self.nodes - len(self.tokens), self.heap)
        missing = [slot[-1] for slot in likely if slot[-1] not in self.families and slot[1] < max(self.level, 1)]
        return missing[:ROWS]


@dataclass(slots=True)
class DySpecPoints(_BestFirst):
    """The draft's most likely paths.

    Attributes:
        ranking: what a node must reach to be among the best.
        waiting: nodes that were not expanded yet, as a heap of (-reach, number).
    """

    ranking: Ranking = field(init=False)
    waiting: list[tuple[float, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.ranking = Ranking(self.nodes)

    def expand(self, weights_fv: torch.Tensor) -> None:
        """Give the front those children that may be among the best, and choose the next front."""
        for parent, tokens, chances in zip(self.front, *best(weights_fv, self.nodes), strict=True):
            for token, chance in zip(tokens, chances, strict=True):
                reach = self.reach_of(parent) * chance
                if not reach > self.ranking.bar:
                    break
                self.ranking.add(reach)
                heapq.heappush(self.waiting, (-reach, self.add(parent, token, chance)))
        self.front = []
        while self.waiting and len(self.front) < ROWS and -self.waiting[0][0] > self.ranking.bar:
            node = heapq.heappop(self.waiting)[1]
            if self._may_descend(node):
                self.front.append(node)

    def tree(self, source: int) -> TokenTree:
        """The best of all nodes."""
        tree = super(DySpecPoints, self).tree(source)
        return tree if tree is EMPTY_TREE else select(tree, self.nodes)
