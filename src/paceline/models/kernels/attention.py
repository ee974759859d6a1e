"""Attention of the rows of one pass over cache slots, compiled.

In: float32 projections of all rows, lists of visible slots. Out: keys and values in their slots, mixed values of every row. Not
here: the inner loops (models.kernels.attention_tiles), what a row sees (models.kernels.visible).

Up to eight queries that share a list go through the keys together; what else a row sees (itself, its ancestors in the tree) follows
as a list of its own. Threads divide the kv heads.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from paceline.models.kernels import frame as at
from paceline.models.kernels.attention_tiles import MOST_QUERIES, score, weigh
from paceline.models.kernels.tiles import DOT
from paceline.models.kernels.vectors import (
    LANES,
    add,
    broadcast,
    call,
    div,
    exponential,
    fma,
    larger,
    largest,
    load,
    mul,
    read,
    read_float,
    root,
    store,
    store_half,
    sub,
    total,
)  # fmt: skip

LOWEST = np.float32(-np.inf)


@njit(error_model="numpy")
def scaled_norm(source: int, size: int, weight: int, epsilon: np.float32, target: int, half: bool) -> None:
    """RMS norm of one row of float32, times weights, to float32 or bfloat16 (`half`); target may be the source."""
    even, odd = broadcast(np.float32(0.0)), broadcast(np.float32(0.0))
    for i in range(0, size, 2 * LANES):
        one, two = load(source + 4 * i), load(source + 4 * i + 64)
        even, odd = fma(one, one, even), fma(two, two, odd)
    factor = broadcast(np.float32(1.0) / root(total(add(even, odd)) / np.float32(size) + epsilon))
    for i in range(0, size, LANES):
        value = mul(mul(load(source + 4 * i), factor), load(weight + 4 * i))
        if half:
            store_half(target + 2 * i, value)
        else:
            store(target + 4 * i, value)


@njit(error_model="numpy")
def copy_row(source: int, size: int, target: int, half: bool) -> None:
    """One row of float32 to float32 or bfloat16 (`half`)."""
    for i in range(0, size, LANES):
        if half:
            store_half(target + 2 * i, load(source + 4 * i))
        else:
            store(target + 4 * i, load(source + 4 * i))


@njit(error_model="numpy")
def _turn(head: int, rope: int, row: int) -> None:
    """Rotary embedding of one head in place."""
    dims = read(rope + at.TURNED)
    place = read(read(rope + at.PLACE) + 8 * row)
    cosine, sine = read(rope + at.COSINE) + 4 * dims * place, read(rope + at.SINE) + 4 * dims * place
    half = dims // 2
    for i in range(0, half, LANES):
        low, high, c, s = load(head + 4 * i), load(head + 4 * (half + i)), load(cosine + 4 * i), load(sine + 4 * (half + i))
        store(head + 4 * i, sub(mul(low, c), mul(high, s)))
        store(head + 4 * (half + i), fma(low, s, mul(high, c)))


@njit(error_model="numpy")
def _prepare(frame: int, layer: int, row: int, head: int, weight: int, target: int, half: bool) -> None:
    """Norm, rotate and store one head of a row's projections (in place but for the copy to target)."""
    size, rope = read(frame + at.HEAD_DIM), read(layer + at.ROPE)
    source = read(frame + at.QKV) + row * read(frame + at.QKV_PITCH) + 4 * head * size
    if weight != 0:
        scaled_norm(source, size, weight, read_float(frame + at.EPSILON), source, False)
    if rope != 0:
        _turn(source, rope, row)
    copy_row(source, size, target, half)


@njit(error_model="numpy")
def _remember(frame: int, layer: int, first: int, stop: int) -> None:
    """Write keys and values of (kv head, row) items to their slots."""
    rows, size, narrow = read(frame + at.ROWS), read(frame + at.HEAD_DIM), read(frame + at.NARROW)
    heads, kv_heads = read(frame + at.HEADS), read(frame + at.KV_HEADS)
    width = size * (2 if narrow == 1 else 4)
    for item in range(first, stop):
        head, row = item // rows, item % rows
        slot = read(layer + at.CACHE) + read(read(frame + at.SLOT) + 8 * row) * read(frame + at.SLOT_PITCH)
        _prepare(frame, layer, row, heads + head, read(layer + at.K_NORM), slot + head * width, narrow == 1)
        values = read(frame + at.QKV) + row * read(frame + at.QKV_PITCH) + 4 * (heads + kv_heads + head) * size
        copy_row(values, size, slot + (kv_heads + head) * width, narrow == 1)


@njit(error_model="numpy")
def softmax(scores: int, count: int, scale: np.float32) -> np.float32:
    """Replace scores by exp(scale * (score - largest)); returns their sum. Sixteen scores behind the last are overwritten."""
    store(scores + 4 * count, broadcast(LOWEST))
    top = broadcast(LOWEST)
    for i in range(0, count, LANES):
        top = larger(top, load(scores + 4 * i))
    high, factor, parts = broadcast(largest(top)), broadcast(scale), broadcast(np.float32(0.0))
    for i in range(0, count, LANES):
        value = exponential(mul(sub(load(scores + 4 * i), high), factor))
        store(scores + 4 * i, value)
        parts = add(parts, value)
    return total(parts)


@njit(error_model="numpy")
def _own(seen: int, row: int) -> tuple[int, int]:
    entry = seen + row * at.SEEN_FIELDS
    return read(entry + at.OWN), read(entry + at.OWN_COUNT)


@njit(error_model="numpy")
def _scores(frame: int, layer: int, kv_head: int, row: int, first: int, queries: int, query: int, pitch: int, scores: int) -> None:
    """Scores of queries first .. first + queries - 1 (row by row, group by group, from `row` on) with all that they see."""
    kind, size, slot_pitch = read(frame + at.KIND), read(frame + at.HEAD_DIM), read(frame + at.SLOT_PITCH)
    groups = read(frame + at.HEADS) // read(frame + at.KV_HEADS)
    keys = read(layer + at.CACHE) + kv_head * size * (2 if read(frame + at.NARROW) == 1 else 4)
    seen, out_pitch = read(layer + at.SEEN), read(frame + at.SCORES_PITCH)
    shared, count = read(seen + row * at.SEEN_FIELDS + at.SHARED), read(seen + row * at.SEEN_FIELDS + at.SHARED_COUNT)
    for i in range(0, count, LANES):
        score(kind, size, queries, query, pitch, keys, shared + 8 * i, slot_pitch, scores + 4 * i, out_pitch)
    for q in range(queries):
        slots, more = _own(seen, row + (first + q) // groups)
        for i in range(0, more, LANES):
            own = scores + q * out_pitch + 4 * (count + i)
            score(kind, size, 1, query + q * pitch, pitch, keys, slots + 8 * i, slot_pitch, own, out_pitch)


@njit(error_model="numpy")
def _mix(frame: int, layer: int, kv_head: int, row: int, first: int, queries: int, scores: int, sums: int, part: int) -> None:
    """Weighted sums of 32 dimensions (from `part` on) of all visible values, to sums (queries, 32)."""
    size, slot_pitch, pitch = read(frame + at.HEAD_DIM), read(frame + at.SLOT_PITCH), read(frame + at.SCORES_PITCH)
    groups, wide = read(frame + at.HEADS) // read(frame + at.KV_HEADS), 1 - read(frame + at.NARROW)
    values = read(layer + at.CACHE) + ((read(frame + at.KV_HEADS) + kv_head) * size + part) * (4 if wide == 1 else 2)
    seen = read(layer + at.SEEN)
    shared, count = read(seen + row * at.SEEN_FIELDS + at.SHARED), read(seen + row * at.SEEN_FIELDS + at.SHARED_COUNT)
    for i in range(2 * queries):
        store(sums + 64 * i, broadcast(np.float32(0.0)))
    weigh(wide, queries, scores, pitch, values, shared, count, slot_pitch, sums, 128)
    for q in range(queries):
        slots, more = _own(seen, row + (first + q) // groups)
        weigh(wide, 1, scores + q * pitch + 4 * count, pitch, values, slots, more, slot_pitch, sums + 128 * q, 128)


@njit(error_model="numpy")
def _block(frame: int, layer: int, me: int, kv_head: int, row: int, first: int, queries: int) -> None:
    """One block of queries of one kv head, to its place in the mixed values."""
    size, kv_heads = read(frame + at.HEAD_DIM), read(frame + at.KV_HEADS)
    groups, half = read(frame + at.HEADS) // kv_heads, read(frame + at.KIND) == DOT
    item = 2 if half else 4
    query, pitch = read(frame + at.QUERY) + me * read(frame + at.QUERY_SIZE), item * size
    scores, out_pitch = read(frame + at.SCORES) + me * read(frame + at.SCORES_SIZE), read(frame + at.SCORES_PITCH)
    sums, weight = query + MOST_QUERIES * 4 * size, read(layer + at.Q_NORM)
    for q in range(queries):
        group, own = (first + q) % groups, row + (first + q) // groups
        _prepare(frame, layer, own, group * kv_heads + kv_head, weight, query + q * pitch, half)
    _scores(frame, layer, kv_head, row, first, queries, query, pitch, scores)
    shared = read(read(layer + at.SEEN) + row * at.SEEN_FIELDS + at.SHARED_COUNT)
    for q in range(queries):
        _, more = _own(read(layer + at.SEEN), row + (first + q) // groups)
        whole = softmax(scores + q * out_pitch, shared + more, read_float(frame + at.ATTENTION_SCALE))
        store(sums + 128 * MOST_QUERIES + 64 * q, broadcast(whole))
    for part in range(0, size, 2 * LANES):
        _mix(frame, layer, kv_head, row, first, queries, scores, sums, part)
        for q in range(queries):
            group, own = (first + q) % groups, row + (first + q) // groups
            place = (group * kv_heads + kv_head) * size + part
            target = read(frame + at.MIXED) + own * read(frame + at.MIXED_PITCH) + item * place
            whole = load(sums + 128 * MOST_QUERIES + 64 * q)
            for i in range(2):
                store(sums + 128 * q + 64 * i, div(load(sums + 128 * q + 64 * i), whole))
            copy_row(sums + 128 * q, 2 * LANES, target, half)


@njit(error_model="numpy")
def _run_of(seen: int, row: int, rows: int) -> int:
    """Number of rows from `row` on that share their list of slots."""
    entry, count = seen + row * at.SEEN_FIELDS, 1
    while row + count < rows:
        other = entry + count * at.SEEN_FIELDS
        if read(other + at.SHARED) != read(entry + at.SHARED) or read(other + at.SHARED_COUNT) != read(entry + at.SHARED_COUNT):
            break
        count += 1
    return count


@njit(error_model="numpy")
def attend(frame: int, layer: int, me: int, team: int) -> None:
    """Keys and values to the cache, then attention of all rows; every thread calls it with its number."""
    rows, kv_heads, seen = read(frame + at.ROWS), read(frame + at.KV_HEADS), read(layer + at.SEEN)
    groups = read(frame + at.HEADS) // kv_heads
    _remember(frame, layer, kv_heads * rows * me // team, kv_heads * rows * (me + 1) // team)
    most = MOST_QUERIES
    if kv_heads % team:
        most = MOST_QUERIES // 2  # smaller blocks divide better among threads
        call(read(frame + at.BARRIER))
    blocks, row = 0, 0
    while row < rows:
        run = _run_of(seen, row, rows)
        blocks += (run * groups + most - 1) // most
        row += run
    begin, end = kv_heads * blocks * me // team, kv_heads * blocks * (me + 1) // team
    for kv_head in range(begin // blocks, (end + blocks - 1) // blocks):
        index, row = kv_head * blocks, 0
        while row < rows:
            run = _run_of(seen, row, rows)
            for first in range(0, run * groups, most):
                if begin <= index < end:
                    _block(frame, layer, me, kv_head, row, first, min(most, run * groups - first))
                index += 1
            row += run
