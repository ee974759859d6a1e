"""SpecTr's drafts: independent chains from one root, which share the nodes on which they agree.

In: rows of a draft model. Out: trees drawn with replacement, in which equal draws of a place count apart. Not here:
verifying (k-SEQ, `acceptance_method` "k_seq"), trees of points, which this policy grows as `draft_tree` does.

How many draws a place gets is settled by the chains that reached it, before its tokens are drawn.

Source: SpecTr: fast speculative decoding via optimal transport (arXiv:2310.15141).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from paceline.drafters.common.draft_rows import draw_for
from paceline.drafters.growth.base import Growth
from paceline.tree import GroupTrial


@dataclass(slots=True)
class ChainsDraft(Growth):
    """Several chains, drawn together.

    Attributes:
        width: chains. on: node -> chains that go through it. made: draws so far.
    """

    width: int = 1
    on: dict[int, int] = field(default_factory=dict)
    made: int = 0

    def expand(self, weights_fv: torch.Tensor) -> None:
        """Go on with every chain that reached the front, as far as the budget goes, and choose the next front."""
        first = len(self.tokens)
        left = self.nodes - first
        for parent, row_v in zip(self.front, weights_fv.softmax(-1), strict=True):
            number = min(self.on.get(parent, self.width), left)
            left -= number
            self._draw(parent, row_v, number)
        self.level += 1
        self.front = self.last_level(first)

    def _draw(self, parent: int, row_v: torch.Tensor, number: int) -> None:
        """Draw with replacement; the trials share the row, by which k-SEQ knows them."""
        children: dict[int, int] = {}
        for _ in range(number):
            found = draw_for(self.state.context, row_v, (), self.made)
            if found is None:
                return
            token, chance = found
            if token not in children:
                children[token] = self.add(parent, token, chance)
            node = children[token]
            self.on[node] = self.on.get(node, 0) + 1
            self.trials.setdefault(parent, []).append(GroupTrial(node, row_v, order=self.made, group=number))
            self.made += 1
