"""Trees without branches, made in a few microseconds.

In: tokens and confidences. Out: the tree that `TokenTree.chain` makes of them. Not here: its checks, for drafts are well formed by
their making, and the engine checks what drafters propose.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from paceline.tree.chain_columns import chain_columns, chain_sources
from paceline.tree.token_tree import COLUMNS, TokenTree

Tokens = npt.NDArray[np.int32]
Chances = npt.NDArray[np.float32]

_NOTHING: Final[Mapping[int, Any]] = MappingProxyType({})


class _Draft:
    """A `TokenTree` to be: setting a frozen one's columns takes a call for each, four times as long in all."""

    __slots__ = (*COLUMNS, "also", "trials")


def chain_tree(tokens: Sequence[int], confidence: Sequence[float], source: int) -> TokenTree:
    """`TokenTree.chain` without its checks; columns that follow from the length are shared among all chains of that length."""
    chances = np.array(confidence if max(confidence, default=0.0) <= 1.0 else [min(one, 1.0) for one in confidence], np.float32)
    return chain_of(np.array(tokens, np.int32), chances, source)


def chain_of(tokens: Tokens, confidence: Chances, source: int) -> TokenTree:
    """The same of (n,) int32 tokens and (n,) float32 chances in 0..1, which the tree keeps."""
    made: Any = _Draft()
    made.parents, made.depths, made.slots, made.kinds = chain_columns(count := len(tokens))
    made.tokens, made.sources, made.confidence = tokens, chain_sources(count, source), confidence
    made.trials = made.also = _NOTHING
    made.__class__ = TokenTree
    tree: TokenTree = made
    return tree
