"""Columns that follow from a chain's length alone, made once and shared by all chains of that length.

In: a length, a drafter's index. Out: read-only columns, and the quick check of trees that hold them. Not here: any
other tree.

Shared columns lie over `bytes`, which nobody can make writable. So a tree that holds one of these very objects is right
in that column, whoever built it, and need not be looked through: that makes a chain's checks take a few microseconds.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from paceline.tree.token_tree import TokenTree

Ints = npt.NDArray[np.int32]
INT: Final = np.dtype(np.int32)


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
    return ChainColumns(
        _fixed(parents), _fixed(depths), _fixed(np.full(length, -1, np.int32)), _fixed(np.zeros(length, np.int32))
    )


@lru_cache(maxsize=1024)
def chain_sources(length: int, source: int) -> Ints:
    """(n,) int32: every node proposed by drafter number `source`."""
    return _fixed(np.full(length, source, np.int32))


@lru_cache(maxsize=256)
def first_nodes(count: int) -> tuple[int, ...]:
    """0, 1, ... count - 1: the path of an accepted chain."""
    return tuple(range(count))


def _fixed(column: Ints) -> Ints:
    return np.frombuffer(column.tobytes(), np.int32)


def lone_source(tree: TokenTree) -> int:
    """The drafter of a chain of shared columns with points alone, all by one drafter; -1 says nothing about the
    tree.
    """
    n = len(tree.tokens)
    if not n or tree.trials or tree.also:
        return -1
    columns, source = chain_columns(n), tree.sources.item(0)
    shared = tree.parents is columns.parents and tree.depths is columns.depths and tree.kinds is columns.kinds
    return source if shared and tree.sources is chain_sources(n, source) else -1


def is_sound_chain(tree: TokenTree, vocab_size: int, source: int | None = None) -> bool:
    """Whether a tree is a chain of shared columns with nothing wrong in the others; False says nothing about the tree.

    Args:
        source: proposed by this drafter, as the shared column says it; None for any.
    """
    tokens, sources, confidence = tree.tokens, tree.sources, tree.confidence
    parents, depths, slots, kinds = chain_columns(n := len(tokens))
    if tree.parents is not parents or tree.depths is not depths or tree.slots is not slots or tree.kinds is not kinds:
        return False
    if tree.trials or not n or tokens.dtype != INT or not tokens.shape == confidence.shape == (n,):
        return False
    if source is None:
        if sources.dtype != INT or sources.shape != (n,):
            return False
    elif sources is not chain_sources(n, source):
        return False
    for token, chance in zip(tokens.tolist(), confidence.tolist(), strict=True):
        if not (0 <= token < vocab_size and 0.0 <= chance <= 1.0):  # a NaN is not in 0..1 either
            break
    else:
        return True
    return False
