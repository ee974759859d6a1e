"""The index of prompt lookup: where each n-gram of a text stood last.

In: a text as an array, a table of slots. Out: the latest place of the longest n-gram at the text's end, what to copy from there.
Not here: requests, confidences (`ngram`).

The table is open-addressed. A slot holds the place of an n-gram's last token and its length, and the text itself says which n-gram
that is: so n-grams with equal hashes are told apart.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from paceline.drafters.compiled import compiled

Ints = npt.NDArray[np.int32]
Longs = npt.NDArray[np.int64]
Pair = tuple[int, int]

LONGEST_MATCH: Final = 32
"""Matches are followed back no further than this to judge their confidence."""

_SHIFT: Final = 6
_LENGTH: Final = 63
_PRIME: Final = np.uint64(1000003)
_MIX: Final = np.uint64(0x9E3779B97F4A7C15)
_HIGH: Final = np.uint64(32)


def empty(entries: int) -> Longs:
    """A table with room for so many n-grams, at most half full."""
    return np.full(1 << max(2 * entries - 1, 1).bit_length(), -1, np.int64)


@compiled
def _slot_of(text: Ints, end: int, n: int, value: np.uint64, table: Longs) -> np.int64:
    """The slot that holds the n-gram which ends at `end`, or the free one where it belongs."""
    mask = len(table) - 1
    slot = np.int64((value * _MIX) >> _HIGH) & mask
    while table[slot] >= 0:
        if table[slot] & _LENGTH == n:
            place, i = table[slot] >> _SHIFT, 0
            while i < n and text[place - i] == text[end - i]:
                i += 1
            if i == n:
                return slot
        slot = (slot + 1) & mask
    return slot


@compiled
def index(text: Ints, span: Pair, lengths: Pair, table: Longs) -> None:
    """Remember the n-grams of lengths low..high whose last token is at first..stop - 1."""
    low, high = lengths
    for end in range(span[0], span[1]):
        value = np.uint64(0)
        for n in range(1, min(high, end + 1) + 1):
            value = value * _PRIME + np.uint64(text[end + 1 - n]) + np.uint64(1)
            if n >= low:
                table[_slot_of(text, end, n, value, table)] = (end << _SHIFT) | n


@compiled
def latest(text: Ints, size: int, lengths: Pair, table: Longs) -> int:
    """Where the last token of the latest, longest earlier match of the end of text[:size] stands, or -1.

    Where n tokens have stood before, n - 1 have: the first length that is missing ends the search.
    """
    low, high = lengths
    found, value = -1, np.uint64(0)
    for n in range(1, min(high, size) + 1):
        value = value * _PRIME + np.uint64(text[size - n]) + np.uint64(1)
        if n >= low:
            entry = table[_slot_of(text, size - 1, n, value, table)]
            if entry < 0:
                break
            found = entry >> _SHIFT
    return found


@compiled
def draft(text: Ints, span: Pair, lengths: Pair, table: Longs, out: Longs) -> int:
    """Index what got a follower, then copy what followed the best match.

    Args:
        span: tokens that were indexed before; tokens of the text.
        lengths: least and greatest n.
        out: (steps,) the copied tokens; a match that touches the end goes on copying what it has copied itself.
    Returns:
        Tokens that match, at most LONGEST_MATCH; 0 where nothing does.
    """
    first, size = span
    index(text, (first, size - 1), lengths, table)
    place = latest(text, size, lengths, table)
    if place < 0:
        return 0
    for i in range(len(out)):
        at = place + 1 + i
        out[i] = text[at] if at < size else out[at - size]
    match = 1
    while match < LONGEST_MATCH and place >= match and text[place - match] == text[size - 1 - match]:
        match += 1
    return match
