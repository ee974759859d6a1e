"""A whole chain of drafts as one compiled function: every token of every row without a return to Python.

In: the tables of models.kernels.draft_frame. Out: drafted tokens with their chances, keys and values in the caches. Not here: who
fills the tables (models.one_layer_chain), the head (models.kernels.draft_head).

A token's query, key and value are rows of tables, as in models.one_layer. Threads divide heads and strips as in
models.kernels.forward and meet five times a token; which token comes next every thread finds for itself.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from paceline.models.kernels import draft_frame as of
from paceline.models.kernels import frame as at
from paceline.models.kernels.attention import copy_row, softmax
from paceline.models.kernels.attention_tiles import score, weigh
from paceline.models.kernels.draft_bytes import small_gate_up, small_project
from paceline.models.kernels.draft_head import choose, judge, logits, row_chance
from paceline.models.kernels.draft_tiles import write
from paceline.models.kernels.forward import gate_up, meet, project
from paceline.models.kernels.tiles import DOT, FULL
from paceline.models.kernels.vectors import LANES, broadcast, div, fma, load, mul, read, read_float, store


@njit(error_model="numpy")
def turned(data: int, token: int, position: int, first: int, count: int, target: int) -> None:
    """Rotated values first .. first + count - 1 of a token's row."""
    row = read(data + of.TABLE) + token * read(data + of.TABLE_PITCH) + 4 * first
    pitch = read(data + of.TURNED_PITCH)
    other = read(data + of.TURNED) + token * pitch + 4 * first
    cosine, sine = read(data + of.COSINE) + position * pitch + 4 * first, read(data + of.SINE) + position * pitch + 4 * first
    for i in range(0, 4 * count, 64):
        store(target + i, fma(load(row + i), load(cosine + i), mul(load(other + i), load(sine + i))))


@njit(error_model="numpy")
def remember(data: int, sequence: int, token: int, slot: int, position: int) -> None:
    """Keys and values of one token at a position, to a slot."""
    frame = read(data + of.FRAME)
    size, heads, kv_heads = read(frame + at.HEAD_DIM), read(frame + at.HEADS), read(frame + at.KV_HEADS)
    values = read(data + of.TABLE) + token * read(data + of.TABLE_PITCH) + 4 * size * (heads + kv_heads)
    for head in range(kv_heads):
        place = head * read(sequence + of.HEAD_PITCH) + 4 * size * slot
        turned(data, token, position, (heads + head) * size, size, read(sequence + of.KEYS) + place)
        copy_row(values + 4 * size * head, size, read(sequence + of.VALUES) + place, False)


@njit(error_model="numpy")
def feed(data: int, sequence: int, index: int) -> None:
    """Keys and values of one of the tokens that come before the draft."""
    place = read(sequence + of.LENGTH) + index
    remember(data, sequence, read(read(sequence + of.FEED) + 8 * index), place, place)


@njit(error_model="numpy")
def _attend(data: int, row: int, head: int, token: int, position: int, me: int) -> None:
    """Attention of one query head of one row over positions 0 .. position, to its place in the mixed values."""
    frame, sequence = read(data + of.FRAME), read(data + of.SEQUENCES) + row * of.SEQUENCE_FIELDS
    size, kv_heads, half = read(frame + at.HEAD_DIM), read(frame + at.KV_HEADS), read(frame + at.KIND) == DOT
    groups = read(frame + at.HEADS) // kv_heads
    kv_head, group = head // groups, head % groups
    query = read(frame + at.QUERY) + me * read(frame + at.QUERY_SIZE)
    scores, sums, slots = read(frame + at.SCORES) + me * read(frame + at.SCORES_SIZE), query + 4 * size, read(data + of.IOTA)
    keys, values = (read(sequence + of.KEYS), read(sequence + of.VALUES))
    keys, values = keys + kv_head * read(sequence + of.HEAD_PITCH), values + kv_head * read(sequence + of.HEAD_PITCH)
    turned(data, token, position, head * size, size, query)
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
    frame, sequence = read(data + of.FRAME), read(data + of.SEQUENCES) + row * of.SEQUENCE_FIELDS
    hidden, heads, rows = read(frame + at.HIDDEN), read(frame + at.HEADS), read(frame + at.ROWS)
    count, position = read(sequence + of.COUNT), read(sequence + of.LENGTH) + read(sequence + of.COUNT) - 1 + step
    token = read(read(sequence + of.FEED) + 8 * (count - 1))
    if step == 0:
        for i in range(count):
            feed(data, sequence, i)
    else:
        token = read(read(data + of.TOKENS) + row * read(data + of.OUT_PITCH) + 8 * (step - 1))
        remember(data, sequence, token, position, position)
    if rows * me // team <= row < rows * (me + 1) // team:
        copy_row(
            read(data + of.EMBEDDING) + 4 * hidden * token, hidden, read(frame + at.X) + row * read(frame + at.X_PITCH), False
        )  # fmt: skip
    for head in range(heads):
        if (row * heads + head) % team == me:
            _attend(data, row, head, token, position, me)


@njit(error_model="numpy")
def above_attention(data: int, me: int, team: int) -> None:
    """From the mixed values and embeddings of all rows to this thread's strips of their logits."""
    frame, layer, small = read(data + of.FRAME), read(data + of.LAYER), read(data + of.STRIPS) != 0
    mixed, mixed_pitch, width = (
        read(frame + at.MIXED),
        read(frame + at.MIXED_PITCH),
        read(frame + at.HEADS) * read(frame + at.HEAD_DIM),
    )
    inner, inner_pitch, depth = read(frame + at.INNER), read(frame + at.INNER_PITCH), read(frame + at.INTERMEDIATE)
    if small:
        small_project(data, me, team, read(data + of.O_STRIPS), read(data + of.O_SCALES), mixed, mixed_pitch, width)
    else:
        project(frame, me, team, read(layer + at.O_WEIGHT), 0, mixed, mixed_pitch, width, False)
    meet(frame, team)
    if small:
        small_gate_up(data, me, team)
    else:
        gate_up(frame, layer, me, team)
    meet(frame, team)
    if small:
        small_project(data, me, team, read(data + of.DOWN_STRIPS), read(data + of.DOWN_SCALES), inner, inner_pitch, depth)
    else:
        project(frame, me, team, read(layer + at.DOWN_WEIGHT), 0, inner, inner_pitch, depth, False)
    meet(frame, team)
    logits(data, me, team)


@njit(error_model="numpy")
def chain(data: int, me: int, team: int) -> None:
    """Draft; see the module."""
    frame = read(data + of.FRAME)
    rows = read(frame + at.ROWS)
    for step in range(read(data + of.STEPS)):
        for row in range(rows):
            _enter(data, row, step, me, team)
        meet(frame, team)
        above_attention(data, me, team)
        judge(data, me, team)
        meet(frame, team)
        likely = np.float32(0.0)
        for row in range(rows):
            choose(data, row, step, team)
            likely = max(likely, row_chance(data, row, step + 1))
        if me == 0:
            write(data + of.DONE, step + 1)
        if likely <= read_float(data + of.PAUSE):
            break
