"""Levels of draft trees as one compiled function: rows through the model, their children, the next rows, until a tree is done.

In: the tables of models.kernels.draft_frame. Out: grown trees or logits, keys and values in the caches. Not here: which nodes a
tree gets (models.kernels.draft_grow), chains (models.kernels.draft), who fills the tables (models.one_layer_tree).

A row sees the text of its sequence and its own path in the tree. Up to eight queries go through the keys of the text together.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from paceline.models.kernels import draft_frame as of
from paceline.models.kernels import frame as at
from paceline.models.kernels.attention import copy_row, softmax
from paceline.models.kernels.attention_tiles import MOST_QUERIES, score, weigh
from paceline.models.kernels.draft import above_attention, feed, remember, turned
from paceline.models.kernels.draft_grow import grow
from paceline.models.kernels.draft_lay import lay_rows
from paceline.models.kernels.draft_rank import survey
from paceline.models.kernels.forward import meet
from paceline.models.kernels.tiles import DOT, FULL
from paceline.models.kernels.vectors import LANES, broadcast, div, load, read, store


@njit(error_model="numpy")
def _scores(data: int, sequence: int, kv_head: int, row: int, first: int, queries: int, query: int, scores: int) -> None:
    """Scores of queries first .. first + queries - 1 (row by row, group by group, from `row` on) with all that they see."""
    frame, iota = read(data + of.FRAME), read(data + of.IOTA)
    size, groups = read(frame + at.HEAD_DIM), read(frame + at.HEADS) // read(frame + at.KV_HEADS)
    keys, pitch = read(sequence + of.KEYS) + kv_head * read(sequence + of.HEAD_PITCH), read(frame + at.SCORES_PITCH)
    text = read(sequence + of.LENGTH) + read(sequence + of.COUNT)
    for i in range(0, text, LANES):
        score(FULL, size, queries, query, 4 * size, keys, iota + 8 * i, 4 * size, scores + 4 * i, pitch)
    for q in range(queries):
        own = row + (first + q) // groups
        slots = read(data + of.OWN) + own * read(data + of.OWN_PITCH)
        for i in range(0, read(read(data + of.LAID) + own * of.ROW_FIELDS + of.ROW_OWN), LANES):
            out = scores + q * pitch + 4 * (text + i)
            score(FULL, size, 1, query + 4 * size * q, 4 * size, keys, slots + 8 * i, 4 * size, out, pitch)


@njit(error_model="numpy")
def _mix(data: int, sequence: int, kv_head: int, row: int, first: int, queries: int, scores: int, sums: int, part: int) -> None:
    """Weighted sums of 32 dimensions (from `part` on) of all visible values, to sums (queries, 32)."""
    frame, iota = read(data + of.FRAME), read(data + of.IOTA)
    size, groups = read(frame + at.HEAD_DIM), read(frame + at.HEADS) // read(frame + at.KV_HEADS)
    values = read(sequence + of.VALUES) + kv_head * read(sequence + of.HEAD_PITCH) + 4 * part
    text, pitch = read(sequence + of.LENGTH) + read(sequence + of.COUNT), read(frame + at.SCORES_PITCH)
    for i in range(2 * queries):
        store(sums + 64 * i, broadcast(np.float32(0.0)))
    weigh(1, queries, scores, pitch, values, iota, text, 4 * size, sums, 128)
    for q in range(queries):
        own = row + (first + q) // groups
        slots, more = read(data + of.OWN) + own * read(data + of.OWN_PITCH), read(data + of.LAID) + own * of.ROW_FIELDS + of.ROW_OWN
        weigh(1, 1, scores + q * pitch + 4 * text, pitch, values, slots, read(more), 4 * size, sums + 128 * q, 128)


@njit(error_model="numpy")
def _block(data: int, sequence: int, me: int, kv_head: int, first: int, queries: int) -> None:
    """One block of queries of one kv head of a sequence, to its place in the mixed values."""
    frame, row = read(data + of.FRAME), read(sequence + of.FIRST_ROW)
    size, kv_heads, half = read(frame + at.HEAD_DIM), read(frame + at.KV_HEADS), read(frame + at.KIND) == DOT
    groups, item = read(frame + at.HEADS) // kv_heads, 2 if half else 4
    query, pitch = read(frame + at.QUERY) + me * read(frame + at.QUERY_SIZE), read(frame + at.SCORES_PITCH)
    scores, sums = read(frame + at.SCORES) + me * read(frame + at.SCORES_SIZE), query + MOST_QUERIES * 4 * size
    text = read(sequence + of.LENGTH) + read(sequence + of.COUNT)
    for q in range(queries):
        laid = read(data + of.LAID) + (row + (first + q) // groups) * of.ROW_FIELDS
        head = kv_head * groups + (first + q) % groups
        turned(data, read(laid + of.ROW_TOKEN), read(laid + of.ROW_POSITION), head * size, size, query + 4 * size * q)
    _scores(data, sequence, kv_head, row, first, queries, query, scores)
    for q in range(queries):
        laid = read(data + of.LAID) + (row + (first + q) // groups) * of.ROW_FIELDS
        whole = softmax(scores + q * pitch, text + read(laid + of.ROW_OWN), np.float32(1.0))
        store(sums + 128 * MOST_QUERIES + 64 * q, broadcast(whole))
    for part in range(0, size, 2 * LANES):
        _mix(data, sequence, kv_head, row, first, queries, scores, sums, part)
        for q in range(queries):
            place = ((first + q) % groups * kv_heads + kv_head) * size + part
            target = read(frame + at.MIXED) + (row + (first + q) // groups) * read(frame + at.MIXED_PITCH) + item * place
            whole = load(sums + 128 * MOST_QUERIES + 64 * q)
            for i in range(2):
                store(sums + 128 * q + 64 * i, div(load(sums + 128 * q + 64 * i), whole))
            copy_row(sums + 128 * q, 2 * LANES, target, half)


@njit(error_model="numpy")
def _attend(data: int, me: int, team: int) -> None:
    """This thread's share of the attention of all rows."""
    frame = read(data + of.FRAME)
    heads, kv_heads = read(frame + at.HEADS), read(frame + at.KV_HEADS)
    most = max(1, min(MOST_QUERIES, (read(frame + at.ROWS) * heads + team - 1) // team))
    block = 0
    for index in range(read(data + of.COUNT_OF)):
        sequence = read(data + of.SEQUENCES) + index * of.SEQUENCE_FIELDS
        queries = read(sequence + of.ROW_COUNT) * (heads // kv_heads)
        for kv_head in range(kv_heads):
            for first in range(0, queries, most):
                if block % team == me:
                    _block(data, sequence, me, kv_head, first, min(most, queries - first))
                block += 1


@njit(error_model="numpy")
def _enter(data: int, me: int, team: int, fresh: bool) -> None:
    """Keys and values of all rows, by every thread for itself; the embeddings of its share."""
    frame = read(data + of.FRAME)
    hidden, rows = read(frame + at.HIDDEN), read(frame + at.ROWS)
    for index in range(read(data + of.COUNT_OF)):
        sequence = read(data + of.SEQUENCES) + index * of.SEQUENCE_FIELDS
        if fresh:
            for i in range(read(sequence + of.COUNT)):
                feed(data, sequence, i)
        first = read(sequence + of.FIRST_ROW)
        for row in range(first, first + read(sequence + of.ROW_COUNT)):
            laid = read(data + of.LAID) + row * of.ROW_FIELDS
            remember(data, sequence, read(laid + of.ROW_TOKEN), read(laid + of.ROW_SLOT), read(laid + of.ROW_POSITION))
    for row in range(rows * me // team, rows * (me + 1) // team):
        token = read(read(data + of.LAID) + row * of.ROW_FIELDS + of.ROW_TOKEN)
        target = read(frame + at.X) + row * read(frame + at.X_PITCH)
        copy_row(read(data + of.EMBEDDING) + 4 * hidden * token, hidden, target, False)


@njit(error_model="numpy")
def trees(data: int, me: int, team: int) -> None:
    """Grow; see the module. With GO_ON the rows that were laid last have been used, and only questions stand open."""
    frame, mode, growths = read(data + of.FRAME), read(data + of.MODE), read(data + of.COUNT_OF)
    scored, fresh = mode != of.GO_ON, True
    while True:
        if scored:
            _enter(data, me, team, fresh and mode != of.GO_ON)
            fresh = False
            _attend(data, me, team)
            meet(frame, team)
            above_attention(data, me, team)
            if mode == of.ROWS_ONLY:
                return
            survey(data, me, team)
            meet(frame, team)
        for index in range(me, growths, team):
            grow(data, index, team, scored)
        if growths > 1:
            meet(frame, team)
        if me == 0:
            lay_rows(data)
        meet(frame, team)
        if read(frame + at.ROWS) == 0:
            return
        scored = True
