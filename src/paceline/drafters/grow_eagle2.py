"""EAGLE-2's dynamic trees: expand the most likely nodes of each level, then rank all nodes again and keep the best.

In: rows of the expanded nodes. Out: a tree of points. Not here: EAGLE's heads; this is its way to grow, with a draft model's rows.

On each level the `width` nodes with the most likely paths get their `width` most likely children; in the end the nodes with the
most likely paths stay, which always hold their parents. All are points: a drawn tree that is cut by what came up breaks the output
law, so above temperature 0 children are chosen by rank as well, and the verifier's own draw looks whether it is among them.

Source: EAGLE-2: Faster Inference of Language Models with Dynamic Draft Trees (arXiv:2406.16858); 10 children and nodes a level.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

from paceline.drafters.grow import Ranked

WIDTH: Final = 10


@dataclass(slots=True)
class Eagle2Draft(Ranked):
    """A tree that is expanded by levels and ranked again in the end.

    Attributes:
        width: nodes expanded on a level, and children of each.
    """

    width: int = WIDTH

    def expand(self, weights_fv: torch.Tensor) -> None:
        """Give the front its children; the most likely ones come next, unless no child of theirs could be among the best."""
        new = sorted(self.enter(weights_fv, self.width), key=lambda node: -self.reach[node])[: self.width]
        new = [node for node in new if self.reach[node] > self.bar]
        self.level += 1
        self.front = new if new and self.level < self.depth and self.go_on(self.level + 1, self.reach[new[0]], None) else []
