"""Convolutions and recurrences of mixers in compiled code: columns and heads of one sequence's rows.

An input stands in the pass (`at.MIX`), in the records of an earlier pass over the same tree, or among the columns that
were committed; its parent says which comes before it. See models.state.recurrence for the formula.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from paceline.models.cpu import offsets as at
from paceline.models.cpu.vectors import (
    LANES,
    add,
    broadcast,
    div,
    exponential,
    fma,
    largest,
    load,
    mul,
    read,
    read_float,
    root,
    store,
    sub,
    total,
    write_float,
)  # fmt: skip
from paceline.models.mixer_spec import KEY_EPS
from paceline.utils import part_of_compiled


@part_of_compiled
def column(frame: int, sequence: int, states: int, pitch: int, taps: int, node: int) -> int:
    """Address of the input of a node; of committed ones, node -1 is the last."""
    done = read(sequence + at.SEQUENCE_DONE)
    if node < 0:
        return read(states + at.COLUMNS) + (taps - 1 + node) * pitch
    if node < done:
        return read(states + at.NODE_COLUMNS) + node * pitch
    return read(frame + at.MIX) + (read(sequence + at.SEQUENCE_FIRST) + node - done) * read(frame + at.MIX_PITCH)


@part_of_compiled
def parent_of(sequence: int, node: int) -> int:
    """The node before one; of those that are committed, the one before."""
    return node - 1 if node <= 0 else read(read(sequence + at.SEQUENCE_PARENTS) + 8 * node)


@part_of_compiled
def convolve_rows(frame: int, mixer: int, sequence: int, states: int, first: int, stop: int) -> None:
    """Channels first .. stop - 1 of a sequence's rows, each a node behind its parents."""
    done, rows, start = (
        read(sequence + at.SEQUENCE_DONE), read(sequence + at.SEQUENCE_COUNT), read(sequence + at.SEQUENCE_FIRST),
    )  # fmt: skip
    channels, taps, weights = read(mixer + at.MIX_CHANNELS), read(mixer + at.MIX_TAPS), read(mixer + at.CONV_WEIGHT)
    offset = 4 * read(mixer + at.MIX_FIRST)
    pitch, bias, short = 4 * channels, read(mixer + at.CONV_BIAS), read(mixer + at.MIX_HEADS) == 0
    for row in range(rows):
        own, x = done + row, read(frame + at.MIX) + (start + row) * read(frame + at.MIX_PITCH)
        if short:
            for i in range(4 * first, 4 * stop, 64):
                store(x + i, mul(load(x + i), load(x + 2 * pitch + i)))
        out = read(frame + at.CONVOLVED) + (start + row) * read(frame + at.CONVOLVED_PITCH)
        for i in range(4 * first, 4 * stop, 64):
            value = mul(load(x + offset + i), load(weights + (taps - 1) * pitch + i))
            store(out + i, value)
        node = own
        for back in range(1, taps):
            node = parent_of(sequence, node)
            source = column(frame, sequence, states, pitch, taps, node) + (offset if node >= done else 0)
            tap = weights + (taps - 1 - back) * pitch
            for i in range(4 * first, 4 * stop, 64):
                store(out + i, fma(load(source + i), load(tap + i), load(out + i)))
        if not short:
            for i in range(4 * first, 4 * stop, 64):
                value = load(out + i)
                store(out + i, silu(value if bias == 0 else add(value, load(bias + i))))
    leave_columns(frame, sequence, states, 4 * first, 4 * stop, pitch, taps, offset)


@part_of_compiled
def silu(x: Any) -> Any:
    """x * sigmoid(x) of lanes."""
    return div(x, add(broadcast(np.float32(1.0)), exponential(mul(x, broadcast(np.float32(-1.0))))))


@part_of_compiled
def leave_columns(
    frame: int, sequence: int, states: int, first: int, stop: int, pitch: int, taps: int, offset: int
) -> None:  # fmt: skip
    """The inputs of all rows as records; of known tokens the last ones, which will be the committed columns."""
    done, rows = read(sequence + at.SEQUENCE_DONE), read(sequence + at.SEQUENCE_COUNT)
    if read(sequence + at.SEQUENCE_KNOWN) == 1:
        for back in range(1, taps):
            node = done + rows - back
            source = column(frame, sequence, states, pitch, taps, node) + (offset if node >= done else 0)
            target = read(states + at.NEXT_COLUMNS) + (taps - 1 - back) * pitch
            for i in range(first, stop, 64):
                store(target + i, load(source + i))
        return
    for row in range(done, done + rows):
        source = column(frame, sequence, states, pitch, taps, row) + offset
        for i in range(first, stop, 64):
            store(read(states + at.NODE_COLUMNS) + row * pitch + i, load(source + i))


@part_of_compiled
def exp_of(value: np.float32) -> np.float32:
    """e^x of one number."""
    return largest(exponential(broadcast(value)))


@part_of_compiled
def _softplus(value: np.float32) -> np.float32:
    """log(1 + e^x)."""
    return value if value > np.float32(20.0) else np.float32(np.log1p(np.exp(np.float64(value))))


@part_of_compiled
def dot(a: int, b: int, size: int) -> np.float32:
    """Sum of products of `size` bytes of float32 at two addresses."""
    sums = broadcast(np.float32(0.0))
    for i in range(0, size, 64):
        sums = fma(load(a + i), load(b + i), sums)
    return total(sums)


@part_of_compiled
def scale(source: int, target: int, size: int, factor: np.float32) -> None:
    """`size` bytes of float32 times a factor, to another address."""
    for i in range(0, size, 64):
        store(target + i, mul(load(source + i), broadcast(factor)))


@part_of_compiled
def shape_of_heads(mixer: int) -> tuple[int, int, int, bool]:
    """Bytes of a head's keys and of its values, the number of heads, and whether they have the delta rule."""
    dim, size = 4 * read(mixer + at.MIX_KEY_DIM), 4 * read(mixer + at.MIX_VALUE_DIM)
    return dim, size, read(mixer + at.MIX_HEADS), read(mixer + at.MIX_DELTA) == 1


@part_of_compiled
def spare_of(frame: int, me: int) -> int:
    """Address of this thread's own numbers."""
    return read(frame + at.MIX_SPARE) + me * read(frame + at.MIX_SPARE_SIZE)


@part_of_compiled
def read_place(frame: int, row: int, head: int, size: int) -> int:
    """Address of what a row reads of a head."""
    return read(frame + at.READ) + row * read(frame + at.READ_PITCH) + head * size


@part_of_compiled
def begun_state(states: int, head: int, whole: int) -> int:
    """Address of the next state of a head, `whole` bytes, which begins as the committed one."""
    source, state = read(states + at.MATRICES) + head * whole, read(states + at.NEXT_MATRICES) + head * whole
    if source != state:
        for i in range(0, whole, 64):
            store(state + i, load(source + i))
    return state


@part_of_compiled
def correct(value: int, held: int, size: int, beta: np.float32) -> None:
    """beta * (value - what the state holds for its key), in its place."""
    for i in range(0, size, 64):
        store(value + i, mul(sub(load(value + i), load(held + i)), broadcast(beta)))


@part_of_compiled
def prepare_delta(
    x: int, group: int, groups: int, head: int, dim: int, size: int, key: int, query: int, value: int
) -> None:  # fmt: skip
    """Key, query and value of a head of the delta rule, to three addresses; key and query have one length.

    `x`: a row of queries and keys of so many groups, and of values.
    """
    first, second = x + group * dim, x + (groups + group) * dim
    lengths = np.float32(1.0) / root(dot(first, first, dim) + np.float32(KEY_EPS))
    scale(first, query, dim, lengths / root(np.float32(dim // 4)))
    scale(second, key, dim, np.float32(1.0) / root(dot(second, second, dim) + np.float32(KEY_EPS)))
    scale(x + 2 * groups * dim + head * size, value, size, np.float32(1.0))


@part_of_compiled
def sigmoid_of(value: np.float32) -> np.float32:
    """1 / (1 + e^-x) of one number."""
    return np.float32(1.0) / (np.float32(1.0) + exp_of(-value))


@part_of_compiled
def _prepare(frame: int, mixer: int, row: int, head: int, key: int, query: int, value: int) -> tuple[Any, Any]:
    """Key, query and value of a head's row, to three addresses; its decay, and its beta (0 without the delta rule).

    A row of what was convolved is queries, keys and values of the delta rule; of Mamba-2 values, keys and queries.
    """
    x = read(frame + at.CONVOLVED) + row * read(frame + at.CONVOLVED_PITCH)
    gates, groups = read(frame + at.GATES) + row * read(frame + at.GATES_PITCH), read(mixer + at.MIX_GROUPS)
    dim, size, heads, delta = shape_of_heads(mixer)
    group = head % groups if read(mixer + at.MIX_IN_TURN) == 1 else head // (heads // groups)
    rate, bias = (
        read_float(read(mixer + at.MIX_RATE) + 4 * head), read_float(read(mixer + at.MIX_STEP_BIAS) + 4 * head),
    )  # fmt: skip
    if delta:
        prepare_delta(x, group, groups, head, dim, size, key, query, value)
        beta = sigmoid_of(read_float(gates + 4 * head))
        return rate * _softplus(read_float(gates + 4 * (heads + head)) + bias), beta
    step = _softplus(read_float(gates + 4 * head) + bias)
    step = min(max(step, read_float(mixer + at.MIX_LEAST)), read_float(mixer + at.MIX_MOST))
    shared = x + heads * size
    scale(shared + group * dim, key, dim, np.float32(1.0))
    scale(shared + (groups + group) * dim, query, dim, np.float32(1.0))
    scale(x + head * size, value, size, step)
    return rate * step, np.float32(0.0)


@part_of_compiled
def read_state(state: int, rows: int, dim: int, size: int, target: int, factor: np.float32) -> None:
    """factor * (row of `dim` bytes) times a state (key dim, value dim), to `size` bytes."""
    for i in range(0, size, 64):
        sums = broadcast(np.float32(0.0))
        for j in range(dim // 4):
            sums = fma(broadcast(read_float(rows + 4 * j)), load(state + j * size + i), sums)
        store(target + i, mul(sums, broadcast(factor)))


@part_of_compiled
def carry(frame: int, mixer: int, sequence: int, states: int, head: int, me: int) -> None:
    """A head through known tokens, one after another: the state is scaled, corrected and read."""
    dim, size, _, delta = shape_of_heads(mixer)
    start, rows = read(sequence + at.SEQUENCE_FIRST), read(sequence + at.SEQUENCE_COUNT)
    state, spare = begun_state(states, head, dim // 4 * size), spare_of(frame, me)
    key, query, value, held = spare, spare + dim, spare + 2 * dim, spare + 2 * dim + size
    for row in range(start, start + rows):
        decay, beta = _prepare(frame, mixer, row, head, key, query, value)
        left = exp_of(decay)
        if delta:
            read_state(state, key, dim, size, held, left)
            correct(value, held, size, beta)
        _write_and_read(state, key, query, value, dim, size, left, read_place(frame, row, head, size))


@part_of_compiled
def _write_and_read(
    state: int, key: int, query: int, value: int, dim: int, size: int, left: np.float32, out: int
) -> None:  # fmt: skip
    """S = left * S + key value^T, and what the query reads of it."""
    lanes = broadcast(left)
    for i in range(0, size, 64):
        sums, written = broadcast(np.float32(0.0)), load(value + i)
        for j in range(dim // 4):
            at_key = state + j * size + i
            new = fma(broadcast(read_float(key + 4 * j)), written, mul(load(at_key), lanes))
            store(at_key, new)
            sums = fma(broadcast(read_float(query + 4 * j)), new, sums)
        store(out + i, sums)


@part_of_compiled
def read_nodes(frame: int, mixer: int, sequence: int, states: int, head: int, me: int) -> None:
    """A head at scored nodes: each reads the committed state and its ancestors, and records what it would write."""
    dim, size, heads, delta = shape_of_heads(mixer)
    start, done = read(sequence + at.SEQUENCE_FIRST), read(sequence + at.SEQUENCE_DONE)
    state, query = read(states + at.MATRICES) + head * (dim // 4 * size), spare_of(frame, me)
    held = query + dim
    for node in range(done, done + read(sequence + at.SEQUENCE_COUNT)):
        row = start + node - done
        key = read(states + at.NODE_KEYS) + (node * heads + head) * dim
        update = read(states + at.NODE_UPDATES) + (node * heads + head) * size
        decay, beta = _prepare(frame, mixer, row, head, key, query, update)
        sums, before = read(states + at.NODE_SUMS), parent_of(sequence, node)
        decay += np.float32(0.0) if before < 0 else read_float(sums + 4 * (before * heads + head))
        write_float(sums + 4 * (node * heads + head), decay)
        left = exp_of(decay)
        out = read_place(frame, row, head, size)
        read_state(state, query, dim, size, out, left)
        if delta:
            read_state(state, key, dim, size, held, left)
            _add_ancestors(sequence, states, before, head, heads, key, dim, size, decay, held)
            correct(update, held, size, beta)
        _add_ancestors(sequence, states, node, head, heads, query, dim, size, decay, out)


@part_of_compiled
def _add_ancestors(
    sequence: int, states: int, node: int, head: int, heads: int, rows: int, dim: int, size: int, decay: np.float32,
    target: int,
) -> None:  # fmt: skip
    """Add what a row of `dim` bytes reads of a node and its ancestors, each decayed to `decay`."""
    while node >= 0:
        place = node * heads + head
        weight = dot(rows, read(states + at.NODE_KEYS) + place * dim, dim)
        weight *= exp_of(decay - read_float(read(states + at.NODE_SUMS) + 4 * place))
        written = read(states + at.NODE_UPDATES) + place * size
        for i in range(0, size, 64):
            store(target + i, fma(broadcast(weight), load(written + i), load(target + i)))
        node = parent_of(sequence, node)


@part_of_compiled
def settle_head(frame: int, state: int, head: int, me: int) -> None:
    """What a path of scored nodes leaves of a head's state, sixteen nodes at a time; to its own place, or another."""
    mixer, path, count = read(state + at.SETTLED_MIXER), read(frame + at.PATH), read(frame + at.PATH_COUNT)
    dim, size, heads, _ = shape_of_heads(mixer)
    whole, by_channel = dim // 4 * size, read(mixer + at.MIX_BY_CHANNEL) == 1
    source, target = read(state + at.SETTLED_FROM) + head * whole, read(state + at.SETTLED_TO) + head * whole
    left = spare_of(frame, me)
    keys, last = left + dim, read(path + 8 * (count - 1)) * heads + head
    for i in range(0, dim, 64):
        store(left + i, exponential(_summed(state, last, i, dim, by_channel)))
    for first in range(0, count, LANES):
        here = min(LANES, count - first)
        for node in range(here):
            place = read(path + 8 * (first + node)) * heads + head
            for i in range(0, dim, 64):
                apart = sub(_summed(state, last, i, dim, by_channel), _summed(state, place, i, dim, by_channel))
                key = load(read(state + at.SETTLED_KEYS) + place * dim + i)
                store(keys + node * dim + i, mul(key, exponential(apart)))
        for row in range(dim // 4):
            _settle_row(state, path + 8 * first, here, heads, head, left, row, source, target)
        source = target
        for i in range(0, dim, 64):
            store(left + i, broadcast(np.float32(1.0)))


@part_of_compiled
def _summed(state: int, place: int, offset: int, dim: int, by_channel: bool) -> Any:
    """Lanes of the decays summed up to a head of a node, from byte `offset` of its key dimensions on."""
    sums = read(state + at.SETTLED_SUMS)
    return load(sums + place * dim + offset) if by_channel else broadcast(read_float(sums + 4 * place))


@part_of_compiled
def _settle_row(
    state: int, path: int, count: int, heads: int, head: int, left: int, row: int, source: int, target: int
) -> None:  # fmt: skip
    """One key dimension: what is left of it, and what each node has written there; decayed keys stand behind `left`."""
    mixer, updates = read(state + at.SETTLED_MIXER), read(state + at.SETTLED_UPDATES)
    dim, size, _, _ = shape_of_heads(mixer)
    share, keys = broadcast(read_float(left + 4 * row)), left + dim + 4 * row
    for i in range(0, size, 64):
        value = mul(load(source + row * size + i), share)
        for node in range(count):
            place = read(path + 8 * node) * heads + head
            value = fma(broadcast(read_float(keys + node * dim)), load(updates + place * size + i), value)
        store(target + row * size + i, value)
