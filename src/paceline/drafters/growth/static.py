"""Static trees: the same shape at every step, filled with the draft model's candidates by rank.

In: a shape, rows of a draft model. Out: a tree of points. Not here: which shape is best (`tree.static_shapes`).

Shapes are given as vLLM's `speculative_token_tree`, or (PPD) come with the budget from a controller that has learned
which ranks the target takes and measured what rows cost (`controllers.ppd`).

Source: Medusa (arXiv:2401.10774); Hardware-Aware Parallel Prompt Decoding (arXiv:2405.18628).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from paceline.drafters.common.draft_rows import best_tokens
from paceline.drafters.growth.base import Growth
from paceline.tree import ROOT, Shape, best_shapes


@dataclass(slots=True)
class StaticDraft(Growth):
    """A tree of a given shape, without what has no token of its rank.

    Attributes:
        shape: nodes and levels within the limits. places: node -> its place in the shape; ROOT has -1.
    """

    shape: Shape = field(default_factory=lambda: best_shapes([], 0))
    places: dict[int, int] = field(default_factory=lambda: {ROOT: -1})

    def __post_init__(self) -> None:
        self.shape = self.shape.cut(self.nodes, self.depth)
        if not len(self.shape):
            self.front = []

    def expand(self, weights_fv: torch.Tensor) -> None:
        """Give the front its children, and go on with those that have children in the shape."""
        first, shape = len(self.tokens), self.shape
        wanted = {node: (shape.parents_n == self.places[node]).nonzero()[0].tolist() for node in self.front}
        most = 1 + max(int(shape.ranks_n[place]) for places in wanted.values() for place in places)
        for parent, tokens, chances in zip(self.front, *best_tokens(weights_fv, most), strict=True):
            for place in wanted[parent]:
                rank = int(shape.ranks_n[place])
                if rank < len(tokens) and chances[rank] > 0.0:
                    self.places[self.add(parent, tokens[rank], chances[rank])] = place
        self.level += 1
        inner = set(shape.parents_n.tolist())
        new = [node for node in range(first, len(self.tokens)) if self.places[node] in inner]
        self.front = new if new and self.go_on(self.level + 1, max(self.reach[node] for node in new), None) else []
