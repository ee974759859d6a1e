"""Integer products: weights of one byte or half a byte, activations of two bytes, sums that are exact.

A row x is kept as scale * (256 * high + low), high and low being signed bytes: 16 bits relative to its largest element,
which errs less than rounding to bfloat16. Sums are int32 without rounding, so that neither order nor width changes a
bit.

*Bytes* (int8): weights are kept plus 128, since the instruction multiplies unsigned by signed bytes; 128 times the sums
of high and low are taken away at the end. The loop over a strip is that of models.cpu.tiles.

*Half bytes* (int4): sixteen values, a scale for every 32 inputs of an output. A block holds 64 outputs of one group:
their scales, then four steps of 256 bytes, a byte being two inputs of an output, four inputs apart. Two instructions
unpack sixteen outputs. Within a group sums begin at -8 times the sum of the group's activations, since weights are kept
plus 8. Groups are added in float32 from the first to the last, for each row of bytes by itself.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import njit

from paceline.models.cpu.pages import Pages
from paceline.models.cpu.tiles import (
    AHEAD,
    BYTES,
    COLUMNS,
    GROUP,
    INPUTS,
    MAX_ROWS,
    STEP,
    STRIP,
    dot_bytes,
    has_dot_bytes,
    prefetch,
)
from paceline.models.cpu.vectors import (
    F32V,
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
    add,
    broadcast,
    call_named,
    floats,
    fma,
    fused,
    integers,
    larger,
    largest,
    load,
    load_at,
    lowered,
    maximum,
    mul,
    read_float,
    splat,
    store,
    store_at,
    total,
    widen,
)  # fmt: skip  # fmt: skip
from paceline.models.loading.quantization import GROUP as WIDTH
from paceline.models.loading.quantization import unpacked

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
    for own, rows in zip(strips.split(AT_ONCE), weight.split(AT_ONCE * STRIP), strict=True):
        padded = torch.nn.functional.pad(rows, (0, steps * INPUTS[BYTES] - inputs)).view(
            -1, STRIP, steps, INPUTS[BYTES]
        )
        moved = padded.transpose(1, 2).reshape(-1, steps, STEP)
        torch.bitwise_xor(moved.view(torch.uint8), ZERO, out=own[:, :steps])
    strips[:, steps].view(torch.float32).copy_(scale.view(-1, STRIP))
    return strips


@lowered(Nothing, Int, Float)
def _write(builder: Builder, address: Value, value: Value) -> None:
    store_at(builder, address, value)


@lowered(Lanes, Lanes)
def _size(builder: Builder, lanes: Value) -> Value:
    """Absolute values."""
    return call_named(builder, "llvm.fabs.v16f32", F32V, lanes)


@lowered(Lanes, Lanes)
def _rounded(builder: Builder, lanes: Value) -> Value:
    """The nearest whole numbers, none beyond TOP; NaN becomes one too."""
    bounded = call_named(builder, "llvm.minnum.v16f32", F32V, maximum(builder, lanes, floats(-TOP)), floats(TOP))
    return call_named(builder, "llvm.rint.v16f32", F32V, bounded)


@lowered(Lanes, Lanes)
def _high(builder: Builder, whole: Value) -> Value:
    """The whole number h that leaves whole - 256 h in -128 .. 127."""
    moved = fused(builder, whole, floats(1 / 256), floats(0.5))
    return call_named(builder, "llvm.floor.v16f32", F32V, moved)


@lowered(Nothing, Int, Lanes)
def _store_bytes(builder: Builder, address: Value, whole: Value) -> None:
    store_at(builder, address, builder.trunc(builder.fptosi(whole, I32V), ir.VectorType(I8, LANES)))


@lowered(Nothing, Int, Int)
def _sum_group(builder: Builder, source: Value, target: Value) -> None:
    """Write the sum of WIDTH signed bytes times -8 as int32."""
    group = builder.sext(load_at(builder, source, ir.VectorType(I8, WIDTH)), ir.VectorType(I32, WIDTH))
    whole = call_named(builder, f"llvm.vector.reduce.add.v{WIDTH}i32", I32, group)
    store_at(builder, target, builder.mul(whole, ir.Constant(I32, -8)))


@lowered(Lanes, Int, Int, Float, Float)
def _settled(builder: Builder, high_at: Value, low_at: Value, high_sum: Value, low_sum: Value) -> Value:
    """256 * (high - 128 * high_sum) + (low - 128 * low_sum) for sixteen outputs, rounded to float32 at the end."""
    parts = []
    for place, taken in ((high_at, high_sum), (low_at, low_sum)):
        offset = builder.shl(builder.fptosi(taken, I32), ir.Constant(I32, 7))
        parts.append(builder.sitofp(builder.sub(load_at(builder, place, I32V), splat(builder, offset)), F32V))
    return fused(builder, parts[0], floats(256.0), parts[1])


@njit(error_model="numpy")
def _sum_groups(row: int, size: int) -> None:
    groups = (size + WIDTH - 1) // WIDTH
    if (size + LANES - 1) // LANES % 2 == 1:
        _store_bytes(row + groups * WIDTH - LANES, broadcast(np.float32(0.0)))
    for i in range(groups):
        _sum_group(row + i * WIDTH, row + groups * WIDTH + 4 * i)


@njit(error_model="numpy")
def to_bytes(source: int, size: int, target: int, pitch: int, grouped: bool = False) -> None:
    """One row of float32 as two rows of bytes.

    Header and high bytes at `target`, low bytes half a `pitch` on, behind a gap.

    The row is read up to a multiple of sixteen; what lies there must be zero. Where a value is not finite, the scale is
    NaN. With `grouped`, bytes are filled up to whole groups of WIDTH, and behind them go int32 sums of each group times
    -8.
    """
    zero = broadcast(np.float32(0.0))
    top, odd = zero, zero
    for i in range(0, size, LANES):
        lanes = load(source + 4 * i)
        top, odd = larger(top, _size(lanes)), fma(lanes, zero, odd)
    most = largest(top)
    factor = broadcast(np.float32(TOP) / most if most > 0 else np.float32(0.0))
    highs, lows = zero, zero
    for i in range(0, size, LANES):
        whole = _rounded(mul(load(source + 4 * i), factor))
        high = _high(whole)
        low = fma(high, broadcast(np.float32(-256.0)), whole)
        _store_bytes(target + HEADER + i, high)
        _store_bytes(target + pitch // 2 + HEADER + i, low)
        highs, lows = add(highs, high), add(lows, low)
    _write(target, most / np.float32(TOP) + total(odd))
    _write(target + 4, total(highs))
    _write(target + 8, total(lows))
    if grouped:
        _sum_groups(target + HEADER, size)
        _sum_groups(target + pitch // 2 + HEADER, size)


@njit(error_model="numpy")
def settle_bytes(scales: int, x: int, pitch: int, rows: int, sums: int) -> None:
    """Turn integer sums (2 * rows, 64) of high and low bytes into products (rows, 64) float32, in place."""
    for row in range(rows):
        at = x + row * pitch
        factor, high_sum, low_sum = broadcast(read_float(at)), read_float(at + 4), read_float(at + 8)
        high = sums + 2 * row * (4 * STRIP)
        for i in range(0, 4 * STRIP, 64):
            value = _settled(high + i, high + 4 * STRIP + i, high_sum, low_sum)
            store(sums + row * (4 * STRIP) + i, mul(mul(value, factor), load(scales + i)))


SCALES = 2 * STRIP
NIBBLE_BLOCK = SCALES + GROUP * STEP
"""Bytes of a strip's scales in one group, and of its block."""

NIBBLE_CHUNK = 16
"""Blocks of a strip (18 KiB) that all rows take before the next (see models.cpu.matrix)."""

LOW = integers(0x0F0F0F0F)


def pack_nibbles(pairs: torch.Tensor, scale: torch.Tensor, pages: Pages) -> torch.Tensor:
    """Blocks of pairs (out, in / 2) uint8 with scales (out, groups) bfloat16 (models.loading.quantization), both in the
    order of strips.

    Returns:
        (strips, groups, NIBBLE_BLOCK) uint8.
    """
    strips, groups = len(pairs) // STRIP, scale.shape[1]
    out = pages.take(strips * groups * NIBBLE_BLOCK).view(strips, groups, NIBBLE_BLOCK)
    out[:, :, :SCALES].view(torch.bfloat16).copy_(scale.view(strips, STRIP, groups).transpose(1, 2))
    for own, rows in zip(out.split(AT_ONCE), pairs.split(AT_ONCE * STRIP), strict=True):
        padded = torch.nn.functional.pad(rows, (0, groups * WIDTH // 2 - pairs.shape[1]), value=0x88)
        whole = (unpacked(padded) + 8).view(torch.uint8).view(len(own), STRIP, groups, GROUP, 2, 4)
        both = whole[..., 0, :] | whole[..., 1, :] << 4
        own[:, :, SCALES:].view(len(own), groups, GROUP, STRIP, 4).copy_(both.permute(0, 2, 3, 1, 4))
    return out


class _NibbleLoop:
    """The loop over groups for a number of rows of bytes; `lines` are fetched ahead with each group."""

    def __init__(self, builder: Builder, rows: int, lines: int) -> None:
        self.builder, self.rows, self.lines, self.native = builder, rows, lines, has_dot_bytes()

    def emit(
        self, weights: Value, groups: Value, x: Value, x_sums: Value, stride: Value, sums: Value, ahead: Value
    ) -> None:
        builder, zero = self.builder, ir.Constant(I64, 0)
        offsets = [builder.mul(stride, ir.Constant(I64, row)) for row in range(self.rows)]
        before, loop, after = builder.block, builder.append_basic_block(), builder.append_basic_block()
        builder.branch(loop)
        builder.position_at_end(loop)
        index = builder.phi(I64)
        index.add_incoming(zero, before)
        at = builder.add(weights, builder.mul(index, ir.Constant(I64, NIBBLE_BLOCK)))
        along = builder.add(x, builder.mul(index, ir.Constant(I64, WIDTH)))
        starts = builder.add(x_sums, builder.mul(index, ir.Constant(I64, 4)))
        whole = []
        for offset in offsets:
            whole += [splat(builder, load_at(builder, builder.add(starts, offset), I32))] * COLUMNS
        line = builder.add(ahead, builder.mul(index, ir.Constant(I64, 64 * self.lines)))
        whole = self._group(at, [builder.add(along, offset) for offset in offsets], whole, line)
        self._add(at, whole, sums)
        following = builder.add(index, ir.Constant(I64, 1))
        index.add_incoming(following, builder.block)
        builder.cbranch(builder.icmp_signed("<", following, groups), loop, after)
        builder.position_at_end(after)

    def _group(self, at: Value, rows: list[Value], whole: list[Value], line: Value) -> list[Value]:
        builder = self.builder
        for step in range(GROUP):
            for i in range(step * self.lines // GROUP, (step + 1) * self.lines // GROUP):
                prefetch(builder, line, i * 64, 2)
            both = [load_at(builder, at, I32V, SCALES + step * STEP + column * 64) for column in range(COLUMNS)]
            for half in range(2):
                strip = [builder.and_(builder.lshr(one, integers(4)) if half else one, LOW) for one in both]
                for i, row in enumerate(rows):
                    four = splat(builder, load_at(builder, row, I32, 8 * step + 4 * half))
                    for column, weight in enumerate(strip):
                        cell = i * COLUMNS + column
                        whole[cell] = dot_bytes(builder, whole[cell], weight, four, native=self.native)
        return whole

    def _add(self, at: Value, whole: list[Value], sums: Value) -> None:
        builder = self.builder
        scales = [widen(builder, load_at(builder, at, I16V, 32 * column)) for column in range(COLUMNS)]
        for cell, value in enumerate(whole):
            total = load_at(builder, sums, F32V, 64 * cell)
            total = fused(builder, builder.sitofp(value, F32V), scales[cell % COLUMNS], total)
            store_at(builder, sums, total, 64 * cell)


@lowered(Nothing, Int, Int, Int, Int, Int, Int, Int, Int, Int, outlined=True)
def _accumulate_nibbles(
    builder: Builder, rows: Value, alone: Value,
    weights: Value, groups: Value, x: Value, x_sums: Value, stride: Value, sums: Value, ahead: Value,
) -> Any:  # fmt: skip
    """Add blocks of a strip to sums (rows, 64) float32; `alone`: 1 where no other rows take the same weights."""
    done, nothing = builder.append_basic_block(), builder.append_basic_block()
    switch = builder.switch(builder.add(builder.mul(rows, ir.Constant(I64, 2)), alone), nothing)
    for count in range(1, MAX_ROWS + 1):
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


@njit(error_model="numpy")
def nibble_sums(weights: int, groups: int, x: int, pitch: int, rows: int, sums: int) -> None:
    """Products of one strip with `rows` rows at `x`: sums (rows, 64) float32, in room for twice as many."""
    start, stride, count = x + HEADER, pitch // 2, 2 * rows
    for i in range(4 * count):
        store(sums + 64 * i, broadcast(np.float32(0.0)))
    passes = (count + MAX_ROWS - 1) // MAX_ROWS
    for at in range(0, groups, NIBBLE_CHUNK):
        size, done = min(NIBBLE_CHUNK, groups - at), 0
        block = weights + at * NIBBLE_BLOCK
        for turn in range(passes):
            take = (count - done + passes - turn - 1) // (passes - turn)
            ahead = (
                block + AHEAD if passes == 1 else block + size * NIBBLE_BLOCK + (turn & 1) * (size * NIBBLE_BLOCK // 2)
            )
            row = start + done * stride
            _accumulate_nibbles(
                take, 1 if passes == 1 else 0, block, size, row + at * WIDTH, row + groups * WIDTH + 4 * at, stride,
                sums + done * (4 * STRIP), ahead,
            )  # fmt: skip
            done += take
    _settle_nibbles(x, pitch, rows, sums)


@njit(error_model="numpy")
def _settle_nibbles(x: int, pitch: int, rows: int, sums: int) -> None:
    """Turn sums (2 * rows, 64) of high and low bytes into products (rows, 64), in place."""
    shift = broadcast(np.float32(256.0))
    for row in range(rows):
        factor, high = broadcast(read_float(x + row * pitch)), sums + 2 * row * (4 * STRIP)
        for i in range(0, 4 * STRIP, 64):
            value = fma(load(high + i), shift, load(high + 4 * STRIP + i))
            store(sums + row * (4 * STRIP) + i, mul(value, factor))
