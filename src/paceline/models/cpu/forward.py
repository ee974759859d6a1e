"""One pass of the decoder as one compiled function, which every thread of the team runs from end to end: embeddings,
layers, taps, logits, and the best token of every row.

It works on the tables of models.cpu.offsets, which models.cpu.compiled_decoder fills. Threads divide the strips of each
matrix and the heads of the attention, and wait for each other where one needs what another wrote: five times a layer.
Norms are computed by every thread for itself, which costs less than a meeting. The residual stream is float32 within a
layer and rounded to the model's type behind it, so that a pass may stop and go on at any layer with the same bits. For
the best tokens every thread looks through the logits that it has just written; one of them then compares what all of
them found.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numba import njit

from paceline.models.cpu import offsets as at
from paceline.models.cpu.attention import attend, copy_row, scaled_norm
from paceline.models.cpu.compilation import machine_code, source_number
from paceline.models.cpu.integer_products import to_bytes
from paceline.models.cpu.matrix import as_bytes, head_product, product, steps_of, strip_size, strip_sums
from paceline.models.cpu.tiles import BYTES, DOT, NIBBLES, STRIP
from paceline.models.cpu.vectors import (
    LANES,
    add,
    broadcast,
    call,
    call_int,
    div,
    exponential,
    fma,
    larger,
    largest,
    load,
    load_half,
    mul,
    read,
    read_float,
    store,
    store_half,
    total,
    write,
)  # fmt: skip

STRIP_BYTES = 4 * STRIP
LOWEST = np.float32(-np.inf)

BEST_BYTES = 128
"""Bytes of what one thread knows of one row: its largest logit in all lanes, NaN where one is not finite; then its
token id.
"""


@njit(error_model="numpy")
def row_of(frame: int, row: int) -> int:
    """Address of a row's logits."""
    width = (read(frame + at.VOCAB) + LANES - 1) // LANES * LANES
    return read(frame + at.LOGITS) + row * width * (2 if read(frame + at.NARROW) == 1 else 4)


@njit(error_model="numpy")
def largest_of(row: int, begin: int, end: int, narrow: bool, spare: int) -> np.float32:
    """Largest of logits begin .. end - 1, `begin` a multiple of 16; NaN where one is not finite."""
    top, doubt, nothing = broadcast(LOWEST), broadcast(np.float32(0.0)), broadcast(np.float32(0.0))
    whole = end - (end - begin) % LANES
    for i in range(begin, whole, LANES):
        value = load_half(row + 2 * i) if narrow else load(row + 4 * i)
        top, doubt = larger(top, value), fma(value, nothing, doubt)  # 0 times a number that is not finite is NaN
    most, sure = largest(top), total(doubt)
    if whole < end:
        store(spare, load_half(row + 2 * whole) if narrow else load(row + 4 * whole))
        for i in range(end - whole):
            one = read_float(spare + 4 * i)
            sure += one * np.float32(0.0)
            most = max(most, one)
    return most + sure


@njit(error_model="numpy")
def first_of(row: int, begin: int, end: int, narrow: bool, most: np.float32, spare: int) -> int:
    """Where the first of logits begin .. end - 1 stands that equals `most`; -1 if none does."""
    for i in range(begin, end, LANES):
        value = load_half(row + 2 * i) if narrow else load(row + 4 * i)
        if largest(value) >= most:
            store(spare, value)
            for j in range(min(LANES, end - i)):
                if read_float(spare + 4 * j) == most:
                    return i + j
    return -1


@njit(error_model="numpy")
def find_best(frame: int, me: int, team: int) -> None:
    """This thread's best token of every row, among the strips whose logits it has made."""
    vocab, narrow = read(frame + at.VOCAB), read(frame + at.NARROW) == 1
    strips, spare = (vocab + STRIP - 1) // STRIP, read(frame + at.SUMS) + me * read(frame + at.SUMS_SIZE)
    begin, end = strips * me // team * STRIP, min(strips * (me + 1) // team * STRIP, vocab)
    for row in range(read(frame + at.HEAD_ROWS)):
        logits, part = (
            row_of(frame, row),
            read(frame + at.PARTS) + (me * read(frame + at.PARTS_ROWS) + row) * BEST_BYTES,
        )
        most = largest_of(logits, begin, end, narrow, spare)
        store(part, broadcast(most))
        write(part + 64, first_of(logits, begin, end, narrow, most, spare))


@njit(error_model="numpy")
def combine_best(frame: int, team: int) -> None:
    """The best of what all threads found, for every row."""
    for row in range(read(frame + at.HEAD_ROWS)):
        best, place = LOWEST, -1
        for one in range(team):
            part = read(frame + at.PARTS) + (one * read(frame + at.PARTS_ROWS) + row) * BEST_BYTES
            value = read_float(part)
            if np.isnan(value):
                place = -1
                break
            if value > best:
                best, place = value, read(part + 64)
        write(read(frame + at.BEST) + 8 * row, place)


@njit(error_model="numpy")
def embed(frame: int, me: int, team: int) -> None:
    """Embeddings, or states that are fed in, as the residual stream."""
    rows, hidden = read(frame + at.ROWS), read(frame + at.HIDDEN)
    factor, narrow = broadcast(read_float(frame + at.SCALE)), read(frame + at.NARROW) == 1
    for row in range(rows * me // team, rows * (me + 1) // team):
        source, x = read(read(frame + at.SOURCE) + 8 * row), read(frame + at.X) + row * read(frame + at.X_PITCH)
        for i in range(0, hidden, LANES):
            value = load_half(source + 2 * i) if narrow else load(source + 4 * i)
            store(x + 4 * i, mul(value, factor))


@njit(error_model="numpy")
def copy_states(frame: int, source: int, pitch: int, target: int, me: int, team: int) -> None:
    """Copy rows of float32 states to the model's type."""
    rows, hidden, narrow = read(frame + at.ROWS), read(frame + at.HIDDEN), read(frame + at.NARROW) == 1
    for row in range(rows * me // team, rows * (me + 1) // team):
        copy_row(source + row * pitch, hidden, target + row * hidden * (2 if narrow else 4), narrow)


@njit(error_model="numpy")
def _put_logits(frame: int, sums: int, column: int) -> None:
    vocab, narrow = read(frame + at.VOCAB), read(frame + at.NARROW) == 1
    factor, item = broadcast(read_float(frame + at.LOGIT_SCALE)), 2 if narrow else 4
    for row in range(read(frame + at.HEAD_ROWS)):
        target = read(frame + at.LOGITS) + (row * ((vocab + LANES - 1) // LANES * LANES) + column) * item
        for i in range(0, min(STRIP, vocab - column), LANES):
            value = mul(load(sums + row * STRIP_BYTES + 4 * i), factor)
            if narrow:
                store_half(target + 2 * i, value)
            else:
                store(target + 4 * i, value)


@njit(error_model="numpy")
def head_inputs(frame: int, me: int) -> int:
    """This thread's own copy of the rows that the head takes, normed where there is a norm."""
    x, pitch = read(frame + at.NORMED) + me * read(frame + at.NORMED_SIZE), read(frame + at.NORMED_PITCH)
    hidden, weight, kind = read(frame + at.HIDDEN), read(frame + at.FINAL_NORM), head_product(frame)
    spare = x + read(frame + at.SPARE)
    for row in range(read(frame + at.HEAD_ROWS)):
        source = read(frame + at.X) + read(read(frame + at.PICKED) + 8 * row) * read(frame + at.X_PITCH)
        target = spare if kind == BYTES else x + row * pitch
        if weight != 0:
            scaled_norm(source, hidden, weight, read_float(frame + at.EPSILON), target, kind == DOT)
        else:
            copy_row(source, hidden, target, kind == DOT)
        if kind == BYTES:
            to_bytes(spare, hidden, x + row * pitch, pitch)
    return x


@njit(error_model="numpy")
def head(frame: int, me: int, team: int) -> None:
    """Logits of the picked rows."""
    x, pitch = head_inputs(frame, me), read(frame + at.NORMED_PITCH)
    kind, rows = head_product(frame), read(frame + at.HEAD_ROWS)
    sums, steps = read(frame + at.SUMS) + me * read(frame + at.SUMS_SIZE), steps_of(kind, read(frame + at.HIDDEN))
    strips = (read(frame + at.VOCAB) + STRIP - 1) // STRIP
    for strip in range(strips * me // team, strips * (me + 1) // team):
        strip_sums(kind, read(frame + at.HEAD) + strip * strip_size(kind, steps), steps, x, pitch, rows, sums)
        _put_logits(frame, sums, strip * STRIP)


@njit(error_model="numpy")
def final_tap(frame: int, me: int, team: int) -> None:
    """The normed states of all rows, by way of the projections' buffer."""
    rows, target, pitch = read(frame + at.ROWS), read(frame + at.QKV), read(frame + at.QKV_PITCH)
    for row in range(rows * me // team, rows * (me + 1) // team):
        x = read(frame + at.X) + row * read(frame + at.X_PITCH)
        weight, epsilon = read(frame + at.FINAL_NORM), read_float(frame + at.EPSILON)
        scaled_norm(x, read(frame + at.HIDDEN), weight, epsilon, target + row * pitch, False)
    copy_states(frame, target, pitch, read(frame + at.FINAL_TAP), me, team)


@njit(error_model="numpy")
def wait_for_all(frame: int, team: int) -> None:
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
    hidden, epsilon = read(frame + at.HIDDEN), read_float(frame + at.EPSILON)
    kind, spare = product(frame), read(frame + at.SPARE)
    for row in range(read(frame + at.ROWS)):
        x = read(frame + at.X) + row * read(frame + at.X_PITCH)
        if kind >= BYTES:
            scaled_norm(x, hidden, weight, epsilon, target + spare, False)
            to_bytes(target + spare, hidden, target + row * pitch, pitch, kind == NIBBLES)
        else:
            scaled_norm(x, hidden, weight, epsilon, target + row * pitch, kind == DOT)
    return target


@njit(error_model="numpy")
def store_strip(sums: int, rows: int, target: int, pitch: int) -> None:
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
    x = _normed(frame, me, read(layer + at.ATTENTION_NORM))
    sums = read(frame + at.SUMS) + me * read(frame + at.SUMS_SIZE)
    outputs = (read(frame + at.HEADS) + 2 * read(frame + at.KV_HEADS)) * read(frame + at.HEAD_DIM)
    strips, rows, kind = (outputs + STRIP - 1) // STRIP, read(frame + at.ROWS), product(frame)
    steps = steps_of(kind, read(frame + at.HIDDEN))
    for strip in range(strips * me // team, strips * (me + 1) // team):
        weight = read(layer + at.QKV_WEIGHT) + strip * strip_size(kind, steps)
        strip_sums(kind, weight, steps, x, read(frame + at.NORMED_PITCH), rows, sums)
        bias = read(layer + at.QKV_BIAS)
        _biased(sums, rows, 0 if bias == 0 else bias + strip * STRIP_BYTES)
        store_strip(sums, rows, read(frame + at.QKV) + strip * STRIP_BYTES, read(frame + at.QKV_PITCH))


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
        wait_for_all(frame, team)
        attend(frame, layer, me, team)
        wait_for_all(frame, team)
        inputs = read(frame + at.HEADS) * read(frame + at.HEAD_DIM)
        project(
            frame, me, team, read(layer + at.O_WEIGHT), read(layer + at.O_BIAS),
            read(frame + at.MIXED), read(frame + at.MIXED_PITCH), inputs, narrow and skipped,
        )  # fmt: skip
        wait_for_all(frame, team)
    if not skipped:
        gate_up(frame, layer, me, team)
        wait_for_all(frame, team)
        project(
            frame, me, team, read(layer + at.DOWN_WEIGHT), read(layer + at.DOWN_BIAS),
            read(frame + at.INNER), read(frame + at.INNER_PITCH), read(frame + at.INTERMEDIATE), narrow,
        )  # fmt: skip
        wait_for_all(frame, team)
    if read(layer + at.TAP) != 0:
        copy_states(frame, read(frame + at.X), read(frame + at.X_PITCH), read(layer + at.TAP), me, team)


@njit(error_model="numpy")
def forward(frame: int) -> None:
    """One pass; see the module."""
    me, team = 0, 1
    if read(frame + at.THREAD) != 0:
        me, team = call_int(read(frame + at.THREAD)), call_int(read(frame + at.TEAM))
    embed(frame, me, team)
    wait_for_all(frame, team)
    for i in range(read(frame + at.LAYERS)):
        layer_pass(frame, read(frame + at.PROGRAM) + i * at.LAYER_FIELDS, me, team)
    if read(frame + at.RESULT) != 0:
        copy_states(frame, read(frame + at.X), read(frame + at.X_PITCH), read(frame + at.RESULT), me, team)
    if read(frame + at.FINAL_TAP) != 0:
        final_tap(frame, me, team)
    if read(frame + at.HEAD_ROWS) > 0:
        head(frame, me, team)
        if read(frame + at.BEST) != 0:
            find_best(frame, me, team)
            wait_for_all(frame, team)
            if me == 0:
                combine_best(frame, team)


@functools.cache
def compiled() -> Any:
    """`forward` as machine code for this CPU, from numba's cache on disk where one can be written."""
    sources = source_number()

    def entry(frame: int) -> None:
        if sources != 0:  # the cache tells functions apart by their constants, and would miss changes in other files
            forward(frame)

    return machine_code(entry, "the CPU kernels", "a minute or two")
