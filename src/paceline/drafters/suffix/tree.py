"""A suffix tree of fixed depth with counts: grows token by token, forgets its oldest sequence exactly.

In: token ids. Out: the arrays that `suffix_lookup` reads. Not here: how nodes are made (`suffix_grow`), which sequences
are kept (`suffix_cache`), what is drafted.

Every suffix of a sequence is in the tree with its first `depth` tokens. The count at the root is the number of
suffixes; a child is never more frequent than its parent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from paceline.drafters.suffix import growth
from paceline.drafters.suffix.nodes import COUNT, FIELDS, LIVE, MAX_DEPTH, POS, USED, Arrays, Ints, rehash
from paceline.drafters.suffix.record import record_of

CHUNK: Final = 2048
"""Tokens taken in at a time, so that little room is kept for what may not be needed."""


class SuffixTree:
    """The suffixes of some sequences, cut at `depth` tokens.

    Args:
        depth: 1..255; the longest match and its continuation together.
        room: tokens that it can take before it grows, with two nodes for each.
    Attributes:
        arrays: see `suffix_nodes.Arrays`; replaced when the tree outgrows them.
        record: of them (`suffix_record`), for `suffix_lookup.step`.
        size: tokens in the text.
    """

    __slots__ = ("arrays", "depth", "record", "size")

    def __init__(self, depth: int, room: int = 32) -> None:
        if not 1 <= depth <= MAX_DEPTH:
            raise ValueError(f"depth must be in 1..{MAX_DEPTH}, got {depth}")
        self.depth, self.size = depth, 0
        nodes: Ints = np.empty((2 * room, FIELDS), np.int32)
        nodes[0] = (-1, 0, -1, 0, 0, -1, -1, 0)
        self._hold(
            Arrays(
                text=np.empty(room, np.int32),
                nodes=nodes,
                heads=np.full(1 << (2 * room - 1).bit_length(), -1, np.int32),
                meta=np.array([1, -1, 1, 0], np.int64),
                active=np.zeros((depth + 1, 2), np.int32),
            )
        )

    def _hold(self, arrays: Arrays) -> None:
        self.arrays, self.record = arrays, record_of(arrays)

    def grow(self, tokens: Ints) -> None:
        """Append to the one sequence of this tree, which stays open."""
        for start, stop in self._take(tokens):
            growth.extend(self.arrays, start, stop, growth.OPEN, self.depth)

    def write(self, tokens: Sequence[int]) -> int:
        """Put a few tokens behind the text for `suffix_lookup.step`, which takes them in; returns where they begin."""
        start, text, meta = self.size, self.arrays.text, self.arrays.meta
        end = start + len(tokens)
        if end > len(text) or meta.item(LIVE) + 2 * (len(tokens) + self.depth) > len(self.arrays.nodes):
            self.grow(np.array(tokens, np.int32))
            return end
        for at, token in enumerate(tokens, start):
            text[at] = token
        self.size = end
        return start

    def insert(self, tokens: Ints) -> tuple[int, int]:
        """Add a whole sequence; returns where it lies in `text`."""
        first, end = self.size, self.size + len(tokens)
        for start, stop in self._take(tokens):
            growth.extend(self.arrays, start, stop, end, self.depth)
        growth.close(self.arrays, end)
        return first, end

    def remove(self, start: int, stop: int) -> None:
        """Take out the oldest inserted sequence, which lies at `text[start:stop]`."""
        growth.remove(self.arrays, start, stop, self.depth)

    def shift(self, by: int) -> None:
        """Drop the first `by` tokens of the text, which belong to no sequence any more."""
        text, nodes = self.arrays.text, self.arrays.nodes
        text[: self.size - by] = text[by : self.size].copy()
        nodes[: int(self.arrays.meta[USED]), POS] -= np.int32(by)
        self.size -= by

    def copy(self) -> SuffixTree:
        """An independent copy."""
        twin = SuffixTree(self.depth)
        text, nodes, heads, meta, active = self.arrays
        twin.size = self.size
        twin._hold(Arrays(text.copy(), nodes.copy(), heads.copy(), meta.copy(), active.copy()))
        return twin

    @property
    def count(self) -> int:
        """Suffixes in the tree."""
        return int(self.arrays.nodes[0, COUNT])

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(array.nbytes for array in self.arrays)

    def _take(self, tokens: Ints) -> Iterator[tuple[int, int]]:
        """Copy tokens into the text and make room for their nodes, a chunk at a time."""
        end = self.size + len(tokens)
        if end > len(self.arrays.text):
            self._hold(self.arrays._replace(text=_larger(self.arrays.text, end, self.size)))
        self.arrays.text[self.size : end] = tokens
        while self.size < end:
            start, self.size = self.size, min(self.size + CHUNK, end)
            need = int(self.arrays.meta[LIVE]) + 2 * (self.size - start + self.depth)
            if need > len(self.arrays.nodes):
                self._make_room(need)
            yield start, self.size

    def _make_room(self, rows: int) -> None:
        used, heads = int(self.arrays.meta[USED]), self.arrays.heads
        nodes = _larger(self.arrays.nodes, rows, used)
        if len(nodes) > len(heads):
            heads = np.full(1 << (len(nodes) - 1).bit_length(), -1, np.int32)
            rehash(nodes, heads, used)
        self._hold(self.arrays._replace(nodes=nodes, heads=heads))


def _larger(array: Ints, length: int, used: int) -> Ints:
    """A longer array with the same first `used` rows."""
    wanted = max(length, 2 * len(array) if len(array) < 65536 else len(array) + len(array) // 4)
    made: Ints = np.empty((wanted, *array.shape[1:]), np.int32)
    made[:used] = array[:used]
    return made
