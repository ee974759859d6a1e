"""Trees level by level: a beam of nodes is expanded on each level. The default where `tree_width` is above 1.

In: rows of the level's nodes. Out: their children, and the nodes to expand next. Not here: running the model (`grow`), chains
(`draft_chain`), other ways to grow (`tree_policies`).

*Point* trees take the `width` most likely tokens of every expanded node and keep the nodes most likely reached (EAGLE-2,
arXiv:2406.16858). *Drawn* trees draw `width` tokens of every expanded node without replacement (recursive rejection sampling,
arXiv:2402.14160): how many are drawn where is settled before the draws of the level are made, and nothing is cut afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from paceline.drafters.draft_rows import best, draws
from paceline.drafters.grow import Growth
from paceline.tree.select import select
from paceline.tree.token_tree import EMPTY_TREE, TokenTree


@dataclass(slots=True)
class TreeDraft(Growth):
    """A tree that grows level by level.

    Attributes:
        width: children of a node, and nodes expanded on a level.
    """

    width: int = 1

    def expand(self, weights_fv: torch.Tensor) -> None:
        """Give the front its children and choose the next front."""
        first = len(self.tokens)
        if self.drawn:
            self._draw(weights_fv.softmax(-1))
        else:
            for parent, tokens, chances in zip(self.front, *best(weights_fv, self.width), strict=True):
                self._add(parent, tokens, chances)
        self.level += 1
        self.front = self._next_front(first)

    def _add(self, parent: int, tokens: Sequence[int], chances: Sequence[float]) -> None:
        for token, chance in zip(tokens, chances, strict=True):
            if chance > 0.0:
                self.add(parent, token, chance)

    def _draw(self, q_fv: torch.Tensor) -> None:
        for parent, row_v in zip(self.front, q_fv, strict=True):
            start = len(self.tokens)
            numbers = range(start, min(start + self.width, self.nodes))
            trials, tokens, chances = draws(self.state.context, row_v, numbers, start)
            if trials:
                self.trials[parent] = trials
                self._add(parent, tokens, chances)

    def _next_front(self, first: int) -> list[int]:
        """The nodes of the last level worth expanding, most likely reached first; none when the tree is done."""
        new = sorted(range(first, len(self.tokens)), key=lambda node: -self.reach[node])[: self.width]
        if not new or self.level >= self.depth or (self.drawn and len(self.tokens) >= self.nodes):
            return []
        if not self.drawn and len(self.tokens) >= self.nodes:
            bar = sorted(self.reach, reverse=True)[self.nodes - 1]
            new = [node for node in new if self.reach[node] > bar]
        return new if new and self.go_on(self.level + 1, self.reach[new[0]], None) else []

    def tree(self, source: int) -> TokenTree:
        """The tree; one of points is cut to the nodes most likely reached."""
        tree = super(TreeDraft, self).tree(source)
        return tree if self.drawn or tree is EMPTY_TREE else select(tree, self.nodes)
