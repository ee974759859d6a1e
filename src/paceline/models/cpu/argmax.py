"""The best token of every row of logits, found where the logits are made.

In: the logits of a pass in the model's type (models.cpu.ends). Out: per row the lowest token id that holds the largest
logit, or -1 where some logit is not finite. Not here: what is done about such a row (its reader looks at the logits
themselves).

Every thread looks through the logits that it has just written; one of them then compares what all of them found.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from paceline.models.cpu import layout as at
from paceline.models.cpu.tiles import STRIP
from paceline.models.cpu.vectors import (
    LANES,
    broadcast,
    fma,
    larger,
    largest,
    load,
    load_half,
    read,
    read_float,
    store,
    total,
    write,
)  # fmt: skip

LOWEST = np.float32(-np.inf)

PART = 128
"""Bytes of what one thread knows of one row: its largest logit in all lanes, NaN where one is not finite; then its
token id.
"""


@njit(error_model="numpy")
def row_of(frame: int, row: int) -> int:
    """Address of a row's logits."""
    width = (read(frame + at.VOCAB) + LANES - 1) // LANES * LANES
    return read(frame + at.LOGITS) + row * width * (2 if read(frame + at.NARROW) == 1 else 4)


@njit(error_model="numpy")
def largest_of(row: int, begin: int, end: int, narrow: bool, spare: int) -> np.float32:
    """Largest of logits begin .. end - 1, `begin` a multiple of 16; NaN where one is not finite."""
    top, doubt, nothing = broadcast(LOWEST), broadcast(np.float32(0.0)), broadcast(np.float32(0.0))
    whole = end - (end - begin) % LANES
    for i in range(begin, whole, LANES):
        value = load_half(row + 2 * i) if narrow else load(row + 4 * i)
        top, doubt = larger(top, value), fma(value, nothing, doubt)  # 0 times a number that is not finite is NaN
    most, sure = largest(top), total(doubt)
    if whole < end:
        store(spare, load_half(row + 2 * whole) if narrow else load(row + 4 * whole))
        for i in range(end - whole):
            one = read_float(spare + 4 * i)
            sure += one * np.float32(0.0)
            most = max(most, one)
    return most + sure


@njit(error_model="numpy")
def first_of(row: int, begin: int, end: int, narrow: bool, most: np.float32, spare: int) -> int:
    """Where the first of logits begin .. end - 1 stands that equals `most`; -1 if none does."""
    for i in range(begin, end, LANES):
        value = load_half(row + 2 * i) if narrow else load(row + 4 * i)
        if largest(value) >= most:
            store(spare, value)
            for j in range(min(LANES, end - i)):
                if read_float(spare + 4 * j) == most:
                    return i + j
    return -1


@njit(error_model="numpy")
def look(frame: int, me: int, team: int) -> None:
    """This thread's best token of every row, among the strips whose logits it has made."""
    vocab, narrow = read(frame + at.VOCAB), read(frame + at.NARROW) == 1
    strips, spare = (vocab + STRIP - 1) // STRIP, read(frame + at.SUMS) + me * read(frame + at.SUMS_SIZE)
    begin, end = strips * me // team * STRIP, min(strips * (me + 1) // team * STRIP, vocab)
    for row in range(read(frame + at.HEAD_ROWS)):
        logits, part = row_of(frame, row), read(frame + at.PARTS) + (me * read(frame + at.PARTS_ROWS) + row) * PART
        most = largest_of(logits, begin, end, narrow, spare)
        store(part, broadcast(most))
        write(part + 64, first_of(logits, begin, end, narrow, most, spare))


@njit(error_model="numpy")
def settle_best(frame: int, team: int) -> None:
    """The best of what all threads found, for every row."""
    for row in range(read(frame + at.HEAD_ROWS)):
        best, place = LOWEST, -1
        for one in range(team):
            part = read(frame + at.PARTS) + (one * read(frame + at.PARTS_ROWS) + row) * PART
            value = read_float(part)
            if np.isnan(value):
                place = -1
                break
            if value > best:
                best, place = value, read(part + 64)
        write(read(frame + at.BEST) + 8 * row, place)
