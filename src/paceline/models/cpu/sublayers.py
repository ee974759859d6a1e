"""The sub-layers of one layer in compiled code: projections of attention, and the MLP.

Every thread of the team makes its own strips of each matrix. Norms of few rows before a sub-layer are computed by every
thread for itself, which costs less than a meeting; a norm behind one needs whole rows, so the projection waits in the
buffer of the queries, keys and values, and threads divide the rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from paceline.models.cpu import offsets as at
from paceline.models.cpu.attention import WHOLE, copy_row, norm_row, scaled_norm
from paceline.models.cpu.matrix import (
    as_bytes,
    convert_row,
    own_rows,
    share_of,
    steps_of,
    strip_size,
    strip_sums,
    when_prepared,
)
from paceline.models.cpu.threads import wait_for_all
from paceline.models.cpu.tiles import BYTES, DOT, STRIP
from paceline.models.cpu.vectors import (
    add,
    broadcast,
    div,
    error_function,
    exponential,
    fma,
    larger,
    load,
    load_half,
    mul,
    read,
    read_float,
    smaller,
    store,
    store_half,
    sub,
)  # fmt: skip
from paceline.utils import part_of_compiled

STRIP_BYTES = 4 * STRIP

SILU, GELU_TANH, GELU, CLAMPED, RELU, RELU2, XIELU = 0, 1, 2, 3, 4, 5, 6
"""Activations of the gate, or of an MLP without one; CLAMPED is that of gpt-oss, see ModelSpec."""


@part_of_compiled
def add_bias(sums: int, rows: int, bias: int) -> None:
    """Add 64 float32, unless their address is 0, to sums (rows, 64)."""
    if bias != 0:
        for row in range(rows):
            for i in range(0, STRIP_BYTES, 64):
                store(sums + row * STRIP_BYTES + i, add(load(sums + row * STRIP_BYTES + i), load(bias + i)))


@part_of_compiled
def add_rows(frame: int, sums: int, rows: int, column: int) -> None:
    """Add what is given for the projections, from byte `column` on, to sums (rows, 64)."""
    added = read(frame + at.ADDED_QKV)
    if added != 0:
        for row in range(rows):
            row_sums, row_added = sums + row * STRIP_BYTES, added + row * read(frame + at.ADDED_QKV_PITCH) + column
            for i in range(0, STRIP_BYTES, 64):
                store(row_sums + i, add(load(row_sums + i), load(row_added + i)))


@part_of_compiled
def norm_or_copy(frame: int, x: int, weight: int, target: int, half: bool) -> None:
    """One row of the residual stream, normed where there is a norm."""
    if weight != 0:
        norm_row(frame, x, weight, target, half)
    else:
        copy_row(x, read(frame + at.HIDDEN), target, half)


@part_of_compiled
def normed_rows(frame: int, me: int, team: int, weight: int, kind: int, order: int) -> int:
    """Address of all rows, normed, for a kind of product; `order`: see `models.cpu.block_products.to_signed_bytes`."""
    rows, pitch = read(frame + at.ROWS), read(frame + at.NORMED_PITCH)
    target, first, stop = share_of(frame, me, team, rows)
    spare = own_rows(frame, me) + read(frame + at.SPARE)
    for row in range(first, stop):
        x = read(frame + at.X) + row * read(frame + at.X_PITCH)
        if kind >= BYTES:
            norm_or_copy(frame, x, weight, spare, False)
            convert_row(kind, spare, read(frame + at.HIDDEN), target + row * pitch, pitch, order)
        else:
            norm_or_copy(frame, x, weight, target + row * pitch, kind == DOT)
    when_prepared(frame, team, rows)
    return target


@part_of_compiled
def _store_strip(sums: int, rows: int, target: int, pitch: int) -> None:
    for row in range(rows):
        for i in range(0, STRIP_BYTES, 64):
            store(target + row * pitch + i, load(sums + row * STRIP_BYTES + i))


@part_of_compiled
def add_residual(frame: int, x: int, source: int, size: int, rounded: bool, spare: int) -> None:
    """Add `size` bytes of a sub-layer's output to the residual stream at `x`; `spare`: room for a vector."""
    lanes = broadcast(read_float(frame + at.RESIDUAL))
    for i in range(0, size, 64):
        value = fma(load(source + i), lanes, load(x + i))
        if rounded:
            store_half(spare, value)
            value = load_half(spare)
        store(x + i, value)


@part_of_compiled
def _put_output(frame: int, sums: int, strip: int, norm: int, rounded: bool) -> None:
    """A strip of a sub-layer's output: to the residual stream, or where a norm follows to the buffer that it reads."""
    column, rows = strip * STRIP_BYTES, read(frame + at.ROWS)
    if norm != 0:
        _store_strip(sums, rows, read(frame + at.QKV) + column, read(frame + at.QKV_PITCH))
        return
    for row in range(rows):
        x, row_sums = read(frame + at.X) + row * read(frame + at.X_PITCH) + column, sums + row * STRIP_BYTES
        add_residual(frame, x, row_sums, STRIP_BYTES, rounded, sums)


@part_of_compiled
def add_normed(frame: int, me: int, team: int, norm: int, rounded: bool) -> None:
    """What `_put_output` left for a norm: norm it and add it to the residual stream, the rows divided among threads."""
    if norm == 0:
        return
    wait_for_all(frame, team)
    rows, hidden = read(frame + at.ROWS), read(frame + at.HIDDEN)
    spare = read(frame + at.SUMS) + me * read(frame + at.SUMS_SIZE)
    for row in range(rows * me // team, rows * (me + 1) // team):
        out = read(frame + at.QKV) + row * read(frame + at.QKV_PITCH)
        norm_row(frame, out, norm, out, False)
        x = read(frame + at.X) + row * read(frame + at.X_PITCH)
        add_residual(frame, x, out, 4 * hidden, rounded, spare)


@part_of_compiled
def _activated(gate: Any, kind: int) -> Any:
    """The activation of lanes; gelu_tanh is x * sigmoid(1.5958 (x + 0.044715 x^3))."""
    ones = broadcast(np.float32(1.0))
    if kind == RELU2:
        positive = larger(gate, broadcast(np.float32(0.0)))
        return mul(positive, positive)
    if kind == RELU:
        return larger(gate, broadcast(np.float32(0.0)))
    if kind == GELU:
        share = error_function(mul(gate, broadcast(np.float32(0.7071067811865476))))
        return mul(mul(gate, broadcast(np.float32(0.5))), add(ones, share))
    turned = mul(gate, broadcast(np.float32(-1.0)))
    if kind == GELU_TANH:
        cubic = fma(mul(gate, gate), broadcast(np.float32(0.044715)), ones)
        turned = mul(mul(gate, cubic), broadcast(np.float32(-1.5957691216057308)))
    return div(gate, add(ones, exponential(turned)))


@part_of_compiled
def _clamped(gate: Any, up: Any, alpha: np.float32, limit: np.float32) -> Any:
    """gate * sigmoid(alpha * gate) * (up + 1) of lanes, the gate at most `limit` and up within it."""
    ones, least = broadcast(np.float32(1.0)), broadcast(-limit)
    gate, up = smaller(gate, broadcast(limit)), larger(smaller(up, broadcast(limit)), least)
    return mul(div(gate, add(ones, exponential(mul(gate, broadcast(-alpha))))), add(up, ones))


@part_of_compiled
def _above_line(x: Any) -> Any:
    """exp(x) - 1 - x of lanes from 0 down: a series up to -0.5, where the difference would cancel out, and what is
    gained from there on.
    """
    edge = broadcast(np.float32(-0.5))
    near, far = larger(x, edge), smaller(x, edge)
    series = fma(near, broadcast(np.float32(1 / 40320)), broadcast(np.float32(1 / 5040)))
    series = fma(series, near, broadcast(np.float32(1 / 720)))
    series = fma(series, near, broadcast(np.float32(1 / 120)))
    series = fma(series, near, broadcast(np.float32(1 / 24)))
    series = fma(series, near, broadcast(np.float32(1 / 6)))
    series = fma(series, near, broadcast(np.float32(0.5)))
    gained = sub(sub(exponential(far), far), sub(exponential(edge), edge))
    return fma(mul(near, near), series, gained)


@part_of_compiled
def _xielu(x: Any, numbers: int) -> Any:
    """See ModelSpec, of lanes; `numbers`: address of the three factors."""
    above, below = broadcast(read_float(numbers)), broadcast(read_float(numbers + 4))
    beta, zeros = broadcast(read_float(numbers + 8)), broadcast(np.float32(0.0))
    positive = larger(x, zeros)
    curve = fma(mul(positive, positive), above, mul(_above_line(smaller(x, zeros)), below))
    return fma(x, beta, curve)


@part_of_compiled
def put_inner(frame: int, layer: int, sums: int, target: int, rows: int) -> None:
    """Inner activations of one strip, from `target` on: act(gate) * up of 32 gates and 32 ups, or act(up) of 64."""
    half, kind, gated = read(frame + at.KIND) == DOT, read(frame + at.ACTIVATE), read(frame + at.GATED) == 1
    alpha, limit = read_float(frame + at.ALPHA), read_float(frame + at.LIMIT)
    for row in range(rows):
        inner, row_sums = target + row * read(frame + at.INNER_PITCH), sums + row * STRIP_BYTES
        for i in range(2 if gated else 4):
            value = load(row_sums + 64 * i)
            if kind == XIELU:
                value = _xielu(value, read(layer + at.XIELU))
            elif kind == CLAMPED:
                value = _clamped(value, load(row_sums + 128 + 64 * i), alpha, limit)
            elif gated:
                value = mul(_activated(value, kind), load(row_sums + 128 + 64 * i))
            else:
                value = _activated(value, kind)
            if half:
                store_half(inner + 32 * i, value)
            else:
                store(inner + 64 * i, value)


@part_of_compiled
def qkv(frame: int, layer: int, me: int, team: int) -> None:
    """Queries, keys and values of all rows, or what latent attention makes them of."""
    kind = read(layer + at.QKV_KIND)
    x = normed_rows(frame, me, team, read(layer + at.ATTENTION_NORM), kind, read(layer + at.QKV_ORDER))
    sums = read(frame + at.SUMS) + me * read(frame + at.SUMS_SIZE)
    target, pitch = read(frame + at.PROJECTED), read(frame + at.PROJECTED_PITCH)
    outputs, to_source = read(frame + at.PROJECTED_SIZE), read(layer + at.SOURCE_ATTENTION) == 1
    if to_source:
        outputs = read(frame + at.HEADS) * read(frame + at.HEAD_DIM)
    strips, rows = (outputs + STRIP - 1) // STRIP, read(frame + at.ROWS)
    steps = steps_of(kind, read(frame + at.HIDDEN))
    for strip in range(strips * me // team, strips * (me + 1) // team):
        weight = read(layer + at.QKV_WEIGHT) + strip * strip_size(kind, steps)
        strip_sums(kind, weight, steps, x, read(frame + at.NORMED_PITCH), rows, sums)
        bias = read(layer + at.QKV_BIAS)
        add_bias(sums, rows, 0 if bias == 0 else bias + strip * STRIP_BYTES)
        if not to_source:
            add_rows(frame, sums, rows, strip * STRIP_BYTES)
        _store_strip(sums, rows, target + strip * STRIP_BYTES, pitch)


@part_of_compiled
def norm_sums(frame: int, me: int, team: int, norm: int, rounded: bool) -> None:
    """Norm the residual stream itself, unless `norm` is 0; the rows divided among threads, which meet behind it."""
    if norm == 0:
        return
    for row in range(read(frame + at.ROWS) * me // team, read(frame + at.ROWS) * (me + 1) // team):
        x = read(frame + at.X) + row * read(frame + at.X_PITCH)
        norm_row(frame, x, norm, x, False)
        for i in range(0, 4 * read(frame + at.HIDDEN) if rounded else 0, 64):
            store_half(read(frame + at.SUMS) + me * read(frame + at.SUMS_SIZE), load(x + i))
            store(x + i, load_half(read(frame + at.SUMS) + me * read(frame + at.SUMS_SIZE)))
    wait_for_all(frame, team)


@part_of_compiled
def norm_all_heads(frame: int, layer: int, me: int, team: int) -> None:
    """Norms over all heads of the queries and over all heads of the keys, the rows divided among threads (OLMo-2)."""
    if read(frame + at.QK_NORM) != WHOLE:
        return
    rows, size, epsilon = read(frame + at.ROWS), read(frame + at.HEAD_DIM), read_float(frame + at.HEAD_EPSILON)
    queries, keys = read(frame + at.HEADS) * size, read(frame + at.KV_HEADS) * size
    for row in range(rows * me // team, rows * (me + 1) // team):
        start = read(frame + at.QKV) + row * read(frame + at.QKV_PITCH)
        scaled_norm(start, queries, read(layer + at.Q_NORM), epsilon, start, False)
        start += 4 * queries
        scaled_norm(start, keys, read(layer + at.K_NORM), epsilon, start, False)
    wait_for_all(frame, team)


@part_of_compiled
def project(
    frame: int, me: int, team: int, weights: int, kind: int, bias: int, x: int, pitch: int, inputs: int, norm: int,
    rounded: bool, heads: bool, order: int,
) -> None:  # fmt: skip
    """A projection back to the residual stream, normed where `norm` is not 0.

    Args:
        heads: of attention's output. order: of its inputs, see `models.cpu.block_products.to_signed_bytes`.
    """
    sums, rows = read(frame + at.SUMS) + me * read(frame + at.SUMS_SIZE), read(frame + at.ROWS)
    strips, steps = (read(frame + at.HIDDEN) + STRIP - 1) // STRIP, steps_of(kind, inputs)
    if kind >= BYTES:
        x = as_bytes(frame, me, team, kind, x, pitch, rows, inputs, heads, order)
        pitch = read(frame + at.NORMED_PITCH)
    for strip in range(strips * me // team, strips * (me + 1) // team):
        strip_sums(kind, weights + strip * strip_size(kind, steps), steps, x, pitch, rows, sums)
        add_bias(sums, rows, 0 if bias == 0 else bias + strip * STRIP_BYTES)
        _put_output(frame, sums, strip, norm, rounded)
    add_normed(frame, me, team, norm, rounded)


@part_of_compiled
def gate_up(frame: int, layer: int, me: int, team: int) -> None:
    """The MLP's inner activations of all rows."""
    kind = read(layer + at.GATE_UP_KIND)
    x = normed_rows(frame, me, team, read(layer + at.MLP_NORM), kind, read(layer + at.GATE_UP_ORDER))
    sums = read(frame + at.SUMS) + me * read(frame + at.SUMS_SIZE)
    rows, bias = read(frame + at.ROWS), read(layer + at.GATE_UP_BIAS)
    each = STRIP // 2 if read(frame + at.GATED) == 1 else STRIP
    strips, steps = (read(frame + at.INTERMEDIATE) + each - 1) // each, steps_of(kind, read(frame + at.HIDDEN))
    item = 2 if read(frame + at.KIND) == DOT else 4
    for strip in range(strips * me // team, strips * (me + 1) // team):
        weight = read(layer + at.GATE_UP_WEIGHT) + strip * strip_size(kind, steps)
        strip_sums(kind, weight, steps, x, read(frame + at.NORMED_PITCH), rows, sums)
        add_bias(sums, rows, 0 if bias == 0 else bias + strip * STRIP_BYTES)
        put_inner(frame, layer, sums, read(frame + at.INNER) + strip * each * item, rows)


@part_of_compiled
def down(frame: int, layer: int, me: int, team: int, rounded: bool) -> None:
    """The MLP's output of all rows, from its inner activations."""
    project(
        frame, me, team, read(layer + at.DOWN_WEIGHT), read(layer + at.DOWN_KIND), read(layer + at.DOWN_BIAS),
        read(frame + at.INNER), read(frame + at.INNER_PITCH), read(frame + at.INTERMEDIATE),
        read(layer + at.POST_MLP_NORM), rounded, False, read(layer + at.DOWN_ORDER),
    )  # fmt: skip
