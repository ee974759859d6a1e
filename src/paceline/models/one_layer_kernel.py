"""A whole chain of drafts as one compiled function: every token of every row without a return to Python.

In: the tables described below. Out: drafted tokens with their chances, keys and values in the caches. Not here: who fills the tables
(models.one_layer_chain), products (models.kernels, models.one_layer_tiles).

A token's query, key and value are rows of tables, as in models.one_layer. Threads divide heads and strips as in
models.kernels.forward and meet five times a token; which token comes next every thread finds for itself.
"""

from __future__ import annotations

import functools
import logging
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numba import cfunc, njit, types

from paceline.models.kernels import frame as at
from paceline.models.kernels.attention import _softmax as softmax
from paceline.models.kernels.attention import copy_row, scaled_norm
from paceline.models.kernels.attention_tiles import score, weigh
from paceline.models.kernels.forward import _gate_up as gate_up
from paceline.models.kernels.forward import _meet as meet
from paceline.models.kernels.forward import _project as project
from paceline.models.kernels.forward import _put as put
from paceline.models.kernels.matrix import AHEAD, strip_sums
from paceline.models.kernels.tiles import DOT, FULL, GROUP, MOST_ROWS, STEP, STRIP
from paceline.models.kernels.vectors import (
    LANES,
    add,
    broadcast,
    call_int,
    div,
    exponential,
    fma,
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
from paceline.models.one_layer_tiles import INPUTS, TOP, accumulate_bytes, load_sums, size_of, store_bytes, write

log = logging.getLogger("paceline")

(
    FRAME, LAYER,  # tables of models.kernels.frame
    STEPS, PAUSE, DONE,  # most tokens; stop where no row's chance so far is above this; tokens drafted
    SEQUENCES,  # records of the rows
    EMBEDDING, TABLE, TABLE_PITCH, TURNED, TURNED_PITCH,  # float32 rows by token; pitches in bytes
    COSINE, SINE,  # float32 rows by position, as long as TURNED's
    IOTA,  # 0, 1, 2 ... int64
    TOKENS, CHANCES, OUT_PITCH,  # (rows, steps) int64 tokens and float32 chances in fields of 8 bytes
    PARTS, PARTS_SIZE,  # per thread (rows, 3) lanes: largest logit, its place, sum of exponentials
    FINE, FINE_SIZE, FINE_PITCH,  # per thread (rows, hidden) float32 normed states
    BYTES, BYTES_SIZE, BYTES_PITCH,  # per thread (rows, hidden) 8-bit activations
    STRIPS, SCALES,  # the 8-bit head, or 0
    LOGITS, LOGITS_PITCH,  # (rows, v + ...) float32
    CHAIN_FIELDS,
) = range(0, 30 * at.FIELD, at.FIELD)  # fmt: skip

(
    KEYS, VALUES, HEAD_PITCH, LENGTH,  # float32 (kv heads, capacity, dim); bytes of a head; tokens in the cache
    FEED, COUNT,  # int64 tokens that come before the first draft
    SEQUENCE_FIELDS,
) = range(0, 7 * at.FIELD, at.FIELD)  # fmt: skip

LOWEST = np.float32(-np.inf)


@njit(error_model="numpy")
def _turned(data: int, token: int, position: int, first: int, count: int, target: int) -> None:
    """Rotated values first .. first + count - 1 of a token's row."""
    row = read(data + TABLE) + token * read(data + TABLE_PITCH) + 4 * first
    pitch = read(data + TURNED_PITCH)
    other = read(data + TURNED) + token * pitch + 4 * first
    cosine, sine = read(data + COSINE) + position * pitch + 4 * first, read(data + SINE) + position * pitch + 4 * first
    for i in range(0, 4 * count, 64):
        store(target + i, fma(load(row + i), load(cosine + i), mul(load(other + i), load(sine + i))))


@njit(error_model="numpy")
def _remember(data: int, sequence: int, token: int, position: int) -> None:
    """Keys and values of one token to its place."""
    frame = read(data + FRAME)
    size, heads, kv_heads = read(frame + at.HEAD_DIM), read(frame + at.HEADS), read(frame + at.KV_HEADS)
    values = read(data + TABLE) + token * read(data + TABLE_PITCH) + 4 * size * (heads + kv_heads)
    for head in range(kv_heads):
        place = head * read(sequence + HEAD_PITCH) + 4 * size * position
        _turned(data, token, position, (heads + head) * size, size, read(sequence + KEYS) + place)
        copy_row(values + 4 * size * head, size, read(sequence + VALUES) + place, False)


@njit(error_model="numpy")
def _attend(data: int, row: int, head: int, token: int, position: int, me: int) -> None:
    """Attention of one query head of one row over positions 0 .. position, to its place in the mixed values."""
    frame, sequence = read(data + FRAME), read(data + SEQUENCES) + row * SEQUENCE_FIELDS
    size, kv_heads, half = read(frame + at.HEAD_DIM), read(frame + at.KV_HEADS), read(frame + at.KIND) == DOT
    groups = read(frame + at.HEADS) // kv_heads
    kv_head, group = head // groups, head % groups
    query = read(frame + at.QUERY) + me * read(frame + at.QUERY_SIZE)
    scores, sums, slots = read(frame + at.SCORES) + me * read(frame + at.SCORES_SIZE), query + 4 * size, read(data + IOTA)
    keys, values = (read(sequence + KEYS), read(sequence + VALUES))
    keys, values = keys + kv_head * read(sequence + HEAD_PITCH), values + kv_head * read(sequence + HEAD_PITCH)
    _turned(data, token, position, head * size, size, query)
    for i in range(0, position + 1, LANES):
        score(FULL, size, 1, query, 0, keys, slots + 8 * i, 4 * size, scores + 4 * i, 0)
    whole = broadcast(softmax(scores, position + 1, np.float32(1.0)))
    mixed = read(frame + at.MIXED) + row * read(frame + at.MIXED_PITCH) + (group * kv_heads + kv_head) * size * (2 if half else 4)
    for part in range(0, size, 2 * LANES):
        for i in range(2):
            store(sums + 64 * i, broadcast(np.float32(0.0)))
        weigh(1, 1, scores, 0, values + 4 * part, slots, position + 1, 4 * size, sums, 128)
        for i in range(2):
            store(sums + 64 * i, div(load(sums + 64 * i), whole))
        copy_row(sums, 2 * LANES, mixed + part * (2 if half else 4), half)


@njit(error_model="numpy")
def _enter(data: int, row: int, step: int, me: int, team: int) -> None:
    """Feed one row its tokens: at first those that come before the draft, then the last drafted one."""
    frame, sequence = read(data + FRAME), read(data + SEQUENCES) + row * SEQUENCE_FIELDS
    hidden, heads, rows = read(frame + at.HIDDEN), read(frame + at.HEADS), read(frame + at.ROWS)
    count, position = read(sequence + COUNT), read(sequence + LENGTH) + read(sequence + COUNT) - 1 + step
    token = read(read(sequence + FEED) + 8 * (count - 1))
    if step == 0:
        for i in range(count):
            _remember(data, sequence, read(read(sequence + FEED) + 8 * i), read(sequence + LENGTH) + i)
    else:
        token = read(read(data + TOKENS) + row * read(data + OUT_PITCH) + 8 * (step - 1))
        _remember(data, sequence, token, position)
    if rows * me // team <= row < rows * (me + 1) // team:
        copy_row(
            read(data + EMBEDDING) + 4 * hidden * token, hidden, read(frame + at.X) + row * read(frame + at.X_PITCH), False
        )  # fmt: skip
    for head in range(heads):
        if (row * heads + head) % team == me:
            _attend(data, row, head, token, position, me)


@njit(error_model="numpy")
def _shrink(data: int, me: int) -> None:
    """Normed states of all rows as 8-bit activations; each row's scale follows its bytes."""
    frame = read(data + FRAME)
    hidden = read(frame + at.HIDDEN)
    for row in range(read(frame + at.ROWS)):
        fine = read(data + FINE) + me * read(data + FINE_SIZE) + row * read(data + FINE_PITCH)
        target = read(data + BYTES) + me * read(data + BYTES_SIZE) + row * read(data + BYTES_PITCH)
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
    frame = read(data + FRAME)
    hidden, rows, pitch = read(frame + at.HIDDEN), read(frame + at.ROWS), read(data + BYTES_PITCH)
    groups, scales = hidden // (INPUTS * GROUP), read(data + SCALES) + strip * 8 * STRIP
    weights, x = read(data + STRIPS) + strip * groups * GROUP * STEP, read(data + BYTES) + me * read(data + BYTES_SIZE)
    for first in range(0, rows, MOST_ROWS):
        count = min(MOST_ROWS, rows - first)
        accumulate_bytes(count, weights, groups, x + first * pitch, pitch, sums, weights + AHEAD)
        for row in range(first, first + count):
            scale = load(x + row * pitch + hidden)
            target = read(data + LOGITS) + row * read(data + LOGITS_PITCH) + 4 * strip * STRIP
            for i in range(0, 4 * STRIP, 64):
                value = sub(load_sums(sums + (row - first) * 4 * STRIP + i), load(scales + i))
                store(target + i, mul(mul(value, load(scales + 4 * STRIP + i)), scale))


@njit(error_model="numpy")
def _logits(data: int, me: int, team: int) -> None:
    """This thread's strips of the logits of all rows."""
    frame = read(data + FRAME)
    hidden, rows, kind, small = read(frame + at.HIDDEN), read(frame + at.ROWS), read(frame + at.KIND), read(data + STRIPS) != 0
    for row in range(rows):
        x, weight = read(frame + at.X) + row * read(frame + at.X_PITCH), read(frame + at.FINAL_NORM)
        target = read(frame + at.NORMED) + me * read(frame + at.NORMED_SIZE) + row * read(frame + at.NORMED_PITCH)
        if small:
            target = read(data + FINE) + me * read(data + FINE_SIZE) + row * read(data + FINE_PITCH)
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
            put(sums, rows, read(data + LOGITS) + 4 * strip * STRIP, read(data + LOGITS_PITCH))


@njit(error_model="numpy")
def _first_at(row: int, begin: int, end: int, top: np.float32) -> int:
    for i in range(begin, end, LANES):
        if largest(load(row + 4 * i)) == top:
            for j in range(i, i + LANES):
                if read_float(row + 4 * j) == top:
                    return j
    return begin


@njit(error_model="numpy")
def _judge(data: int, me: int, team: int) -> None:
    """Largest logit, its place and the sum of exponentials over this thread's strips, for every row."""
    frame = read(data + FRAME)
    vocab, rows = read(frame + at.VOCAB), read(frame + at.ROWS)
    strips = (vocab + STRIP - 1) // STRIP
    begin, end = strips * me // team * STRIP, strips * (me + 1) // team * STRIP
    for row in range(rows):
        logits = read(data + LOGITS) + row * read(data + LOGITS_PITCH)
        if end > vocab:
            for i in range(vocab, end, LANES):
                store(logits + 4 * i, broadcast(LOWEST))
        top, parts = broadcast(LOWEST), broadcast(np.float32(0.0))
        for i in range(begin, end, LANES):
            top = larger(top, load(logits + 4 * i))
        most = largest(top)
        for i in range(begin, end, LANES):
            parts = add(parts, exponential(sub(load(logits + 4 * i), broadcast(most))))
        part = read(data + PARTS) + me * read(data + PARTS_SIZE) + 192 * row
        store(part, broadcast(most))
        store(part + 128, broadcast(total(parts)))
        write(part + 64, _first_at(logits, begin, end, most))


@njit(error_model="numpy")
def _choose(data: int, row: int, step: int, team: int) -> np.float32:
    """The best token of all threads' parts, and its chance, to their places; every thread writes the same."""
    best, place, whole = LOWEST, 0, np.float32(0.0)
    for one in range(team):
        part = read(data + PARTS) + one * read(data + PARTS_SIZE) + 192 * row
        if read_float(part) > best:
            best, place = read_float(part), read(part + 64)
    for one in range(team):
        part = read(data + PARTS) + one * read(data + PARTS_SIZE) + 192 * row
        lanes = mul(exponential(broadcast(read_float(part) - best)), load(part + 128))
        whole += largest(lanes)
    out = row * read(data + OUT_PITCH) + 8 * step
    write(read(data + TOKENS) + out, place)
    chance = np.float32(1.0) / whole
    store(read(data + CHANCES) + out, broadcast(chance))
    return chance


@njit(error_model="numpy")
def _row_chance(data: int, row: int, steps: int) -> np.float32:
    reach = np.float32(1.0)
    for step in range(steps):
        reach *= read_float(read(data + CHANCES) + row * read(data + OUT_PITCH) + 8 * step)
    return reach


@njit(error_model="numpy")
def chain(data: int) -> None:
    """Draft; see the module."""
    frame, layer, me, team = read(data + FRAME), read(data + LAYER), 0, 1
    if read(frame + at.THREAD) != 0:
        me, team = call_int(read(frame + at.THREAD)), call_int(read(frame + at.TEAM))
    rows, mixed = read(frame + at.ROWS), read(frame + at.HEADS) * read(frame + at.HEAD_DIM)
    for step in range(read(data + STEPS)):
        for row in range(rows):
            _enter(data, row, step, me, team)
        meet(frame, team)
        project(frame, me, team, read(layer + at.O_WEIGHT), 0, read(frame + at.MIXED), read(frame + at.MIXED_PITCH), mixed, False)
        meet(frame, team)
        gate_up(frame, layer, me, team)
        meet(frame, team)
        inner, pitch = read(frame + at.INNER), read(frame + at.INNER_PITCH)
        project(frame, me, team, read(layer + at.DOWN_WEIGHT), 0, inner, pitch, read(frame + at.INTERMEDIATE), False)
        meet(frame, team)
        _logits(data, me, team)
        _judge(data, me, team)
        meet(frame, team)
        likely = np.float32(0.0)
        for row in range(rows):
            _choose(data, row, step, team)
            likely = max(likely, _row_chance(data, row, step + 1))
        if me == 0:
            write(data + DONE, step + 1)
        if likely <= read_float(data + PAUSE):
            break


@functools.cache
def compiled() -> Any:
    """`chain` as machine code for this CPU, from numba's cache on disk where one can be written."""
    here = Path(__file__)
    files = [*sorted((here.parent / "kernels").glob("*.py")), here, here.with_name("one_layer_tiles.py")]
    sources = zlib.crc32(b"".join(path.read_bytes() for path in files)) or 1

    def entry(data: int) -> None:
        if sources != 0:  # the cache tells functions apart by their constants, and would miss changes in other files
            chain(data)

    try:
        return cfunc(types.void(types.int64), cache=True, error_model="numpy")(entry)
    except (RuntimeError, OSError) as reason:
        log.debug("the draft kernel is not kept on disk: %s", reason)
        return cfunc(types.void(types.int64), error_model="numpy")(entry)
