"""An 8-bit product for a draft model: up to six rows of activations times one strip of 64 outputs.

In: a strip of packed weights, rows of 8-bit activations. Out: integer sums in lanes of 32 bits. Not here: which strips, what the
sums mean (models.kernels.draft_bytes).

Weights are signed with one scale per output, activations unsigned with one scale per row and 128 for zero, so that a processor with
avx512vnni multiplies four of them at a time (vpdpbusd). A draft needs no exact logits, but it waits for the bytes of its
weights: these are half of bfloat16's.
"""

from __future__ import annotations

from typing import Any

import torch
from llvmlite import ir

from paceline.models.kernels.attention_tiles import switch
from paceline.models.kernels.pages import Pages
from paceline.models.kernels.tiles import COLUMNS, GROUP, MOST_ROWS, STRIP, Loop
from paceline.models.kernels.vectors import (
    F32V,
    I8,
    I16,
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
    call_named,
    floats,
    integers,
    load_at,
    lowered,
    splat,
    store_at,
)  # fmt: skip

INPUTS, ZERO, TOP = 4, 128, 127
"""Inputs per step; the unsigned number of activation 0; the largest weight and activation."""


def has_bytes() -> bool:
    """Whether this CPU multiplies 8-bit numbers four at a time."""
    from llvmlite import binding

    return bool(binding.get_host_cpu_features().get("avx512vnni"))


def fits(*inputs: int) -> bool:
    """Whether rows of these lengths fill groups of steps and whole lanes, and their integer sums stay in int32."""
    return all(one % (INPUTS * GROUP) == 0 and one * 255 * TOP < 2**31 for one in inputs)


def pack(weight: torch.Tensor, pages: Pages) -> tuple[torch.Tensor, torch.Tensor]:
    """Strips of a head (out, in), and what turns sums into logits.

    Returns:
        (strips, in / 4, 64, 4) int8; (strips, 2, 64) float32: what to take off a sum, and the scale of an output. Both are padded.
    """
    outputs, inputs = weight.shape
    padded = torch.zeros(-(-outputs // STRIP) * STRIP, inputs)
    padded[:outputs] = weight.float()
    scale = padded.abs().amax(1).clamp_(min=1e-30) / TOP
    small = (padded / scale[:, None]).round_().to(torch.int8)
    rows = small.view(-1, STRIP, inputs // INPUTS, INPUTS).transpose(1, 2)
    strips = pages.take(rows.numel()).view(torch.int8).view(rows.shape)
    strips.copy_(rows)
    offset = ZERO * small.sum(1, dtype=torch.int32).float()
    return strips, torch.stack((offset.view(-1, STRIP), scale.view(-1, STRIP)), 1).contiguous()


class _Bytes(Loop):
    """The loop of models.kernels.tiles over 8-bit numbers; its sums are integers that travel as float32 lanes."""

    def __init__(self, builder: Builder, rows: int) -> None:
        self.builder, self.kind, self.rows, self.lines = builder, 0, rows, 0
        self.pitch = GROUP * INPUTS

    def _step(self, strip: list[Value], row: Value, offset: int, sums: list[Value]) -> list[Value]:
        builder = self.builder
        four = splat(builder, load_at(builder, row, I32, offset))
        return [builder.bitcast(self._add(builder.bitcast(one, I32V), four, w), F32V) for one, w in zip(sums, strip, strict=True)]

    def _add(self, total: Value, activations: Value, weights: Value) -> Value:
        return call_named(self.builder, "llvm.x86.avx512.vpdpbusd.512", I32V, total, activations, weights)


@lowered(Nothing, Int, Int, Int, Int, Int, Int, Int)
def accumulate_bytes(
    builder: Builder, rows: Value, weights: Value, groups: Value, x: Value, stride: Value, sums: Value, ahead: Value
) -> Any:
    """Sums (rows, 64) of one strip as integers, from zero. `rows` is 1 to 6; a CPU without the instruction does nothing."""

    def emit(count: int) -> None:
        for cell in range(count * COLUMNS):
            store_at(builder, sums, floats(0.0), 64 * cell)
        _Bytes(builder, count).emit(weights, groups, x, stride, sums, ahead)

    cases = {count: (lambda count=count: emit(count)) for count in range(1, MOST_ROWS + 1)}
    switch(builder, rows, cases if has_bytes() else {})


@lowered(Lanes, Int)
def load_sums(builder: Builder, address: Value) -> Value:
    """Sixteen integer sums as float32."""
    return builder.sitofp(load_at(builder, address, I32V), F32V)


@lowered(Nothing, Int, Lanes)
def store_bytes(builder: Builder, address: Value, lanes: Value) -> None:
    """Sixteen activations, already in -127 .. 127, rounded and moved by 128."""
    whole = builder.fptosi(call_named(builder, "llvm.rint.v16f32", F32V, lanes), I32V)
    store_at(builder, address, builder.trunc(builder.add(whole, integers(ZERO)), ir.VectorType(I8, LANES)))


@lowered(Lanes, Lanes)
def size_of(builder: Builder, lanes: Value) -> Value:
    """Absolute values."""
    return call_named(builder, "llvm.fabs.v16f32", F32V, lanes)


@lowered(Nothing, Int, Int)
def write(builder: Builder, address: Value, value: Value) -> None:
    """An int64 to an address."""
    store_at(builder, address, value)


@lowered(Int, Int, Float)
def place_of(builder: Builder, address: Value, value: Value) -> Any:
    """The first of sixteen float32 lanes that equals a value; 16 where none does."""
    equal = builder.fcmp_ordered("==", load_at(builder, address, F32V), splat(builder, value))
    bits = builder.bitcast(equal, I16)
    return builder.zext(call_named(builder, "llvm.cttz.i16", I16, bits, ir.Constant(ir.IntType(1), 0)), I64)


@lowered(Int, Int, Float)
def put_float(builder: Builder, address: Value, value: Value) -> Any:
    """A float32 to an address; returns the address."""
    at_ = builder.inttoptr(address, value.type.as_pointer())
    builder.store(value, at_, align=4)
    return address
