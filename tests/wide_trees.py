"""A drafter whose trees are suddenly much wider than any before."""

from __future__ import annotations

from collections.abc import Sequence

from adversaries import Adversary

from paceline.drafters import Context
from paceline.tree import EMPTY_TREE, Budget, TokenTree

QUIET, WIDE = 12, 80
"""Tokens of the text beyond the prompt before the first tree; nodes of that tree."""


class Sudden(Adversary):
    """Says nothing for a while, then everything that it may."""

    taps: Sequence[int] = ()

    def tree(self, context: Context, budget: Budget) -> TokenTree:
        if len(context.tokens) - context.prompt_length < QUIET:
            return EMPTY_TREE
        tokens = self.rng(context).permutation(200)[: min(WIDE, budget.nodes)] + 5
        return TokenTree.build([int(token) for token in tokens], [-1] * len(tokens))
