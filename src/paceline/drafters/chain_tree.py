"""Trees without branches, made in a few microseconds.

In: tokens and confidences. Out: the tree that `TokenTree.chain` makes of them. Not here: its checks, for drafts are well formed by
their making, and the engine checks what drafters propose.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from paceline.tree.chain_columns import chain_columns, chain_sources
from paceline.tree.token_tree import TokenTree


def chain_tree(tokens: Sequence[int], confidence: Sequence[float], source: int) -> TokenTree:
    """`TokenTree.chain` without its checks; columns that follow from the length are shared among all chains of that length."""
    count = len(tokens)
    parents, depths, slots, kinds = chain_columns(count)
    chances = np.array([min(chance, 1.0) for chance in confidence], np.float32)
    return TokenTree(np.array(tokens, np.int32), parents, depths, chain_sources(count, source), chances, slots, kinds)
