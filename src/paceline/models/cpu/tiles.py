"""The inner loop of every matrix product: up to six rows of activations times one strip of 64 outputs.

Weights come in steps of 256 bytes: for 64 outputs one float32 input each, or a pair of bfloat16 inputs. An output's sum
lives in one lane from the first input to the last, so its bits depend neither on the number of rows nor on the
neighbours. Kinds: DOT multiplies bfloat16 pairs by bfloat16 pairs in one instruction (avx512bf16), HALF widens the
weights and keeps float32 activations, FULL is float32 throughout, BYTES multiplies four unsigned by four signed bytes
(models.cpu.integer_products), whose int32 sums travel as the bits of float32 lanes. NIBBLES and BLOCKS have loops of
their own (models.cpu.integer_products, models.cpu.block_products); FINE_BLOCKS are BLOCKS with activations of two
bytes. SHORTS multiplies pairs of two bytes (models.cpu.products), where there is no instruction for BYTES.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from llvmlite import ir

from paceline.models.cpu.processor import features, has_bfloat, has_dot_bytes
from paceline.models.cpu.vectors import (
    F32V,
    FLOAT,
    I8,
    I16,
    I32,
    I32V,
    I64,
    Bfloat,
    Builder,
    Int,
    Nothing,
    Value,
    call_named,
    fused,
    integers,
    load_at,
    lowered,
    splat,
    store_at,
)  # fmt: skip

DOT, HALF, FULL, BYTES, NIBBLES, BLOCKS, FINE_BLOCKS, SHORTS = range(8)
STRIP, STEP, GROUP = 64, 256, 4
"""Outputs of a strip, bytes of one step, steps that the loop takes at a time."""

NARROW = bool(features().get("avx2") and not features().get("avx512f"))
"""16 registers of 8 numbers: several rows take a quarter of a strip at a time."""

MAX_ROWS = 6
"""24 sums, 4 weights and an activation fill the 32 registers of AVX-512; 12 sums, 2 weights and an activation the 16 of
AVX2.
"""

INPUTS = {DOT: 2, HALF: 2, FULL: 1, BYTES: 4, NIBBLES: 8, BLOCKS: 32, FINE_BLOCKS: 32, SHORTS: 2}
"""Inputs per step."""
ACTIVATION = {DOT: 2, HALF: 4, FULL: 4, BYTES: 1, NIBBLES: 1, BLOCKS: 1, FINE_BLOCKS: 1, SHORTS: 2}
"""Bytes of one activation."""

COLUMNS, ROWS = 4, range(1, MAX_ROWS + 1)

AHEAD = 2048
"""Bytes that a single pass fetches ahead."""


PAIRS, PAIRS_OF_16 = ir.VectorType(Bfloat(), 32), ir.VectorType(I16, 32)


def dot_pairs(builder: Builder, sums: Value, a: Value, b: Value) -> Value:
    """Emit sums + a.even * b.even + a.odd * b.odd for lanes of bfloat16 pairs."""
    pairs = [builder.bitcast(operand, PAIRS) for operand in (a, b)]
    return call_named(builder, "llvm.x86.avx512bf16.dpbf16ps.512", F32V, sums, *pairs)


def dot_bytes(builder: Builder, sums: Value, unsigned: Value, signed: Value, *, native: bool) -> Value:
    """Emit sums + the products of four unsigned and four signed bytes of each lane, all int32.

    `native`: by one instruction, else by products of 16 bits.
    """
    if native:
        return call_named(builder, "llvm.x86.avx512.vpdpbusd.512", I32V, sums, unsigned, signed)
    left, right = (builder.bitcast(value, PAIRS_OF_16) for value in (unsigned, signed))
    low = (builder.and_(left, _sixteens(255)), builder.ashr(builder.shl(right, _sixteens(8)), _sixteens(8)))
    high = (builder.lshr(left, _sixteens(8)), builder.ashr(right, _sixteens(8)))
    for pair in (low, high):
        sums = builder.add(sums, _pairs_of_16(builder, *pair))
    return sums


def _sixteens(value: int) -> Value:
    return ir.Constant(PAIRS_OF_16, [value] * 32)


def _pairs_of_16(builder: Builder, a: Value, b: Value) -> Value:
    """Emit a.even * b.even + a.odd * b.odd of lanes of signed 16-bit pairs, int32."""
    if not NARROW:
        whole = builder.mul(*(builder.sext(operand, ir.VectorType(I32, 32)) for operand in (a, b)))
        return builder.add(*(_picked(builder, whole, range(first, 32, 2)) for first in (0, 1)))
    halves = [[_picked(builder, operand, range(first, first + 16)) for operand in (a, b)] for first in (0, 16)]
    sums = [call_named(builder, "llvm.x86.avx2.pmadd.wd", ir.VectorType(I32, 8), *half) for half in halves]
    return builder.shuffle_vector(*sums, ir.Constant(I32V, list(range(16))))


def _picked(builder: Builder, lanes: Value, places: Iterable[int]) -> Value:
    chosen = list(places)
    return builder.shuffle_vector(
        lanes, ir.Constant(lanes.type, ir.Undefined), ir.Constant(ir.VectorType(I32, len(chosen)), chosen)
    )


class StripLoop:
    """One variant of the loop: a kind, a number of rows, columns of 16 outputs, lines to prefetch a group."""

    def __init__(self, builder: Builder, kind: int, rows: int, columns: int, lines: int) -> None:
        self.builder, self.kind, self.rows, self.columns, self.lines = builder, kind, rows, columns, lines
        self.pitch = GROUP * INPUTS[kind] * ACTIVATION[kind]

    def emit(
        self, weights: Value, groups: Value, x: Value, stride: Value, sums: Value, sums_pitch: Value, ahead: Value
    ) -> None:
        builder = self.builder
        outs = [builder.add(sums, builder.mul(sums_pitch, ir.Constant(I64, row))) for row in range(self.rows)]
        starts = [builder.add(x, builder.mul(stride, ir.Constant(I64, row))) for row in range(self.rows)]
        cells = [(row, column) for row in range(self.rows) for column in range(self.columns)]
        first = [load_at(builder, outs[row], F32V, column * 64) for row, column in cells]
        before = builder.block
        loop, after = builder.append_basic_block(), builder.append_basic_block()
        builder.branch(loop)
        builder.position_at_end(loop)
        index = builder.phi(I64)
        kept = [builder.phi(F32V) for _ in cells]
        index.add_incoming(ir.Constant(I64, 0), before)
        for phi, value in zip(kept, first, strict=True):
            phi.add_incoming(value, before)
        next_sums = self._group(weights, starts, index, list(kept), ahead)
        following = builder.add(index, ir.Constant(I64, 1))
        index.add_incoming(following, builder.block)
        for phi, value in zip(kept, next_sums, strict=True):
            phi.add_incoming(value, builder.block)
        builder.cbranch(builder.icmp_signed("<", following, groups), loop, after)
        builder.position_at_end(after)
        for (row, column), value in zip(cells, next_sums, strict=True):
            store_at(builder, outs[row], value, column * 64)

    def _group(self, weights: Value, starts: list[Value], index: Value, sums: list[Value], ahead: Value) -> list[Value]:
        builder = self.builder
        at = builder.add(weights, builder.mul(index, ir.Constant(I64, GROUP * STEP)))
        along = builder.mul(index, ir.Constant(I64, self.pitch))
        rows = [builder.add(start, along) for start in starts]
        pitch = STEP if self.columns < COLUMNS else 16 * self.lines  # bytes from what a step fetches to the next
        line = builder.add(ahead, builder.mul(index, ir.Constant(I64, GROUP * pitch)))
        for step in range(GROUP):
            for i in range(self.lines // GROUP):
                prefetch(builder, line, step * pitch + i * 64, 2)
            kind = F32V if self.kind == FULL else I32V
            strip = [load_at(builder, at, kind, step * STEP + column * 64) for column in range(self.columns)]
            for row in range(self.rows):
                columns = slice(row * self.columns, (row + 1) * self.columns)
                sums[columns] = self._step(strip, rows[row], step * (self.pitch // GROUP), sums[columns])
        return sums

    def _step(self, strip: list[Value], row: Value, offset: int, sums: list[Value]) -> list[Value]:
        builder = self.builder
        if self.kind == DOT:
            pair = splat(builder, load_at(builder, row, I32, offset))
            return [dot_pairs(builder, total, weight, pair) for total, weight in zip(sums, strip, strict=True)]
        if self.kind == BYTES:
            four, native = splat(builder, load_at(builder, row, I32, offset)), has_dot_bytes()
            whole = [builder.bitcast(total, I32V) for total in sums]
            whole = [
                dot_bytes(builder, total, weight, four, native=native)
                for total, weight in zip(whole, strip, strict=True)
            ]
            return [builder.bitcast(total, F32V) for total in whole]
        if self.kind == SHORTS:
            pair = builder.bitcast(splat(builder, load_at(builder, row, I32, offset)), PAIRS_OF_16)
            products = [_pairs_of_16(builder, builder.bitcast(weight, PAIRS_OF_16), pair) for weight in strip]
            return [
                builder.bitcast(builder.add(builder.bitcast(total, I32V), product), F32V)
                for total, product in zip(sums, products, strict=True)
            ]
        x = splat(builder, load_at(builder, row, FLOAT, offset))
        if self.kind == FULL:
            return [fused(builder, weight, x, total) for total, weight in zip(sums, strip, strict=True)]
        even = [builder.bitcast(builder.shl(weight, integers(16)), F32V) for weight in strip]
        odd = [builder.bitcast(builder.and_(weight, integers(-65536)), F32V) for weight in strip]
        sums = [fused(builder, weight, x, total) for total, weight in zip(sums, even, strict=True)]
        x = splat(builder, load_at(builder, row, FLOAT, offset + 4))
        return [fused(builder, weight, x, total) for total, weight in zip(sums, odd, strict=True)]


def prefetch(builder: Builder, address: Value, offset: int, level: int) -> None:
    """Emit a fetch of one cache line to a cache level, 1 or 2."""
    at = builder.inttoptr(builder.add(address, ir.Constant(I64, offset)), I8.as_pointer())
    flags = [ir.Constant(I32, value) for value in (0, 4 - level, 1)]  # for reading, how near, data
    call_named(builder, "llvm.prefetch.p0", ir.VoidType(), at, *flags)


KINDS = {DOT: has_bfloat(), HALF: True, FULL: True, BYTES: True, SHORTS: not has_dot_bytes()}
"""Kinds of the loop, and whether this processor needs them."""


def _variants() -> list[tuple[int, int, int, int]]:
    """Kinds, rows, columns and lines."""
    kinds = [kind for kind, there in KINDS.items() if there]
    if NARROW:
        return [(kind, rows, 1, 4) for kind in kinds for rows in ROWS] + [(kind, 1, COLUMNS, 16) for kind in kinds]
    return [
        (kind, rows, COLUMNS, lines) for kind in kinds for rows in ROWS for lines in ((16, 8) if rows > 2 else (16,))
    ]


@lowered(Nothing, *[Int] * 10, outlined=True)
def accumulate(
    builder: Builder, kind: Value, rows: Value, alone: Value,
    weights: Value, groups: Value, x: Value, stride: Value, sums: Value, sums_pitch: Value, ahead: Value,
) -> Any:  # fmt: skip
    """Add a stretch of a strip to sums (rows, 64) float32, `sums_pitch` bytes apart; if NARROW, only its first 16
    outputs, but all of a row that is alone.

    `kind`, `rows` (1 to 6): the variant. `alone`: 1 where no other rows take the same weights, so that all of the
    memory ahead is fetched here, else half. `groups`: stretch of the strip, GROUP steps each. `stride`: bytes between
    rows of activations.
    """
    done, nothing = builder.append_basic_block(), builder.append_basic_block()
    code = builder.add(builder.mul(kind, ir.Constant(I64, 16)), builder.mul(rows, ir.Constant(I64, 2)))
    code = builder.add(code, alone)
    switch = builder.switch(code, nothing)
    for variant in _variants():
        block = builder.append_basic_block()
        kind_, rows_, columns, lines = variant
        switch.add_case(ir.Constant(I64, 16 * kind_ + 2 * rows_ + (lines == 16)), block)
        if rows_ == 2 or (rows_ > 2 and NARROW) or (rows_ == 1 and not NARROW):
            switch.add_case(ir.Constant(I64, 16 * kind_ + 2 * rows_ + (lines != 16)), block)
        builder.position_at_end(block)
        StripLoop(builder, kind_, rows_, columns, lines).emit(weights, groups, x, stride, sums, sums_pitch, ahead)
        builder.branch(done)
    builder.position_at_end(nothing)
    builder.branch(done)
    builder.position_at_end(done)
