"""Attention by products of strips: keys and values of bfloat16 as models.cpu.tiles has weights.

64 keys are the outputs of a strip whose inputs are a head's dimensions; 64 dimensions of the values are the outputs of
one whose inputs are keys. A chunk of keys is packed for all queries of a block. For the matrix unit queries, and the
shares that weigh the values, are bfloat16, else float32; sums are float32. A sum over keys runs through blocks of a
row's list, and a key behind the row's last has a share of 0: so a result depends on the sequence of visible keys alone,
here too.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
from llvmlite import ir

from paceline.models.cpu.matrix_unit import TILE_ROWS, TILE_STEPS, configure, has_matrix_unit, multiply_strips
from paceline.models.cpu.tiles import COLUMNS, GROUP, HALF, MAX_ROWS, NARROW, STEP, STRIP, accumulate, prefetch
from paceline.models.cpu.vectors import (
    F32V,
    FLOAT,
    I32V,
    I64,
    LANES,
    Builder,
    Float,
    Int,
    Nothing,
    Value,
    broadcast,
    counted,
    emit_exponential,
    floats,
    fold,
    fused,
    integers,
    load_at,
    lowered,
    maximum,
    narrow,
    read,
    shuffle,
    splat,
    store,
    store_at,
    write,
)  # fmt: skip
from paceline.utils import part_of_compiled

MATRIX_UNIT = has_matrix_unit()
IN_STRIPS = MATRIX_UNIT or NARROW
"""Whether this is how the processor attends fastest."""
ITEM = 2 if MATRIX_UNIT else 4
"""Bytes of a number of a query, and of a share."""
BLOCK = 2 * LANES if MATRIX_UNIT else 2 * GROUP
"""Keys whose weighted values are summed in one go."""
CHUNK = 512
"""Keys that are packed at a time where few queries see them; a multiple of 64."""
QUERIES = 64
"""Most queries of a block."""
FETCHED = 64
"""How many slots ahead keys and values are fetched; a guess that slots lie in order."""
ROUNDING = 1.5 * 2.0**23
"""What is added to a small float32 to round it to a whole number, which its lowest bits then hold."""
POWER = (0.0095701017, 0.0559178603, 0.240247448, 0.693121815, 0.999999261)
"""Of 2^x for -1/2 <= x <= 1/2, the highest power first."""
HALVES = ir.VectorType(ir.IntType(16), 2 * LANES)


def _addresses(
    builder: Builder, base: Value, slots: Value, pitch: Value, count: Value, first: Value, keys: int
) -> list[Value]:
    """Emit addresses of slots first .. first + keys - 1 of a list, where it has that many, else of its last."""
    last, results = builder.sub(count, ir.Constant(I64, 1)), []
    for i in range(keys):
        index = builder.add(first, ir.Constant(I64, i))
        index = builder.select(builder.icmp_signed("<", index, last), index, last)
        slot = load_at(builder, builder.add(slots, builder.mul(index, ir.Constant(I64, 8))), I64)
        results.append(builder.add(base, builder.mul(slot, pitch)))
    return results


def _turned(builder: Builder, rows: list[Value]) -> list[Value]:
    """Emit the columns of sixteen rows of 32-bit lanes."""
    for width in (8, 4, 2, 1):
        low = [lane + (16 - width if lane & width else 0) for lane in range(LANES)]
        high = [lane + (16 if lane & width else width) for lane in range(LANES)]
        pairs = [(i, rows[i], rows[i + width]) for i in range(LANES) if not i & width]
        rows = list(rows)
        for i, a, b in pairs:
            rows[i], rows[i + width] = shuffle(builder, a, b, low), shuffle(builder, a, b, high)
    return rows


@lowered(Nothing, *[Int] * 6, outlined=True)
def pack_keys(
    builder: Builder, base: Value, slots: Value, slot_pitch: Value, count: Value, blocks: Value, out: Value
) -> Any:
    """Pack the keys in `count` slots as strips of 64 keys; places behind the last hold anything.

    `base`: address of the head's key in slot 0. `blocks`: of 32 dimensions.
    """
    ahead, size = builder.mul(slot_pitch, ir.Constant(I64, FETCHED)), builder.mul(blocks, ir.Constant(I64, 16 * STEP))
    sixteens = builder.udiv(builder.add(count, ir.Constant(I64, LANES - 1)), ir.Constant(I64, LANES))
    with counted(builder, sixteens) as index:
        first = builder.mul(index, ir.Constant(I64, LANES))
        addresses = _addresses(builder, base, slots, slot_pitch, count, first, LANES)
        strip, column = (op(index, ir.Constant(I64, STRIP // LANES)) for op in (builder.udiv, builder.urem))
        place = builder.add(builder.mul(strip, size), builder.mul(column, ir.Constant(I64, 64)))
        place = builder.add(out, place)
        with counted(builder, blocks) as block:
            offset = builder.mul(block, ir.Constant(I64, 64))
            rows = []
            for address in addresses:
                at = builder.add(address, offset)
                prefetch(builder, builder.add(at, ahead), 0, 1)
                rows.append(load_at(builder, at, I32V))
            target = builder.add(place, builder.mul(block, ir.Constant(I64, 16 * STEP)))
            for step, value in enumerate(_turned(builder, rows)):
                store_at(builder, target, value, step * STEP)


@lowered(Nothing, *[Int] * 6, outlined=True)
def pack_values(
    builder: Builder, base: Value, slots: Value, slot_pitch: Value, count: Value, lines: Value, out: Value
) -> Any:
    """Pack 32 (`lines` is 1) or 64 dimensions (2) of the values in `count` slots as a strip.

    The last value fills up a block. `base`: address of the first dimension in slot 0.
    """
    ahead = builder.mul(slot_pitch, ir.Constant(I64, FETCHED))
    blocks = builder.udiv(builder.add(count, ir.Constant(I64, BLOCK - 1)), ir.Constant(I64, BLOCK))
    eights = builder.mul(blocks, ir.Constant(I64, BLOCK // 8))
    masks = [[lane // 2 + 16 * half + 32 * (lane % 2) for lane in range(32)] for half in (0, 1)]
    with counted(builder, eights) as index:
        first = builder.mul(index, ir.Constant(I64, 8))
        addresses = _addresses(builder, base, slots, slot_pitch, count, first, 8)
        place = builder.add(out, builder.mul(index, ir.Constant(I64, 4 * STEP)))
        with counted(builder, lines) as line:
            offset, target = builder.mul(line, ir.Constant(I64, 64)), builder.mul(line, ir.Constant(I64, 128))
            target, values = builder.add(place, target), []
            for address in addresses:
                at = builder.add(address, offset)
                prefetch(builder, builder.add(at, ahead), 0, 1)
                values.append(load_at(builder, at, HALVES))
            for step in range(4):
                for half, mask in enumerate(masks):
                    lanes = ir.Constant(ir.VectorType(ir.IntType(32), 32), mask)
                    pairs = builder.shuffle_vector(values[2 * step], values[2 * step + 1], lanes)
                    store_at(builder, target, pairs, step * STEP + 64 * half)


def _larger(builder: Builder, a: Value, b: Value) -> Value:
    """Emit the larger of each pair of lanes, `b` where one is NaN: a single instruction."""
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def _power(builder: Builder, lanes: Value) -> Value:
    """Emit 2^x of lanes of 0 or less to 3e-6 of it, far less than shares are rounded by; 2^-126 below -126."""
    x = _larger(builder, floats(-126.0), lanes)
    turned = builder.fadd(x, floats(ROUNDING))
    rest, value = builder.fsub(x, builder.fsub(turned, floats(ROUNDING))), floats(POWER[0])
    for factor in POWER[1:]:
        value = fused(builder, value, rest, floats(factor))
    shift = builder.shl(builder.bitcast(turned, I32V), integers(23))
    return builder.bitcast(builder.add(builder.bitcast(value, I32V), shift), F32V)


def _softmax(builder: Builder, scores: Value, count: Value, scale: Value, *, half: bool) -> Value:
    """Emit `half_softmax` or `whole_softmax`: four sums and maxima side by side."""
    each = range(STRIP // LANES)
    pieces = builder.udiv(builder.add(count, ir.Constant(I64, STRIP - 1)), ir.Constant(I64, STRIP))

    def over(start: float, emit: Any) -> list[Value]:
        before = builder.block
        with counted(builder, pieces) as index:
            state = [builder.phi(F32V) for _ in each]
            results = [emit(builder.mul(index, ir.Constant(I64, STRIP)), i, kept) for i, kept in enumerate(state)]
            for phi, value in zip(state, results, strict=True):
                phi.add_incoming(floats(start), before)
                phi.add_incoming(value, builder.block)
        return results

    def at(first: Value, i: int, size: int) -> Value:
        return builder.add(scores, builder.mul(builder.add(first, ir.Constant(I64, LANES * i)), ir.Constant(I64, size)))

    def top(first: Value, i: int, kept: Value) -> Value:
        return _larger(builder, kept, load_at(builder, at(first, i, 4), F32V))

    tops = over(-math.inf, top)
    high = fold(builder, functools.reduce(functools.partial(_larger, builder), tops), maximum)
    factor = splat(builder, builder.fmul(scale, ir.Constant(FLOAT, math.log2(math.e) if half else 1.0)))
    offset = builder.fneg(builder.fmul(splat(builder, high), factor))

    def share(first: Value, i: int, kept: Value) -> Value:
        power = fused(builder, load_at(builder, at(first, i, 4), F32V), factor, offset)
        value = _power(builder, power) if half else emit_exponential(builder, power)
        store_at(builder, at(first, i, 2 if half else 4), narrow(builder, value) if half else value)
        return builder.fadd(kept, value)

    sums = over(0.0, share)
    return fold(builder, functools.reduce(builder.fadd, sums), lambda b, x, y: b.fadd(x, y))


@lowered(Float, Int, Int, Float)
def half_softmax(builder: Builder, scores: Value, count: Value, scale: Value) -> Value:
    """Replace scores by exp(scale * (score - largest)) as bfloat16; returns their sum before they are rounded.

    The 64 scores behind the last are minus infinity.
    """
    return _softmax(builder, scores, count, scale, half=True)


@lowered(Float, Int, Int, Float)
def whole_softmax(builder: Builder, scores: Value, count: Value, scale: Value) -> Value:
    """The same in float32."""
    return _softmax(builder, scores, count, scale, half=False)


@part_of_compiled
def _tile_rows(queries: int) -> int:
    """Rows of each of the fewest tiles that hold some queries."""
    tiles = (queries + TILE_ROWS - 1) // TILE_ROWS
    return (queries + tiles - 1) // tiles


@part_of_compiled
def _multiply(
    outputs: int, weights: int, steps: int, x: int, pitch: int, rows: int, sums: int, sums_pitch: int, fresh: bool
) -> None:
    """Products of rows with strips of 64 outputs; `fresh`: whether the matrix unit starts their sums at 0.

    Beyond the sixteen of the last output nothing is read: what lies there could be slow denormal numbers.
    """
    strips = (outputs + STRIP - 1) // STRIP
    if MATRIX_UNIT:
        each = _tile_rows(rows)
        configure(each)
        for row in range(0, rows, each):
            multiply_strips(
                1 if fresh else 0, strips, weights, steps // TILE_STEPS, x + row * pitch, pitch,
                sums + row * sums_pitch, sums_pitch,
            )  # fmt: skip
        return
    passes = (rows + MAX_ROWS - 1) // MAX_ROWS
    for strip in range(strips):
        strip_weights, done, parts = (
            weights + strip * steps * STEP,
            0,
            min(COLUMNS, (outputs - strip * STRIP + LANES - 1) // LANES),
        )
        for turn in range(passes):
            take, row = (rows - done + passes - turn - 1) // (passes - turn), x + done * pitch
            for part in range(0, 64 * parts, 64):
                target = sums + strip * 4 * STRIP + done * sums_pitch + part
                accumulate(
                    HALF, take, 0, strip_weights + part, steps // GROUP, row, pitch, target, sums_pitch, strip_weights
                )
            done += take


@part_of_compiled
def strip_scores(
    keys: int, slots: int, slot_pitch: int, count: int, size: int,
    queries: int, query: int, scores: int, pitch: int, packed: int, ready: bool,
) -> None:  # fmt: skip
    """Scores (queries, count) float32 of queries (queries, size) with the keys in `count` slots.

    `ready`: whether all of these are packed already, else they are chunk by chunk. Up to 15 rows more are written.
    """
    for first in range(0, count, CHUNK):
        here, place = min(CHUNK, count - first), packed
        if ready:
            place += first * 2 * size
        else:
            pack_keys(keys, slots + 8 * first, slot_pitch, here, size // 32, packed)
        for q in range(0 if MATRIX_UNIT else queries):
            for i in range(first, first + here, LANES):
                store(scores + q * pitch + 4 * i, broadcast(np.float32(0.0)))
        _multiply(here, place, size // 2, query, ITEM * size, queries, scores + 4 * first, pitch, True)


@part_of_compiled
def strip_weigh(
    values: int, slots: int, slot_pitch: int, count: int, lines: int,
    queries: int, shares: int, pitch: int, sums: int, packed: int, ready: bool,
) -> None:  # fmt: skip
    """Add shares (queries, count), 0 up to a whole block, times values in `count` slots to sums (queries, 64)
    float32; see `strip_scores`.
    """
    for first in range(0, count, CHUNK):
        here, place = min(CHUNK, count - first), packed
        if ready:
            place += first * 2 * STRIP
        else:
            pack_values(values, slots + 8 * first, slot_pitch, here, lines, packed)
        steps = (here + BLOCK - 1) // BLOCK * (BLOCK // 2)
        _multiply(32 * lines, place, steps, shares + ITEM * first, pitch, queries, sums, 4 * STRIP, False)


@part_of_compiled
def strip_weigh_own(
    values: int, shared: int, count: int, behind: int, more: int, slot_pitch: int, lines: int,
    queries: int, shares: int, pitch: int, sums: int, packed: int, mixed: int,
) -> None:  # fmt: skip
    """`strip_weigh` from the last whole block of `count` shared slots on, which `more` slots follow.

    `mixed`: memory for the slots of a block.
    """
    begun = count % BLOCK
    taken = min(more, BLOCK - begun)
    for i in range(begun):
        write(mixed + 8 * i, read(shared + 8 * (count - begun + i)))
    for i in range(taken):
        write(mixed + 8 * (begun + i), read(behind + 8 * i))
    start, rest = shares + ITEM * (count - begun), more - taken
    strip_weigh(values, mixed, slot_pitch, begun + taken, lines, queries, start, pitch, sums, packed, False)
    start += ITEM * BLOCK
    strip_weigh(values, behind + 8 * taken, slot_pitch, rest, lines, queries, start, pitch, sums, packed, False)
