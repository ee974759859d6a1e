"""Recurrences whose heads have one value (Mamba, the simpler simple recurrent unit), in compiled code.

Of these a state behind every input is less to keep than what all inputs have written, and each is made of that behind
the input before it: known tokens carry one state on, scored nodes leave one each. Threads have channels of their own.
A row's sums are the same however a text is fed.

Sources: Mamba (arXiv:2312.00752), From Research to Production and Back (D19-5632).
"""

from __future__ import annotations

import numpy as np

from paceline.models.cpu import offsets as at
from paceline.models.cpu.recurrences import dot, parent_of
from paceline.models.cpu.vectors import (
    LANES,
    add,
    broadcast,
    div,
    exponential,
    fma,
    larger,
    load,
    mul,
    read,
    read_float,
    root,
    softplus,
    store,
    total,
    write_float,
)  # fmt: skip
from paceline.utils import part_of_compiled


@part_of_compiled
def _before_and_behind(sequence: int, states: int, row: int, whole: int) -> tuple[int, int]:
    """Addresses of the states of `whole` bytes before a row of a sequence, and behind it."""
    if read(sequence + at.SEQUENCE_KNOWN) == 1:
        behind = read(states + at.NEXT_MATRICES)
        return read(states + at.MATRICES) if row == 0 else behind, behind
    nodes, node = read(states + at.NODE_STATES), read(sequence + at.SEQUENCE_DONE) + row
    parent = parent_of(sequence, node)
    return read(states + at.MATRICES) if parent < 0 else nodes + parent * whole, nodes + node * whole


@part_of_compiled
def norm_parts(frame: int, mixer: int, me: int, team: int) -> None:
    """Norms of what small maps have made of each row: of steps, keys and queries; the rows divided among threads."""
    rows, weights = read(frame + at.ROWS), read(mixer + at.MIX_PART_NORM)
    rank, dim = 4 * read(mixer + at.MIX_RANK), 4 * read(mixer + at.MIX_KEY_DIM)
    for row in range(rows * me // team, rows * (me + 1) // team):
        x = read(frame + at.GATES) + row * read(frame + at.GATES_PITCH)
        _norm_part(mixer, x, rank, weights)
        _norm_part(mixer, x + rank, dim, weights + rank)
        _norm_part(mixer, x + rank + dim, dim, weights + rank + dim)


@part_of_compiled
def _norm_part(mixer: int, x: int, size: int, weights: int) -> None:
    """RMS norm of `size` bytes of float32, in place."""
    mean = dot(x, x, size) / np.float32(size // 4)
    factor = broadcast(np.float32(1.0) / root(mean + read_float(mixer + at.MIX_PART_EPSILON)))
    for i in range(0, size, 64):
        store(x + i, mul(mul(load(x + i), factor), load(weights + i)))


@part_of_compiled
def carry_mamba(frame: int, mixer: int, sequence: int, states: int, first: int, stop: int) -> None:
    """Channels first .. stop - 1 through the rows of a sequence: S = e^(step * rate) S + B * step * x, read by C.

    Both are multiples of LANES. Steps before their softplus stand in MADE, B and C behind what these were made of.
    """
    dim, rank = 4 * read(mixer + at.MIX_KEY_DIM), 4 * read(mixer + at.MIX_RANK)
    whole, start = read(mixer + at.MIX_HEADS) * dim, read(sequence + at.SEQUENCE_FIRST)
    for row in range(read(sequence + at.SEQUENCE_COUNT)):
        before, behind = _before_and_behind(sequence, states, row, whole)
        keys = read(frame + at.GATES) + (start + row) * read(frame + at.GATES_PITCH) + rank
        x = read(frame + at.CONVOLVED) + (start + row) * read(frame + at.CONVOLVED_PITCH)
        steps = read(frame + at.MADE) + (start + row) * read(frame + at.MADE_PITCH)
        out = read(frame + at.READ) + (start + row) * read(frame + at.READ_PITCH)
        for block in range(4 * first, 4 * stop, 64):
            store(steps + block, softplus(add(load(steps + block), load(read(mixer + at.MIX_STEP_BIAS) + block))))
            for channel in range(block, block + 64, 4):
                step = read_float(steps + channel)
                write_float(
                    out + channel, _step(mixer, channel // 4 * dim, dim, before, behind, keys, step, x + channel)
                )


@part_of_compiled
def _step(
    mixer: int, place: int, dim: int, before: int, behind: int, keys: int, step: np.float32, x: int
) -> np.float32:  # fmt: skip
    """One channel, whose state stands at byte `place`; what is read of it."""
    rates, lanes, written = read(mixer + at.MIX_RATE) + place, broadcast(step), broadcast(step * read_float(x))
    sums = broadcast(np.float32(0.0))
    for i in range(0, dim, 64):
        left = mul(load(before + place + i), exponential(mul(lanes, load(rates + i))))
        state = fma(load(keys + i), written, left)
        store(behind + place + i, state)
        sums = fma(state, load(keys + dim + i), sums)
    return total(sums)


@part_of_compiled
def carry_simple(frame: int, mixer: int, sequence: int, states: int, first: int, stop: int) -> None:
    """Numbers first .. stop - 1, multiples of LANES, through the rows of a sequence: relu(c) of c = g * last c +
    (1 - g) * input. Inputs stand in MIX, and gates before their sigmoid behind them.
    """
    width, start = 4 * read(mixer + at.MIX_HEADS), read(sequence + at.SEQUENCE_FIRST)
    ones, zeros = broadcast(np.float32(1.0)), broadcast(np.float32(0.0))
    for row in range(read(sequence + at.SEQUENCE_COUNT)):
        before, behind = _before_and_behind(sequence, states, row, width)
        x = read(frame + at.MIX) + (start + row) * read(frame + at.MIX_PITCH)
        out = read(frame + at.READ) + (start + row) * read(frame + at.READ_PITCH)
        for i in range(4 * first, 4 * stop, 4 * LANES):
            rest = exponential(mul(load(x + width + i), broadcast(np.float32(-1.0))))
            gate = div(ones, add(ones, rest))
            state = fma(mul(rest, gate), load(x + i), mul(gate, load(before + i)))
            store(behind + i, state)
            store(out + i, larger(state, zeros))
