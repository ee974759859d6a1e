"""EAGLE-2's dynamic trees: expand the most likely nodes of each level, then rank all nodes again and keep the best.

In: rows of the expanded nodes. Out: a tree of points. Not here: EAGLE's heads; this is its way to grow, with a draft model's rows.

On each level the `width` nodes with the most likely paths get their `width` most likely children; in the end the nodes with the
most likely paths stay, which always hold their parents. All are points: a drawn tree that is cut by what came up breaks the output
law, so above temperature 0 children are chosen by rank as well, and the verifier's own draw looks whether it is among them.

Source: EAGLE-2: Faster Inference of Language Models with Dynamic Draft Trees (arXiv:2406.16858); 10 children and nodes a level.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import torch

from paceline.drafters.draft_rows import best
from paceline.drafters.grow import Growth, Ranking
from paceline.tree.select import select
from paceline.tree.token_tree import EMPTY_TREE, TokenTree

WIDTH: Final = 10


@dataclass(slots=True)
class Eagle2Draft(Growth):
    """A tree that is expanded by levels and ranked again in the end.

    Attributes:
        width: nodes expanded on a level, and children of each.
        ranking: what a node must reach to stay in the end; others are not entered.
    """

    width: int = WIDTH
    ranking: Ranking = field(init=False)

    def __post_init__(self) -> None:
        self.ranking = Ranking(self.nodes)

    def expand(self, weights_fv: torch.Tensor) -> None:
        """Give the front its children and choose the next front."""
        first = len(self.tokens)
        for parent, tokens, chances in zip(self.front, *best(weights_fv, self.width), strict=True):
            for token, chance in zip(tokens, chances, strict=True):
                if not self.reach_of(parent) * chance > self.ranking.bar:
                    break
                self.ranking.add(self.reach[self.add(parent, token, chance)])
        self.level += 1
        self.front = self._next_front(first)

    def _next_front(self, first: int) -> list[int]:
        """The most likely nodes of the last level; none when no child of theirs could be among the best."""
        new = sorted(range(first, len(self.tokens)), key=lambda node: -self.reach[node])[: self.width]
        new = [node for node in new if self.reach[node] > self.ranking.bar]
        return new if new and self.level < self.depth and self.go_on(self.level + 1, self.reach[new[0]], None) else []

    def tree(self, source: int) -> TokenTree:
        """The nodes with the most likely paths."""
        tree = super(Eagle2Draft, self).tree(source)
        return tree if tree is EMPTY_TREE else select(tree, self.nodes)
