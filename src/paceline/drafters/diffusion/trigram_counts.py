"""Counts of n-grams up to three, and the chance of a token after two others.

Chances are interpolated: p(c | a, b) = (n(abc) + K p(c | b)) / (n(ab.) + K), alike down to the uniform distribution,
with K = 1: what was seen once after a pair has about half of its chances. They sum to 1 over the vocabulary.

An open-addressed table holds hashes of 64 bits beside their counts; two n-grams with one hash would share a count,
which can make no draft wrong but by chance better or worse. A table that is full halves all counts and drops what is
left without one: it follows the present text and never takes more than 12 bytes for each of its slots.

Source: tri-gram proxy of DiffuSpec (arXiv:2510.02358), which fits one to a task's training split; Dirichlet smoothing:
MacKay and Peto, A hierarchical Dirichlet language model (1995).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from paceline.drafters.common.tables import Arrays
from paceline.utils import compiled, part_of_compiled

Longs = npt.NDArray[np.int64]
Counts = npt.NDArray[np.int32]
Slots = tuple[Longs, Counts]
"""Hashes of n-grams, 0 for none (s,); how often each was counted (s,). s is a power of two."""

SMALLEST: Final = 2**12
CHUNK: Final = 128
"""Tokens that are counted at once; what they can make fits into half of the smallest table."""
DTYPES: Final = {"hashes": np.dtype(np.int64), "counts": np.dtype(np.int32)}
KINDS: Final = 6
"""Entries that a token can make: of one, two and three tokens, and of the none, one and two before it."""

PRIOR: Final = 1.0
_MIX: Final = np.uint64(0xBF58476D1CE4E5B9)
_MORE: Final = np.uint64(0x94D049BB133111EB)
_WEYL: Final = np.uint64(0x9E3779B97F4A7C15)
_A: Final = np.uint64(30)
_B: Final = np.uint64(27)
_C: Final = np.uint64(31)


@part_of_compiled
def key(kind: int, a: int, b: int, c: int) -> np.int64:
    """The hash of an entry, never 0 (SplitMix64, Steele et al., 2014)."""
    state = np.uint64(kind)
    for token in (a, b, c):
        state = (state ^ np.uint64(token + 1)) + _WEYL
        state = (state ^ (state >> _A)) * _MIX
        state = (state ^ (state >> _B)) * _MORE
        state ^= state >> _C
    return np.int64(state | np.uint64(1))


@part_of_compiled
def slot_of(slots: Slots, wanted: np.int64) -> int:
    """The slot of a hash, or the free one where it belongs."""
    hashes = slots[0]
    at = (wanted >> 1) & (len(hashes) - 1)
    while hashes[at] != 0 and hashes[at] != wanted:
        at = (at + 1) & (len(hashes) - 1)
    return int(at)


@part_of_compiled
def count(slots: Slots, kind: int, a: int, b: int, c: int) -> int:
    """Give how often an entry was counted."""
    return int(slots[1][slot_of(slots, key(kind, a, b, c))])


@part_of_compiled
def add(slots: Slots, kind: int, a: int, b: int, c: int) -> int:
    """Count an entry; 1 where it is new."""
    wanted = key(kind, a, b, c)
    at = slot_of(slots, wanted)
    new = slots[0][at] == 0
    slots[0][at] = wanted
    if slots[1][at] < 2**31 - 1:
        slots[1][at] += 1
    return 1 if new else 0


@compiled
def learn(slots: Slots, text: Longs, start: int) -> int:
    """Count the tokens of `text` from `start` on, each after those before it; entries that are new."""
    new = 0
    for i in range(start, len(text)):
        c = text[i]
        new += add(slots, 1, -1, -1, c) + add(slots, 4, -1, -1, -1)
        if i > 0:
            new += add(slots, 2, -1, text[i - 1], c) + add(slots, 5, -1, text[i - 1], -1)
        if i > 1:
            new += add(slots, 3, text[i - 2], text[i - 1], c) + add(slots, 6, text[i - 2], text[i - 1], -1)
    return new


@compiled
def chance(slots: Slots, a: int, b: int, c: int, vocab_size: int) -> float:
    """Of c after a, b; -1 for tokens before the text's beginning."""
    p = (count(slots, 1, -1, -1, c) + PRIOR / vocab_size) / (count(slots, 4, -1, -1, -1) + PRIOR)
    if b >= 0:
        p = (count(slots, 2, -1, b, c) + PRIOR * p) / (count(slots, 5, -1, b, -1) + PRIOR)
        if a >= 0:
            p = (count(slots, 3, a, b, c) + PRIOR * p) / (count(slots, 6, a, b, -1) + PRIOR)
    return p


@compiled
def move(old: Slots, new: Slots, halve: bool) -> int:
    """Put the entries of one table into another, empty one; how many there are."""
    used = 0
    for i in range(len(old[0])):
        left = old[1][i] // 2 if halve else old[1][i]
        if left > 0:
            at = slot_of(new, old[0][i])
            new[0][at], new[1][at] = old[0][i], left
            used += 1
    return used


class TrigramCounts:
    """Counts the trigrams of one tenant's texts.

    Args:
        most: slots of the table, a power of two of SMALLEST or more; at most half of them are used. vocab_size: ids lie
            below it.
    """

    def __init__(self, most: int, vocab_size: int) -> None:
        self.most, self.vocab_size, self.used = most, vocab_size, 0
        self.slots: Slots = _empty(SMALLEST)

    def learn(self, text: Sequence[int], start: int = 0) -> None:
        """Count the tokens of `text` from `start` on; those before it were counted already."""
        first = max(start - 2, 0)
        tokens = np.asarray(text[first:], np.int64)
        for at in range(start - first, len(tokens), CHUNK):
            self._make_room(KINDS * CHUNK)
            low, high = max(at - 2, 0), at + CHUNK
            self.used += learn(self.slots, tokens[low:high], at - low)

    def chance(self, a: int, b: int, c: int) -> float:
        """Of c after a, b; -1 for tokens before the text's beginning."""
        return chance(self.slots, a, b, c, self.vocab_size)

    def to_arrays(self) -> Arrays:
        """Give the entries in use."""
        used = self.slots[1] > 0
        return {"hashes": self.slots[0][used], "counts": self.slots[1][used]}

    def read_arrays(self, arrays: Arrays, stored: int | None = None) -> None:
        """Take over entries; of more than a quarter of the table's slots, the most frequent. Hashes do not say of which
        ids they are, and those of others are never looked up.

        Raises:
            ValueError: arrays that are missing, of another shape or dtype, or out of range.
        """
        stored_arrays: dict[str, npt.NDArray[Any]] = {name: arrays[name] for name in DTYPES if name in arrays}
        if {name: array.dtype for name, array in stored_arrays.items()} != DTYPES or stored_arrays["hashes"].ndim != 1:
            raise ValueError("hashes must be int64 and counts int32, one for each")
        hashes, counts = stored_arrays["hashes"], stored_arrays["counts"]
        if hashes.shape != counts.shape or not (counts > 0).all() or not (hashes & 1 == 1).all():
            raise ValueError("counts must be positive, one for each hash")
        if np.unique(hashes).size != hashes.size:
            raise ValueError("hashes must differ")
        kept = np.argsort(-counts, kind="stable")[: self.most // 4]
        self.slots = hashes[kept], counts[kept]
        self._rebuild(min(self.most, max(SMALLEST, 1 << (4 * kept.size).bit_length())), halve=False)

    def _make_room(self, entries: int) -> None:
        """Let at most half of the slots be used once so many more entries were made."""
        size = len(self.slots[0])
        while 2 * (self.used + entries) > size and size < self.most:
            size *= 2
        if size != len(self.slots[0]):
            self._rebuild(size, halve=False)
        while 2 * (self.used + entries) > size:
            self._rebuild(size, halve=True)

    def _rebuild(self, size: int, *, halve: bool) -> None:
        fresh = _empty(size)
        self.used = move(self.slots, fresh, halve)
        self.slots = fresh


def _empty(size: int) -> Slots:
    return np.zeros(size, np.int64), np.zeros(size, np.int32)
