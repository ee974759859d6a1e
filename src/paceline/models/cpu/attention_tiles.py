"""The inner loops of attention over scattered cache slots: sixteen scores at a time, weighted sums of values, fetching
ahead.

A score is summed within one key's lanes, in the same tree whichever of the sixteen places the key takes; a weighted sum
runs through the keys in the order of the list. So a result depends on the sequence of visible keys alone, not on where
they lie.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from paceline.models.cpu.processor import has_bfloat
from paceline.models.cpu.tiles import DOT, FULL, HALF, dot_pairs, prefetch
from paceline.models.cpu.vectors import (
    F32V,
    FLOAT,
    I16V,
    I32V,
    I64,
    LANES,
    Builder,
    Int,
    Nothing,
    Value,
    fused,
    integers,
    load_at,
    lowered,
    shuffle,
    splat,
    store_at,
    widen,
)  # fmt: skip

MAX_QUERIES = 8
"""Sixteen sums, eight weights and two values fit into the 32 registers of AVX-512."""
HALF_MAX_QUERIES = MAX_QUERIES // 2
"""With these the same registers hold twice the dimensions, so that fewer queries are not slowed down by waiting for
their sums.
"""
FETCHED = 8
"""How many slots ahead values are fetched; a guess that slots lie in order."""


def _constant(value: int) -> Value:
    return ir.Constant(I64, value)


def _loop(builder: Builder, count: Value, start: list[Value], body: Any) -> list[Value]:
    """Emit `for i in range(count): state = body(i, state)`; a count of 0 is allowed."""
    before, head, inside, after = builder.block, *(builder.append_basic_block() for _ in range(3))
    builder.branch(head)
    builder.position_at_end(head)
    index = builder.phi(I64)
    state = [builder.phi(value.type) for value in start]
    index.add_incoming(_constant(0), before)
    for phi, value in zip(state, start, strict=True):
        phi.add_incoming(value, before)
    builder.cbranch(builder.icmp_signed("<", index, count), inside, after)
    builder.position_at_end(inside)
    following = body(index, list(state))
    index.add_incoming(builder.add(index, _constant(1)), builder.block)
    for phi, value in zip(state, following, strict=True):
        phi.add_incoming(value, builder.block)
    builder.branch(head)
    builder.position_at_end(after)
    return state


def switch(builder: Builder, code: Value, cases: dict[int, Any]) -> None:
    """Emit a switch; each case is a function that emits its block."""
    done = builder.append_basic_block()
    table = builder.switch(code, done)
    for value, emit in cases.items():
        block = builder.append_basic_block()
        table.add_case(_constant(value), block)
        builder.position_at_end(block)
        emit()
        builder.branch(done)
    builder.position_at_end(done)


def _totals(builder: Builder, sums: list[Value]) -> Value:
    """Emit lane i = sum of the lanes of sums[i]: halves are added until one lane is left of each."""
    for width in (8, 4, 2, 1):
        kept = [lane + (16 if lane & width else 0) for lane in range(LANES)]  # a blend, cheaper than a second shuffle
        turned = [lane + (16 - width if lane & width else width) for lane in range(LANES)]
        sums = [
            builder.fadd(shuffle(builder, a, b, kept), shuffle(builder, a, b, turned))
            for a, b in zip(sums[:width], sums[width:], strict=True)
        ]
    return sums[0]


def _slot_addresses(builder: Builder, base: Value, slots: Value, pitch: Value) -> list[Value]:
    return [builder.add(base, builder.mul(load_at(builder, slots, I64, 8 * i), pitch)) for i in range(LANES)]


@lowered(Nothing, *[Int] * 10, outlined=True)
def score(
    builder: Builder, kind: Value, size: Value, queries: Value, query: Value, query_pitch: Value,
    base: Value, slots: Value, slot_pitch: Value, out: Value, out_pitch: Value,
) -> Any:  # fmt: skip
    """Scores of `queries` queries with the keys in sixteen slots, float32 to `out`.

    `size`: head dimension, a multiple of 32. `base`: address of the head's key in slot 0. Pitches are bytes.
    """
    addresses = _slot_addresses(builder, base, slots, slot_pitch)

    def emit(kind_: int) -> None:
        piece, key_bytes, query_bytes = {DOT: (32, 64, 64), HALF: (16, 32, 64), FULL: (16, 64, 64)}[kind_]

        def one(index: Value, state: list[Value]) -> list[Value]:
            row = builder.add(query, builder.mul(index, query_pitch))

            def part(i: Value, sums: list[Value]) -> list[Value]:
                key_at, query_at = (builder.mul(i, _constant(n)) for n in (key_bytes, query_bytes))
                mine = load_at(builder, builder.add(row, query_at), F32V)
                results = []
                for total, address in zip(sums, addresses, strict=True):
                    at = builder.add(address, key_at)
                    if kind_ == DOT:
                        results.append(dot_pairs(builder, total, mine, load_at(builder, at, F32V)))
                    else:
                        key = (
                            widen(builder, load_at(builder, at, I16V)) if kind_ == HALF else load_at(builder, at, F32V)
                        )
                        results.append(fused(builder, mine, key, total))
                return results

            pieces = builder.udiv(size, _constant(piece))
            sums = _loop(builder, pieces, [ir.Constant(F32V, [0.0] * LANES)] * LANES, part)
            store_at(builder, builder.add(out, builder.mul(index, out_pitch)), _totals(builder, sums))
            return state

        _loop(builder, queries, [], one)

    kinds = (DOT, HALF, FULL) if has_bfloat() else (HALF, FULL)
    switch(builder, kind, {kind_: lambda kind_=kind_: emit(kind_) for kind_ in kinds})


@lowered(Nothing, *[Int] * 10, outlined=True)
def weigh(
    builder: Builder, wide: Value, queries: Value, weights: Value, weights_pitch: Value, base: Value, slots: Value,
    count: Value, slot_pitch: Value, sums: Value, sums_pitch: Value,
) -> Any:  # fmt: skip
    """Add weights (queries, count) float32 times the values in `count` slots to `sums` (queries, dimensions), float32.

    `wide` is 1 for float32 values, 0 for bfloat16. `sums_pitch` says how many dimensions there are: 128 for 32 of them,
    `queries` being 1 to MAX_QUERIES, or 256 for 64, `queries` being 1 to HALF_MAX_QUERIES.
    """

    def emit(wide_: int, lines: int, queries_: int) -> None:
        pieces, each = 2 * lines, range(queries_)
        outs = [builder.add(sums, builder.mul(sums_pitch, _constant(query))) for query in each]
        rows = [builder.add(weights, builder.mul(weights_pitch, _constant(query))) for query in each]
        ahead = builder.add(base, builder.mul(slot_pitch, _constant(FETCHED)))

        def one(index: Value, state: list[Value]) -> list[Value]:
            slot = load_at(builder, builder.add(slots, builder.mul(index, _constant(8))), I64)
            offset = builder.mul(slot, slot_pitch)
            for line in range(lines):
                prefetch(builder, builder.add(ahead, offset), 64 * line, 1)
            values = _values(builder, builder.add(base, offset), wide_, lines)
            along = builder.mul(index, _constant(4))
            shares = [splat(builder, load_at(builder, builder.add(row, along), FLOAT)) for row in rows]
            return [fused(builder, shares[i // pieces], values[i % pieces], total) for i, total in enumerate(state)]

        order = _in_order if wide_ else _apart
        start = [
            value
            for out in outs
            for value in order(builder, [load_at(builder, out, F32V, 64 * i) for i in range(pieces)])
        ]
        totals = _loop(builder, count, start, one)
        order = _in_order if wide_ else _together
        for query, out in enumerate(outs):
            for i, value in enumerate(order(builder, totals[query * pieces : (query + 1) * pieces])):
                store_at(builder, out, value, 64 * i)

    code = builder.add(builder.add(builder.mul(wide, _constant(512)), sums_pitch), queries)
    kinds = [
        (w, n, q) for w in (0, 1) for n, most in ((1, MAX_QUERIES), (2, HALF_MAX_QUERIES)) for q in range(1, most + 1)
    ]
    switch(builder, code, {512 * w + 128 * n + q: lambda w=w, n=n, q=q: emit(w, n, q) for w, n, q in kinds})


@lowered(Nothing, *[Int] * 5, outlined=True)
def fetch(builder: Builder, base: Value, slots: Value, slot_pitch: Value, size: Value, gap: Value) -> Any:
    """Bring `size` bytes from `base` on, and as many `gap` bytes further on, of sixteen slots into the caches."""

    def one(index: Value, state: list[Value]) -> list[Value]:
        slot = load_at(builder, builder.add(slots, builder.mul(index, _constant(8))), I64)
        first = builder.add(base, builder.mul(slot, slot_pitch))
        second = builder.add(first, gap)

        def part(i: Value, state: list[Value]) -> list[Value]:
            offset = builder.mul(i, _constant(128))
            for at, level in ((first, 1), (second, 2)):
                for line in (0, 64):
                    prefetch(builder, builder.add(at, offset), line, level)
            return state

        _loop(builder, builder.udiv(builder.add(size, _constant(127)), _constant(128)), [], part)
        return state

    _loop(builder, _constant(LANES), [], one)


def _values(builder: Builder, at: Value, wide: int, lines: int) -> list[Value]:
    """Emit 32 float32 values a line; those of bfloat16 come as even places, odd places, which takes half the
    instructions.
    """
    if wide:
        return [load_at(builder, at, F32V, 64 * i) for i in range(2 * lines)]
    pairs = [load_at(builder, at, I32V, 64 * i) for i in range(lines)]
    both = [(builder.shl(pair, integers(16)), builder.and_(pair, integers(-65536))) for pair in pairs]
    return [builder.bitcast(half, F32V) for halves in both for half in halves]


def _in_order(_: Builder, values: list[Value]) -> list[Value]:
    return values


def _apart(builder: Builder, values: list[Value]) -> list[Value]:
    """Emit even and odd places of each 32."""
    masks = [range(0, 2 * LANES, 2), range(1, 2 * LANES, 2)]
    return [
        shuffle(builder, a, b, list(mask)) for a, b in zip(values[::2], values[1::2], strict=True) for mask in masks
    ]


def _together(builder: Builder, values: list[Value]) -> list[Value]:
    """Emit the reverse of `_apart`."""
    masks = [[lane // 2 + LANES * (lane % 2) for lane in range(start, start + LANES)] for start in (0, LANES)]
    return [shuffle(builder, a, b, mask) for a, b in zip(values[::2], values[1::2], strict=True) for mask in masks]
