"""Columns that follow from a chain's length alone, made once and shared by all chains of that length.

In: a length, a drafter's index. Out: read-only columns, and the quick check of trees that hold them. Not here: any other tree.

Shared columns lie over `bytes`, which nobody can make writable. So a tree that holds one of these very objects is right in that
column, whoever built it, and need not be looked through: that makes a chain's checks take a few microseconds.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from paceline.tree.token_tree import TokenTree

Ints = npt.NDArray[np.int32]


class ChainColumns(NamedTuple):
    """(n,) int32 each: node i continues node i - 1, has no slot, and is a candidate."""

    parents: Ints
    depths: Ints
    slots: Ints
    kinds: Ints


@lru_cache(maxsize=256)
def chain_columns(length: int) -> ChainColumns:
    """The columns of every chain of `length` nodes."""
    parents, depths = np.arange(-1, length - 1, dtype=np.int32), np.arange(1, length + 1, dtype=np.int32)
    return ChainColumns(_fixed(parents), _fixed(depths), _fixed(np.full(length, -1, np.int32)), _fixed(np.zeros(length, np.int32)))


@lru_cache(maxsize=1024)
def chain_sources(length: int, source: int) -> Ints:
    """(n,) int32: every node proposed by drafter number `source`."""
    return _fixed(np.full(length, source, np.int32))


def _fixed(column: Ints) -> Ints:
    return np.frombuffer(column.tobytes(), np.int32)


def is_sound_chain(tree: TokenTree, vocab_size: int) -> bool:
    """Whether a tree is a chain of shared columns with nothing wrong in the others; False says nothing about the tree."""
    columns = chain_columns(n := len(tree))
    if any(a is not b for a, b in zip((tree.parents, tree.depths, tree.slots, tree.kinds), columns, strict=True)) or tree.trials:
        return False
    if any(column.shape != (n,) or column.dtype != np.int32 for column in (tree.tokens, tree.sources)):
        return False
    fits = tree.confidence.shape == (n,) and all(0 <= token < vocab_size for token in tree.tokens.tolist())
    return fits and all(0.0 <= chance <= 1.0 for chance in tree.confidence.tolist())
