"""The end of a draft step, compiled: the final norm, the logits, the best token and its chance.

In: the tables of models.kernels.draft_frame, the residual stream. Out: tokens and chances. Not here: all before
(models.kernels.draft), products (models.kernels.matrix, models.kernels.draft_bytes).
"""

from __future__ import annotations

import numpy as np
from numba import njit

from paceline.models.kernels import draft_frame as of
from paceline.models.kernels import frame as at
from paceline.models.kernels.attention import scaled_norm
from paceline.models.kernels.draft_bytes import STRIP_BYTES, byte_strip, small_normed
from paceline.models.kernels.draft_tiles import place_of, write
from paceline.models.kernels.forward import put
from paceline.models.kernels.matrix import strip_sums
from paceline.models.kernels.tiles import DOT, FULL, STEP, STRIP
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
PART_BYTES = 192
"""What a thread found in a row: three times sixteen lanes."""


@njit(error_model="numpy")
def logits(data: int, me: int, team: int) -> None:
    """This thread's strips of the logits of all rows."""
    frame, small = read(data + of.FRAME), read(data + of.STRIPS) != 0
    hidden, rows, kind, weight = read(frame + at.HIDDEN), read(frame + at.ROWS), read(frame + at.KIND), read(frame + at.FINAL_NORM)
    sums, steps = read(frame + at.SUMS) + me * read(frame + at.SUMS_SIZE), hidden if kind == FULL else hidden // 2
    out, out_pitch = read(data + of.LOGITS), read(data + of.LOGITS_PITCH)
    normed, pitch = read(frame + at.NORMED) + me * read(frame + at.NORMED_SIZE), read(frame + at.NORMED_PITCH)
    if small:
        normed, pitch = small_normed(data, me, weight), read(data + of.BYTES_PITCH)
    else:
        for row in range(rows):
            x, target = read(frame + at.X) + row * read(frame + at.X_PITCH), normed + row * pitch
            scaled_norm(x, hidden, weight, read_float(frame + at.EPSILON), target, kind == DOT)
    strips = (read(frame + at.VOCAB) + STRIP - 1) // STRIP
    for strip in range(strips * me // team, strips * (me + 1) // team):
        target = out + strip * STRIP_BYTES
        if small:
            scales = read(data + of.SCALES)
            byte_strip(read(data + of.STRIPS), scales, strip, hidden, normed, pitch, rows, sums, target, out_pitch)
        else:
            strip_sums(kind, read(frame + at.HEAD) + strip * steps * STEP, steps, normed, pitch, rows, sums)
            put(sums, rows, target, out_pitch)


@njit(error_model="numpy")
def find(start: int, first: int, stop: int, value: np.float32) -> int:
    """The first place from `first` on that holds a value."""
    for i in range(first, stop, LANES):
        lane = place_of(start + 4 * i, value)
        if lane < LANES:
            return i + lane
    return first


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
        part = read(data + of.PARTS) + me * read(data + of.PARTS_SIZE) + PART_BYTES * row
        store(part, broadcast(most))
        store(part + 128, broadcast(total(parts)))
        write(part + 64, find(logits, begin, end, most))


@njit(error_model="numpy")
def choose(data: int, row: int, step: int, team: int) -> np.float32:
    """The best token of all threads' parts, and its chance, to their places; every thread writes the same."""
    best, place, whole = LOWEST, 0, np.float32(0.0)
    for one in range(team):
        part = read(data + of.PARTS) + one * read(data + of.PARTS_SIZE) + PART_BYTES * row
        if read_float(part) > best:
            best, place = read_float(part), read(part + 64)
    for one in range(team):
        part = read(data + of.PARTS) + one * read(data + of.PARTS_SIZE) + PART_BYTES * row
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
