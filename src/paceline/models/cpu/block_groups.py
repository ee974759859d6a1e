"""Reading groups of quantised blocks (models.cpu.blocks) in compiled code: numbers as bytes, and what a group's sums
are multiplied by.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from llvmlite import ir

from paceline.models.cpu.blocks import GROUP, LANES, BlockKind, Scales
from paceline.models.cpu.processor import features
from paceline.models.cpu.vectors import FLOAT, I8, I16, I32, I64, Builder, Value, call_named, load_at, store_at

ONE_STEP: Final = bool(features().get("avx512vnni") or features().get("avxvnni"))
"""The processor multiplies four pairs of bytes of each lane in one instruction."""

PAIRED: Final = bool(features().get("avx2"))
"""It multiplies two, and sums of 16 bits."""

SIGNED: Final = PAIRED and not ONE_STEP
"""Numbers of 8 bits stay signed: their signs go to the activations."""

VECTOR: Final = 4 * LANES
"""Bytes of four inputs of all outputs of a sub-strip."""

READY: Final = (GROUP // 4 + 4) * VECTOR
"""Bytes of a group that many rows take, see `ReadyGroups`."""

F32L, I32L = (ir.VectorType(lane, LANES) for lane in (FLOAT, I32))
PAIRS, BYTES = ir.VectorType(I16, 2 * LANES), ir.VectorType(I8, 4 * LANES)


def all_lanes(value: int) -> Value:
    """Lanes of a constant, int32."""
    return ir.Constant(I32L, [value] * LANES)


def float_lanes(value: float) -> Value:
    """Lanes of a constant, float32."""
    return ir.Constant(F32L, [float(value)] * LANES)


def splat_lanes(builder: Builder, scalar: Value) -> Value:
    """Emit lanes that all hold a scalar."""
    empty = ir.Constant(ir.VectorType(scalar.type, LANES), ir.Undefined)
    first = builder.insert_element(empty, scalar, ir.Constant(I32, 0))
    return builder.shuffle_vector(first, empty, ir.Constant(I32L, [0] * LANES))


def fused_lanes(builder: Builder, a: Value, b: Value, c: Value) -> Value:
    """Emit a * b + c, rounded once."""
    return call_named(builder, f"llvm.fma.v{LANES}f32", F32L, a, b, c)


def _halves(builder: Builder, address: Value, offset: int = 0) -> Value:
    """Emit float32 lanes of float16 in memory."""
    return builder.fpext(load_at(builder, address, ir.VectorType(ir.HalfType(), LANES), offset), F32L)


def pairs_summed(builder: Builder, a: Value, b: Value) -> Value:
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


@dataclass(frozen=True, slots=True)
class GroupScales:
    """What a group of a sub-strip is multiplied by.

    Attributes:
        factor: of its sum. offset: of what its activations stand for, or None.
        halves: int16 pairs (first half, second half) of inputs: what each half's sum is multiplied by, or None.
        zero: int16 pairs by which the activations' sums of both halves are multiplied and then taken away, or None.
        second: of the sum of the second half, where `factor` is of the first alone, or None.
    """

    factor: Value
    offset: Value | None = None
    halves: tuple[Value, Value] | None = None
    zero: Value | None = None
    second: Value | None = None


class Groups:
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

    def scales(self, above: Value, at: Value) -> GroupScales:
        """Emit what a group is multiplied by."""
        if self.kind.scales is Scales.SIXTEENTHS:
            return self._sixteenths(above, at)
        if self.kind.scales is Scales.SUPER:
            return self._super(above, at)
        if self.kind.scales is Scales.HALVES:
            both = [self.builder.fmul(_halves(self.builder, at, part * LANES), float_lanes(0.5)) for part in (0, 2)]
            return GroupScales(both[0], second=both[1])
        return self._alone(at)

    def _sixteenths(self, above: Value, at: Value) -> GroupScales:
        builder = self.builder
        pairs = builder.sext(load_at(builder, at, ir.VectorType(I8, 2 * LANES)), PAIRS)
        whole = builder.bitcast(pairs, I32L)
        low, high = builder.and_(whole, all_lanes(0xFFFF)), builder.lshr(whole, all_lanes(16))
        halves = [builder.or_(part, builder.shl(part, all_lanes(16))) for part in (low, high)]
        zero = builder.shl(pairs, ir.Constant(PAIRS, [5] * (2 * LANES)))
        return GroupScales(_halves(builder, above), halves=(halves[0], halves[1]), zero=zero)

    def _super(self, above: Value, at: Value) -> GroupScales:
        builder = self.builder
        small = [self._byte_floats(at, part * LANES) for part in (0, 1)]
        offset = builder.fmul(_halves(builder, above, 2 * LANES), small[1])
        return GroupScales(builder.fmul(_halves(builder, above), small[0]), builder.fneg(offset))

    def _alone(self, at: Value) -> GroupScales:
        """Of one scale, with an offset, with a zero, or with the kind's zero."""
        builder, kind = self.builder, self.kind
        factor = self._half_of_power(at) if kind.scales is Scales.POWERS else _halves(builder, at)
        if kind.bits == 8:
            return GroupScales(factor, zero=None if SIGNED else all_lanes(kind.zero * 0x0001_0001))
        if kind.scales is Scales.OFFSETS:
            return GroupScales(factor, _halves(builder, at, 2 * LANES))
        zero = self._byte_floats(at, 2 * LANES) if kind.scales is Scales.ZEROS else float_lanes(kind.zero)
        return GroupScales(factor, builder.fneg(builder.fmul(factor, zero)))

    def _byte_floats(self, at: Value, offset: int) -> Value:
        """Emit float32 lanes of unsigned bytes."""
        return self.builder.uitofp(load_at(self.builder, at, ir.VectorType(I8, LANES), offset), F32L)

    def _half_of_power(self, at: Value) -> Value:
        """Emit 2 ** (byte - 128) of each output, 0 below the smallest normal number."""
        builder = self.builder
        exponent = builder.zext(load_at(builder, at, ir.VectorType(I8, LANES)), I32L)
        less = builder.sub(exponent, all_lanes(1))
        least = builder.select(builder.icmp_signed("<", less, all_lanes(0)), all_lanes(0), less)
        return builder.bitcast(builder.shl(least, all_lanes(23)), F32L)

    def _looked_up(self, codes: Value) -> Value:
        """Emit what the kind's table has for codes of a byte each."""
        builder, table = self.builder, self.kind.table
        codes = builder.bitcast(codes, BYTES)
        if PAIRED:
            name = "llvm.x86.avx512.pshuf.b.512" if LANES == 16 else "llvm.x86.avx2.pshuf.b"
            places = ir.Constant(BYTES, list(table) * (LANES // 4))
            return builder.bitcast(call_named(builder, name, BYTES, places, codes), I32L)
        found = ir.Constant(BYTES, [table[0]] * (4 * LANES))
        for code, number in enumerate(table):
            whole, value = (ir.Constant(BYTES, [one] * (4 * LANES)) for one in (code, number))
            found = builder.select(builder.icmp_unsigned("==", codes, whole), value, found)
        return builder.bitcast(found, I32L)

    def numbers(self, at: Value) -> Iterator[Value]:
        """Emit the numbers of each four inputs of all outputs, step by step."""
        builder, kind = self.builder, self.kind
        at, low, vector = builder.add(at, ir.Constant(I64, kind.scale_bytes)), all_lanes(0x0F0F0F0F), None
        above = [load_at(builder, at, I32L, (4 + i) * VECTOR) for i in range(kind.bits - 4 if kind.bits < 8 else 0)]
        for step in range(GROUP // 4):
            if kind.bits == 8:
                whole = load_at(builder, at, I32L, step * VECTOR)
                yield whole if SIGNED else builder.xor(whole, all_lanes(-0x7F7F7F80))
                continue
            if step % 2 == 0:
                vector = load_at(builder, at, I32L, step // 2 * VECTOR)
                number = builder.and_(vector, low)
            else:
                number = builder.and_(builder.lshr(vector, all_lanes(4)), low)
            if kind.bits == 5:
                number = builder.or_(number, builder.and_(_moved(builder, above[0], 4 - step), all_lanes(0x10101010)))
            if kind.bits == 6:
                upper = _moved(builder, above[step // 4], 4 - 2 * (step % 4))
                number = builder.or_(number, builder.and_(upper, all_lanes(0x30303030)))
            yield self._looked_up(number) if kind.table else number

    def added(self, group: GroupScales, place: Value, before: Value, wholes: Sequence[Value]) -> Value:
        """Emit a row's sums with those of a group, int32, and what lies at `place` of its activations.

        Args:
            wholes: the sum of the group, or of each half where the group has a `second` factor.
        """
        builder = self.builder
        if group.second is not None:
            return self._added_halves(group, place, before, wholes)
        (whole,) = wholes
        if group.zero is not None:
            both = splat_lanes(builder, load_at(builder, place, I32, 8))
            whole = builder.sub(whole, pairs_summed(builder, both, group.zero))
        factor = builder.fmul(group.factor, splat_lanes(builder, load_at(builder, place, FLOAT)))
        after = fused_lanes(builder, builder.sitofp(whole, F32L), factor, before)
        if group.offset is not None:
            after = fused_lanes(builder, group.offset, splat_lanes(builder, load_at(builder, place, FLOAT, 4)), after)
        return after

    def _added_halves(self, group: GroupScales, place: Value, before: Value, wholes: Sequence[Value]) -> Value:
        builder = self.builder
        both = splat_lanes(builder, load_at(builder, place, I32, 8))
        scale = splat_lanes(builder, load_at(builder, place, FLOAT))
        for whole, factor, zero in zip(
            wholes, (group.factor, group.second), (self.kind.zero, self.kind.zero << 16), strict=True
        ):
            moved = builder.sub(whole, pairs_summed(builder, both, all_lanes(zero)))
            before = fused_lanes(builder, builder.sitofp(moved, F32L), builder.fmul(factor, scale), before)
        return before


class ReadyGroups(Groups):
    """Reads groups whose numbers are a byte each already, and whose scales are float32.

    A group's vectors: the numbers of each four inputs, the factor, and what else its scales have.
    """

    def write(self, target: Value, group: GroupScales, numbers: Iterable[Value]) -> None:
        """Emit the stores of a group."""
        rest = [part for part in (group.offset, *(group.halves or ()), group.zero, group.second) if part is not None]
        for place, vector in enumerate([*numbers, group.factor, *rest]):
            store_at(self.builder, target, vector, place * VECTOR)

    def places(self, weights: Value, index: Value) -> tuple[Value, Value]:
        at = self.builder.add(weights, self.builder.mul(index, ir.Constant(I64, READY)))
        return self.builder.add(at, ir.Constant(I64, GROUP // 4 * VECTOR)), at

    def scales(self, above: Value, at: Value) -> GroupScales:
        factor, *whole = [
            load_at(self.builder, above, kind, i * VECTOR) for i, kind in enumerate((F32L, I32L, I32L, I32L))
        ]
        if self.kind.scales is Scales.SIXTEENTHS:
            return GroupScales(factor, halves=(whole[0], whole[1]), zero=whole[2])
        if self.kind.scales is Scales.HALVES:
            return GroupScales(factor, second=self.builder.bitcast(whole[0], F32L))
        if self.kind.bits < 8:
            return GroupScales(factor, self.builder.bitcast(whole[0], F32L))
        return GroupScales(factor, zero=None if SIGNED else whole[0])

    def numbers(self, at: Value) -> Iterator[Value]:
        for step in range(GROUP // 4):
            yield load_at(self.builder, at, I32L, step * VECTOR)


def _moved(builder: Builder, lanes: Value, left: int) -> Value:
    """Emit lanes shifted to the left, or right."""
    return builder.shl(lanes, all_lanes(left)) if left > 0 else builder.lshr(lanes, all_lanes(-left)) if left else lanes
