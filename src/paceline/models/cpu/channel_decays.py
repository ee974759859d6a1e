"""Recurrences whose decays are by channel (Kimi's delta net, LightNet), in compiled code: heads of one sequence's rows.

A head's decay is a number for each dimension of its keys; see models.state.recurrence for the formula. LightNet's come
from the logarithms of sums, which stand in the place of a convolution's inputs and are carried from row to row as these
are.

Sources: Kimi Linear (arXiv:2510.26692), LightNet (arXiv:2405.21022).
"""

from __future__ import annotations

import numpy as np

from paceline.models.cpu import offsets as at
from paceline.models.cpu.recurrences import (
    begun_state,
    column,
    correct,
    leave_columns,
    parent_of,
    prepare_delta,
    read_place,
    read_state,
    scale,
    shape_of_heads,
    sigmoid_of,
    silu,
    spare_of,
)
from paceline.models.cpu.vectors import (
    add,
    broadcast,
    exponential,
    fma,
    larger,
    load,
    mul,
    read,
    read_float,
    root,
    smaller,
    softplus,
    store,
    sub,
    total,
)  # fmt: skip
from paceline.utils import part_of_compiled


@part_of_compiled
def sum_logits(frame: int, mixer: int, sequence: int, states: int, first: int, stop: int) -> None:
    """Channels first .. stop - 1 of a sequence's rows: logits give way to the logarithms of sums of e^logit up to their
    token; e^(logit - sum) are the keys, and what sums have grown by the decays.
    """
    done, start = read(sequence + at.SEQUENCE_DONE), read(sequence + at.SEQUENCE_FIRST)
    pitch, offset = 4 * read(mixer + at.MIX_CHANNELS), 4 * read(mixer + at.MIX_FIRST)
    for row in range(start, start + read(sequence + at.SEQUENCE_COUNT)):
        sums = read(frame + at.MIX) + row * read(frame + at.MIX_PITCH) + offset
        keys = read(frame + at.CONVOLVED) + row * read(frame + at.CONVOLVED_PITCH)
        decays = _decays(frame, mixer, row)
        node = parent_of(sequence, done + row - start)
        before = column(frame, sequence, states, pitch, 2, node) + (offset if node >= done else 0)
        if node < 0 and read(sequence + at.SEQUENCE_BEGINS) == 1:
            for i in range(4 * first, 4 * stop, 64):
                store(keys + i, broadcast(np.float32(1.0)))
                store(decays + i, broadcast(np.float32(0.0)))
            continue
        for i in range(4 * first, 4 * stop, 64):
            logit, old = load(sums + i), load(before + i)
            less = softplus(smaller(sub(logit, old), sub(old, logit)))
            new = add(larger(logit, old), less)
            store(sums + i, new)
            store(keys + i, exponential(sub(logit, new)))
            store(decays + i, sub(old, new))
    leave_columns(frame, sequence, states, 4 * first, 4 * stop, pitch, 2, offset)


@part_of_compiled
def _decays(frame: int, mixer: int, row: int) -> int:
    """Address of a row's decays, or of steps that they are made of."""
    made = read(frame + at.MADE) + row * read(frame + at.MADE_PITCH)
    return made if read(mixer + at.MIX_DELTA) == 1 else made + 4 * read(mixer + at.MIX_FURTHER_SIZE)


@part_of_compiled
def _prepare(
    frame: int, mixer: int, row: int, head: int, key: int, query: int, value: int, decays: int
) -> np.float32:  # fmt: skip
    """Key, query, value and decays of a head's row, to four addresses; its beta, 0 without the delta rule."""
    dim, size, heads, delta = shape_of_heads(mixer)
    own, ones = _decays(frame, mixer, row) + head * dim, np.float32(1.0)
    x = read(frame + at.CONVOLVED) + row * read(frame + at.CONVOLVED_PITCH)
    if delta:
        prepare_delta(x, head, heads, head, dim, size, key, query, value)
        bias, rate = (
            read(mixer + at.MIX_STEP_BIAS) + head * dim, broadcast(read_float(read(mixer + at.MIX_RATE) + 4 * head)),
        )  # fmt: skip
        for i in range(0, dim, 64):
            store(decays + i, mul(rate, softplus(add(load(own + i), load(bias + i)))))
        gates = read(frame + at.GATES) + row * read(frame + at.GATES_PITCH)
        return sigmoid_of(read_float(gates + 4 * (2 * read(mixer + at.MIX_RANK) + head)))
    queries = read(frame + at.MIX) + row * read(frame + at.MIX_PITCH)
    factor = broadcast(ones / root(np.float32(dim // 4)))
    for i in range(0, dim, 64):
        store(query + i, mul(silu(load(queries + head * dim + i)), factor))
    scale(x + head * dim, key, dim, ones)
    scale(own, decays, dim, ones)
    scale(queries + 2 * heads * dim + head * size, value, size, ones)
    return np.float32(0.0)


@part_of_compiled
def _decayed(rows: int, left: int, dim: int, target: int) -> None:
    """A row of `dim` bytes times what is left of each of its dimensions."""
    for i in range(0, dim, 64):
        store(target + i, mul(load(rows + i), load(left + i)))


@part_of_compiled
def carry_by_channel(frame: int, mixer: int, sequence: int, states: int, head: int, me: int) -> None:
    """A head through known tokens, one after another: the state is scaled, corrected and read."""
    dim, size, _, delta = shape_of_heads(mixer)
    start, rows = read(sequence + at.SEQUENCE_FIRST), read(sequence + at.SEQUENCE_COUNT)
    state, key = begun_state(states, head, dim // 4 * size), spare_of(frame, me)
    query, left, spare = key + dim, key + 2 * dim, key + 3 * dim
    value, held = key + 4 * dim, key + 4 * dim + size
    for row in range(start, start + rows):
        beta = _prepare(frame, mixer, row, head, key, query, value, left)
        for i in range(0, dim, 64):
            store(left + i, exponential(load(left + i)))
        if delta:
            _decayed(key, left, dim, spare)
            read_state(state, spare, dim, size, held, np.float32(1.0))
            correct(value, held, size, beta)
        _write_and_read(state, key, query, value, left, dim, size, read_place(frame, row, head, size))


@part_of_compiled
def _write_and_read(
    state: int, key: int, query: int, value: int, left: int, dim: int, size: int, out: int
) -> None:  # fmt: skip
    """S = left * S + key value^T, and what the query reads of it."""
    for i in range(0, size, 64):
        sums, written = broadcast(np.float32(0.0)), load(value + i)
        for j in range(0, dim, 4):
            place = state + j // 4 * size + i
            new = fma(broadcast(read_float(key + j)), written, mul(load(place), broadcast(read_float(left + j))))
            store(place, new)
            sums = fma(broadcast(read_float(query + j)), new, sums)
        store(out + i, sums)


@part_of_compiled
def read_nodes_by_channel(frame: int, mixer: int, sequence: int, states: int, head: int, me: int) -> None:
    """A head at scored nodes: each reads the committed state and its ancestors, and records what it would write."""
    dim, size, heads, delta = shape_of_heads(mixer)
    start, done = read(sequence + at.SEQUENCE_FIRST), read(sequence + at.SEQUENCE_DONE)
    state, query = read(states + at.MATRICES) + head * (dim // 4 * size), spare_of(frame, me)
    left, spare, held = query + dim, query + 2 * dim, query + 3 * dim
    for node in range(done, done + read(sequence + at.SEQUENCE_COUNT)):
        row, place = start + node - done, node * heads + head
        key, update = read(states + at.NODE_KEYS) + place * dim, read(states + at.NODE_UPDATES) + place * size
        sums, before = read(states + at.NODE_SUMS) + place * dim, parent_of(sequence, node)
        beta = _prepare(frame, mixer, row, head, key, query, update, sums)
        _add_sums(states, before * heads + head if before >= 0 else -1, dim, sums, left)
        out = read_place(frame, row, head, size)
        _decayed(query, left, dim, spare)
        read_state(state, spare, dim, size, out, np.float32(1.0))
        if delta:
            _decayed(key, left, dim, spare)
            read_state(state, spare, dim, size, held, np.float32(1.0))
            _add_ancestors(sequence, states, before, head, heads, key, dim, size, sums, held)
            correct(update, held, size, beta)
        _add_ancestors(sequence, states, node, head, heads, query, dim, size, sums, out)


@part_of_compiled
def _add_sums(states: int, before: int, dim: int, sums: int, left: int) -> None:
    """Add to a node's decays those of its path, which end at place `before` (-1: there is none); `left`: e^sums."""
    for i in range(0, dim, 64):
        value = load(sums + i)
        if before >= 0:
            value = add(value, load(read(states + at.NODE_SUMS) + before * dim + i))
        store(sums + i, value)
        store(left + i, exponential(value))


@part_of_compiled
def _add_ancestors(
    sequence: int, states: int, node: int, head: int, heads: int, rows: int, dim: int, size: int, sums: int, target: int
) -> None:  # fmt: skip
    """Add what a row of `dim` bytes reads of a node and its ancestors, each decayed to `sums`."""
    while node >= 0:
        place = node * heads + head
        keys, before = read(states + at.NODE_KEYS) + place * dim, read(states + at.NODE_SUMS) + place * dim
        products = broadcast(np.float32(0.0))
        for i in range(0, dim, 64):
            share = exponential(sub(load(sums + i), load(before + i)))
            products = fma(mul(load(rows + i), load(keys + i)), share, products)
        weight, written = broadcast(total(products)), read(states + at.NODE_UPDATES) + place * size
        for i in range(0, size, 64):
            store(target + i, fma(weight, load(written + i), load(target + i)))
        node = parent_of(sequence, node)
