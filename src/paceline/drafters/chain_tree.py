"""Trees without branches, made in a few microseconds.

In: tokens and confidences. Out: the tree that `TokenTree.chain` makes of them. Not here: its checks, for drafts are well formed by
their making, and the engine checks what drafters propose.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import numpy.typing as npt

from paceline.tree.token_tree import TokenTree

Ints = npt.NDArray[np.int32]


def chain_tree(tokens: Sequence[int], confidence: Sequence[float], source: int) -> TokenTree:
    """`TokenTree.chain` without its checks; columns that follow from the length are shared among all chains of that length."""
    parents, depths, slots, kinds, sources = _columns(len(tokens), source)
    chances = np.array(confidence, np.float32)
    return TokenTree(np.array(tokens, np.int32), parents, depths, sources, np.minimum(chances, 1.0, out=chances), slots, kinds)


@cache
def _columns(length: int, source: int) -> tuple[Ints, Ints, Ints, Ints, Ints]:
    found = (
        np.arange(-1, length - 1, dtype=np.int32),
        np.arange(1, length + 1, dtype=np.int32),
        np.full(length, -1, np.int32),
        np.zeros(length, np.int32),
        np.full(length, source, np.int32),
    )
    for column in found:
        column.flags.writeable = False
    return found
