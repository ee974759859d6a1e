"""One pass of the decoder as one compiled function, which every thread of the team runs from end to end: embeddings,
layers, taps, logits, and the best token of every row.

It works on the tables of models.cpu.offsets, which models.passes.compiled_decoder fills. Threads divide the strips of
each matrix and the heads of the attention, and wait for each other where one needs what another wrote: five times a
layer of the Llama shape. The residual stream is float32 within a layer and rounded to the model's type behind it, so
that a pass may stop and go on at any layer with the same bits. For the best tokens every thread looks through the
logits that it has just written; one of them then compares what all of them found.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from paceline.models.cpu import offsets as at
from paceline.models.cpu.attention import LOWEST, attend, copy_row, norm_row, soft_cap
from paceline.models.cpu.compilation import machine_code, source_number
from paceline.models.cpu.experts import mixture
from paceline.models.cpu.matrix import convert_row, own_rows, share_of, steps_of, strip_size, strip_sums, when_prepared
from paceline.models.cpu.matrix_unit import release
from paceline.models.cpu.sublayers import (
    STRIP_BYTES,
    add_bias,
    down,
    gate_up,
    norm_all_heads,
    norm_or_copy,
    norm_sums,
    project,
    qkv,
)
from paceline.models.cpu.threads import wait_for_all
from paceline.models.cpu.tiles import BYTES, DOT, STRIP
from paceline.models.cpu.vectors import (
    LANES,
    add,
    broadcast,
    call_int,
    call_part,
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
from paceline.utils import part_of_compiled

BEST_BYTES = 128
"""Bytes of what one thread knows of one row: its largest logit in all lanes, NaN where one is not finite; then its
token id.
"""


@part_of_compiled
def row_of(frame: int, row: int) -> int:
    """Address of a row's logits."""
    width = (read(frame + at.VOCAB) + LANES - 1) // LANES * LANES
    return read(frame + at.LOGITS) + row * width * (2 if read(frame + at.NARROW) == 1 else 4)


@part_of_compiled
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
            number = read_float(spare + 4 * i)
            sure += number * np.float32(0.0)
            most = max(most, number)
    return most + sure


@part_of_compiled
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


@part_of_compiled
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


@part_of_compiled
def combine_best(frame: int, team: int) -> None:
    """The best of what all threads found, for every row."""
    for row in range(read(frame + at.HEAD_ROWS)):
        best, place = LOWEST, -1
        for member in range(team):
            part = read(frame + at.PARTS) + (member * read(frame + at.PARTS_ROWS) + row) * BEST_BYTES
            value = read_float(part)
            if np.isnan(value):
                place = -1
                break
            if value > best:
                best, place = value, read(part + 64)
        write(read(frame + at.BEST) + 8 * row, place)


@part_of_compiled
def embed(frame: int, me: int, team: int) -> None:
    """Embeddings, or states that are fed in, as the residual stream."""
    rows, hidden = read(frame + at.ROWS), read(frame + at.HIDDEN)
    factor, narrow = broadcast(read_float(frame + at.SCALE)), read(frame + at.NARROW) == 1
    for row in range(rows * me // team, rows * (me + 1) // team):
        source, x = read(read(frame + at.SOURCE) + 8 * row), read(frame + at.X) + row * read(frame + at.X_PITCH)
        for i in range(0, hidden, LANES):
            value = load_half(source + 2 * i) if narrow else load(source + 4 * i)
            store(x + 4 * i, mul(value, factor))


@part_of_compiled
def copy_states(frame: int, source: int, pitch: int, target: int, me: int, team: int) -> None:
    """Copy rows of float32 states to the model's type."""
    rows, hidden, narrow = read(frame + at.ROWS), read(frame + at.HIDDEN), read(frame + at.NARROW) == 1
    for row in range(rows * me // team, rows * (me + 1) // team):
        copy_row(source + row * pitch, hidden, target + row * hidden * (2 if narrow else 4), narrow)


@part_of_compiled
def copy_queries(frame: int, layer: int, me: int, team: int) -> None:
    """Copy the rows' queries, float32, to where they are wanted."""
    rows, size = read(frame + at.ROWS), 4 * read(frame + at.HEADS) * read(frame + at.HEAD_DIM)
    for row in range(rows * me // team, rows * (me + 1) // team):
        source = read(frame + at.PROJECTED) + row * read(frame + at.PROJECTED_PITCH)
        for i in range(0, size, 64):
            store(read(layer + at.QUERIES_TAP) + row * size + i, load(source + i))


@part_of_compiled
def _put_logits(frame: int, sums: int, column: int) -> None:
    vocab, narrow = read(frame + at.VOCAB), read(frame + at.NARROW) == 1
    factor, cap = broadcast(read_float(frame + at.LOGIT_SCALE)), read_float(frame + at.LOGIT_CAP)
    item = 2 if narrow else 4
    for row in range(read(frame + at.HEAD_ROWS)):
        target = read(frame + at.LOGITS) + (row * ((vocab + LANES - 1) // LANES * LANES) + column) * item
        for i in range(0, min(STRIP, vocab - column), LANES):
            value = mul(load(sums + row * STRIP_BYTES + 4 * i), factor)
            if cap > 0:
                value = soft_cap(value, cap)
            if narrow:
                store_half(target + 2 * i, value)
            else:
                store(target + 4 * i, value)


@part_of_compiled
def head_inputs(frame: int, me: int, team: int) -> int:
    """Address of the rows that the head takes, normed where there is a norm."""
    rows, pitch, hidden = read(frame + at.HEAD_ROWS), read(frame + at.NORMED_PITCH), read(frame + at.HIDDEN)
    weight, kind = read(frame + at.FINAL_NORM), read(frame + at.HEAD_KIND)
    x, first, stop = share_of(frame, me, team, rows)
    spare = own_rows(frame, me) + read(frame + at.SPARE)
    for row in range(first, stop):
        source = read(frame + at.X) + read(read(frame + at.PICKED) + 8 * row) * read(frame + at.X_PITCH)
        target = spare if kind >= BYTES else x + row * pitch
        norm_or_copy(frame, source, weight, target, kind == DOT)
        if kind >= BYTES:
            convert_row(kind, spare, hidden, x + row * pitch, pitch, 0)
    when_prepared(frame, team, rows)
    return x


@part_of_compiled
def head(frame: int, me: int, team: int) -> None:
    """Logits of the picked rows."""
    x, pitch = head_inputs(frame, me, team), read(frame + at.NORMED_PITCH)
    kind, rows, bias = read(frame + at.HEAD_KIND), read(frame + at.HEAD_ROWS), read(frame + at.HEAD_BIAS)
    sums, steps = read(frame + at.SUMS) + me * read(frame + at.SUMS_SIZE), steps_of(kind, read(frame + at.HIDDEN))
    strips = (read(frame + at.VOCAB) + STRIP - 1) // STRIP
    for strip in range(strips * me // team, strips * (me + 1) // team):
        strip_sums(kind, read(frame + at.HEAD) + strip * strip_size(kind, steps), steps, x, pitch, rows, sums)
        add_bias(sums, rows, 0 if bias == 0 else bias + strip * STRIP_BYTES)
        _put_logits(frame, sums, strip * STRIP)


@part_of_compiled
def final_tap(frame: int, me: int, team: int) -> None:
    """The normed states of all rows, by way of the projections' buffer."""
    rows, target, pitch = read(frame + at.ROWS), read(frame + at.QKV), read(frame + at.QKV_PITCH)
    for row in range(rows * me // team, rows * (me + 1) // team):
        x = read(frame + at.X) + row * read(frame + at.X_PITCH)
        norm_row(frame, x, read(frame + at.FINAL_NORM), target + row * pitch, False)
    copy_states(frame, target, pitch, read(frame + at.FINAL_TAP), me, team)


@part_of_compiled
def gate_attended(frame: int, me: int, team: int) -> None:
    """What attention has made of each row times the sigmoid of its gates, the rows divided among threads."""
    half, size, ones = read(frame + at.KIND) == DOT, read(frame + at.ATTENDED_SIZE), broadcast(np.float32(1.0))
    rows = read(frame + at.ROWS)
    for row in range(rows * me // team, rows * (me + 1) // team):
        gates = read(frame + at.PROJECTED) + row * read(frame + at.PROJECTED_PITCH) + read(frame + at.ATTENTION_GATE)
        out = read(frame + at.ATTENDED) + row * read(frame + at.ATTENDED_PITCH)
        for i in range(0, size, LANES):
            left = add(ones, exponential(mul(load(gates + 4 * i), broadcast(np.float32(-1.0)))))
            if half:
                store_half(out + 2 * i, div(load_half(out + 2 * i), left))
            else:
                store(out + 4 * i, div(load(out + 4 * i), left))
    wait_for_all(frame, team)


@part_of_compiled
def attention(frame: int, layer: int, me: int, team: int, rounded: bool) -> None:
    """The attention of one layer over all rows, to its end."""
    latent = read(frame + at.LATENT)
    qkv(frame, layer, me, team)
    wait_for_all(frame, team)
    if read(layer + at.QUERIES_TAP) != 0:
        copy_queries(frame, layer, me, team)
    if latent != 0:
        call_part(latent, frame, layer, me, team, 0)
    norm_all_heads(frame, layer, me, team)
    if read(frame + at.SELECTION) != 0 and read(layer + at.CHANNELS) != 0:
        call_part(read(frame + at.SELECTION), frame, layer, me, team, 0)
    else:
        attend(frame, layer, me, team)
    wait_for_all(frame, team)
    if latent != 0:
        call_part(latent, frame, layer, me, team, 1)
        wait_for_all(frame, team)
    if read(frame + at.ATTENTION_GATE) != 0:
        gate_attended(frame, me, team)
    project(
        frame, me, team, read(layer + at.O_WEIGHT), read(layer + at.O_KIND), read(layer + at.O_BIAS),
        read(frame + at.ATTENDED), read(frame + at.ATTENDED_PITCH), read(frame + at.ATTENDED_SIZE),
        read(layer + at.POST_ATTENTION_NORM), rounded, True, read(layer + at.O_ORDER),
    )  # fmt: skip
    wait_for_all(frame, team)


@part_of_compiled
def layer_pass(frame: int, layer: int, me: int, team: int) -> None:
    """One layer over all rows."""
    narrow, skipped = read(frame + at.NARROW) == 1, read(layer + at.MLP) == 0
    parallel = read(frame + at.PARALLEL) == 1 and not skipped
    if parallel:
        gate_up(frame, layer, me, team)
        when_prepared(frame, team, read(frame + at.ROWS))  # normed rows that threads share give way to attention's
    if read(layer + at.ATTENTION) == 1:
        if read(layer + at.MIXER) != 0:
            call_part(read(frame + at.MIXERS), frame, layer, me, team, 0)
        if read(layer + at.O_WEIGHT) != 0:
            attention(frame, layer, me, team, narrow and skipped)
        if read(layer + at.MIXER) != 0:
            call_part(read(frame + at.MIXERS), frame, layer, me, team, 1)
        norm_sums(frame, me, team, read(layer + at.SUM_NORM), narrow and skipped)
    if not skipped:
        if read(layer + at.ROUTER) != 0:
            mixture(frame, layer, me, team, narrow)
        else:
            if not parallel:
                gate_up(frame, layer, me, team)
            wait_for_all(frame, team)
            down(frame, layer, me, team, narrow)
        wait_for_all(frame, team)
        norm_sums(frame, me, team, read(layer + at.MLP_SUM_NORM), narrow)
    if read(layer + at.TAP) != 0:
        copy_states(frame, read(frame + at.X), read(frame + at.X_PITCH), read(layer + at.TAP), me, team)


@part_of_compiled
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
    release()


@functools.cache
def compiled() -> Any:
    """`forward` as machine code for this CPU, from numba's cache on disk where one can be written."""
    sources = source_number()

    def entry(frame: int) -> None:
        if sources != 0:  # the cache tells functions apart by their constants, and would miss changes in other files
            forward(frame)

    return machine_code(entry, "the CPU kernels", "half a minute or more")
