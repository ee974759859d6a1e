"""Tokens of a row by rank, one at a time: as many as a growing tree asks for.

In: logits of all rows. Out: the largest logit and the sum of exponentials of each row, then its best token, its second best ... Not
here: what asks (models.kernels.draft_grow).

The largest logit of every strip is kept. The best token of a row is in the strip with the largest of them; once taken, its logit is
set to the least number, and its strip's largest found again. A token costs about a hundred instructions, whatever the vocabulary.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from paceline.models.kernels import draft_frame as of
from paceline.models.kernels import frame as at
from paceline.models.kernels.draft_head import LOWEST, PART_BYTES, find
from paceline.models.kernels.draft_tiles import put_float
from paceline.models.kernels.tiles import STRIP
from paceline.models.kernels.vectors import (
    LANES,
    add,
    broadcast,
    exponential,
    larger,
    largest,
    load,
    read,
    read_float,
    store,
    sub,
    total,
)  # fmt: skip


@njit(error_model="numpy")
def _strip_top(logits: int) -> np.float32:
    top = load(logits)
    for i in range(4 * LANES, 4 * STRIP, 4 * LANES):
        top = larger(top, load(logits + i))
    return largest(top)


@njit(error_model="numpy")
def survey(data: int, me: int, team: int) -> None:
    """The largest logit of each of this thread's strips of every row, of all of them, and their sum of exponentials."""
    frame = read(data + of.FRAME)
    vocab, strips = read(frame + at.VOCAB), (read(frame + at.VOCAB) + STRIP - 1) // STRIP
    first, stop = strips * me // team, strips * (me + 1) // team
    for row in range(read(frame + at.ROWS)):
        logits = read(data + of.LOGITS) + row * read(data + of.LOGITS_PITCH)
        maxima = read(data + of.MAXIMA) + row * read(data + of.MAXIMA_PITCH)
        if stop == strips:
            for i in range(vocab, strips * STRIP):
                put_float(logits + 4 * i, LOWEST)
        most = LOWEST
        for strip in range(first, stop):
            top = _strip_top(logits + 4 * STRIP * strip)
            put_float(maxima + 4 * strip, top)
            most = top if top > most else most
        even, odd, high = broadcast(np.float32(0.0)), broadcast(np.float32(0.0)), broadcast(most)
        for i in range(4 * STRIP * first, 4 * STRIP * stop, 8 * LANES):
            even = add(even, exponential(sub(load(logits + i), high)))
            odd = add(odd, exponential(sub(load(logits + i + 4 * LANES), high)))
        part = read(data + of.PARTS) + me * read(data + of.PARTS_SIZE) + PART_BYTES * row
        store(part, high)
        store(part + 128, broadcast(total(add(even, odd))))


@njit(error_model="numpy")
def row_top(data: int, row: int, team: int) -> tuple[float, float]:
    """The largest logit of a row, and the sum of exponentials less it; NaN or 0 where the logits are no numbers."""
    top, whole = -np.inf, 0.0
    for one in range(team):
        top = max(top, np.float64(read_float(read(data + of.PARTS) + one * read(data + of.PARTS_SIZE) + PART_BYTES * row)))
    for one in range(team):
        part = read(data + of.PARTS) + one * read(data + of.PARTS_SIZE) + PART_BYTES * row
        whole += math.exp(np.float64(read_float(part)) - top) * np.float64(read_float(part + 128))
    return top, whole


@njit(error_model="numpy")
def take_best(data: int, row: int) -> tuple[int, float]:
    """The best token of a row that was not taken yet, and its logit; -1 where none is left."""
    frame = read(data + of.FRAME)
    strips = (read(frame + at.VOCAB) + STRIP - 1) // STRIP
    logits = read(data + of.LOGITS) + row * read(data + of.LOGITS_PITCH)
    maxima = read(data + of.MAXIMA) + row * read(data + of.MAXIMA_PITCH)
    high = load(maxima)
    for i in range(LANES, strips, LANES):
        high = larger(high, load(maxima + 4 * i))
    top = largest(high)
    if not top > LOWEST:
        return -1, -np.inf
    strip = find(maxima, 0, strips, top)
    token = find(logits, STRIP * strip, STRIP * (strip + 1), top)
    put_float(logits + 4 * token, LOWEST)
    put_float(maxima + 4 * strip, _strip_top(logits + 4 * STRIP * strip))
    return token, np.float64(top)
