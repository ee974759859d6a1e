"""Products of GGUF's quantised blocks with activations of one byte; whole numbers are summed exactly.

Weights keep the numbers and scales of their file (models.cpu.blocks). Activations are rounded to signed bytes, with a
float32 scale for every 32 inputs; where they shall have two bytes, what that loses is a row of its own. In each lane of
32 bits four unsigned numbers of one output meet four signed activations, which are the same for all lanes, so that
nothing is summed across lanes. Processors without an instruction for that sum pairs of products in 16 bits, as many as
cannot overflow, and widen once.

The sum of a group of 32 inputs is multiplied by both scales in float32, an offset is added for the group's activations,
and groups follow each other from the first to the last. So a row's bits depend neither on the rows beside it nor on the
width of vectors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from llvmlite import ir

from paceline.models.cpu.blocks import GROUP, KINDS, LANES, BlockKind, Scales
from paceline.models.cpu.matrix_unit import TILE_ROWS, GroupTiles, has_matrix_unit
from paceline.models.cpu.processor import features
from paceline.models.cpu.tiles import AHEAD, STRIP, prefetch
from paceline.models.cpu.vectors import (
    F32V,
    FLOAT,
    I8,
    I16,
    I32,
    I64,
    Builder,
    Float,
    Int,
    Lanes,
    Nothing,
    Value,
    broadcast,
    call_named,
    counted,
    floats,
    fma,
    larger,
    largest,
    load,
    load_at,
    lowered,
    maximum,
    mul,
    read_float,
    stack_memory,
    store,
    store_at,
    total,
    write_float,
)  # fmt: skip
from paceline.models.cpu.vectors import LANES as WIDE
from paceline.utils import part_of_compiled

ONE_STEP: Final = bool(features().get("avx512vnni") or features().get("avxvnni"))
"""The processor multiplies four pairs of bytes of each lane in one instruction."""

PAIRED: Final = bool(features().get("avx2"))
"""It multiplies two, and sums of 16 bits."""

SIGNED: Final = PAIRED and not ONE_STEP
"""Numbers of 8 bits stay signed: their signs go to the activations."""

MAX_ROWS: Final = 8 if LANES == 16 else 4
"""Rows of activations whose sums stay in registers."""

VECTOR: Final = 4 * LANES
"""Bytes of four inputs of all outputs of a sub-strip."""

LINES: Final = 2
"""That each such group and pass of rows fetches of the groups behind, in steps so small that two passes fetch all."""

READY: Final = (GROUP // 4 + 4) * VECTOR
"""Bytes of a group that many rows take, see `_Ready`."""

AT_ONCE: Final = 32
"""Most groups that are ready at a time, a multiple of 8: with some rows of activations they fit into the first-level
cache.
"""

TOP, PER_GROUP = 127, 12
"""Largest activation; bytes of a group of activations behind the numbers of a row: float32 scale, float32 sum of what
the group's numbers stand for, two sums of 16 numbers as 16 bits.
"""

MATRIX_UNIT, SUBS = has_matrix_unit(), STRIP // LANES
F32L, I32L = (ir.VectorType(lane, LANES) for lane in (FLOAT, I32))
PAIRS, BYTES = ir.VectorType(I16, 2 * LANES), ir.VectorType(I8, 4 * LANES)


def row_pitch(inputs: int) -> int:
    """Bytes from one row of activations to the next: an odd number of lines."""
    groups = -(-inputs // GROUP)
    return (-(-groups * (GROUP + PER_GROUP) // 128) * 2 + 1) * 64


def _all(value: int) -> Value:
    return ir.Constant(I32L, [value] * LANES)


def _splat(builder: Builder, scalar: Value) -> Value:
    empty = ir.Constant(ir.VectorType(scalar.type, LANES), ir.Undefined)
    first = builder.insert_element(empty, scalar, ir.Constant(I32, 0))
    return builder.shuffle_vector(first, empty, ir.Constant(I32L, [0] * LANES))


def _fused(builder: Builder, a: Value, b: Value, c: Value) -> Value:
    return call_named(builder, f"llvm.fma.v{LANES}f32", F32L, a, b, c)


def _halves(builder: Builder, address: Value, offset: int = 0) -> Value:
    """Emit float32 lanes of float16 in memory."""
    return builder.fpext(load_at(builder, address, ir.VectorType(ir.HalfType(), LANES), offset), F32L)


def _pairs_summed(builder: Builder, a: Value, b: Value) -> Value:
    """Emit a.even * b.even + a.odd * b.odd of lanes of signed 16-bit pairs, int32."""
    a, b = builder.bitcast(a, PAIRS), builder.bitcast(b, PAIRS)
    if PAIRED:
        name = "llvm.x86.avx512.pmaddw.d.512" if LANES == 16 else "llvm.x86.avx2.pmadd.wd"
        return call_named(builder, name, I32L, a, b)
    whole = [builder.sext(operand, ir.VectorType(I32, 2 * LANES)) for operand in (a, b)]
    both = builder.mul(*whole)
    empty = ir.Constant(both.type, ir.Undefined)
    parts = [
        builder.shuffle_vector(both, empty, ir.Constant(I32L, list(range(first, 2 * LANES, 2)))) for first in (0, 1)
    ]
    return builder.add(*parts)


def _four_summed(builder: Builder, sums: Value, unsigned: Value, signed: Value) -> Value:
    """Emit sums + the products of four unsigned and four signed bytes of each lane, int32."""
    if ONE_STEP:
        name = f"llvm.x86.avx512.vpdpbusd.{32 * LANES}"
        return call_named(builder, name, I32L, sums, unsigned, signed)
    for place in range(4):
        byte = builder.and_(builder.lshr(unsigned, _all(8 * place)), _all(255))
        other = builder.ashr(builder.shl(signed, _all(24 - 8 * place)), _all(24))
        sums = builder.add(sums, builder.mul(byte, other))
    return sums


@dataclass(frozen=True, slots=True)
class _GroupScales:
    """What a group of a sub-strip is multiplied by.

    Attributes:
        factor: of its sum. offset: of what its activations stand for, or None.
        halves: int16 pairs (first half, second half) of inputs: what each half's sum is multiplied by, or None.
        zero: int16 pairs by which the activations' sums of both halves are multiplied and then taken away, or None.
    """

    factor: Value
    offset: Value | None = None
    halves: tuple[Value, Value] | None = None
    zero: Value | None = None


class _Groups:
    """Reads groups of a kind of blocks."""

    def __init__(self, builder: Builder, kind: BlockKind) -> None:
        self.builder, self.kind = builder, kind

    def places(self, weights: Value, index: Value) -> tuple[Value, Value]:
        """Emit the addresses of what eight groups have in common, and of a group."""
        builder, kind = self.builder, self.kind
        size = ir.Constant(I64, kind.group_bytes)
        if not kind.header_bytes:
            at = builder.add(weights, builder.mul(index, size))
            return at, at
        above = builder.mul(builder.lshr(index, ir.Constant(I64, 3)), ir.Constant(I64, kind.super_bytes))
        above = builder.add(weights, above)
        within = builder.mul(builder.and_(index, ir.Constant(I64, 7)), size)
        return above, builder.add(builder.add(above, within), ir.Constant(I64, kind.header_bytes))

    def scales(self, above: Value, at: Value) -> _GroupScales:
        builder, kind = self.builder, self.kind
        if kind.scales is Scales.SIXTEENTHS:
            pairs = builder.sext(load_at(builder, at, ir.VectorType(I8, 2 * LANES)), PAIRS)
            whole = builder.bitcast(pairs, I32L)
            low, high = builder.and_(whole, _all(0xFFFF)), builder.lshr(whole, _all(16))
            halves = [builder.or_(part, builder.shl(part, _all(16))) for part in (low, high)]
            zero = builder.shl(pairs, ir.Constant(PAIRS, [5] * (2 * LANES)))
            return _GroupScales(_halves(builder, above), halves=(halves[0], halves[1]), zero=zero)
        if kind.scales is Scales.SUPER:
            small = [
                builder.uitofp(load_at(builder, at, ir.VectorType(I8, LANES), part * LANES), F32L) for part in (0, 1)
            ]
            offset = builder.fmul(_halves(builder, above, 2 * LANES), small[1])
            return _GroupScales(builder.fmul(_halves(builder, above), small[0]), builder.fneg(offset))
        if kind.scales is Scales.OFFSETS:
            return _GroupScales(_halves(builder, at), _halves(builder, at, 2 * LANES))
        factor = _halves(builder, at)
        if kind.bits < 8:
            return _GroupScales(factor, builder.fmul(factor, ir.Constant(F32L, [-kind.zero] * LANES)))
        return _GroupScales(factor, zero=None if SIGNED else _all(kind.zero * 0x0001_0001))

    def numbers(self, at: Value) -> Iterator[Value]:
        """Emit the numbers of each four inputs of all outputs, step by step."""
        builder, kind = self.builder, self.kind
        at, low, vector = builder.add(at, ir.Constant(I64, kind.scale_bytes)), _all(0x0F0F0F0F), None
        above = [load_at(builder, at, I32L, (4 + i) * VECTOR) for i in range(kind.bits - 4 if kind.bits < 8 else 0)]
        for step in range(GROUP // 4):
            if kind.bits == 8:
                whole = load_at(builder, at, I32L, step * VECTOR)
                yield whole if SIGNED else builder.xor(whole, _all(-0x7F7F7F80))
                continue
            if step % 2 == 0:
                vector = load_at(builder, at, I32L, step // 2 * VECTOR)
                number = builder.and_(vector, low)
            else:
                number = builder.and_(builder.lshr(vector, _all(4)), low)
            if kind.bits == 5:
                number = builder.or_(number, builder.and_(_moved(builder, above[0], 4 - step), _all(0x10101010)))
            if kind.bits == 6:
                upper = _moved(builder, above[step // 4], 4 - 2 * (step % 4))
                number = builder.or_(number, builder.and_(upper, _all(0x30303030)))
            yield number

    def added(self, group: _GroupScales, place: Value, before: Value, whole: Value) -> Value:
        """Emit a row's sums with those of a group, int32, and what lies at `place` of its activations."""
        builder = self.builder
        if group.zero is not None:
            both = _splat(builder, load_at(builder, place, I32, 8))
            whole = builder.sub(whole, _pairs_summed(builder, both, group.zero))
        factor = builder.fmul(group.factor, _splat(builder, load_at(builder, place, FLOAT)))
        after = _fused(builder, builder.sitofp(whole, F32L), factor, before)
        if group.offset is not None:
            after = _fused(builder, group.offset, _splat(builder, load_at(builder, place, FLOAT, 4)), after)
        return after


class _Ready(_Groups):
    """Reads groups whose numbers are a byte each already, and whose scales are float32.

    A group's vectors: the numbers of each four inputs, the factor, and what else its scales have.
    """

    def write(self, target: Value, group: _GroupScales, numbers: Iterable[Value]) -> None:
        """Emit the stores of a group."""
        rest = [part for part in (group.offset, *(group.halves or ()), group.zero) if part is not None]
        for place, vector in enumerate([*numbers, group.factor, *rest]):
            store_at(self.builder, target, vector, place * VECTOR)

    def places(self, weights: Value, index: Value) -> tuple[Value, Value]:
        at = self.builder.add(weights, self.builder.mul(index, ir.Constant(I64, READY)))
        return self.builder.add(at, ir.Constant(I64, GROUP // 4 * VECTOR)), at

    def scales(self, above: Value, at: Value) -> _GroupScales:
        factor, *whole = [
            load_at(self.builder, above, kind, i * VECTOR) for i, kind in enumerate((F32L, I32L, I32L, I32L))
        ]
        if self.kind.scales is Scales.SIXTEENTHS:
            return _GroupScales(factor, halves=(whole[0], whole[1]), zero=whole[2])
        if self.kind.bits < 8:
            return _GroupScales(factor, self.builder.bitcast(whole[0], F32L))
        return _GroupScales(factor, zero=None if SIGNED else whole[0])

    def numbers(self, at: Value) -> Iterator[Value]:
        for step in range(GROUP // 4):
            yield load_at(self.builder, at, I32L, step * VECTOR)


class _BlockLoop:
    """The loop over groups of one sub-strip, for a number of rows.

    Args:
        lines: of memory ahead that each group fetches.
    """

    def __init__(self, builder: Builder, groups: _Groups, rows: int, lines: int) -> None:
        self.builder, self.groups, self.kind, self.rows, self.lines = builder, groups, groups.kind, rows, lines

    def emit(
        self, weights: Value, groups: Value, x: Value, scales: Value, stride: Value, sums: Value, ahead: Value,
        pitch: Value,
    ) -> None:  # fmt: skip
        """`ahead`: what the first group fetches; `pitch`: bytes from there to what the next does."""
        builder = self.builder
        offsets = [builder.mul(stride, ir.Constant(I64, row)) for row in range(self.rows)]
        first = [load_at(builder, sums, F32L, 4 * STRIP * row) for row in range(self.rows)]
        before, loop, after = builder.block, builder.append_basic_block(), builder.append_basic_block()
        builder.branch(loop)
        builder.position_at_end(loop)
        index = builder.phi(I64)
        index.add_incoming(ir.Constant(I64, 0), before)
        kept = [builder.phi(F32L) for _ in offsets]
        for phi, value in zip(kept, first, strict=True):
            phi.add_incoming(value, before)
        above, at = self.groups.places(weights, index)
        fetched = builder.add(ahead, builder.mul(index, pitch))
        for line in range(self.lines):
            prefetch(builder, fetched, 64 * line, 2)
        along = builder.add(x, builder.mul(index, ir.Constant(I64, GROUP)))
        beside = builder.add(scales, builder.mul(index, ir.Constant(I64, PER_GROUP)))
        next_kept = self._group(
            above,
            at,
            [builder.add(along, offset) for offset in offsets],
            [builder.add(beside, offset) for offset in offsets],
            kept,
        )
        following = builder.add(index, ir.Constant(I64, 1))
        index.add_incoming(following, builder.block)
        for phi, value in zip(kept, next_kept, strict=True):
            phi.add_incoming(value, builder.block)
        builder.cbranch(builder.icmp_signed("<", following, groups), loop, after)
        builder.position_at_end(after)
        for row, value in enumerate(next_kept):
            store_at(builder, sums, value, 4 * STRIP * row)

    def _group(self, above: Value, at: Value, rows: list[Value], places: list[Value], sums: list[Value]) -> list[Value]:
        group = self.groups.scales(above, at)
        whole = self._sums(at, rows, group)
        return [self.groups.added(group, *parts) for parts in zip(places, sums, whole, strict=True)]

    def _sums(self, at: Value, rows: list[Value], group: _GroupScales) -> list[Value]:
        """Emit int32 sums of products of every row."""
        if SIGNED:
            return self._sums_of_pairs(at, rows, group)
        builder = self.builder
        sums = [_all(0)] * len(rows)
        halves = [_all(0)] * len(rows)
        for step, number in enumerate(self.groups.numbers(at)):
            for i, row in enumerate(rows):
                four = _splat(builder, load_at(builder, row, I32, 4 * step))
                halves[i] = _four_summed(builder, halves[i], number, four)
            if group.halves is not None and step % 4 == 3:
                factor = builder.ashr(group.halves[step // 4], _all(16))
                sums = [builder.add(total, builder.mul(half, factor)) for total, half in zip(sums, halves, strict=True)]
                halves = [_all(0)] * len(rows)
        return halves if group.halves is None else sums

    def _sums_of_pairs(self, at: Value, rows: list[Value], group: _GroupScales) -> list[Value]:
        """The same by sums of 16 bits, widened before they could overflow."""
        builder, room = self.builder, {4: 8, 5: 4, 6: 2, 8: 1}[self.kind.bits]
        sums: list[Value | None] = [None] * len(rows)
        pairs: list[Value | None] = [None] * len(rows)
        for step, number in enumerate(self.groups.numbers(at)):
            unsigned = builder.bitcast(number, BYTES)
            if self.kind.bits == 8:
                unsigned = call_named(
                    builder, f"llvm.abs.v{4 * LANES}i8", BYTES, unsigned, ir.Constant(ir.IntType(1), 0)
                )
            for i, row in enumerate(rows):
                four = builder.bitcast(_splat(builder, load_at(builder, row, I32, 4 * step)), BYTES)
                if self.kind.bits == 8:
                    four = call_named(builder, "llvm.x86.avx2.psign.b", BYTES, four, builder.bitcast(number, BYTES))
                two = call_named(builder, "llvm.x86.avx2.pmadd.ub.sw", PAIRS, unsigned, four)
                pairs[i] = two if pairs[i] is None else builder.add(pairs[i], two)
            if step % room == room - 1:
                factor = _all(0x0001_0001) if group.halves is None else group.halves[step // 4]
                wide = [_pairs_summed(builder, pair, factor) for pair in pairs]
                sums = [new if old is None else builder.add(old, new) for old, new in zip(sums, wide, strict=True)]
                pairs = [None] * len(rows)
        return [total for total in sums if total is not None]


def _moved(builder: Builder, lanes: Value, left: int) -> Value:
    """Emit lanes shifted to the left, or right."""
    return builder.shl(lanes, _all(left)) if left > 0 else builder.lshr(lanes, _all(-left)) if left else lanes


@lowered(Nothing, *[Int] * 8, outlined=True)
def _accumulate_blocks(
    builder: Builder, kind: Value, rows: Value, weights: Value, groups: Value, x: Value, scales: Value, stride: Value,
    sums: Value,
) -> Any:  # fmt: skip
    """Add a sub-strip to sums (rows, 64 float32 apart) of up to MAX_ROWS rows; see `_BlockLoop`."""
    done = builder.append_basic_block()
    code = builder.add(builder.mul(kind, ir.Constant(I64, 16)), rows)
    switch = builder.switch(code, done)
    for form in KINDS.values():
        for count in range(1, MAX_ROWS + 1):
            block = builder.append_basic_block()
            switch.add_case(ir.Constant(I64, 16 * form.number + count), block)
            builder.position_at_end(block)
            loop = _BlockLoop(builder, _Groups(builder, form), count, -(-form.group_bytes // 64))
            ahead = builder.add(weights, ir.Constant(I64, AHEAD))
            loop.emit(weights, groups, x, scales, stride, sums, ahead, ir.Constant(I64, form.group_bytes))
            builder.branch(done)
    builder.position_at_end(done)


@lowered(Nothing, *[Int] * 4, outlined=True)
def _make_ready(builder: Builder, kind: Value, weights: Value, groups: Value, target: Value) -> Any:
    """Groups of a sub-strip as `_Ready` reads them."""
    done = builder.append_basic_block()
    switch = builder.switch(kind, done)
    for form in KINDS.values():
        block = builder.append_basic_block()
        switch.add_case(ir.Constant(I64, form.number), block)
        builder.position_at_end(block)
        source, ready = _Groups(builder, form), _Ready(builder, form)
        with counted(builder, groups) as index:
            above, at = source.places(weights, index)
            ready.write(ready.places(target, index)[1], source.scales(above, at), source.numbers(at))
        builder.branch(done)
    builder.position_at_end(done)


@lowered(Nothing, *[Int] * 10, outlined=True)
def _accumulate_ready(
    builder: Builder, bits: Value, rows: Value, ready: Value, groups: Value, x: Value, scales: Value, stride: Value,
    sums: Value, ahead: Value, pitch: Value,
) -> Any:  # fmt: skip
    """Add groups that are ready to sums (rows, 64 float32 apart) of up to MAX_ROWS rows; see `_BlockLoop`."""
    done = builder.append_basic_block()
    switch = builder.switch(builder.add(builder.mul(bits, ir.Constant(I64, 16)), rows), done)
    for form in {kind.bits: kind for kind in KINDS.values()}.values():
        for count in range(1, MAX_ROWS + 1):
            block = builder.append_basic_block()
            switch.add_case(ir.Constant(I64, 16 * form.bits + count), block)
            builder.position_at_end(block)
            loop = _BlockLoop(builder, _Ready(builder, form), count, LINES)
            loop.emit(ready, groups, x, scales, stride, sums, ahead, pitch)
            builder.branch(done)
    builder.position_at_end(done)


@lowered(Int)
def _stack_room(builder: Builder) -> Value:
    """The address of room for AT_ONCE groups that are ready, while the function runs."""
    return stack_memory(builder, AT_ONCE * READY)


class _BlockTiles(_Groups):
    """The loop over groups of all sub-strips of a strip by the matrix unit, for a kind and up to TILE_ROWS rows."""

    def emit(
        self, rows: Value, weights: Value, size: Value, groups: Value, x: Value, scales: Value, stride: Value,
        sums: Value,
    ) -> None:  # fmt: skip
        builder, halved = self.builder, self.kind.scales is Scales.SIXTEENTHS
        units = [GroupTiles(builder, rows, stride) for _ in range(2 if halved else 1)]
        steps = GROUP // 4
        for half, unit in enumerate(units):
            for step in range(steps if halved else 0):
                if step // (steps // 2) != half:
                    unit.put(step, [_all(0)] * SUBS)
        starts = [builder.add(weights, builder.mul(size, ir.Constant(I64, sub))) for sub in range(SUBS)]
        with counted(builder, groups) as index:
            groups_of_subs = []
            for sub, start in enumerate(starts):
                above, at = self.places(start, index)
                for line in range(0, self.kind.group_bytes, 64):
                    prefetch(builder, at, AHEAD // 2 + line, 2)
                groups_of_subs.append(self.scales(above, at))
                for step, number in enumerate(self.numbers(at)):
                    units[step // (steps // 2) if halved else 0].put_one(step, sub, number)
            for unit in units:
                unit.multiply(builder.add(x, builder.mul(index, ir.Constant(I64, GROUP))))
            beside = builder.add(scales, builder.mul(index, ir.Constant(I64, PER_GROUP)))
            with counted(builder, rows) as row:
                place = builder.add(beside, builder.mul(row, stride))
                row_sums = builder.add(sums, builder.mul(row, ir.Constant(I64, 4 * STRIP)))
                products = [unit.products(row) for unit in units]
                for sub, group in enumerate(groups_of_subs):
                    whole = products[0][sub]
                    if group.halves is not None:
                        parts = [builder.ashr(half, _all(16)) for half in group.halves]
                        both = [
                            builder.mul(unit_products[sub], part)
                            for unit_products, part in zip(products, parts, strict=True)
                        ]
                        whole = builder.add(*both)
                    at = 4 * LANES * sub
                    store_at(
                        builder, row_sums, self.added(group, place, load_at(builder, row_sums, F32L, at), whole), at
                    )


@lowered(Nothing, *[Int] * 9, outlined=True)
def _accumulate_tiles(
    builder: Builder, kind: Value, rows: Value,
    weights: Value, size: Value, groups: Value, x: Value, scales: Value, stride: Value, sums: Value,
) -> Any:  # fmt: skip
    """Add a strip, its sub-strips `size` bytes apart, to sums (rows, 64) float32; see `_BlockTiles`."""
    if not MATRIX_UNIT:
        return
    done = builder.append_basic_block()
    switch = builder.switch(kind, done)
    for form in KINDS.values():
        block = builder.append_basic_block()
        switch.add_case(ir.Constant(I64, form.number), block)
        builder.position_at_end(block)
        _BlockTiles(builder, form).emit(rows, weights, size, groups, x, scales, stride, sums)
        builder.branch(done)
    builder.position_at_end(done)


GROUP_BYTES = tuple(kind.group_bytes for kind in KINDS.values())
HEADER_BYTES = tuple(kind.header_bytes for kind in KINDS.values())
BITS = tuple(kind.bits for kind in KINDS.values())


@part_of_compiled
def sub_bytes(kind: int, groups: int) -> int:
    """Bytes of so many groups of a sub-strip, whole eights where they have something in common."""
    return groups * GROUP_BYTES[kind] + groups // 8 * HEADER_BYTES[kind]


@part_of_compiled
def block_sums(kind: int, weights: int, groups: int, x: int, pitch: int, rows: int, sums: int) -> None:
    """Products of one strip with all rows: sums (rows, 64) float32."""
    scales, size = x + groups * GROUP, sub_bytes(kind, groups)
    for i in range(4 * rows):
        store(sums + 64 * i, broadcast(np.float32(0.0)))
    if MATRIX_UNIT and rows > MAX_ROWS:
        for first in range(0, rows, TILE_ROWS):
            count, row = min(TILE_ROWS, rows - first), first * pitch
            _accumulate_tiles(
                kind, count, weights, size, groups, x + row, scales + row, pitch, sums + first * (4 * STRIP)
            )
        return
    for sub in range(SUBS):
        sub_weights, target = weights + sub * size, sums + 4 * LANES * sub
        if rows <= MAX_ROWS:
            _accumulate_blocks(kind, rows, sub_weights, groups, x, scales, pitch, target)
        else:
            _accumulate_rows(kind, sub_weights, groups, x, scales, pitch, rows, target)


@part_of_compiled
def _accumulate_rows(
    kind: int, weights: int, groups: int, x: int, scales: int, stride: int, rows: int, sums: int
) -> None:
    """Add a sub-strip to the sums of many rows: its groups are made ready once for all, and every pass of rows fetches
    its share of those that follow.
    """
    ready, passes = _stack_room(), (rows + MAX_ROWS - 1) // MAX_ROWS
    parts = (groups + AT_ONCE - 1) // AT_ONCE
    stretch = (groups + 8 * parts - 1) // (8 * parts) * 8
    for at in range(0, groups, stretch):
        count, done = min(stretch, groups - at), 0
        group_weights, following = weights + sub_bytes(kind, at), weights + sub_bytes(kind, at + count)
        pitch = (following - group_weights + passes * count - 1) // (passes * count)
        _make_ready(kind, group_weights, count, ready)
        for turn in range(passes):
            take, row = (rows - done + passes - turn - 1) // (passes - turn), done * stride
            _accumulate_ready(
                BITS[kind], take, ready, count, x + row + at * GROUP, scales + row + at * PER_GROUP, stride,
                sums + done * (4 * STRIP), following + turn * count * pitch, pitch,
            )  # fmt: skip
            done += take


@lowered(Lanes, Lanes)
def _size(builder: Builder, lanes: Value) -> Value:
    return call_named(builder, "llvm.fabs.v16f32", F32V, lanes)


@lowered(Lanes, Lanes)
def _rounded(builder: Builder, lanes: Value) -> Value:
    """The nearest whole numbers, none beyond TOP; NaN becomes one too."""
    bounded = call_named(builder, "llvm.minnum.v16f32", F32V, maximum(builder, lanes, floats(-TOP)), floats(TOP))
    return call_named(builder, "llvm.rint.v16f32", F32V, bounded)


@lowered(Nothing, Int, Lanes)
def _store_bytes(builder: Builder, address: Value, whole: Value) -> None:
    store_at(builder, address, builder.trunc(builder.fptosi(whole, ir.VectorType(I32, WIDE)), ir.VectorType(I8, WIDE)))


@lowered(Nothing, Int, Float, Float)
def _store_sums(builder: Builder, address: Value, low: Value, high: Value) -> None:
    for offset, value in ((0, low), (2, high)):
        store_at(builder, address, builder.fptosi(value, I16), offset)


@part_of_compiled
def _put_group(low: Any, high: Any, target: int, beside: int) -> tuple[Any, Any]:
    """The numbers and the record of 32 activations; returns what they lose."""
    most = largest(larger(_size(low), _size(high)))
    factor, scale = broadcast(np.float32(TOP) / most if most > 0 else np.float32(0.0)), most / np.float32(TOP)
    first, second = _rounded(mul(low, factor)), _rounded(mul(high, factor))
    _store_bytes(target, first)
    _store_bytes(target + 16, second)
    sums = total(first), total(second)
    write_float(beside, scale)
    write_float(beside + 4, scale * (sums[0] + sums[1]))
    _store_sums(beside + 8, *sums)
    back = broadcast(-scale)
    return fma(first, back, low), fma(second, back, high)


@part_of_compiled
def to_signed_bytes(source: int, size: int, target: int, dim: int, outer: int, inner: int, rest: int) -> None:
    """One row of float32, zero from `size` to the end of its group, as `block_sums` takes it.

    With `inner` above 1 the source holds heads of `dim` numbers in the order (inner, outer), the result (outer, inner).
    What rounding to bytes loses goes to `rest` as one more row, unless that is 0. Where a value is not finite, the
    first scale is NaN.
    """
    groups, zero = (size + GROUP - 1) // GROUP, broadcast(np.float32(0.0))
    odd, beside = zero, target + groups * GROUP
    for i in range(groups):
        at = source + 128 * i
        if inner > 1:
            head, within = GROUP * i // dim, GROUP * i % dim
            at = source + 4 * ((head % inner * outer + head // inner) * dim + within)
        low, high = load(at), load(at + 64)
        odd = fma(low, zero, fma(high, zero, odd))
        lost = _put_group(low, high, target + GROUP * i, beside + PER_GROUP * i)
        if rest != 0:
            _put_group(lost[0], lost[1], rest + GROUP * i, rest + groups * GROUP + PER_GROUP * i)
    write_float(beside, read_float(beside) + total(odd))
