"""Attention of the rows of one pass over cache slots, compiled.

Up to eight queries that share a list go through the keys together; what else a row sees (itself, its ancestors in the
tree) follows as a list of its own. Where that goes on from the shared one in one piece, as in chains and prompts, its
keys are shared as well. Keys and values are fetched ahead, those of the next sequence too. Threads divide the kv heads.

Where the matrix unit multiplies bfloat16, or registers are few, a layer without a window attends by strips of keys and
values (models.cpu.attention_strips), in every pass and for every row.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from paceline.models.cpu import offsets as at
from paceline.models.cpu.attention_strips import (
    BLOCK,
    ITEM,
    MATRIX_UNIT,
    QUERIES,
    half_softmax,
    pack_keys,
    pack_values,
    strip_scores,
    strip_weigh,
    strip_weigh_own,
)
from paceline.models.cpu.attention_tiles import HALF_MAX_QUERIES, MAX_QUERIES, fetch, score, weigh
from paceline.models.cpu.matrix_unit import TILE_ROWS
from paceline.models.cpu.threads import wait_for_all
from paceline.models.cpu.tiles import DOT, STRIP
from paceline.models.cpu.vectors import (
    LANES,
    add,
    broadcast,
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
    write_float,
)  # fmt: skip
from paceline.models.cpu.visible_slots import common_own_slots, own_slots, shared_slots
from paceline.utils import part_of_compiled

BY_HEAD, WHOLE, ROTATED = 0, 1, 2
"""Norms of queries and keys: of each head, of all heads together, and of each head when it is rotated."""

LOWEST = np.float32(-np.inf)
AHEAD = 32
"""How many slots ahead keys and values are fetched; no more than window_slots.SPARE."""


@part_of_compiled
def scaled_norm(source: int, size: int, weight: int, epsilon: np.float32, target: int, half: bool) -> None:
    """RMS norm of one row of float32, times weights, to float32 or bfloat16 (`half`); target may be the source."""
    even, odd = broadcast(np.float32(0.0)), broadcast(np.float32(0.0))
    for i in range(0, size, 2 * LANES):
        first, second = load(source + 4 * i), load(source + 4 * i + 64)
        even, odd = fma(first, first, even), fma(second, second, odd)
    factor = broadcast(np.float32(1.0) / root(total(add(even, odd)) / np.float32(size) + epsilon))
    for i in range(0, size, LANES):
        value = mul(mul(load(source + 4 * i), factor), load(weight + 4 * i))
        if half:
            store_half(target + 2 * i, value)
        else:
            store(target + 4 * i, value)


@part_of_compiled
def centred_norm(source: int, size: int, weight: int, bias: int, epsilon: np.float32, target: int, half: bool) -> None:
    """Layer norm of one row of float32, times weights plus bias, to float32 or bfloat16 (`half`)."""
    parts = broadcast(np.float32(0.0))
    for i in range(0, size, LANES):
        parts = add(load(source + 4 * i), parts)
    mean, parts = broadcast(total(parts) / np.float32(size)), broadcast(np.float32(0.0))
    for i in range(0, size, LANES):
        value = sub(load(source + 4 * i), mean)
        parts = fma(value, value, parts)
    factor = broadcast(np.float32(1.0) / root(total(parts) / np.float32(size) + epsilon))
    for i in range(0, size, LANES):
        value = fma(mul(sub(load(source + 4 * i), mean), factor), load(weight + 4 * i), load(bias + 4 * i))
        if half:
            store_half(target + 2 * i, value)
        else:
            store(target + 4 * i, value)


@part_of_compiled
def norm_row(frame: int, source: int, weight: int, target: int, half: bool) -> None:
    """The model's norm of one row of the residual stream's width; target may be the source."""
    size, epsilon, to_bias = read(frame + at.HIDDEN), read_float(frame + at.EPSILON), read(frame + at.NORM_BIAS)
    if to_bias == 0:
        scaled_norm(source, size, weight, epsilon, target, half)
    else:
        centred_norm(source, size, weight, weight + to_bias, epsilon, target, half)


@part_of_compiled
def copy_row(source: int, size: int, target: int, half: bool) -> None:
    """One row of float32 to float32 or bfloat16 (`half`)."""
    for i in range(0, size, LANES):
        if half:
            store_half(target + 2 * i, load(source + 4 * i))
        else:
            store(target + 4 * i, load(source + 4 * i))


@part_of_compiled
def _rotate(head: int, rope: int, row: int) -> None:
    """Rotary embedding of one head in place."""
    dims = read(rope + at.TURNED)
    place = read(read(rope + at.PLACE) + 8 * row)
    cosine, sine = read(rope + at.COSINE) + 4 * dims * place, read(rope + at.SINE) + 4 * dims * place
    half = dims // 2
    for i in range(0, half, LANES):
        low, high = load(head + 4 * i), load(head + 4 * (half + i))
        c, s = load(cosine + 4 * i), load(sine + 4 * (half + i))
        store(head + 4 * i, sub(mul(low, c), mul(high, s)))
        store(head + 4 * (half + i), fma(low, s, mul(high, c)))


@part_of_compiled
def _grow(head: int, size: int, rope: int, row: int) -> None:
    """Multiply one head of a row's queries in place by what its position makes of it."""
    growth = read(rope + at.GROWTH)
    if growth != 0:
        factor = broadcast(read_float(growth + 4 * read(read(rope + at.PLACE) + 8 * row)))
        for i in range(0, size, LANES):
            store(head + 4 * i, mul(load(head + 4 * i), factor))


@part_of_compiled
def _norm_head(frame: int, head: int, weight: int, when: int) -> None:
    """Norm one head of a row in place where heads are normed at that time; `weight` is 0 where they are not at all."""
    if weight != 0 and read(frame + at.QK_NORM) == when:
        scaled_norm(head, read(frame + at.HEAD_DIM), weight, read_float(frame + at.HEAD_EPSILON), head, False)


@part_of_compiled
def prepare(frame: int, layer: int, row: int, head: int, weight: int, target: int, half: bool) -> None:
    """Norm, rotate and store one head of a row's projections (in place but for the copy to target)."""
    size, rope = read(frame + at.HEAD_DIM), read(layer + at.ROPE)
    source = read(frame + at.QKV) + row * read(frame + at.QKV_PITCH) + 4 * head * size
    _norm_head(frame, source, weight, BY_HEAD)
    if rope != 0:
        _rotate(source, rope, row)
    _norm_head(frame, source, weight, ROTATED)
    if rope != 0 and head < read(frame + at.HEADS):
        _grow(source, size, rope, row)
    copy_row(source, size, target, half)


@part_of_compiled
def write_cache(frame: int, layer: int, first: int, stop: int) -> None:
    """Write keys and values of (kv head, row) items to their slots; values that are keys once."""
    rows, size, narrow = read(frame + at.ROWS), read(frame + at.HEAD_DIM), read(frame + at.NARROW)
    heads, kv_heads = read(frame + at.HEADS), read(frame + at.KV_HEADS)
    width, to_values = size * (2 if narrow == 1 else 4), read(frame + at.VALUES)
    for item in range(first, stop):
        head, row = item // rows, item % rows
        slot = read(layer + at.CACHE) + read(read(layer + at.SLOT) + 8 * row) * read(frame + at.SLOT_PITCH)
        prepare(frame, layer, row, heads + head, read(layer + at.K_NORM), slot + head * width, narrow == 1)
        if to_values != 0:
            values = read(frame + at.QKV) + row * read(frame + at.QKV_PITCH) + 4 * (heads + kv_heads + head) * size
            copy_row(values, size, slot + to_values + head * width, narrow == 1)


@part_of_compiled
def soft_cap(lanes: Any, cap: np.float32) -> Any:
    """cap * tanh(x / cap) of lanes."""
    power = exponential(mul(lanes, broadcast(np.float32(2.0) / cap)))
    return sub(broadcast(cap), div(broadcast(np.float32(2.0) * cap), add(power, broadcast(np.float32(1.0)))))


@part_of_compiled
def cap_scores(scores: int, count: int, scale: np.float32, cap: np.float32) -> np.float32:
    """Scale and cap scores unless `cap` is 0; returns the scale that is left."""
    if cap == 0:
        return scale
    for i in range(0, count, LANES):
        store(scores + 4 * i, soft_cap(mul(load(scores + 4 * i), broadcast(scale)), cap))
    return np.float32(1.0)


@part_of_compiled
def softmax(scores: int, count: int, scale: np.float32) -> np.float32:
    """Replace scores by exp(scale * (score - largest)); returns their sum.

    Sixteen scores behind the last are overwritten.
    """
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


@part_of_compiled
def _scores(
    frame: int, layer: int, kv_head: int, row: int, first: int, queries: int,
    query: int, pitch: int, scores: int, most: int, ahead: bool,
) -> None:  # fmt: skip
    """Scores of queries first .. first + queries - 1 (row by row, group by group, from `row` on) with all that they
    see.

    `most`: of `common_own_slots`. `ahead`: whether to fetch keys and values ahead.
    """
    kind, size, slot_pitch = read(frame + at.KIND), read(frame + at.HEAD_DIM), read(frame + at.SLOT_PITCH)
    groups = read(frame + at.HEADS) // read(frame + at.KV_HEADS)
    item = 2 if read(frame + at.NARROW) == 1 else 4
    keys = read(layer + at.CACHE) + kv_head * size * item
    seen, out_pitch = read(layer + at.SEEN), read(frame + at.SCORES_PITCH)
    shared, count = shared_slots(seen, row)
    for i in range(0, count + most, LANES):
        if ahead and i + AHEAD < count + most:
            fetch(keys, shared + 8 * (i + AHEAD), slot_pitch, size * item, read(frame + at.VALUES))
        score(kind, size, queries, query, pitch, keys, shared + 8 * i, slot_pitch, scores + 4 * i, out_pitch)
    if most > 0:
        return
    q = 0
    while q < queries:
        slots, more = own_slots(seen, row + (first + q) // groups)
        together = min(groups - (first + q) % groups, queries - q)
        for i in range(0, more, LANES):
            out = scores + q * out_pitch + 4 * (count + i)
            score(kind, size, together, query + q * pitch, pitch, keys, slots + 8 * i, slot_pitch, out, out_pitch)
        q += together


@part_of_compiled
def _mix_values(
    frame: int, layer: int, kv_head: int, row: int, first: int, queries: int,
    scores: int, sums: int, part: int, width: int, least: int,
) -> None:  # fmt: skip
    """Weighted sums of `width` dimensions (from `part` on) of visible values, to sums (queries, width). `least`: of
    `common_own_slots`.
    """
    size, slot_pitch, pitch = read(frame + at.HEAD_DIM), read(frame + at.SLOT_PITCH), read(frame + at.SCORES_PITCH)
    groups, wide = read(frame + at.HEADS) // read(frame + at.KV_HEADS), 1 - read(frame + at.NARROW)
    values = read(layer + at.CACHE) + read(frame + at.VALUES) + (kv_head * size + part) * (4 if wide == 1 else 2)
    seen = read(layer + at.SEEN)
    shared, count = shared_slots(seen, row)
    for i in range(0, queries * width, LANES):
        store(sums + 4 * i, broadcast(np.float32(0.0)))
    weigh(wide, queries, scores, pitch, values, shared, count + least, slot_pitch, sums, 4 * width)
    for q in range(queries):
        slots, more = own_slots(seen, row + (first + q) // groups)
        if more > least:
            strip = scores + q * pitch + 4 * (count + least)
            rest, out = slots + 8 * least, sums + 4 * width * q
            weigh(wide, 1, strip, pitch, values, rest, more - least, slot_pitch, out, 4 * width)


@part_of_compiled
def _fetch_first(frame: int, layer: int, kv_head: int, row: int) -> None:
    """Bring keys and values of the first slots that a row sees into the caches."""
    if row < read(frame + at.ROWS):
        pitch, item = read(frame + at.SLOT_PITCH), 2 if read(frame + at.NARROW) == 1 else 4
        width = read(frame + at.HEAD_DIM) * item
        shared, count = shared_slots(read(layer + at.SEEN), row)
        for i in range(0, min(count, AHEAD), LANES):
            fetch(read(layer + at.CACHE) + kv_head * width, shared + 8 * i, pitch, width, read(frame + at.VALUES))


@part_of_compiled
def _add_biases(frame: int, layer: int, row: int, scores: int, count: int, head: int) -> None:
    """Add what distances add to a query's scores: a row sees the positions up to its own, in order."""
    biases = read(layer + at.BIASES)
    if biases != 0:
        first = read(frame + at.BIAS_COUNT) - 1 - read(read(frame + at.POSITIONS) + 8 * row)
        biases += 4 * (head * read(frame + at.BIAS_PITCH) + first)
        for i in range(0, count, LANES):
            store(scores + 4 * i, add(load(scores + 4 * i), load(biases + 4 * i)))


@part_of_compiled
def to_shares(frame: int, layer: int, row: int, scores: int, count: int, head: int, in_strips: bool) -> np.float32:
    """Replace a query's scores by shares that are not yet divided by their sum, which counts its head's sink; returns
    it. With `in_strips` they are bfloat16 in the matrix unit.
    """
    _add_biases(frame, layer, row, scores, count, head)
    sinks = read(layer + at.SINKS)
    if sinks != 0:  # one more score, which has no value
        write_float(scores + 4 * count, read_float(sinks + 4 * head))
        count += 1
    scale = cap_scores(scores, count, read_float(frame + at.ATTENTION_SCALE), read_float(frame + at.ATTENTION_CAP))
    if not in_strips:
        return softmax(scores, count, scale)
    if not MATRIX_UNIT:
        return softmax(scores, count, scale)
    for i in range(count, count + STRIP, LANES):
        store(scores + 4 * i, broadcast(LOWEST))
    return half_softmax(scores, count, scale)


@part_of_compiled
def put_mixed(mixed: int, width: int, whole: Any, target: int, half: bool) -> None:
    """Weighted sums of `width` dimensions, divided by the sum of their weights, to their place."""
    for i in range(0, width, LANES):
        store(mixed + 4 * i, div(load(mixed + 4 * i), whole))
    copy_row(mixed, width, target, half)


@part_of_compiled
def _block(frame: int, layer: int, me: int, kv_head: int, row: int, first: int, queries: int, coming: int) -> None:
    """One block of queries of one kv head, to its place in the mixed values. `coming`: the row whose block comes
    next.
    """
    size, kv_heads = read(frame + at.HEAD_DIM), read(frame + at.KV_HEADS)
    groups, half = read(frame + at.HEADS) // kv_heads, read(frame + at.KIND) == DOT
    item = 2 if half else 4
    query, pitch = read(frame + at.QUERY) + me * read(frame + at.QUERY_SIZE), item * size
    scores, out_pitch = read(frame + at.SCORES) + me * read(frame + at.SCORES_SIZE), read(frame + at.SCORES_PITCH)
    sums, weight, seen = query + MAX_QUERIES * 4 * size, read(layer + at.Q_NORM), read(layer + at.SEEN)
    begin, end = row + first // groups, row + (first + queries + groups - 1) // groups
    for q in range(queries):
        group, at_row = (first + q) % groups, row + (first + q) // groups
        prepare(frame, layer, at_row, group * kv_heads + kv_head, weight, query + q * pitch, half)
    least, most = common_own_slots(seen, begin, end)
    _scores(frame, layer, kv_head, row, first, queries, query, pitch, scores, most, first == 0)
    _, shared = shared_slots(seen, row)
    if coming > row:
        _fetch_first(frame, layer, kv_head, coming)
    wholes = sums + 128 * MAX_QUERIES
    for q in range(queries):
        of_row = row + (first + q) // groups
        _, more = own_slots(seen, of_row)
        head = (first + q) % groups * kv_heads + kv_head
        whole = to_shares(frame, layer, of_row, scores + q * out_pitch, shared + more, head, False)
        store(wholes + 64 * q, broadcast(whole))
    part = 0
    while part < size:
        width = 4 * LANES if queries <= HALF_MAX_QUERIES and size - part >= 4 * LANES else 2 * LANES
        _mix_values(frame, layer, kv_head, row, first, queries, scores, sums, part, width, least)
        for q in range(queries):
            group, at_row = (first + q) % groups, row + (first + q) // groups
            place = (group * kv_heads + kv_head) * size + part
            target = read(frame + at.MIXED) + at_row * read(frame + at.MIXED_PITCH) + item * place
            put_mixed(sums + 4 * width * q, width, load(wholes + 64 * q), target, half)
        part += width


@part_of_compiled
def _packed(frame: int, me: int) -> tuple[int, int]:
    """Where a thread packs keys, and values."""
    scores = read(frame + at.SCORES) + me * read(frame + at.SCORES_SIZE)
    keys = scores + QUERIES * read(frame + at.SCORES_PITCH)
    return keys, keys + read(frame + at.PACKED) * 2 * read(frame + at.HEAD_DIM)


@part_of_compiled
def _pack_run(frame: int, layer: int, me: int, kv_head: int, row: int, run: int) -> None:
    """Pack all that rows see in common, for several blocks of queries."""
    size, slot_pitch, seen = read(frame + at.HEAD_DIM), read(frame + at.SLOT_PITCH), read(layer + at.SEEN)
    own_keys, own_values = _packed(frame, me)
    shared, count = shared_slots(seen, row)
    count += common_own_slots(seen, row, row + run)[1]
    keys = read(layer + at.CACHE) + kv_head * size * 2
    if count > 0:
        pack_keys(keys, shared, slot_pitch, count, size // 32, own_keys)
    for part in range(0, size if count > 0 else 0, STRIP):
        values, lines = keys + read(frame + at.VALUES) + part * 2, min(STRIP, size - part) // 32
        pack_values(values, shared, slot_pitch, count, lines, own_values + part * 2 * read(frame + at.PACKED))


@part_of_compiled
def _strip_block(
    frame: int, layer: int, me: int, kv_head: int, row: int, first: int, queries: int, ready: bool
) -> None:
    """`_block` by strips of keys and values. `ready`: after `_pack_run`."""
    groups, seen = read(frame + at.HEADS) // read(frame + at.KV_HEADS), read(layer + at.SEEN)
    _, most = common_own_slots(seen, row + first // groups, row + (first + queries + groups - 1) // groups)
    _score_in_strips(frame, layer, me, kv_head, row, first, queries, most, ready)
    _shares_of_block(frame, layer, me, kv_head, row, first, queries, most)
    for part in range(0, read(frame + at.HEAD_DIM), STRIP):
        _weigh_in_strips(frame, layer, me, kv_head, row, first, queries, most, part, ready)


@part_of_compiled
def _room(frame: int, me: int) -> tuple[int, int, int, int, int]:
    """A thread's memory for a block: scores, queries, sums, sums of shares, and the slots of a mixed block."""
    scores = read(frame + at.SCORES) + me * read(frame + at.SCORES_SIZE)
    query = read(frame + at.QUERY) + me * read(frame + at.QUERY_SIZE)
    sums = query + QUERIES * ITEM * read(frame + at.HEAD_DIM)
    return scores, query, sums, sums + QUERIES * 4 * STRIP, sums + QUERIES * (4 * STRIP + 64)


@part_of_compiled
def _score_in_strips(
    frame: int, layer: int, me: int, kv_head: int, row: int, first: int, queries: int, most: int, ready: bool
) -> None:
    """Scores of a block. `most`: own slots that all of its rows have; 0 where they differ."""
    size, kv_heads, seen = read(frame + at.HEAD_DIM), read(frame + at.KV_HEADS), read(layer + at.SEEN)
    groups, slot_pitch, pitch = (
        read(frame + at.HEADS) // kv_heads,
        read(frame + at.SLOT_PITCH),
        read(frame + at.SCORES_PITCH),
    )
    scores, query, _, _, mixed = _room(frame, me)
    for q in range(queries):
        at_row, head = row + (first + q) // groups, (first + q) % groups * kv_heads + kv_head
        prepare(frame, layer, at_row, head, read(layer + at.Q_NORM), query + q * ITEM * size, MATRIX_UNIT)
    keys, (shared, count) = read(layer + at.CACHE) + kv_head * size * 2, shared_slots(seen, row)
    packed, _ = _packed(frame, me)
    strip_scores(keys, shared, slot_pitch, count + most, size, queries, query, scores, pitch, packed, ready)
    q = queries if most > 0 else 0
    while q < queries:
        slots, more = own_slots(seen, row + (first + q) // groups)
        together, out = min(groups - (first + q) % groups, queries - q, TILE_ROWS), scores + q * pitch + 4 * count
        strip_scores(
            keys, slots, slot_pitch, more, size, together, query + q * ITEM * size, out, pitch, mixed + 8 * BLOCK, False
        )
        q += together


@part_of_compiled
def _shares_of_block(
    frame: int, layer: int, me: int, kv_head: int, row: int, first: int, queries: int, most: int
) -> None:
    """Shares in place of a block's scores, 0 behind each row's last key, and their sums."""
    kv_heads, seen, pitch = read(frame + at.KV_HEADS), read(layer + at.SEEN), read(frame + at.SCORES_PITCH)
    groups, (_, count), (scores, _, _, wholes, _) = (
        read(frame + at.HEADS) // kv_heads,
        shared_slots(seen, row),
        _room(frame, me),
    )
    for q in range(queries):
        head, shares = (first + q) % groups * kv_heads + kv_head, scores + q * pitch
        of_row = row + (first + q) // groups
        _, more = own_slots(seen, of_row)
        store(wholes + 64 * q, broadcast(to_shares(frame, layer, of_row, shares, count + more, head, True)))
        for i in range(count + more, count + max(most, more) + BLOCK, LANES):
            if MATRIX_UNIT:
                store_half(shares + 2 * i, broadcast(np.float32(0.0)))
            else:
                store(shares + 4 * i, broadcast(np.float32(0.0)))


@part_of_compiled
def _weigh_in_strips(
    frame: int, layer: int, me: int, kv_head: int, row: int, first: int, queries: int, most: int, part: int, ready: bool
) -> None:
    """Values of a block by its shares, of the dimensions `part` .. `part` + 63."""
    size, kv_heads, seen = read(frame + at.HEAD_DIM), read(frame + at.KV_HEADS), read(layer + at.SEEN)
    groups, slot_pitch, pitch = (
        read(frame + at.HEADS) // kv_heads,
        read(frame + at.SLOT_PITCH),
        read(frame + at.SCORES_PITCH),
    )
    scores, _, sums, wholes, mixed = _room(frame, me)
    _, own_values = _packed(frame, me)
    width, values = (
        min(STRIP, size - part),
        read(layer + at.CACHE) + read(frame + at.VALUES) + (kv_head * size + part) * 2,
    )
    strip, (shared, count) = own_values + (part * 2 * read(frame + at.PACKED) if ready else 0), shared_slots(seen, row)
    for i in range(0, queries * STRIP, LANES):
        store(sums + 4 * i, broadcast(np.float32(0.0)))
    together = count + most if most > 0 else count - count % BLOCK
    strip_weigh(values, shared, slot_pitch, together, width // 32, queries, scores, pitch, sums, strip, ready)
    q = queries if most > 0 else 0
    while q < queries:
        slots, more = own_slots(seen, row + (first + q) // groups)
        together = min(groups - (first + q) % groups, queries - q, TILE_ROWS)
        strip_weigh_own(
            values, shared, count, slots, more, slot_pitch, width // 32, together,
            scores + q * pitch, pitch, sums + q * 4 * STRIP, mixed + 8 * BLOCK, mixed,
        )  # fmt: skip
        q += together
    half = read(frame + at.KIND) == DOT
    for q in range(queries):
        at_row, head = row + (first + q) // groups, (first + q) % groups * kv_heads + kv_head
        row_of = read(frame + at.MIXED) + at_row * read(frame + at.MIXED_PITCH)
        target = row_of + (2 if half else 4) * (head * size + part)
        put_mixed(sums + 4 * STRIP * q, width, load(wholes + 64 * q), target, half)


@part_of_compiled
def _one_block(
    frame: int, layer: int, me: int, kv_head: int, row: int, run: int, first: int, queries: int, new: bool
) -> None:
    """A block of queries of `run` rows that share their list. `new`: the thread's first block of these."""
    if read(layer + at.IN_STRIPS) == 0:
        _block(frame, layer, me, kv_head, row, first, queries, row + run)
        return
    several = queries < run * (read(frame + at.HEADS) // read(frame + at.KV_HEADS))
    if several and new:
        _pack_run(frame, layer, me, kv_head, row, run)
    _strip_block(frame, layer, me, kv_head, row, first, queries, several)


@part_of_compiled
def _run_of(seen: int, row: int, rows: int) -> int:
    """Number of rows from `row` on that share their list of slots."""
    count = 1
    while row + count < rows and shared_slots(seen, row + count) == shared_slots(seen, row):
        count += 1
    return count


@part_of_compiled
def attend(frame: int, layer: int, me: int, team: int) -> None:
    """Keys and values to the cache, then attention of all rows; every thread calls it with its number."""
    rows, kv_heads, seen = read(frame + at.ROWS), read(frame + at.KV_HEADS), read(layer + at.SEEN)
    groups = read(frame + at.HEADS) // kv_heads
    if read(layer + at.SOURCE_ATTENTION) == 0:
        write_cache(frame, layer, kv_heads * rows * me // team, kv_heads * rows * (me + 1) // team)
    in_strips = read(layer + at.IN_STRIPS) == 1
    most = QUERIES if in_strips else MAX_QUERIES
    if kv_heads % team:
        if not in_strips:
            most = MAX_QUERIES // 2  # smaller blocks divide better among threads
        elif rows * groups >= QUERIES // 2:
            most = min(most, (rows * groups + team - 1) // team)
        wait_for_all(frame, team)
    blocks, row = 0, 0
    while row < rows:
        run = _run_of(seen, row, rows)
        blocks += (run * groups + most - 1) // most
        row += run
    begin, end = kv_heads * blocks * me // team, kv_heads * blocks * (me + 1) // team
    for kv_head in range(begin // blocks, (end + blocks - 1) // blocks):
        index, row = kv_head * blocks, 0
        _fetch_first(frame, layer, kv_head, 0)
        while row < rows:
            run = _run_of(seen, row, rows)
            for first in range(0, run * groups, most):
                if begin <= index < end:
                    new = index == begin or first == 0
                    _one_block(frame, layer, me, kv_head, row, run, first, min(most, run * groups - first), new)
                index += 1
            row += run
