"""One pass of the decoder as one compiled function, which every thread of the team runs from end to end.

In: the tables of models.cpu.layout. Out: keys and values in the cache; hidden states, taps and logits at their
addresses. Not
here: who fills the tables (models.cpu.compiled_decoder).

Threads divide the strips of each matrix and the heads of the attention, and meet at a barrier where one needs what
another wrote: five times a layer. Norms are computed by every thread for itself, which costs less than a meeting. The
residual stream is float32 within a layer and rounded to the model's type behind it, so that a pass may stop and go on
at any layer with the same bits.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numba import njit

from paceline.models.cpu import layout as at
from paceline.models.cpu.argmax import look, settle_best
from paceline.models.cpu.attention import attend, scaled_norm
from paceline.models.cpu.compilation import machine_code, source_number
from paceline.models.cpu.ends import embed, final_tap, head, show
from paceline.models.cpu.int8 import to_bytes
from paceline.models.cpu.matrix import as_bytes, product, steps_of, strip_size, strip_sums
from paceline.models.cpu.tiles import BYTES, DOT, NIBBLES, STRIP
from paceline.models.cpu.vectors import (
    add,
    broadcast,
    call,
    call_int,
    div,
    exponential,
    fma,
    load,
    load_half,
    mul,
    read,
    read_float,
    store,
    store_half,
)  # fmt: skip

STRIP_BYTES = 4 * STRIP


@njit(error_model="numpy")
def meet(frame: int, team: int) -> None:
    if team > 1:
        call(read(frame + at.BARRIER))


@njit(error_model="numpy")
def _biased(sums: int, rows: int, bias: int) -> None:
    if bias != 0:
        for row in range(rows):
            for i in range(0, STRIP_BYTES, 64):
                store(sums + row * STRIP_BYTES + i, add(load(sums + row * STRIP_BYTES + i), load(bias + i)))


@njit(error_model="numpy")
def _normed(frame: int, me: int, weight: int) -> int:
    """This thread's own normed copy of all rows."""
    target, pitch = read(frame + at.NORMED) + me * read(frame + at.NORMED_SIZE), read(frame + at.NORMED_PITCH)
    hidden, epsilon, kind, spare = (
        read(frame + at.HIDDEN),
        read_float(frame + at.EPSILON),
        product(frame),
        read(frame + at.SPARE),
    )
    for row in range(read(frame + at.ROWS)):
        x = read(frame + at.X) + row * read(frame + at.X_PITCH)
        if kind >= BYTES:
            scaled_norm(x, hidden, weight, epsilon, target + spare, False)
            to_bytes(target + spare, hidden, target + row * pitch, pitch, kind == NIBBLES)
        else:
            scaled_norm(x, hidden, weight, epsilon, target + row * pitch, kind == DOT)
    return target


@njit(error_model="numpy")
def put(sums: int, rows: int, target: int, pitch: int) -> None:
    for row in range(rows):
        for i in range(0, STRIP_BYTES, 64):
            store(target + row * pitch + i, load(sums + row * STRIP_BYTES + i))


@njit(error_model="numpy")
def put_residual(frame: int, sums: int, column: int, rounded: bool) -> None:
    """Add a strip to the residual stream."""
    factor = broadcast(read_float(frame + at.RESIDUAL))
    for row in range(read(frame + at.ROWS)):
        x = read(frame + at.X) + row * read(frame + at.X_PITCH) + 4 * column
        for i in range(0, STRIP_BYTES, 64):
            value = fma(load(sums + row * STRIP_BYTES + i), factor, load(x + i))
            if rounded:
                store_half(sums, value)
                value = load_half(sums)
            store(x + i, value)


@njit(error_model="numpy")
def put_gated(frame: int, sums: int, column: int) -> None:
    """act(gate) * up for 32 inner activations; gelu is its tanh form, x * sigmoid(1.5958 (x + 0.044715 x^3))."""
    one, half, gelu = broadcast(np.float32(1.0)), read(frame + at.KIND) == DOT, read(frame + at.GELU) == 1
    for row in range(read(frame + at.ROWS)):
        inner = read(frame + at.INNER) + row * read(frame + at.INNER_PITCH) + column * (2 if half else 4)
        for i in range(2):
            gate, up = load(sums + row * STRIP_BYTES + 64 * i), load(sums + row * STRIP_BYTES + 128 + 64 * i)
            turned = mul(gate, broadcast(np.float32(-1.0)))
            if gelu:
                cubic = fma(mul(gate, gate), broadcast(np.float32(0.044715)), one)
                turned = mul(mul(gate, cubic), broadcast(np.float32(-1.5957691216057308)))
            value = mul(div(gate, add(one, exponential(turned))), up)
            if half:
                store_half(inner + 32 * i, value)
            else:
                store(inner + 64 * i, value)


@njit(error_model="numpy")
def _qkv(frame: int, layer: int, me: int, team: int) -> None:
    x, sums = (
        _normed(frame, me, read(layer + at.ATTENTION_NORM)),
        read(frame + at.SUMS) + me * read(frame + at.SUMS_SIZE),
    )
    outputs = (read(frame + at.HEADS) + 2 * read(frame + at.KV_HEADS)) * read(frame + at.HEAD_DIM)
    strips, rows, kind = (outputs + STRIP - 1) // STRIP, read(frame + at.ROWS), product(frame)
    steps = steps_of(kind, read(frame + at.HIDDEN))
    for strip in range(strips * me // team, strips * (me + 1) // team):
        weight = read(layer + at.QKV_WEIGHT) + strip * strip_size(kind, steps)
        strip_sums(kind, weight, steps, x, read(frame + at.NORMED_PITCH), rows, sums)
        bias = read(layer + at.QKV_BIAS)
        _biased(sums, rows, 0 if bias == 0 else bias + strip * STRIP_BYTES)
        put(sums, rows, read(frame + at.QKV) + strip * STRIP_BYTES, read(frame + at.QKV_PITCH))


@njit(error_model="numpy")
def project(
    frame: int, me: int, team: int, weights: int, bias: int, x: int, pitch: int, inputs: int, rounded: bool
) -> None:  # fmt: skip
    """A projection back to the residual stream."""
    sums, rows, kind = read(frame + at.SUMS) + me * read(frame + at.SUMS_SIZE), read(frame + at.ROWS), product(frame)
    strips, steps = (read(frame + at.HIDDEN) + STRIP - 1) // STRIP, steps_of(kind, inputs)
    if kind >= BYTES:
        x, pitch = as_bytes(frame, me, x, pitch, rows, inputs), read(frame + at.NORMED_PITCH)
    for strip in range(strips * me // team, strips * (me + 1) // team):
        strip_sums(kind, weights + strip * strip_size(kind, steps), steps, x, pitch, rows, sums)
        _biased(sums, rows, 0 if bias == 0 else bias + strip * STRIP_BYTES)
        put_residual(frame, sums, strip * STRIP, rounded)


@njit(error_model="numpy")
def gate_up(frame: int, layer: int, me: int, team: int) -> None:
    x, sums = _normed(frame, me, read(layer + at.MLP_NORM)), read(frame + at.SUMS) + me * read(frame + at.SUMS_SIZE)
    rows, kind, bias = read(frame + at.ROWS), product(frame), read(layer + at.GATE_UP_BIAS)
    strips, steps = (2 * read(frame + at.INTERMEDIATE) + STRIP - 1) // STRIP, steps_of(kind, read(frame + at.HIDDEN))
    for strip in range(strips * me // team, strips * (me + 1) // team):
        weight = read(layer + at.GATE_UP_WEIGHT) + strip * strip_size(kind, steps)
        strip_sums(kind, weight, steps, x, read(frame + at.NORMED_PITCH), rows, sums)
        _biased(sums, rows, 0 if bias == 0 else bias + strip * STRIP_BYTES)
        put_gated(frame, sums, strip * (STRIP // 2))


@njit(error_model="numpy")
def layer_pass(frame: int, layer: int, me: int, team: int) -> None:
    """One layer over all rows."""
    narrow, skipped = read(frame + at.NARROW) == 1, read(layer + at.MLP) == 0
    if read(layer + at.ATTENTION) == 1:
        _qkv(frame, layer, me, team)
        meet(frame, team)
        attend(frame, layer, me, team)
        meet(frame, team)
        inputs = read(frame + at.HEADS) * read(frame + at.HEAD_DIM)
        project(
            frame, me, team, read(layer + at.O_WEIGHT), read(layer + at.O_BIAS),
            read(frame + at.MIXED), read(frame + at.MIXED_PITCH), inputs, narrow and skipped,
        )  # fmt: skip
        meet(frame, team)
    if not skipped:
        gate_up(frame, layer, me, team)
        meet(frame, team)
        project(
            frame, me, team, read(layer + at.DOWN_WEIGHT), read(layer + at.DOWN_BIAS),
            read(frame + at.INNER), read(frame + at.INNER_PITCH), read(frame + at.INTERMEDIATE), narrow,
        )  # fmt: skip
        meet(frame, team)
    if read(layer + at.TAP) != 0:
        show(frame, read(frame + at.X), read(frame + at.X_PITCH), read(layer + at.TAP), me, team)


@njit(error_model="numpy")
def forward(frame: int) -> None:
    """One pass; see the module."""
    me, team = 0, 1
    if read(frame + at.THREAD) != 0:
        me, team = call_int(read(frame + at.THREAD)), call_int(read(frame + at.TEAM))
    embed(frame, me, team)
    meet(frame, team)
    for i in range(read(frame + at.LAYERS)):
        layer_pass(frame, read(frame + at.PROGRAM) + i * at.LAYER_FIELDS, me, team)
    if read(frame + at.RESULT) != 0:
        show(frame, read(frame + at.X), read(frame + at.X_PITCH), read(frame + at.RESULT), me, team)
    if read(frame + at.FINAL_TAP) != 0:
        final_tap(frame, me, team)
    if read(frame + at.HEAD_ROWS) > 0:
        head(frame, me, team)
        if read(frame + at.BEST) != 0:
            look(frame, me, team)
            meet(frame, team)
            if me == 0:
                settle_best(frame, team)


@functools.cache
def compiled() -> Any:
    """`forward` as machine code for this CPU, from numba's cache on disk where one can be written."""
    sources = source_number()

    def entry(frame: int) -> None:
        if sources != 0:  # the cache tells functions apart by their constants, and would miss changes in other files
            forward(frame)

    return machine_code(entry, "the CPU kernels", "a minute or two")
