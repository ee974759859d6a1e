"""Mixers in compiled code: what stands beside attention in a layer, or instead of it (models.layers.mixers).

Stages, between which the threads meet: the projections of all rows; convolutions, of which each thread has columns of
its own; further maps of what came of these; the recurrence, of which each has heads of its own; gates and norms, row by
row; the projection back. Known tokens carry the state from row to row. A scored node reads the committed state, and its
ancestors by the formula of models.state.recurrence: what it would write goes to its sequence's records, and the state
stays as it is. Where heads have one value, it leaves a state of its own instead (models.cpu.node_states).

This is an entry of its own, so that it is compiled for models that have it only.
"""

from __future__ import annotations

import functools
from typing import Any, Final

import numpy as np

from paceline.models.cpu import offsets as at
from paceline.models.cpu.attention import copy_row, scaled_norm
from paceline.models.cpu.channel_decays import carry_by_channel, read_nodes_by_channel, sum_logits
from paceline.models.cpu.compilation import machine_code, source_number
from paceline.models.cpu.matrix import steps_of, strip_size, strip_sums, when_prepared
from paceline.models.cpu.node_states import carry_mamba, carry_simple, norm_parts
from paceline.models.cpu.recurrences import carry, convolve_rows, read_nodes, settle_head, silu
from paceline.models.cpu.sublayers import STRIP_BYTES, add_bias, add_residual, normed_rows, project
from paceline.models.cpu.threads import wait_for_all
from paceline.models.cpu.tiles import DOT, STRIP
from paceline.models.cpu.vectors import (
    LANES,
    add,
    broadcast,
    call_int,
    div,
    exponential,
    fma,
    load,
    mul,
    read,
    read_float,
    store,
)  # fmt: skip
from paceline.utils import part_of_compiled

CONV: Final = 1
DELTA: Final = 2
MAMBA2: Final = 3
KIMI: Final = 4
LIGHT: Final = 5
MAMBA: Final = 6
SIMPLE: Final = 7
"""Kinds of mixers; the last two leave a state behind every scored node."""

GATE_BEFORE: Final = 1
GATE_AFTER: Final = 2
"""Where the gate of Mamba-2 stands to its norm; 0: there is none."""


@part_of_compiled
def _multiplied(
    frame: int, me: int, team: int, weights: int, kind: int, bias: int, x: int, pitch: int, inputs: int, size: int,
    target: int, target_pitch: int,
) -> None:  # fmt: skip
    """All rows of `inputs` activations times a matrix of `size` outputs, as float32 rows of whole strips."""
    sums, steps = read(frame + at.SUMS) + me * read(frame + at.SUMS_SIZE), steps_of(kind, inputs)
    strips, rows = (size + STRIP - 1) // STRIP, read(frame + at.ROWS)
    for strip in range(strips * me // team, strips * (me + 1) // team):
        strip_sums(kind, weights + strip * strip_size(kind, steps), steps, x, pitch, rows, sums)
        add_bias(sums, rows, 0 if bias == 0 else bias + strip * STRIP_BYTES)
        for row in range(rows):
            out = target + row * target_pitch + strip * STRIP_BYTES
            copy_row(sums + row * STRIP_BYTES, STRIP, out, False)


@part_of_compiled
def _projected(
    frame: int, layer: int, me: int, team: int, weights: int, kind: int, bias: int, size: int, target: int, pitch: int
) -> None:  # fmt: skip
    """All normed rows times a matrix, as float32 rows of whole strips."""
    x, inputs = normed_rows(frame, me, team, read(layer + at.ATTENTION_NORM), kind, 0), read(frame + at.HIDDEN)
    _multiplied(
        frame, me, team, weights, kind, bias, x, read(frame + at.NORMED_PITCH), inputs, size, target, pitch
    )  # fmt: skip
    when_prepared(frame, team, read(frame + at.ROWS))  # normed rows that threads share give way to what follows


@part_of_compiled
def _project_in(frame: int, layer: int, mixer: int, me: int, team: int) -> None:
    _projected(
        frame, layer, me, team, read(mixer + at.MIX_IN), read(mixer + at.MIX_IN_KIND), read(mixer + at.MIX_IN_BIAS),
        read(mixer + at.MIX_IN_SIZE), read(frame + at.MIX), read(frame + at.MIX_PITCH),
    )  # fmt: skip
    if read(mixer + at.MIX_GATES) != 0 and read(mixer + at.MIX_KIND) != MAMBA:
        _projected(
            frame, layer, me, team, read(mixer + at.MIX_GATES), read(mixer + at.MIX_GATES_KIND),
            read(mixer + at.MIX_GATES_BIAS), read(mixer + at.MIX_GATES_SIZE), read(frame + at.GATES),
            read(frame + at.GATES_PITCH),
        )  # fmt: skip
    wait_for_all(frame, team)


@part_of_compiled
def _convolve(frame: int, layer: int, mixer: int, me: int, team: int) -> None:
    """Columns of this thread, of all sequences: convolved, or LightNet's summed up, and left where the next pass finds
    them.
    """
    blocks, summed = (read(mixer + at.MIX_CHANNELS) + LANES - 1) // LANES, read(mixer + at.MIX_KIND) == LIGHT
    first, stop = blocks * me // team * LANES, blocks * (me + 1) // team * LANES
    for sequence in range(read(frame + at.SEQUENCES)):
        rows = read(frame + at.SEQUENCE_ROWS) + sequence * at.SEQUENCE_FIELDS
        states = read(layer + at.STATES) + sequence * at.STATE_FIELDS
        if summed:
            sum_logits(frame, mixer, rows, states, first, stop)
        else:
            convolve_rows(frame, mixer, rows, states, first, stop)
    wait_for_all(frame, team)


@part_of_compiled
def _make_more(frame: int, mixer: int, me: int, team: int) -> None:
    """What further maps make of rows: Mamba's of what was convolved, and others of the first numbers of GATES."""
    gates, pitch, rank = read(frame + at.GATES), read(frame + at.GATES_PITCH), read(mixer + at.MIX_RANK)
    if read(mixer + at.MIX_KIND) == MAMBA:
        _multiplied(
            frame, me, team, read(mixer + at.MIX_GATES), read(mixer + at.MIX_GATES_KIND), 0,
            read(frame + at.CONVOLVED), read(frame + at.CONVOLVED_PITCH), read(mixer + at.MIX_CHANNELS),
            read(mixer + at.MIX_GATES_SIZE), gates, pitch,
        )  # fmt: skip
        wait_for_all(frame, team)
        if read(mixer + at.MIX_PART_NORM) != 0:
            norm_parts(frame, mixer, me, team)
            wait_for_all(frame, team)
    size, made = read(mixer + at.MIX_FURTHER_SIZE), read(frame + at.MADE)
    for number in range(1 if read(mixer + at.MIX_OTHER_FURTHER) == 0 else 2):
        weights = read(mixer + (at.MIX_FURTHER if number == 0 else at.MIX_OTHER_FURTHER))
        _multiplied(
            frame, me, team, weights, read(mixer + at.MIX_FURTHER_KIND), 0, gates + 4 * number * rank, pitch, rank,
            size, made + 4 * number * size, read(frame + at.MADE_PITCH),
        )  # fmt: skip
    wait_for_all(frame, team)


@part_of_compiled
def _recur(frame: int, layer: int, mixer: int, me: int, team: int) -> None:
    """Heads of this thread, sequence by sequence."""
    kind, heads = read(mixer + at.MIX_KIND), read(mixer + at.MIX_HEADS)
    blocks = heads // LANES
    first, stop = blocks * me // team * LANES, blocks * (me + 1) // team * LANES
    for sequence in range(read(frame + at.SEQUENCES)):
        rows = read(frame + at.SEQUENCE_ROWS) + sequence * at.SEQUENCE_FIELDS
        states = read(layer + at.STATES) + sequence * at.STATE_FIELDS
        if kind == MAMBA:
            carry_mamba(frame, mixer, rows, states, first, stop)
        elif kind == SIMPLE:
            carry_simple(frame, mixer, rows, states, first, stop)
        else:
            for head in range(heads * me // team, heads * (me + 1) // team):
                _recur_head(frame, mixer, rows, states, head, me)
    wait_for_all(frame, team)


@part_of_compiled
def _recur_head(frame: int, mixer: int, rows: int, states: int, head: int, me: int) -> None:
    """One head of one sequence."""
    known = read(rows + at.SEQUENCE_KNOWN) == 1
    if read(mixer + at.MIX_BY_CHANNEL) == 1:
        if known:
            carry_by_channel(frame, mixer, rows, states, head, me)
        else:
            read_nodes_by_channel(frame, mixer, rows, states, head, me)
    elif known:
        carry(frame, mixer, rows, states, head, me)
    else:
        read_nodes(frame, mixer, rows, states, head, me)


@part_of_compiled
def _gate_conv(frame: int, mixer: int, row: int) -> None:
    """c * (what was convolved + bias)."""
    size, bias = read(mixer + at.MIX_CHANNELS), read(mixer + at.CONV_BIAS)
    gate = read(frame + at.MIX) + row * read(frame + at.MIX_PITCH) + 4 * size
    source = read(frame + at.CONVOLVED) + row * read(frame + at.CONVOLVED_PITCH)
    target = read(frame + at.READ) + row * read(frame + at.READ_PITCH)
    for i in range(0, 4 * size, 64):
        value = load(source + i)
        if bias != 0:
            value = add(value, load(bias + i))
        store(target + i, mul(value, load(gate + i)))


@part_of_compiled
def _gate_delta(frame: int, mixer: int, row: int) -> None:
    """norm(what a head has read) * silu(z), head by head, in place."""
    heads, size = read(mixer + at.MIX_HEADS), 4 * read(mixer + at.MIX_VALUE_DIM)
    gate = read(frame + at.MIX) + row * read(frame + at.MIX_PITCH) + 4 * read(mixer + at.MIX_CHANNELS)
    target = read(frame + at.READ) + row * read(frame + at.READ_PITCH)
    for head in range(heads):
        out = target + head * size
        scaled_norm(out, size // 4, read(mixer + at.MIX_NORM), read_float(frame + at.EPSILON), out, False)
        for i in range(0, size, 64):
            store(out + i, mul(load(out + i), silu(load(gate + head * size + i))))


@part_of_compiled
def _gate_mamba2(frame: int, mixer: int, row: int) -> None:
    """(what was read + skip * x), gated and normed, in place."""
    heads, size, norm = read(mixer + at.MIX_HEADS), 4 * read(mixer + at.MIX_VALUE_DIM), read(mixer + at.MIX_NORM)
    gate, x = (
        read(frame + at.MIX) + row * read(frame + at.MIX_PITCH),
        read(frame + at.CONVOLVED) + row * read(frame + at.CONVOLVED_PITCH),
    )
    target, order = read(frame + at.READ) + row * read(frame + at.READ_PITCH), read(mixer + at.MIX_NORM_ORDER)
    for head in range(heads):
        skip = broadcast(read_float(read(mixer + at.MIX_SKIP) + 4 * head))
        for i in range(head * size, (head + 1) * size, 64):
            value = fma(skip, load(x + i), load(target + i))
            if order != GATE_AFTER:
                value = mul(value, silu(load(gate + i)))
            store(target + i, value)
    if order != 0:
        group = 4 * read(mixer + at.MIX_NORM_SIZE)
        for start in range(0, heads * size, group):
            out = target + start
            scaled_norm(out, group // 4, norm + start, read_float(frame + at.EPSILON), out, False)
    if order == GATE_AFTER:
        for i in range(0, heads * size, 64):
            store(target + i, mul(load(target + i), silu(load(gate + i))))


@part_of_compiled
def _gate_by_channel(frame: int, mixer: int, row: int, kind: int) -> None:
    """norm(what was read), head by head times sigmoid(z) or all of it times silu(z), in place."""
    each = 4 * read(mixer + at.MIX_NORM_SIZE)
    gate = read(frame + at.MADE) + row * read(frame + at.MADE_PITCH)
    if kind == KIMI:
        gate += 4 * read(mixer + at.MIX_FURTHER_SIZE)
    target, ones = read(frame + at.READ) + row * read(frame + at.READ_PITCH), broadcast(np.float32(1.0))
    for start in range(0, 4 * read(mixer + at.MIX_OUT_SIZE), each):
        out = target + start
        scaled_norm(out, each // 4, read(mixer + at.MIX_NORM), read_float(frame + at.EPSILON), out, False)
        for i in range(0, each, 64):
            z = load(gate + start + i)
            if kind == KIMI:
                left = add(ones, exponential(mul(z, broadcast(np.float32(-1.0)))))
                store(out + i, div(load(out + i), left))
            else:
                store(out + i, mul(load(out + i), silu(z)))


@part_of_compiled
def _gate_mamba(frame: int, mixer: int, row: int) -> None:
    """(what was read + skip * x) * silu(z), in place."""
    size, skips = 4 * read(mixer + at.MIX_CHANNELS), read(mixer + at.MIX_SKIP)
    gate = read(frame + at.MIX) + row * read(frame + at.MIX_PITCH) + size
    x = read(frame + at.CONVOLVED) + row * read(frame + at.CONVOLVED_PITCH)
    target = read(frame + at.READ) + row * read(frame + at.READ_PITCH)
    for i in range(0, size, 64):
        value = fma(load(skips + i), load(x + i), load(target + i))
        store(target + i, mul(value, silu(load(gate + i))))


@part_of_compiled
def _add_read(frame: int, mixer: int, me: int, team: int, rounded: bool) -> None:
    """What was read, which no map follows, to the residual stream, by the threads that have read it."""
    blocks = read(mixer + at.MIX_HEADS) // LANES
    first, stop = 64 * (blocks * me // team), 64 * (blocks * (me + 1) // team)
    spare = read(frame + at.SUMS) + me * read(frame + at.SUMS_SIZE)
    for row in range(read(frame + at.ROWS)):
        x = read(frame + at.X) + row * read(frame + at.X_PITCH) + first
        source = read(frame + at.READ) + row * read(frame + at.READ_PITCH) + first
        add_residual(frame, x, source, stop - first, rounded, spare)


@part_of_compiled
def _gate(frame: int, mixer: int, me: int, team: int) -> None:
    """What the projection behind takes, the rows divided among threads."""
    rows, kind, size = read(frame + at.ROWS), read(mixer + at.MIX_KIND), read(mixer + at.MIX_OUT_SIZE)
    half = read(mixer + at.MIX_OUT_KIND) == DOT
    for row in range(rows * me // team, rows * (me + 1) // team):
        if kind == CONV:
            _gate_conv(frame, mixer, row)
        elif kind == DELTA:
            _gate_delta(frame, mixer, row)
        elif kind == MAMBA2:
            _gate_mamba2(frame, mixer, row)
        elif kind == MAMBA:
            _gate_mamba(frame, mixer, row)
        else:
            _gate_by_channel(frame, mixer, row, kind)
        if half:
            out = read(frame + at.READ) + row * read(frame + at.READ_PITCH)
            copy_row(out, size, out, True)
    wait_for_all(frame, team)


@functools.cache
def compiled_mixers() -> Any:
    """What mixers add to a layer's pass as machine code; the last argument: 0 for all but the projection back, then
    that.
    """
    sources = source_number()

    def entry(frame: int, layer: int, me: int, team: int, behind: int) -> None:
        if sources == 0:  # see forward.compiled
            return
        mixer = read(layer + at.MIXER)
        if behind == 0:
            _project_in(frame, layer, mixer, me, team)
            if read(mixer + at.MIX_CHANNELS) != 0:
                _convolve(frame, layer, mixer, me, team)
            if read(mixer + at.MIX_FURTHER) != 0:
                _make_more(frame, mixer, me, team)
            if read(mixer + at.MIX_HEADS) != 0:
                _recur(frame, layer, mixer, me, team)
            if read(mixer + at.MIX_OUT) != 0:
                _gate(frame, mixer, me, team)
        else:
            rounded = read(frame + at.NARROW) == 1 and read(layer + at.MLP) == 0
            if read(mixer + at.MIX_OUT) == 0:
                _add_read(frame, mixer, me, team, rounded)
            else:
                project(
                    frame, me, team, read(mixer + at.MIX_OUT), read(mixer + at.MIX_OUT_KIND),
                    read(mixer + at.MIX_OUT_BIAS), read(frame + at.READ), read(frame + at.READ_PITCH),
                    read(mixer + at.MIX_OUT_SIZE), 0, rounded, False, 0,
                )  # fmt: skip
            wait_for_all(frame, team)

    return machine_code(entry, "kernels of mixers", "some seconds", arguments=5)


@part_of_compiled
def _settle(frame: int) -> None:
    """All heads of all states that are committed, divided among threads."""
    me, team = 0, 1
    if read(frame + at.THREAD) != 0:
        me, team = call_int(read(frame + at.THREAD)), call_int(read(frame + at.TEAM))
    for item in range(read(frame + at.SETTLED_COUNT)):
        state = read(frame + at.SETTLED) + item * at.SETTLED_FIELDS
        heads = read(read(state + at.SETTLED_MIXER) + at.MIX_HEADS)
        for head in range(heads * me // team, heads * (me + 1) // team):
            settle_head(frame, state, head, me)


@functools.cache
def compiled_settling() -> Any:
    """What makes the states behind accepted nodes, as machine code."""
    sources = source_number()

    def entry(frame: int) -> None:
        if sources != 0:  # see forward.compiled
            _settle(frame)

    return machine_code(entry, "kernels of states", "some seconds")
