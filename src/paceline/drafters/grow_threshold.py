"""DySpec by levels: every place worth more than a threshold gets a child, and one pass of the draft model serves a whole level.

In: rows of a level's nodes, a threshold. Out: their children, the next level. Not here: drawing (`siblings`), growth node by node
(`grow_dyspec`), whose v this is.

Siblings are added while v >= c; with c about 1 / nodes the tree comes near the budget. Where the budget is used up first, the
places of a level with the largest v have come first.

Source: DySpec: Faster Speculative Decoding with Dynamic Token Tree Structure (arXiv:2410.11744), the layer-wise variant.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import torch

from paceline.drafters.grow import Growth
from paceline.drafters.siblings import siblings_of


@dataclass(slots=True)
class ThresholdDraft(Growth):
    """A tree whose levels take all that is worth it.

    Attributes:
        threshold: least v of a child; the tree's first child is taken whatever its v.
    """

    threshold: float = 0.0

    def expand(self, weights_fv: torch.Tensor) -> None:
        """Give the front its children, places with the largest v first, and choose the next front."""
        first = len(self.tokens)
        families = siblings_of(self.state.context, weights_fv, drawn=self.drawn, most=self.nodes - first)
        heap = [(-self.reach_of(p) * family.share, i) for i, (p, family) in enumerate(zip(self.front, families, strict=True))]
        heapq.heapify(heap)
        while heap and len(self.tokens) < self.nodes:
            negative, place = heapq.heappop(heap)
            if negative == 0.0 or (-negative < self.threshold and self.tokens):
                break
            parent, family = self.front[place], families[place]
            found = family.take(len(self.tokens))
            if found is None:
                continue
            token, chance, trial = found
            if trial is not None:
                self.trials.setdefault(parent, []).append(trial)
            self.add(parent, token, chance)
            heapq.heappush(heap, (-self.reach_of(parent) * family.share, place))
        self.level += 1
        self.front = self._next_front(first)

    def _next_front(self, first: int) -> list[int]:
        """The nodes of the last level whose children may be worth the threshold, most likely reached first."""
        new = [node for node in range(first, len(self.tokens)) if self.reach[node] >= self.threshold and self.reach[node] > 0.0]
        if not new or self.level >= self.depth or len(self.tokens) >= self.nodes:
            return []
        new.sort(key=lambda node: -self.reach[node])
        return new if self.go_on(self.level + 1, self.reach[new[0]], None) else []
