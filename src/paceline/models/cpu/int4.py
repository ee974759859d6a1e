"""Integer products with weights of half a byte: sixteen values, a scale for every 32 inputs of an output.

In: rows of bytes as `quantized.to_bytes` leaves them, with the sums of their groups; int4 weights with bfloat16 scales.
Out: blocks of strips; sums as float32. Not here: threads (models.cpu.forward), rounding weights
(models.loading.quantization).

A block holds 64 outputs of one group: their scales, then four steps of 256 bytes, a byte being two inputs of an output,
four inputs apart. Two instructions unpack sixteen outputs. Within a group sums are int32 without rounding, and begin at
-8 times the sum of the group's activations, since weights are kept plus 8. Groups are added in float32 from the first
to the last, for each row of bytes by itself, so that neither the number of rows nor the width of vectors changes a bit.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import njit

from paceline.models.cpu.int8 import HEADER, read_scale
from paceline.models.cpu.pages import Pages
from paceline.models.cpu.tiles import COLUMNS, GROUP, MOST_ROWS, STEP, STRIP, dot_bytes, has_dot_bytes, prefetch
from paceline.models.cpu.vectors import (
    F32V,
    I16V,
    I32,
    I32V,
    I64,
    Builder,
    Int,
    Nothing,
    Value,
    broadcast,
    fma,
    fused,
    integers,
    load,
    load_at,
    lowered,
    mul,
    splat,
    store,
    store_at,
    widen,
)  # fmt: skip
from paceline.models.loading.quantization import GROUP as WIDTH
from paceline.models.loading.quantization import unpacked

SCALES = 2 * STRIP
BLOCK = SCALES + GROUP * STEP
"""Bytes of a strip's scales in one group, and of its block."""

CHUNK = 16
"""Blocks of a strip (18 KiB) that all rows take before the next (see models.cpu.matrix)."""

AHEAD = 2048
"""Bytes that a single pass fetches ahead."""

LOW = integers(0x0F0F0F0F)


def pack_nibbles(pairs: torch.Tensor, scale: torch.Tensor, pages: Pages) -> torch.Tensor:
    """Blocks of pairs (out, in / 2) uint8 with scales (out, groups) bfloat16 (models.loading.quantization), both in the
    order of strips.

    Returns:
        (strips, groups, BLOCK) uint8.
    """
    strips, groups = len(pairs) // STRIP, scale.shape[1]
    out = pages.take(strips * groups * BLOCK).view(strips, groups, BLOCK)
    out[:, :, :SCALES].view(torch.bfloat16).copy_(scale.view(strips, STRIP, groups).transpose(1, 2))
    padded = torch.nn.functional.pad(pairs, (0, groups * WIDTH // 2 - pairs.shape[1]), value=0x88)
    whole = (unpacked(padded) + 8).view(torch.uint8).view(strips, STRIP, groups, GROUP, 2, 4)
    both = whole[..., 0, :] | whole[..., 1, :] << 4
    out[:, :, SCALES:].view(strips, groups, GROUP, STRIP, 4).copy_(both.permute(0, 2, 3, 1, 4))
    return out


class _Loop:
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
        at = builder.add(weights, builder.mul(index, ir.Constant(I64, BLOCK)))
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
def _accumulate(
    builder: Builder, rows: Value, alone: Value,
    weights: Value, groups: Value, x: Value, x_sums: Value, stride: Value, sums: Value, ahead: Value,
) -> Any:  # fmt: skip
    """Add blocks of a strip to sums (rows, 64) float32; `alone`: 1 where no other rows take the same weights."""
    done, nothing = builder.append_basic_block(), builder.append_basic_block()
    switch = builder.switch(builder.add(builder.mul(rows, ir.Constant(I64, 2)), alone), nothing)
    for count in range(1, MOST_ROWS + 1):
        for only in (0, 1):
            block = builder.append_basic_block()
            switch.add_case(ir.Constant(I64, 2 * count + only), block)
            builder.position_at_end(block)
            _Loop(builder, count, BLOCK // 64 if only else BLOCK // 128).emit(
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
    passes = (count + MOST_ROWS - 1) // MOST_ROWS
    for at in range(0, groups, CHUNK):
        size, done = min(CHUNK, groups - at), 0
        block = weights + at * BLOCK
        for turn in range(passes):
            take = (count - done + passes - turn - 1) // (passes - turn)
            ahead = block + AHEAD if passes == 1 else block + size * BLOCK + (turn & 1) * (size * BLOCK // 2)
            row = start + done * stride
            _accumulate(
                take, 1 if passes == 1 else 0, block, size, row + at * WIDTH, row + groups * WIDTH + 4 * at, stride,
                sums + done * (4 * STRIP), ahead,
            )  # fmt: skip
            done += take
    _settle(x, pitch, rows, sums)


@njit(error_model="numpy")
def _settle(x: int, pitch: int, rows: int, sums: int) -> None:
    """Turn sums (2 * rows, 64) of high and low bytes into products (rows, 64), in place."""
    shift = broadcast(np.float32(256.0))
    for row in range(rows):
        factor, high = broadcast(read_scale(x + row * pitch)), sums + 2 * row * (4 * STRIP)
        for i in range(0, 4 * STRIP, 64):
            value = fma(load(high + i), shift, load(high + 4 * STRIP + i))
            store(sums + row * (4 * STRIP) + i, mul(value, factor))
