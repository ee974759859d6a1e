"""Integer products: weights of one byte or half a byte, activations of two bytes, sums that are exact.

A row x is kept as scale * (256 * high + low), high and low being signed bytes: 16 bits relative to its largest element,
which errs less than rounding to bfloat16. Sums are int32 without rounding, so that neither order nor width changes a
bit.

*Bytes* (int8): weights are kept plus 128, since the instruction multiplies unsigned by signed bytes; 128 times the sums
of high and low are taken away at the end. The loop over a strip is that of models.cpu.tiles.

*Half bytes* (int4): sixteen values, a scale and a zero for every 32 inputs of an output. A block holds 64 outputs of
one group: their scales, their zeros (eighths, plus ZERO_OFFSET), then four steps of 256 bytes, a byte being two inputs
of an output, four inputs apart. Two instructions unpack sixteen outputs. A group's sums of high and low bytes are one
whole number of 25 bits; it is multiplied by the scale, the sum of the group's activations by scale times zero. Groups
are added in float32 from the first to the last.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from llvmlite import ir

from paceline.checkpoints import GROUP as WIDTH
from paceline.checkpoints import LOWEST_ZERO, ZEROS, unpacked
from paceline.models.cpu.matrix_unit import TILE_ROWS, GroupTiles, has_matrix_unit
from paceline.models.cpu.pages import Pages
from paceline.models.cpu.processor import has_dot_bytes
from paceline.models.cpu.tiles import (
    AHEAD,
    BYTES,
    COLUMNS,
    GROUP,
    INPUTS,
    MAX_ROWS,
    NARROW,
    STEP,
    STRIP,
    dot_bytes,
    prefetch,
)
from paceline.models.cpu.vectors import (
    F32V,
    FLOAT,
    I8,
    I16V,
    I32,
    I32V,
    I64,
    LANES,
    Builder,
    Float,
    Int,
    Lanes,
    Nothing,
    Value,
    absolute,
    add,
    broadcast,
    call_named,
    counted,
    floats,
    fma,
    fused,
    integers,
    larger,
    largest,
    load,
    load_at,
    lowered,
    mul,
    read_float,
    splat,
    store,
    store_at,
    store_bytes,
    total,
    whole_within,
    widen,
    write_float,
)  # fmt: skip
from paceline.utils import part_of_compiled

TOP, ZERO = 32512, 128
"""Largest activation, 127 * 256; the stored byte of weight 0."""

HEADER = 64
"""Bytes before the bytes of a row: float32 scale, sums of its high and its low bytes. Behind them may be sums of
groups.
"""

WHOLE = INPUTS[BYTES] * GROUP
"""Rows of bytes are filled up to a multiple of this."""


def byte_steps(inputs: int) -> int:
    """Steps of a strip of bytes, the one of scales left out."""
    return -(-inputs // WHOLE) * GROUP


def half_pitch(inputs: int) -> int:
    """Bytes of a row's high or low half with its header: an odd number of lines (see `Workspace`)."""
    groups = -(-inputs // WIDTH)
    return (-(-(HEADER + (WIDTH + 4) * groups) // 128) * 2 + 1) * 64


AT_ONCE = 4
"""Strips that are packed together, few, so that what is held meanwhile is small."""


def pack_bytes(weight: torch.Tensor, scale: torch.Tensor, pages: Pages) -> torch.Tensor:
    """Strips of an int8 weight (out, in) with scales (out,) float32, already in the order of strips and padded to whole
    ones.

    Returns:
        (strips, steps + 1, 256) uint8: per step 64 outputs of 4 inputs, then the scales of the strip's 64 outputs.
    """
    outputs, inputs = weight.shape
    steps = byte_steps(inputs)
    strips = pages.take(outputs // STRIP * (steps + 1) * STEP).view(outputs // STRIP, steps + 1, STEP)
    for strip_part, rows in zip(strips.split(AT_ONCE), weight.split(AT_ONCE * STRIP), strict=True):
        padded = torch.nn.functional.pad(rows, (0, steps * INPUTS[BYTES] - inputs)).view(
            -1, STRIP, steps, INPUTS[BYTES]
        )
        moved = padded.transpose(1, 2).reshape(-1, steps, STEP)
        torch.bitwise_xor(moved.view(torch.uint8), ZERO, out=strip_part[:, :steps])
    strips[:, steps].view(torch.float32).copy_(scale.view(-1, STRIP))
    return strips


@lowered(Lanes, Lanes)
def rounded(builder: Builder, lanes: Value) -> Value:
    """The nearest whole numbers, none beyond TOP; NaN becomes one too."""
    return whole_within(builder, lanes, TOP)


@lowered(Lanes, Lanes)
def _high(builder: Builder, whole: Value) -> Value:
    """The whole number h that leaves whole - 256 h in -128 .. 127."""
    moved = fused(builder, whole, floats(1 / 256), floats(0.5))
    return call_named(builder, "llvm.floor.v16f32", F32V, moved)


@lowered(Nothing, Int, Int)
def _sum_group(builder: Builder, source: Value, target: Value) -> None:
    """Write the sum of WIDTH signed bytes as int32."""
    group = builder.sext(load_at(builder, source, ir.VectorType(I8, WIDTH)), ir.VectorType(I32, WIDTH))
    whole = call_named(builder, f"llvm.vector.reduce.add.v{WIDTH}i32", I32, group)
    store_at(builder, target, whole)


@lowered(Lanes, Int, Int, Float, Float)
def _settled(builder: Builder, high_at: Value, low_at: Value, high_sum: Value, low_sum: Value) -> Value:
    """256 * (high - 128 * high_sum) + (low - 128 * low_sum) for sixteen outputs, rounded to float32 at the end."""
    parts = []
    for place, taken in ((high_at, high_sum), (low_at, low_sum)):
        offset = builder.shl(builder.fptosi(taken, I32), ir.Constant(I32, 7))
        parts.append(builder.sitofp(builder.sub(load_at(builder, place, I32V), splat(builder, offset)), F32V))
    return fused(builder, parts[0], floats(256.0), parts[1])


@part_of_compiled
def _sum_groups(row: int, size: int) -> None:
    groups = (size + WIDTH - 1) // WIDTH
    if (size + LANES - 1) // LANES % 2 == 1:
        store_bytes(row + groups * WIDTH - LANES, broadcast(np.float32(0.0)))
    for i in range(groups):
        _sum_group(row + i * WIDTH, row + groups * WIDTH + 4 * i)


@part_of_compiled
def to_bytes(source: int, size: int, target: int, pitch: int, grouped: bool = False) -> None:
    """One row of float32 as two rows of bytes.

    Header and high bytes at `target`, low bytes half a `pitch` on, behind a gap.

    The row is read up to a multiple of sixteen; what lies there must be zero. Where a value is not finite, the scale is
    NaN. With `grouped`, bytes are filled up to whole groups of WIDTH, and behind them go int32 sums of each group.
    """
    zero = broadcast(np.float32(0.0))
    top, odd = zero, zero
    for i in range(0, size, LANES):
        lanes = load(source + 4 * i)
        top, odd = larger(top, absolute(lanes)), fma(lanes, zero, odd)
    most = largest(top)
    factor = broadcast(np.float32(TOP) / most if most > 0 else np.float32(0.0))
    highs, lows = zero, zero
    for i in range(0, size, LANES):
        whole = rounded(mul(load(source + 4 * i), factor))
        high = _high(whole)
        low = fma(high, broadcast(np.float32(-256.0)), whole)
        store_bytes(target + HEADER + i, high)
        store_bytes(target + pitch // 2 + HEADER + i, low)
        highs, lows = add(highs, high), add(lows, low)
    write_float(target, most / np.float32(TOP) + total(odd))
    write_float(target + 4, total(highs))
    write_float(target + 8, total(lows))
    if grouped:
        _sum_groups(target + HEADER, size)
        _sum_groups(target + pitch // 2 + HEADER, size)


@part_of_compiled
def settle_bytes(scales: int, x: int, pitch: int, rows: int, sums: int) -> None:
    """Turn integer sums (2 * rows, 64) of high and low bytes into products (rows, 64) float32, in place."""
    for row in range(rows):
        at = x + row * pitch
        factor, high_sum, low_sum = broadcast(read_float(at)), read_float(at + 4), read_float(at + 8)
        high = sums + 2 * row * (4 * STRIP)
        for i in range(0, 4 * STRIP, 64):
            value = _settled(high + i, high + 4 * STRIP + i, high_sum, low_sum)
            store(sums + row * (4 * STRIP) + i, mul(mul(value, factor), load(scales + i)))


SCALES, SCALES_AND_ZEROS = 2 * STRIP, 3 * STRIP
NIBBLE_BLOCK = SCALES_AND_ZEROS + GROUP * STEP
"""Bytes of a strip's scales in one group, of them and its zeros, and of its block."""

ZERO_OFFSET = int(-LOWEST_ZERO * ZEROS)
"""What is added to eighths of zeros."""

NIBBLE_CHUNK = 16
"""Blocks of a strip (19 KiB) that all rows take before the next (see models.cpu.matrix)."""

LOW = integers(0x0F0F0F0F)
MATRIX_UNIT = has_matrix_unit()


def pack_nibbles(pairs: torch.Tensor, scale: torch.Tensor, pages: Pages) -> torch.Tensor:
    """Blocks of pairs (out, in / 2) uint8 with scales and zeros (out, groups, 2) bfloat16, both in the order of strips
    (checkpoints.quantization).

    Returns:
        (strips, groups, NIBBLE_BLOCK) uint8.
    """
    strips, groups = len(pairs) // STRIP, scale.shape[1]
    out = pages.take(strips * groups * NIBBLE_BLOCK).view(strips, groups, NIBBLE_BLOCK)
    factors, zeros = (part.view(strips, STRIP, groups).transpose(1, 2) for part in scale.unbind(-1))
    out[:, :, :SCALES].view(torch.bfloat16).copy_(factors)
    out[:, :, SCALES:SCALES_AND_ZEROS].copy_(zeros * ZEROS + ZERO_OFFSET)
    for out_part, rows in zip(out.split(AT_ONCE), pairs.split(AT_ONCE * STRIP), strict=True):
        padded = torch.nn.functional.pad(rows, (0, groups * WIDTH // 2 - pairs.shape[1]))
        whole = unpacked(padded).view(torch.uint8).view(len(out_part), STRIP, groups, GROUP, 2, 4)
        both = whole[..., 0, :] | whole[..., 1, :] << 4
        out_part[:, :, SCALES_AND_ZEROS:].view(len(out_part), groups, GROUP, STRIP, 4).copy_(
            both.permute(0, 2, 3, 1, 4)
        )
    return out


class _NibbleLoop:
    """The loop over groups for a number of rows of high and low bytes; `lines` are fetched ahead with each group."""

    def __init__(self, builder: Builder, rows: int, lines: int) -> None:
        self.builder, self.rows, self.lines, self.native = builder, rows, lines, has_dot_bytes()

    def emit(
        self, weights: Value, groups: Value, x: Value, x_sums: Value, stride: Value, sums: Value, ahead: Value
    ) -> None:
        builder, zero = self.builder, ir.Constant(I64, 0)
        offsets = [builder.mul(stride, ir.Constant(I64, row)) for row in range(2 * self.rows)]
        before, loop, after = builder.block, builder.append_basic_block(), builder.append_basic_block()
        builder.branch(loop)
        builder.position_at_end(loop)
        index = builder.phi(I64)
        index.add_incoming(zero, before)
        at = builder.add(weights, builder.mul(index, ir.Constant(I64, NIBBLE_BLOCK)))
        along = builder.add(x, builder.mul(index, ir.Constant(I64, WIDTH)))
        starts = builder.add(x_sums, builder.mul(index, ir.Constant(I64, 4)))
        whole = [integers(0)] * (COLUMNS * len(offsets))
        line = builder.add(ahead, builder.mul(index, ir.Constant(I64, 64 * self.lines)))
        whole = self._group(at, [builder.add(along, offset) for offset in offsets], whole, line)
        scales = scales_of(builder, at)
        for row in range(self.rows):
            high, low = (whole[(2 * row + half) * COLUMNS :][:COLUMNS] for half in (0, 1))
            taken = [load_at(builder, builder.add(starts, offset), I32) for offset in offsets[2 * row : 2 * row + 2]]
            add_group(builder, high, low, taken, scales, builder.add(sums, ir.Constant(I64, 4 * STRIP * row)))
        following = builder.add(index, ir.Constant(I64, 1))
        index.add_incoming(following, builder.block)
        builder.cbranch(builder.icmp_signed("<", following, groups), loop, after)
        builder.position_at_end(after)

    def _group(self, at: Value, rows: list[Value], whole: list[Value], line: Value) -> list[Value]:
        builder = self.builder
        for step in range(GROUP):
            for i in range(step * self.lines // GROUP, (step + 1) * self.lines // GROUP):
                prefetch(builder, line, i * 64, 2)
            for half, strip in enumerate(nibbles(builder, at, step)):
                for i, row in enumerate(rows):
                    four = splat(builder, load_at(builder, row, I32, 8 * step + 4 * half))
                    for column, weight in enumerate(strip):
                        cell = i * COLUMNS + column
                        whole[cell] = dot_bytes(builder, whole[cell], weight, four, native=self.native)
        return whole


def nibbles(builder: Builder, block: Value, step: int) -> tuple[list[Value], list[Value]]:
    """Emit the bytes of the first and of the last four inputs of a step, for each column of a block."""
    start = SCALES_AND_ZEROS + step * STEP
    both = [load_at(builder, block, I32V, start + column * 64) for column in range(COLUMNS)]
    return [builder.and_(pair, LOW) for pair in both], [
        builder.and_(builder.lshr(pair, integers(4)), LOW) for pair in both
    ]


def scales_of(builder: Builder, block: Value) -> list[tuple[Value, Value]]:
    """Emit the scales of a block's columns, and what they make of zeros: -scale * zero."""
    sums = []
    for column in range(COLUMNS):
        scale = widen(builder, load_at(builder, block, I16V, 32 * column))
        kept = builder.zext(load_at(builder, block, ir.VectorType(I8, LANES), SCALES + 16 * column), I32V)
        zero = fused(builder, builder.sitofp(kept, F32V), floats(-1 / ZEROS), floats(ZERO_OFFSET / ZEROS))
        sums.append((scale, builder.fmul(scale, zero)))
    return sums


def add_group(
    builder: Builder, high: list[Value], low: list[Value], taken: list[Value], scales: list[tuple[Value, Value]],
    sums: Value,
) -> None:  # fmt: skip
    """Emit one row's sums (64) plus a group's (256 * high + low) * scale, less its activations times scale * zero.

    `taken`: the sums of the activations' high and low bytes.
    """
    activations = builder.add(builder.shl(taken[0], ir.Constant(I32, 8)), taken[1])
    activations = splat(builder, builder.sitofp(activations, FLOAT))
    for column, (high_sum, low_sum, (scale, offset)) in enumerate(zip(high, low, scales, strict=True)):
        moved = fused(builder, activations, offset, load_at(builder, sums, F32V, 64 * column))
        whole = builder.sitofp(builder.add(builder.shl(high_sum, integers(8)), low_sum), F32V)
        store_at(builder, sums, fused(builder, whole, scale, moved), 64 * column)


NIBBLE_ROWS = 1 if NARROW else MAX_ROWS // 2
"""Rows of high and low bytes that the loop takes at a time."""


@lowered(Nothing, Int, Int, Int, Int, Int, Int, Int, Int, Int, outlined=True)
def _accumulate_nibbles(
    builder: Builder, rows: Value, alone: Value,
    weights: Value, groups: Value, x: Value, x_sums: Value, stride: Value, sums: Value, ahead: Value,
) -> Any:  # fmt: skip
    """Add blocks of a strip to sums (rows, 64) float32; `alone`: 1 where no other rows take the same weights."""
    done, nothing = builder.append_basic_block(), builder.append_basic_block()
    switch = builder.switch(builder.add(builder.mul(rows, ir.Constant(I64, 2)), alone), nothing)
    for count in range(1, NIBBLE_ROWS + 1):
        for only in (0, 1):
            block = builder.append_basic_block()
            switch.add_case(ir.Constant(I64, 2 * count + only), block)
            builder.position_at_end(block)
            _NibbleLoop(builder, count, NIBBLE_BLOCK // 64 if only else NIBBLE_BLOCK // 128).emit(
                weights, groups, x, x_sums, stride, sums, ahead
            )
            builder.branch(done)
    builder.position_at_end(nothing)
    builder.branch(done)
    builder.position_at_end(done)


@part_of_compiled
def nibble_sums(weights: int, groups: int, x: int, pitch: int, rows: int, sums: int) -> None:
    """Products of one strip with `rows` rows at `x`: sums (rows, 64) float32."""
    start, stride = x + HEADER, pitch // 2
    for i in range(4 * rows):
        store(sums + 64 * i, broadcast(np.float32(0.0)))
    if MATRIX_UNIT and rows > 2 * NIBBLE_ROWS:
        _nibbles_in_tiles(weights, groups, start, stride, rows, sums)
    else:
        _nibbles_in_loops(weights, groups, start, stride, rows, sums)
    for row in range(rows):
        factor = broadcast(read_float(x + row * pitch))
        for i in range(sums + row * (4 * STRIP), sums + (row + 1) * (4 * STRIP), 64):
            store(i, mul(load(i), factor))


@part_of_compiled
def _nibbles_in_loops(weights: int, groups: int, start: int, stride: int, rows: int, sums: int) -> None:
    passes = (rows + NIBBLE_ROWS - 1) // NIBBLE_ROWS
    for at in range(0, groups, NIBBLE_CHUNK):
        size, done = min(NIBBLE_CHUNK, groups - at), 0
        block = weights + at * NIBBLE_BLOCK
        for turn in range(passes):
            take = (rows - done + passes - turn - 1) // (passes - turn)
            ahead = (
                block + AHEAD if passes == 1 else block + size * NIBBLE_BLOCK + (turn & 1) * (size * NIBBLE_BLOCK // 2)
            )
            row = start + 2 * done * stride
            _accumulate_nibbles(
                take, 1 if passes == 1 else 0, block, size, row + at * WIDTH, row + groups * WIDTH + 4 * at, stride,
                sums + done * (4 * STRIP), ahead,
            )  # fmt: skip
            done += take


@part_of_compiled
def _nibbles_in_tiles(weights: int, groups: int, start: int, stride: int, rows: int, sums: int) -> None:
    for at in range(0, groups, NIBBLE_CHUNK):
        size = min(NIBBLE_CHUNK, groups - at)
        for first in range(0, rows, TILE_ROWS // 2):
            row = start + 2 * first * stride
            accumulate_nibble_tiles(
                min(TILE_ROWS // 2, rows - first), weights + at * NIBBLE_BLOCK, size, row + at * WIDTH,
                row + groups * WIDTH + 4 * at, stride, sums + first * (4 * STRIP),
            )  # fmt: skip


@lowered(Nothing, *[Int] * 7, outlined=True)
def accumulate_nibble_tiles(
    builder: Builder, rows: Value, weights: Value, groups: Value, x: Value, x_sums: Value, stride: Value, sums: Value
) -> Any:
    """`_accumulate_nibbles` by the matrix unit: half bytes become bytes in memory, whose products come back from it."""
    if not has_matrix_unit():
        return
    unit = GroupTiles(builder, builder.mul(rows, ir.Constant(I64, 2)), stride)
    with counted(builder, groups) as index:
        at = builder.add(weights, builder.mul(index, ir.Constant(I64, NIBBLE_BLOCK)))
        for line in range(NIBBLE_BLOCK // 64):
            prefetch(builder, at, AHEAD + 64 * line, 2)
        for step in range(GROUP):
            for half, strip in enumerate(nibbles(builder, at, step)):
                unit.put(2 * step + half, strip)
        unit.multiply(builder.add(x, builder.mul(index, ir.Constant(I64, WIDTH))))
        scales, starts = scales_of(builder, at), builder.add(x_sums, builder.mul(index, ir.Constant(I64, 4)))
        with counted(builder, rows) as row:
            first = builder.mul(row, ir.Constant(I64, 2))
            halves = (first, builder.add(first, ir.Constant(I64, 1)))
            high, low = (unit.products(number) for number in halves)
            taken = [load_at(builder, builder.add(starts, builder.mul(number, stride)), I32) for number in halves]
            add_group(
                builder, high, low, taken, scales, builder.add(sums, builder.mul(row, ir.Constant(I64, 4 * STRIP)))
            )
