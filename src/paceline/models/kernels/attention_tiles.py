"""The two inner loops of attention over scattered cache slots: sixteen scores at a time, and weighted sums of values.

In: a list of slots (int64), a query or weights. Out: scores, sums. Not here: softmax, which slots (models.kernels.attention).

A score is summed within one key's lanes, in the same tree whichever of the sixteen places the key takes; a weighted sum runs
through the keys in the order of the list. So a result depends on the sequence of visible keys alone, not on where they lie.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from paceline.models.kernels.bfloat import has_bfloat
from paceline.models.kernels.tiles import DOT, FULL, HALF, dot_pairs, prefetch
from paceline.models.kernels.vectors import (
    F32V,
    FLOAT,
    I16V,
    I64,
    LANES,
    Builder,
    Int,
    Nothing,
    Value,
    fused,
    load_at,
    lowered,
    shuffle,
    splat,
    store_at,
    widen,
)  # fmt: skip

MOST_QUERIES = 8
"""Sixteen sums, eight weights and two values fit into the 32 registers of AVX-512."""


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
    found = body(index, list(state))
    index.add_incoming(builder.add(index, _constant(1)), builder.block)
    for phi, value in zip(state, found, strict=True):
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
    for address in _slot_addresses(builder, base, builder.add(slots, _constant(8 * LANES)), slot_pitch):
        for line in (0, 64):
            prefetch(builder, address, line, 1)

    def emit(kind_: int) -> None:
        piece, key_bytes, query_bytes = {DOT: (32, 64, 64), HALF: (16, 32, 64), FULL: (16, 64, 64)}[kind_]

        def one(index: Value, state: list[Value]) -> list[Value]:
            row = builder.add(query, builder.mul(index, query_pitch))

            def part(i: Value, sums: list[Value]) -> list[Value]:
                key_at, query_at = (builder.mul(i, _constant(n)) for n in (key_bytes, query_bytes))
                mine = load_at(builder, builder.add(row, query_at), F32V)
                found = []
                for total, address in zip(sums, addresses, strict=True):
                    at = builder.add(address, key_at)
                    if kind_ == DOT:
                        found.append(dot_pairs(builder, total, mine, load_at(builder, at, F32V)))
                    else:
                        key = widen(builder, load_at(builder, at, I16V)) if kind_ == HALF else load_at(builder, at, F32V)
                        found.append(fused(builder, mine, key, total))
                return found

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
    """Add weights (queries, count) float32 times the values in `count` slots, 32 dimensions of them, to `sums`.

    `queries` is 1 to MOST_QUERIES; `wide` is 1 for float32 values, 0 for bfloat16.
    """

    def emit(wide_: int, queries_: int) -> None:
        cells = [(query, half) for query in range(queries_) for half in range(2)]
        outs = [builder.add(sums, builder.mul(sums_pitch, _constant(query))) for query in range(queries_)]
        rows = [builder.add(weights, builder.mul(weights_pitch, _constant(query))) for query in range(queries_)]

        def one(index: Value, state: list[Value]) -> list[Value]:
            slot = load_at(builder, builder.add(slots, builder.mul(index, _constant(8))), I64)
            at = builder.add(base, builder.mul(slot, slot_pitch))
            coming = load_at(builder, builder.add(slots, builder.mul(index, _constant(8))), I64, 8 * LANES)
            prefetch(builder, builder.add(base, builder.mul(coming, slot_pitch)), 0, 1)
            if wide_:
                values = [load_at(builder, at, F32V, 64 * half) for half in range(2)]
            else:
                values = [widen(builder, load_at(builder, at, I16V, 32 * half)) for half in range(2)]
            along = builder.mul(index, _constant(4))
            shares = [splat(builder, load_at(builder, builder.add(row, along), FLOAT)) for row in rows]
            return [fused(builder, shares[q], values[half], total) for (q, half), total in zip(cells, state, strict=True)]

        start = [load_at(builder, outs[query], F32V, 64 * half) for query, half in cells]
        for (query, half), value in zip(cells, _loop(builder, count, start, one), strict=True):
            store_at(builder, outs[query], value, 64 * half)

    code = builder.add(builder.mul(wide, _constant(16)), queries)
    switch(
        builder, code, {16 * w + q: lambda w=w, q=q: emit(w, q) for w in (0, 1) for q in range(1, MOST_QUERIES + 1)}
    )  # fmt: skip
