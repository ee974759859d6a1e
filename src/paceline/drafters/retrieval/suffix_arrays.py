"""Suffix arrays over token ids: where does a text say what another text ends with?

The array is made by prefix doubling (Manber and Myers, "Suffix arrays", 1993) with counting sorts, stopped once `DEPTH`
tokens are compared: no search asks for more, so that text which repeats itself costs no more than any other: 7 rounds
at most, each linear. While it is made, 16 bytes a token are needed beside the text.

A search for a pattern finds the positions where the pattern is *followed by a token*, that is, not those that end a
document: these sort in front of the others, which makes the positions one range.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from paceline.utils import compiled, part_of_compiled

IntArray = npt.NDArray[np.int32]
LongArray = npt.NDArray[np.int64]

DEPTH: Final = 64
"""Tokens by which suffixes are ordered."""

BETWEEN: Final = -1
"""What stands between documents; sorts before every token."""


def suffix_array(text_n: IntArray, depth: int = DEPTH) -> IntArray:
    """Positions of `text_n` in the order of the suffixes that begin there.

    Args:
        text_n: (n,) int32 token ids, -1 between documents.
        depth: tokens that are compared, a power of two; suffixes that agree in these come in the order of their
            positions.
    Returns:
        (n,) int32.
    """
    n = len(text_n)
    order, other, rank, position = (np.empty(n, np.int32) for _ in range(4))
    if n == 0:
        return order
    groups = _sort_by_first(text_n, np.zeros(int(text_n.max()) + 3, np.int64), order, rank)
    compared = 1
    while compared < depth and groups < n:
        _sort_further(order, rank, position, other, compared)
        groups = _rank(other, rank, position, compared)
        order, other = other, order
        rank, position = position, rank
        compared *= 2
    return order


@compiled
def _sort_by_first(text: IntArray, starts: LongArray, order: IntArray, rank: IntArray) -> int:
    """Order suffixes by their first token; a suffix's rank is where its group begins. Returns the number of groups."""
    for i in range(len(text)):
        starts[text[i] + 2] += 1
    groups = 0
    for t in range(1, len(starts)):
        groups += starts[t] > 0
        starts[t] += starts[t - 1]
    for i in range(len(text)):
        rank[i] = starts[text[i] + 1]
    for i in range(len(text)):
        order[starts[text[i] + 1]] = i
        starts[text[i] + 1] += 1
    return groups


@compiled
def _sort_further(order: IntArray, rank: IntArray, position: IntArray, out: IntArray, compared: int) -> None:
    """From an order by `compared` tokens to one by twice as many: walk the order of the second halves, fill the groups
    in turn.
    """
    n = len(order)
    for i in range(n):
        position[i] = i
    for i in range(max(n - compared, 0), n):
        out[position[rank[i]]] = i
        position[rank[i]] += 1
    for j in range(n):
        i = order[j] - compared
        if i >= 0:
            out[position[rank[i]]] = i
            position[rank[i]] += 1


@compiled
def _rank(order: IntArray, rank: IntArray, out: IntArray, compared: int) -> int:
    """New ranks after `_sort_further`; returns the number of groups."""
    n = len(order)
    groups, last, first, second = 0, 0, -1, -2
    for j in range(n):
        i = order[j]
        here, further = rank[i], rank[i + compared] if i + compared < n else -1
        if here != first or further != second:
            groups, last, first, second = groups + 1, j, here, further
        out[i] = last
    return groups


@part_of_compiled
def _compare(text: IntArray, at: int, tail: IntArray, length: int) -> int:
    """Whether the suffix at `at` comes before (-1), among (0) or after (1) those that begin with the last `length`
    tokens of `tail` and go on.
    """
    if at < 0:
        return -1
    start = len(tail) - length
    for i in range(length):
        if at + i >= len(text) or text[at + i] < tail[start + i]:
            return -1
        if text[at + i] > tail[start + i]:
            return 1
    return 0 if at + length < len(text) and text[at + length] >= 0 else -1


@compiled
def suffix_bound(text: IntArray, order: IntArray, tail: IntArray, length: int, above: int) -> int:
    """The first position in `order` whose suffix is among (`above` = 0) or after (`above` = 1) those that begin with
    the last `length` tokens of `tail` and go on.
    """
    low, high = 0, len(order)
    while low < high:
        middle = (low + high) // 2
        if _compare(text, order[middle], tail, length) >= above:
            high = middle
        else:
            low = middle + 1
    return low


@part_of_compiled
def occurs(text: IntArray, order: IntArray, tail: IntArray, length: int) -> bool:
    """Whether the last `length` tokens of `tail` occur in `text` with a token after them."""
    position = suffix_bound(text, order, tail, length, 0)
    return position < len(order) and _compare(text, order[position], tail, length) == 0
