"""A suffix tree of fixed depth with counts, which grows token by token and forgets its oldest sequence exactly; and the
global one of past requests.

Every suffix of a sequence is in the tree with its first `depth` tokens. The count at the root is the number of
suffixes; a child is never more frequent than its parent.

While a sequence grows, its suffixes that occurred before run along the edges of those occurrences: the *active points*
(node, tokens matched on its edge), longest suffix first. They are always the suffixes of length 1..ACTIVE, since what
follows a longer suffix has followed the shorter ones too. A point that meets another token splits the edge and ends in
a leaf of its own, which then needs no further work: its edge reaches as far as the text will, up to the depth. So a
token costs as much as the longest match is long, at most the depth. Every suffix makes at most two nodes.

`close` ends a sequence: points within an edge split it, so that every suffix ends at a node and `remove` finds it
again. Labels point to the latest sequence that ran along the whole edge; if sequences are removed oldest first, a label
never outlives its text.

Source: Ukkonen, On-line construction of suffix trees (1995), with counts, a depth and removal added.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from paceline.drafters.common.tables import Arrays
from paceline.drafters.suffix.nodes import (
    ACTIVE,
    CHILD,
    COUNT,
    EDGE,
    FIELDS,
    LIVE,
    MAX_DEPTH,
    NEXT,
    PARENT,
    POS,
    PREV,
    USED,
    Int,
    Ints,
    Longs,
    TreeArrays,
    child_of,
    demote,
    enlist,
    enter,
    free_node,
    leave,
    new_node,
    predecessor,
    promote,
    record_of,
    rehash,
    unlist,
)
from paceline.utils import compiled, part_of_compiled

OPEN: Final = 2**31 - 1
"""The end of a sequence that still grows."""


@compiled
def extend(tree: TreeArrays, start: Int, stop: Int, end: Int, depth: Int) -> None:
    """Take in `text[start:stop]`; the sequence will not reach beyond `end`.

    There must be two free rows a token and point.
    """
    text, nodes, heads, meta, active = tree
    for at in range(start, stop):
        token, points, kept = np.int64(text[at]), meta[ACTIVE] + 1, 0
        active[points - 1, 0] = active[points - 1, 1] = 0
        nodes[0, COUNT] += 1
        for k in range(points):
            node: Int = np.int64(active[k, 0])
            child: Int = np.int64(-1)
            matched, length = np.int64(active[k, 1]), points - 1 - k
            if matched < nodes[node, EDGE] & 255:
                if text[nodes[node, POS] + matched] == token:
                    child, matched = node, matched + 1
                else:
                    node = split(tree, k, points, at)
            else:
                child = child_of(nodes, heads, node, token)
                if child >= 0:
                    nodes[child, COUNT] += 1
                    promote(nodes, child)
                    matched = np.int64(1)
            if child < 0:
                add_leaf(tree, node, token, at, min(depth - length, end - at))
                continue
            if matched == nodes[child, EDGE] & 255:
                nodes[child, POS] = at + 1 - matched
            if length + 1 < depth:
                active[kept, 0], active[kept, 1] = child, matched
                kept += 1
        meta[ACTIVE] = kept


@part_of_compiled
def add_leaf(tree: TreeArrays, parent: Int, token: Int, pos: Int, length: Int) -> None:
    """A new child that one suffix has entered."""
    nodes = tree.nodes
    leaf, first = new_node(nodes, tree.meta), nodes[parent, CHILD]
    nodes[leaf, PARENT], nodes[leaf, EDGE], nodes[leaf, POS], nodes[leaf, COUNT] = parent, token * 256 + length, pos, 1
    enlist(nodes, leaf, np.int64(nodes[first, PREV]) if first >= 0 else np.int64(-1))
    promote(nodes, leaf)
    enter(nodes, tree.heads, leaf)


@part_of_compiled
def split(tree: TreeArrays, k: Int, points: Int, at: Int) -> Int:
    """Cut the edge under point `k` where it stands, before `text[at]`; returns the new upper node.

    The points from `k` on that stand on this edge are not beyond the cut, so that they move to the upper part.
    """
    text, nodes, heads, meta, active = tree
    lower, matched = np.int64(active[k, 0]), active[k, 1]
    upper, before = new_node(nodes, meta), predecessor(nodes, lower)
    edge, parent = nodes[lower, EDGE], nodes[lower, PARENT]
    leave(nodes, heads, lower)
    unlist(nodes, lower)
    nodes[upper, PARENT], nodes[upper, EDGE], nodes[upper, POS] = parent, (edge & ~255) + matched, at - matched
    nodes[upper, COUNT] = nodes[lower, COUNT]
    enlist(nodes, upper, before)
    enter(nodes, heads, upper)
    pos = nodes[lower, POS] + matched
    nodes[lower, PARENT], nodes[lower, EDGE], nodes[lower, POS] = upper, text[pos] * 256 + (edge & 255) - matched, pos
    enlist(nodes, lower, np.int64(-1))
    enter(nodes, heads, lower)
    for j in range(k, points):
        if active[j, 0] == lower:
            active[j, 0] = upper
            nodes[lower, COUNT] -= 1
    return upper


@compiled
def close(tree: TreeArrays, stop: Int) -> None:
    """End the growing sequence at `stop`: every suffix of it ends at a node."""
    points = tree.meta[ACTIVE]
    for k in range(points):
        if tree.active[k, 1] < tree.nodes[tree.active[k, 0], EDGE] & 255:
            split(tree, k, points, stop)
    tree.meta[ACTIVE] = 0


@compiled
def remove(tree: TreeArrays, start: Int, stop: Int, depth: Int) -> None:
    """Take the closed sequence `text[start:stop]`, the oldest one, out again."""
    text, nodes, heads, meta, path = tree
    for first in range(start, stop):
        nodes[0, COUNT] -= 1
        node: Int = np.int64(0)
        at, steps, end = first, 0, min(first + depth, stop)
        while at < end:
            node = child_of(nodes, heads, node, np.int64(text[at]))
            nodes[node, COUNT] -= 1
            path[steps, 0] = node
            steps += 1
            at += nodes[node, EDGE] & 255
        while steps and nodes[path[steps - 1, 0], COUNT] == 0:
            steps -= 1
            gone = np.int64(path[steps, 0])
            leave(nodes, heads, gone)
            unlist(nodes, gone)
            free_node(nodes, meta, gone)
        for k in range(steps):
            demote(nodes, np.int64(path[k, 0]))
        if steps:
            join(nodes, heads, meta, np.int64(path[steps - 1, 0]))


@part_of_compiled
def join(nodes: Ints, heads: Ints, meta: Longs, node: Int) -> None:
    """Make one edge of a node and its child, if it has but one and no suffix ends between."""
    child = np.int64(nodes[node, CHILD])
    if child < 0 or nodes[child, NEXT] >= 0 or nodes[child, COUNT] != nodes[node, COUNT]:
        return
    before, edge = predecessor(nodes, node), nodes[node, EDGE]
    leave(nodes, heads, child)
    leave(nodes, heads, node)
    unlist(nodes, node)
    nodes[child, PARENT], nodes[child, POS] = nodes[node, PARENT], nodes[child, POS] - (edge & 255)
    nodes[child, EDGE] = edge + (nodes[child, EDGE] & 255)
    enlist(nodes, child, before)
    enter(nodes, heads, child)
    free_node(nodes, meta, node)


CHUNK: Final = 2048
"""Tokens taken in at a time, so that little room is kept for what may not be needed."""


class SuffixTree:
    """The suffixes of some sequences, cut at `depth` tokens.

    Args:
        depth: 1..255; the longest match and its continuation together.
        room: tokens that it can take before it grows, with two nodes for each.
    Attributes:
        arrays: see `TreeArrays`; replaced when the tree outgrows them.
        record: of them (`nodes.record_of`), for `drafter.step`.
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
            TreeArrays(
                text=np.empty(room, np.int32),
                nodes=nodes,
                heads=np.full(1 << (2 * room - 1).bit_length(), -1, np.int32),
                meta=np.array([1, -1, 1, 0], np.int64),
                active=np.zeros((depth + 1, 2), np.int32),
            )
        )

    def _hold(self, arrays: TreeArrays) -> None:
        self.arrays, self.record = arrays, record_of(arrays)

    def grow(self, tokens: Ints) -> None:
        """Append to the one sequence of this tree, which stays open."""
        for start, stop in self._take(tokens):
            extend(self.arrays, start, stop, OPEN, self.depth)

    def write(self, tokens: Sequence[int]) -> int:
        """Put a few tokens behind the text for `drafter.step`, which takes them in; returns where they begin."""
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
            extend(self.arrays, start, stop, end, self.depth)
        close(self.arrays, end)
        return first, end

    def remove(self, start: int, stop: int) -> None:
        """Take out the oldest inserted sequence, which lies at `text[start:stop]`."""
        remove(self.arrays, start, stop, self.depth)

    def shift(self, by: int) -> None:
        """Drop the first `by` tokens of the text, which belong to no sequence any more."""
        text, nodes = self.arrays.text, self.arrays.nodes
        text[: self.size - by] = text[by : self.size].copy()
        nodes[: int(self.arrays.meta[USED]), POS] -= np.int32(by)
        self.size -= by

    def copy(self) -> SuffixTree:
        """Make an independent copy."""
        twin = SuffixTree(self.depth)
        text, nodes, heads, meta, active = self.arrays
        twin.size = self.size
        twin._hold(TreeArrays(text.copy(), nodes.copy(), heads.copy(), meta.copy(), active.copy()))
        return twin

    @property
    def count(self) -> int:
        """Count the suffixes in the tree."""
        return int(self.arrays.nodes[0, COUNT])

    @property
    def nbytes(self) -> int:
        """Count the bytes of all arrays."""
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
    larger: Ints = np.empty((wanted, *array.shape[1:]), np.int32)
    larger[:used] = array[:used]
    return larger


LEAST_WASTE: Final = 4096
"""Tokens of forgotten texts that are left lying before the rest is moved."""


class SuffixCache:
    """The latest texts of one tenant in a suffix tree.

    Args:
        depth: of the tree.
        max_requests, max_tokens: most texts, and most tokens of all of them; of a longer text the end is kept.
        vocab_size: token ids that are read from a file must lie below.
    """

    def __init__(self, depth: int, max_requests: int, max_tokens: int, vocab_size: int) -> None:
        self.tree = SuffixTree(depth)
        self.max_requests, self.max_tokens, self.vocab_size = max_requests, max_tokens, vocab_size
        self.lengths: deque[int] = deque()
        self.first = 0

    @property
    def tokens(self) -> int:
        """Count the tokens that are kept."""
        return self.tree.size - self.first

    def add(self, tokens: Ints) -> None:
        """Keep a text, and forget the oldest ones beyond the limits; an empty text is nothing."""
        tokens = tokens[-self.max_tokens :] if self.max_tokens else tokens[:0]
        if not len(tokens) or not self.max_requests:
            return
        while self.lengths and (len(self.lengths) >= self.max_requests or self.tokens + len(tokens) > self.max_tokens):
            self.forget()
        if self.first > max(LEAST_WASTE, self.tokens):
            self.tree.shift(self.first)
            self.first = 0
        self.tree.insert(tokens)
        self.lengths.append(len(tokens))

    def forget(self) -> None:
        """Take the oldest text out of the tree."""
        length = self.lengths.popleft()
        self.tree.remove(self.first, self.first + length)
        self.first += length

    def to_arrays(self) -> Arrays:
        """The texts: `tokens` (n,) int32 and `lengths` (requests,) int64, oldest first."""
        return {
            "tokens": self.tree.arrays.text[self.first : self.tree.size].copy(),
            "lengths": np.array(self.lengths, np.int64),
        }

    def read_arrays(self, arrays: Arrays, stored: int | None = None) -> None:
        """See `tables.TenantTable`; a text with an id beyond is left out."""
        tokens, lengths = arrays["tokens"], arrays["lengths"]
        for name, array, dtype in (("tokens", tokens, np.int32), ("lengths", lengths, np.int64)):
            if array.ndim != 1 or array.dtype != dtype:
                raise ValueError(
                    f"{name} must be one row of {np.dtype(dtype)}, got {array.dtype} of shape {array.shape}"
                )
        outside = len(lengths) > 0 and not 1 <= int(lengths.min()) <= int(lengths.max()) <= len(tokens)
        if outside or int(lengths.sum()) != len(tokens):
            raise ValueError(f"the lengths of {len(lengths)} texts do not add up to {len(tokens)} tokens")
        limit = stored or self.vocab_size
        if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < limit:
            raise ValueError(f"token ids must lie in 0..{limit - 1}")
        for text in np.split(tokens, np.cumsum(lengths)[:-1]) if len(lengths) else ():
            if int(text.max()) < self.vocab_size:
                self.add(text.astype(np.int32))
