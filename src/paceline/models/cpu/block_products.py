"""Products of quantised blocks with activations of one byte; whole numbers are summed exactly.

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

from typing import Any, Final

import numpy as np
from llvmlite import ir

from paceline.models.cpu.block_groups import (
    BYTES,
    F32L,
    I32L,
    ONE_STEP,
    PAIRS,
    READY,
    SIGNED,
    Groups,
    GroupScales,
    ReadyGroups,
    all_lanes,
    pairs_summed,
    splat_lanes,
)
from paceline.models.cpu.blocks import GROUP, KINDS, LANES, Scales
from paceline.models.cpu.matrix_unit import TILE_ROWS, GroupTiles, has_matrix_unit
from paceline.models.cpu.tiles import AHEAD, STRIP, prefetch
from paceline.models.cpu.vectors import (
    I16,
    I32,
    I64,
    Builder,
    Float,
    Int,
    Lanes,
    Nothing,
    Value,
    absolute,
    broadcast,
    call_named,
    counted,
    fma,
    larger,
    largest,
    load,
    load_at,
    lowered,
    mul,
    read,
    read_float,
    stack_memory,
    store,
    store_at,
    store_bytes,
    total,
    whole_within,
    write_float,
)  # fmt: skip
from paceline.utils import part_of_compiled

MAX_ROWS: Final = 8 if LANES == 16 else 4
"""Rows of activations whose sums stay in registers."""

LINES: Final = 2
"""That each such group and pass of rows fetches of the groups behind, in steps so small that two passes fetch all."""

AT_ONCE: Final = 32
"""Most groups that are ready at a time, a multiple of 8: with some rows of activations they fit into the first-level
cache.
"""

TOP, PER_GROUP = 127, 12
"""Largest activation; bytes of a group of activations behind the numbers of a row: float32 scale, float32 sum of what
the group's numbers stand for, two sums of 16 numbers as 16 bits.
"""

MATRIX_UNIT, SUBS = has_matrix_unit(), STRIP // LANES


def row_pitch(inputs: int) -> int:
    """Bytes from one row of activations to the next: an odd number of lines."""
    groups = -(-inputs // GROUP)
    return (-(-groups * (GROUP + PER_GROUP) // 128) * 2 + 1) * 64


def _four_summed(builder: Builder, sums: Value, unsigned: Value, signed: Value) -> Value:
    """Emit sums + the products of four unsigned and four signed bytes of each lane, int32."""
    if ONE_STEP:
        name = f"llvm.x86.avx512.vpdpbusd.{32 * LANES}"
        return call_named(builder, name, I32L, sums, unsigned, signed)
    for place in range(4):
        byte = builder.and_(builder.lshr(unsigned, all_lanes(8 * place)), all_lanes(255))
        other = builder.ashr(builder.shl(signed, all_lanes(24 - 8 * place)), all_lanes(24))
        sums = builder.add(sums, builder.mul(byte, other))
    return sums


class _BlockLoop:
    """The loop over groups of one sub-strip, for a number of rows.

    Args:
        lines: of memory ahead that each group fetches.
    """

    def __init__(self, builder: Builder, groups: Groups, rows: int, lines: int) -> None:
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

    def _sums(self, at: Value, rows: list[Value], group: GroupScales) -> list[list[Value]]:
        """Emit int32 sums of products of every row, see `Groups.added`."""
        if SIGNED:
            return self._sums_of_pairs(at, rows, group)
        builder = self.builder
        sums = [all_lanes(0)] * len(rows)
        halves, firsts = [all_lanes(0)] * len(rows), list[Value]()
        for step, number in enumerate(self.groups.numbers(at)):
            for i, row in enumerate(rows):
                four = splat_lanes(builder, load_at(builder, row, I32, 4 * step))
                halves[i] = _four_summed(builder, halves[i], number, four)
            if group.halves is not None and step % 4 == 3:
                factor = builder.ashr(group.halves[step // 4], all_lanes(16))
                sums = [builder.add(total, builder.mul(half, factor)) for total, half in zip(sums, halves, strict=True)]
                halves = [all_lanes(0)] * len(rows)
            if group.second is not None and step == 3:
                firsts, halves = halves, [all_lanes(0)] * len(rows)
        if group.second is not None:
            return [list(pair) for pair in zip(firsts, halves, strict=True)]
        return [[whole] for whole in (halves if group.halves is None else sums)]

    def _sums_of_pairs(self, at: Value, rows: list[Value], group: GroupScales) -> list[list[Value]]:
        """The same by sums of 16 bits, widened before they could overflow."""
        builder, room = self.builder, {4: 8, 5: 4, 6: 2, 8: 1}[self.kind.number_bits]
        sums = [list[Value]() for _ in rows]
        pairs: list[Value | None] = [None] * len(rows)
        for step, number in enumerate(self.groups.numbers(at)):
            unsigned = builder.bitcast(number, BYTES)
            if self.kind.bits == 8:
                unsigned = call_named(
                    builder, f"llvm.abs.v{4 * LANES}i8", BYTES, unsigned, ir.Constant(ir.IntType(1), 0)
                )
            for i, row in enumerate(rows):
                four = builder.bitcast(splat_lanes(builder, load_at(builder, row, I32, 4 * step)), BYTES)
                if self.kind.bits == 8:
                    four = call_named(builder, "llvm.x86.avx2.psign.b", BYTES, four, builder.bitcast(number, BYTES))
                two = call_named(builder, "llvm.x86.avx2.pmadd.ub.sw", PAIRS, unsigned, four)
                pairs[i] = two if pairs[i] is None else builder.add(pairs[i], two)
            if step % room == room - 1:
                factor = all_lanes(0x0001_0001) if group.halves is None else group.halves[step // 4]
                wide = [pairs_summed(builder, pair, factor) for pair in pairs]
                for whole, new in zip(sums, wide, strict=True):
                    whole.append(builder.add(whole.pop(), new) if whole and group.second is None else new)
                pairs = [None] * len(rows)
        return sums


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
            loop = _BlockLoop(builder, Groups(builder, form), count, -(-form.group_bytes // 64))
            ahead = builder.add(weights, ir.Constant(I64, AHEAD))
            loop.emit(weights, groups, x, scales, stride, sums, ahead, ir.Constant(I64, form.group_bytes))
            builder.branch(done)
    builder.position_at_end(done)


@lowered(Nothing, *[Int] * 4, outlined=True)
def _make_ready(builder: Builder, kind: Value, weights: Value, groups: Value, target: Value) -> Any:
    """Groups of a sub-strip as `ReadyGroups` reads them."""
    done = builder.append_basic_block()
    switch = builder.switch(kind, done)
    for form in KINDS.values():
        block = builder.append_basic_block()
        switch.add_case(ir.Constant(I64, form.number), block)
        builder.position_at_end(block)
        source, ready = Groups(builder, form), ReadyGroups(builder, form)
        with counted(builder, groups) as index:
            above, at = source.places(weights, index)
            ready.write(ready.places(target, index)[1], source.scales(above, at), source.numbers(at))
        builder.branch(done)
    builder.position_at_end(done)


@lowered(Nothing, *[Int] * 10, outlined=True)
def _accumulate_ready(
    builder: Builder, ready_form: Value, rows: Value, ready: Value, groups: Value, x: Value, scales: Value,
    stride: Value, sums: Value, ahead: Value, pitch: Value,
) -> Any:  # fmt: skip
    """Add groups that are ready to sums (rows, 64 float32 apart) of up to MAX_ROWS rows; see `_BlockLoop`."""
    done = builder.append_basic_block()
    switch = builder.switch(builder.add(builder.mul(ready_form, ir.Constant(I64, 16)), rows), done)
    for form in {kind.ready: kind for kind in KINDS.values()}.values():
        for count in range(1, MAX_ROWS + 1):
            block = builder.append_basic_block()
            switch.add_case(ir.Constant(I64, 16 * form.ready + count), block)
            builder.position_at_end(block)
            loop = _BlockLoop(builder, ReadyGroups(builder, form), count, LINES)
            loop.emit(ready, groups, x, scales, stride, sums, ahead, pitch)
            builder.branch(done)
    builder.position_at_end(done)


@lowered(Int)
def _stack_room(builder: Builder) -> Value:
    """The address of room for AT_ONCE groups that are ready, while the function runs."""
    return stack_memory(builder, AT_ONCE * READY)


class _BlockTiles(Groups):
    """The loop over groups of all sub-strips of a strip by the matrix unit, for a kind and up to TILE_ROWS rows."""

    def emit(
        self, rows: Value, weights: Value, size: Value, groups: Value, x: Value, scales: Value, stride: Value,
        sums: Value,
    ) -> None:  # fmt: skip
        builder, halved = self.builder, self.kind.scales in (Scales.SIXTEENTHS, Scales.HALVES)
        units = [GroupTiles(builder, rows, stride) for _ in range(2 if halved else 1)]
        steps = GROUP // 4
        for half, unit in enumerate(units):
            for step in range(steps if halved else 0):
                if step // (steps // 2) != half:
                    unit.put(step, [all_lanes(0)] * SUBS)
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
                    wholes = [of_unit[sub] for of_unit in products]
                    if group.halves is not None:
                        parts = [builder.ashr(half, all_lanes(16)) for half in group.halves]
                        both = [builder.mul(whole, part) for whole, part in zip(wholes, parts, strict=True)]
                        wholes = [builder.add(*both)]
                    at = 4 * LANES * sub
                    store_at(
                        builder, row_sums, self.added(group, place, load_at(builder, row_sums, F32L, at), wholes), at
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
READY_FORMS = tuple(kind.ready for kind in KINDS.values())


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
                READY_FORMS[kind], take, ready, count, x + row + at * GROUP, scales + row + at * PER_GROUP, stride,
                sums + done * (4 * STRIP), following + turn * count * pitch, pitch,
            )  # fmt: skip
            done += take


@lowered(Lanes, Lanes)
def _rounded(builder: Builder, lanes: Value) -> Value:
    """The nearest whole numbers, none beyond TOP; NaN becomes one too."""
    return whole_within(builder, lanes, TOP)


@lowered(Nothing, Int, Float, Float)
def _store_sums(builder: Builder, address: Value, low: Value, high: Value) -> None:
    for offset, value in ((0, low), (2, high)):
        store_at(builder, address, builder.fptosi(value, I16), offset)


@lowered(Int)
def _group_room(builder: Builder) -> Value:
    """The address of room for the activations of a group, while the function runs."""
    return stack_memory(builder, 4 * GROUP)


@part_of_compiled
def _gathered(source: int, order: int, room: int) -> int:
    """Address of 32 numbers, each from where `order` says, in bytes behind `source`."""
    for i in range(GROUP):
        write_float(room + 4 * i, read_float(source + read(order + 8 * i)))
    return room


@part_of_compiled
def _put_group(low: Any, high: Any, target: int, beside: int) -> tuple[Any, Any]:
    """The numbers and the record of 32 activations; returns what they lose."""
    most = largest(larger(absolute(low), absolute(high)))
    factor, scale = broadcast(np.float32(TOP) / most if most > 0 else np.float32(0.0)), most / np.float32(TOP)
    first, second = _rounded(mul(low, factor)), _rounded(mul(high, factor))
    store_bytes(target, first)
    store_bytes(target + 16, second)
    sums = total(first), total(second)
    write_float(beside, scale)
    write_float(beside + 4, scale * (sums[0] + sums[1]))
    _store_sums(beside + 8, *sums)
    back = broadcast(-scale)
    return fma(first, back, low), fma(second, back, high)


@part_of_compiled
def to_signed_bytes(
    source: int, size: int, target: int, dim: int, outer: int, inner: int, rest: int, order: int
) -> None:
    """One row of float32, zero from `size` to the end of its group, as `block_sums` takes it.

    With `inner` above 1 the source holds heads of `dim` numbers in the order (inner, outer), the result (outer, inner).
    Where `order` is not 0, it is the address of (size,) int64, the bytes before each number in the source.
    What rounding to bytes loses goes to `rest` as one more row, unless that is 0. Where a value is not finite, the
    first scale is NaN.
    """
    groups, zero = (size + GROUP - 1) // GROUP, broadcast(np.float32(0.0))
    odd, beside, room = zero, target + groups * GROUP, _group_room()
    for i in range(groups):
        at = source + 128 * i
        if inner > 1:
            head, within = GROUP * i // dim, GROUP * i % dim
            at = source + 4 * ((head % inner * outer + head // inner) * dim + within)
        if order != 0:
            at = _gathered(source, order + 8 * GROUP * i, room)
        low, high = load(at), load(at + 64)
        odd = fma(low, zero, fma(high, zero, odd))
        lost = _put_group(low, high, target + GROUP * i, beside + PER_GROUP * i)
        if rest != 0:
            _put_group(lost[0], lost[1], rest + GROUP * i, rest + groups * GROUP + PER_GROUP * i)
    write_float(beside, read_float(beside) + total(odd))
