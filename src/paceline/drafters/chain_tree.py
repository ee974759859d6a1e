"""Trees without branches, made in a few microseconds.

In: tokens and confidences. Out: the tree that `TokenTree.chain` makes of them. Not here: its checks, for drafts are well formed by
their making, and the engine checks what drafters propose.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import numpy as np

from paceline.tree.chain_columns import chain_columns, chain_sources
from paceline.tree.token_tree import TokenTree

_NOTHING: Final[Mapping[int, Any]] = MappingProxyType({})


def chain_tree(tokens: Sequence[int], confidence: Sequence[float], source: int) -> TokenTree:
    """`TokenTree.chain` without its checks; columns that follow from the length are shared among all chains of that length."""
    count = len(tokens)
    parents, depths, slots, kinds = chain_columns(count)
    chances = np.array(confidence if max(confidence, default=0.0) <= 1.0 else [min(one, 1.0) for one in confidence], np.float32)
    own = np.array(tokens, np.int32)
    return TokenTree(own, parents, depths, chain_sources(count, source), chances, slots, kinds, _NOTHING, _NOTHING)
