"""A chain of drafts by part of a model's own layers as one compiled function: every token without a return to Python.

In: a frame of models.kernels.frame whose rows are the roots of sequences, and the table below. Out: drafted tokens with their
chances, and where the frame has a place for them (steps, rows, hidden) the states behind the layers that ran; keys and values of
those layers in the scratch slots behind each sequence. Not here: who fills the tables
(models.kernels.exit_drafts), the layers (models.kernels.forward), chains of another, one-layer model (models.kernels.draft).

Row i drafts for sequence i: the token that is best after its input becomes its next input, one slot and one position on. Every
thread finds the best tokens for itself, so that they need not meet for it. A row whose chain has ended goes on as long as another
row's has not; its reader leaves out what came after the end.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numba import njit

from paceline.models.kernels import frame as at
from paceline.models.kernels.best import LOWEST, first_of, largest_of, row_of
from paceline.models.kernels.draft_tiles import write
from paceline.models.kernels.ends import embed, head, show
from paceline.models.kernels.entry import machine_code, source_number
from paceline.models.kernels.forward import layer_pass, meet
from paceline.models.kernels.tiles import STRIP
from paceline.models.kernels.vectors import (
    LANES,
    add,
    broadcast,
    call_int,
    exponential,
    largest,
    load,
    load_half,
    mul,
    read,
    read_float,
    store,
    sub,
    total,
)  # fmt: skip

(
    FRAME, STEPS, DONE,  # table of models.kernels.frame; most tokens; tokens drafted
    PAUSE, LEAST,  # float32: rows end where their chance so far is no larger; behind a token whose own chance is below this
    TOKENS, CHANCES, OUT_PITCH,  # (rows, steps) int64 tokens and float32 chances in fields of 8 bytes
    EMBEDDING, ROW_BYTES,  # address of token 0's embedding; from one token's to the next
    PLACES, SEEN,  # (rows,) rows of the rope tables; (rows, 4) what rows see, of the only kind of window
    PARTS, PARTS_SIZE,  # per thread (rows, 3) lanes: largest logit, its place, sum of exponentials
    TABLE_FIELDS,
) = range(0, 15 * at.FIELD, at.FIELD)  # fmt: skip

PART_BYTES = 192
"""What a thread found in a row: three times sixteen lanes."""
OUT = 40
"""Fields of a row of results: a chance is written with the seven fields behind it."""
MOST_STEPS = 32


@njit(error_model="numpy")
def _sum_of(row: int, begin: int, end: int, narrow: bool, most: np.float32, spare: int) -> np.float32:
    """Sum of exp(logit - most) over logits begin .. end - 1, `begin` a multiple of 16."""
    sums, top = broadcast(np.float32(0.0)), broadcast(most)
    whole = end - (end - begin) % LANES
    for i in range(begin, whole, LANES):
        sums = add(sums, exponential(sub(load_half(row + 2 * i) if narrow else load(row + 4 * i), top)))
    found = total(sums)
    if whole < end:
        store(spare, exponential(sub(load_half(row + 2 * whole) if narrow else load(row + 4 * whole), top)))
        for i in range(end - whole):
            found += read_float(spare + 4 * i)
    return found


@njit(error_model="numpy")
def judge(data: int, me: int, team: int) -> None:
    """Largest logit, its place and the sum of exponentials over this thread's strips, for every row."""
    frame = read(data + FRAME)
    vocab, narrow = read(frame + at.VOCAB), read(frame + at.NARROW) == 1
    strips, spare = (vocab + STRIP - 1) // STRIP, read(frame + at.SUMS) + me * read(frame + at.SUMS_SIZE)
    begin, end = strips * me // team * STRIP, min(strips * (me + 1) // team * STRIP, vocab)
    for index in range(read(frame + at.ROWS)):
        row, part = row_of(frame, index), read(data + PARTS) + me * read(data + PARTS_SIZE) + PART_BYTES * index
        most = largest_of(row, begin, end, narrow, spare)
        store(part, broadcast(most))
        store(part + 128, broadcast(_sum_of(row, begin, end, narrow, most, spare)))
        write(part + 64, first_of(row, begin, end, narrow, most, spare))


@njit(error_model="numpy")
def choose(data: int, index: int, step: int, team: int) -> None:
    """The best token of all threads' parts and its chance, NaN where some logit is not finite, to their places."""
    best, place, whole = LOWEST, -1, np.float32(0.0)
    start = read(data + PARTS) + PART_BYTES * index
    for one in range(team):
        part = start + one * read(data + PARTS_SIZE)
        if read_float(part) > best:
            best, place = read_float(part), read(part + 64)
    for one in range(team):
        part = start + one * read(data + PARTS_SIZE)
        whole += largest(mul(exponential(broadcast(read_float(part) - best)), load(part + 128)))
    out = index * read(data + OUT_PITCH) + 8 * step
    write(read(data + TOKENS) + out, max(place, 0))
    store(read(data + CHANCES) + out, broadcast(np.float32(1.0) / whole))


@njit(error_model="numpy")
def ended(data: int, index: int, steps: int) -> bool:
    """Whether a row's chain of so many tokens has ended."""
    reach, chances = np.float32(1.0), read(data + CHANCES) + index * read(data + OUT_PITCH)
    for step in range(steps):
        chance = read_float(chances + 8 * step)
        if not chance >= read_float(data + LEAST):
            return True
        reach *= chance
    return not reach > read_float(data + PAUSE)


@njit(error_model="numpy")
def _advance(data: int, me: int, team: int, step: int) -> None:
    """Make the last drafted token the next input of this thread's rows."""
    frame = read(data + FRAME)
    rows = read(frame + at.ROWS)
    for row in range(rows * me // team, rows * (me + 1) // team):
        token = read(read(data + TOKENS) + row * read(data + OUT_PITCH) + 8 * (step - 1))
        write(read(frame + at.SOURCE) + 8 * row, read(data + EMBEDDING) + token * read(data + ROW_BYTES))


@njit(error_model="numpy")
def _move_on(data: int) -> None:
    """One slot, one position and one visible input further, for all rows; the next step's states behind this one's."""
    frame = read(data + FRAME)
    if read(frame + at.RESULT) != 0:
        size = read(frame + at.ROWS) * read(frame + at.HIDDEN) * (2 if read(frame + at.NARROW) == 1 else 4)
        write(frame + at.RESULT, read(frame + at.RESULT) + size)
    for row in range(read(frame + at.ROWS)):
        slot, place = read(frame + at.SLOT) + 8 * row, read(data + PLACES) + 8 * row
        count = read(data + SEEN) + row * at.SEEN_FIELDS + at.OWN_COUNT
        write(slot, read(slot) + 1)
        write(place, read(place) + 1)
        write(count, read(count) + 1)


@njit(error_model="numpy")
def chain(data: int, me: int, team: int) -> None:
    """Draft; see the module."""
    frame = read(data + FRAME)
    for step in range(read(data + STEPS)):
        if step > 0:
            _advance(data, me, team, step)
            if me == 0:
                _move_on(data)
        embed(frame, me, team)
        meet(frame, team)
        for i in range(read(frame + at.LAYERS)):
            layer_pass(frame, read(frame + at.PROGRAM) + i * at.LAYER_FIELDS, me, team)
        if read(frame + at.RESULT) != 0:
            show(frame, read(frame + at.X), read(frame + at.X_PITCH), read(frame + at.RESULT), me, team)
        head(frame, me, team)
        judge(data, me, team)
        meet(frame, team)
        going = False
        for row in range(read(frame + at.ROWS)):
            choose(data, row, step, team)
            going = going or not ended(data, row, step + 1)
        if me == 0:
            write(data + DONE, step + 1)
        if not going:
            break


@njit(error_model="numpy")
def draft(data: int) -> None:
    """What one thread of the team does."""
    frame, me, team = read(data + FRAME), 0, 1
    if read(frame + at.THREAD) != 0:
        me, team = call_int(read(frame + at.THREAD)), call_int(read(frame + at.TEAM))
    chain(data, me, team)


@functools.cache
def compiled() -> Any:
    """`draft` as machine code for this CPU, from numba's cache on disk where one can be written."""
    sources = source_number()

    def entry(data: int) -> None:
        if sources != 0:  # the cache tells functions apart by their constants, and would miss changes in other files
            draft(data)

    return machine_code(entry, "the kernels of drafts by own layers", "half a minute")
