"""The end of a draft step, compiled: the final norm, the logits, the best token and its chance.

In: the tables of models.kernels.draft_frame, the residual stream. Out: tokens and chances. Not here: all before
(models.kernels.draft), products (models.kernels.matrix, models.kernels.draft_tiles).
"""

from __future__ import annotations

import numpy as np
from numba import njit

from paceline.models.kernels import draft_frame as of
from paceline.models.kernels import frame as at
from paceline.models.kernels.attention import scaled_norm
from paceline.models.kernels.draft_tiles import INPUTS, TOP, accumulate_bytes, load_sums, size_of, store_bytes, write
from paceline.models.kernels.forward import _put as put
from paceline.models.kernels.matrix import AHEAD, strip_sums
from paceline.models.kernels.tiles import DOT, FULL, GROUP, MOST_ROWS, STEP, STRIP
from paceline.models.kernels.vectors import (
    LANES,
    add,
    broadcast,
    exponential,
    larger,
    largest,
    load,
    mul,
    read,
    read_float,
    store,
    sub,
    total,
)  # fmt: skip

LOWEST = np.float32(-np.inf)


@njit(error_model="numpy")
def _shrink(data: int, me: int) -> None:
    """Normed states of all rows as 8-bit activations; each row's scale follows its bytes."""
    frame = read(data + of.FRAME)
    hidden = read(frame + at.HIDDEN)
    for row in range(read(frame + at.ROWS)):
        fine = read(data + of.FINE) + me * read(data + of.FINE_SIZE) + row * read(data + of.FINE_PITCH)
        target = read(data + of.BYTES) + me * read(data + of.BYTES_SIZE) + row * read(data + of.BYTES_PITCH)
        top = broadcast(np.float32(1e-30))
        for i in range(0, hidden, LANES):
            top = larger(top, size_of(load(fine + 4 * i)))
        most = largest(top)
        factor = broadcast(np.float32(TOP) / most)
        for i in range(0, hidden, LANES):
            store_bytes(target + i, mul(load(fine + 4 * i), factor))
        store(target + hidden, broadcast(most / np.float32(TOP)))


@njit(error_model="numpy")
def _small_strip(data: int, strip: int, me: int, sums: int) -> None:
    """One strip of logits of all rows from the 8-bit head."""
    frame = read(data + of.FRAME)
    hidden, rows, pitch = read(frame + at.HIDDEN), read(frame + at.ROWS), read(data + of.BYTES_PITCH)
    groups, scales = hidden // (INPUTS * GROUP), read(data + of.SCALES) + strip * 8 * STRIP
    weights, x = read(data + of.STRIPS) + strip * groups * GROUP * STEP, read(data + of.BYTES) + me * read(data + of.BYTES_SIZE)
    for first in range(0, rows, MOST_ROWS):
        count = min(MOST_ROWS, rows - first)
        accumulate_bytes(count, weights, groups, x + first * pitch, pitch, sums, weights + AHEAD)
        for row in range(first, first + count):
            scale = load(x + row * pitch + hidden)
            target = read(data + of.LOGITS) + row * read(data + of.LOGITS_PITCH) + 4 * strip * STRIP
            for i in range(0, 4 * STRIP, 64):
                value = sub(load_sums(sums + (row - first) * 4 * STRIP + i), load(scales + i))
                store(target + i, mul(mul(value, load(scales + 4 * STRIP + i)), scale))


@njit(error_model="numpy")
def logits(data: int, me: int, team: int) -> None:
    """This thread's strips of the logits of all rows."""
    frame = read(data + of.FRAME)
    hidden, rows, kind, small = read(frame + at.HIDDEN), read(frame + at.ROWS), read(frame + at.KIND), read(data + of.STRIPS) != 0
    for row in range(rows):
        x, weight = read(frame + at.X) + row * read(frame + at.X_PITCH), read(frame + at.FINAL_NORM)
        target = read(frame + at.NORMED) + me * read(frame + at.NORMED_SIZE) + row * read(frame + at.NORMED_PITCH)
        if small:
            target = read(data + of.FINE) + me * read(data + of.FINE_SIZE) + row * read(data + of.FINE_PITCH)
        scaled_norm(x, hidden, weight, read_float(frame + at.EPSILON), target, kind == DOT and not small)
    if small:
        _shrink(data, me)
    sums, steps = read(frame + at.SUMS) + me * read(frame + at.SUMS_SIZE), hidden if kind == FULL else hidden // 2
    normed, pitch = read(frame + at.NORMED) + me * read(frame + at.NORMED_SIZE), read(frame + at.NORMED_PITCH)
    strips = (read(frame + at.VOCAB) + STRIP - 1) // STRIP
    for strip in range(strips * me // team, strips * (me + 1) // team):
        if small:
            _small_strip(data, strip, me, sums)
        else:
            strip_sums(kind, read(frame + at.HEAD) + strip * steps * STEP, steps, normed, pitch, rows, sums)
            put(sums, rows, read(data + of.LOGITS) + 4 * strip * STRIP, read(data + of.LOGITS_PITCH))


@njit(error_model="numpy")
def _first_at(row: int, begin: int, end: int, top: np.float32) -> int:
    for i in range(begin, end, LANES):
        if largest(load(row + 4 * i)) == top:
            for j in range(i, i + LANES):
                if read_float(row + 4 * j) == top:
                    return j
    return begin


@njit(error_model="numpy")
def judge(data: int, me: int, team: int) -> None:
    """Largest logit, its place and the sum of exponentials over this thread's strips, for every row."""
    frame = read(data + of.FRAME)
    vocab, rows = read(frame + at.VOCAB), read(frame + at.ROWS)
    strips = (vocab + STRIP - 1) // STRIP
    begin, end = strips * me // team * STRIP, strips * (me + 1) // team * STRIP
    for row in range(rows):
        logits = read(data + of.LOGITS) + row * read(data + of.LOGITS_PITCH)
        if end > vocab:
            for i in range(vocab, end, LANES):
                store(logits + 4 * i, broadcast(LOWEST))
        top, parts = broadcast(LOWEST), broadcast(np.float32(0.0))
        for i in range(begin, end, LANES):
            top = larger(top, load(logits + 4 * i))
        most = largest(top)
        for i in range(begin, end, LANES):
            parts = add(parts, exponential(sub(load(logits + 4 * i), broadcast(most))))
        part = read(data + of.PARTS) + me * read(data + of.PARTS_SIZE) + 192 * row
        store(part, broadcast(most))
        store(part + 128, broadcast(total(parts)))
        write(part + 64, _first_at(logits, begin, end, most))


@njit(error_model="numpy")
def choose(data: int, row: int, step: int, team: int) -> np.float32:
    """The best token of all threads' parts, and its chance, to their places; every thread writes the same."""
    best, place, whole = LOWEST, 0, np.float32(0.0)
    for one in range(team):
        part = read(data + of.PARTS) + one * read(data + of.PARTS_SIZE) + 192 * row
        if read_float(part) > best:
            best, place = read_float(part), read(part + 64)
    for one in range(team):
        part = read(data + of.PARTS) + one * read(data + of.PARTS_SIZE) + 192 * row
        lanes = mul(exponential(broadcast(read_float(part) - best)), load(part + 128))
        whole += largest(lanes)
    out = row * read(data + of.OUT_PITCH) + 8 * step
    write(read(data + of.TOKENS) + out, place)
    chance = np.float32(1.0) / whole
    store(read(data + of.CHANCES) + out, broadcast(chance))
    return chance


@njit(error_model="numpy")
def row_chance(data: int, row: int, steps: int) -> np.float32:
    reach = np.float32(1.0)
    for step in range(steps):
        reach *= read_float(read(data + of.CHANCES) + row * read(data + of.OUT_PITCH) + 8 * step)
    return reach
