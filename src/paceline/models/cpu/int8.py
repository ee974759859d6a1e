"""Integer products: weights of one byte, activations of two, sums that are exact.

In: rows of float32 activations; an int8 weight with a float32 scale per output. Out: rows as two rows of bytes behind
their scale; strips of bytes; sums as float32. Not here: the loop over a strip (models.cpu.tiles), rounding weights
(models.loading.quantization).

A row x is kept as scale * (256 * high + low), high and low being signed bytes: 16 bits relative to its largest element,
which errs less than rounding to bfloat16. Weights are kept plus 128, since the instruction multiplies unsigned by
signed bytes; 128 times the sums of high and low are taken away at the end. Sums are int32 without rounding, so that
neither order nor width changes a bit.
"""

from __future__ import annotations

import numpy as np
import torch
from llvmlite import ir
from numba import njit

from paceline.models.cpu.pages import Pages
from paceline.models.cpu.tiles import BYTES, GROUP, INPUTS, STEP, STRIP
from paceline.models.cpu.vectors import (
    F32V,
    FLOAT,
    I8,
    I32,
    I32V,
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
    larger,
    largest,
    load,
    load_at,
    lowered,
    maximum,
    mul,
    splat,
    store,
    store_at,
    total,
)  # fmt: skip
from paceline.models.loading.quantization import GROUP as WIDTH

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


def pack_bytes(weight: torch.Tensor, scale: torch.Tensor, pages: Pages) -> torch.Tensor:
    """Strips of an int8 weight (out, in) with scales (out,) float32, already in the order of strips and padded to whole
    ones.

    Returns:
        (strips, steps + 1, 256) uint8: per step 64 outputs of 4 inputs, then the scales of the strip's 64 outputs.
    """
    outputs, inputs = weight.shape
    steps = byte_steps(inputs)
    strips = pages.take(outputs // STRIP * (steps + 1) * STEP).view(outputs // STRIP, steps + 1, STEP)
    padded = torch.nn.functional.pad(weight, (0, steps * INPUTS[BYTES] - inputs)).view(-1, STRIP, steps, INPUTS[BYTES])
    moved = padded.transpose(1, 2).reshape(-1, steps, STEP)
    torch.bitwise_xor(moved.view(torch.uint8), ZERO, out=strips[:, :steps])
    strips[:, steps].view(torch.float32).copy_(scale.view(-1, STRIP))
    return strips


@lowered(Float, Int)
def read_scale(builder: Builder, address: Value) -> Value:
    """The float32 at an address."""
    return load_at(builder, address, FLOAT)


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
    """One row of float32 as two rows of bytes: header and high bytes at `target`, low bytes half a `pitch` on, behind a
    gap.

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
def settle(scales: int, x: int, pitch: int, rows: int, sums: int) -> None:
    """Turn integer sums (2 * rows, 64) of high and low bytes into products (rows, 64) float32, in place."""
    for row in range(rows):
        at = x + row * pitch
        factor, high_sum, low_sum = broadcast(read_scale(at)), read_scale(at + 4), read_scale(at + 8)
        high = sums + 2 * row * (4 * STRIP)
        for i in range(0, 4 * STRIP, 64):
            value = _settled(high + i, high + 4 * STRIP + i, high_sum, low_sum)
            store(sums + row * (4 * STRIP) + i, mul(mul(value, factor), load(scales + i)))
