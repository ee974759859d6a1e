"""Where a pass begins and ends: embeddings in; states, taps and logits out.

In: the tables of models.cpu.layout. Out: what their addresses point at. Not here: layers (models.cpu.forward).
"""

from __future__ import annotations

from numba import njit

from paceline.models.cpu import layout as at
from paceline.models.cpu.attention import copy_row, scaled_norm
from paceline.models.cpu.int8 import to_bytes
from paceline.models.cpu.matrix import head_product, steps_of, strip_size, strip_sums
from paceline.models.cpu.tiles import BYTES, DOT, STRIP
from paceline.models.cpu.vectors import LANES, broadcast, load, load_half, mul, read, read_float, store, store_half

STRIP_BYTES = 4 * STRIP


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
def show(frame: int, source: int, pitch: int, target: int, me: int, team: int) -> None:
    """Copy rows of float32 states to the model's type."""
    rows, hidden, narrow = read(frame + at.ROWS), read(frame + at.HIDDEN), read(frame + at.NARROW) == 1
    for row in range(rows * me // team, rows * (me + 1) // team):
        for i in range(0, hidden, LANES):
            value = load(source + row * pitch + 4 * i)
            if narrow:
                store_half(target + 2 * (row * hidden + i), value)
            else:
                store(target + 4 * (row * hidden + i), value)


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
    x, pitch, kind, rows = (
        head_inputs(frame, me),
        read(frame + at.NORMED_PITCH),
        head_product(frame),
        read(frame + at.HEAD_ROWS),
    )
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
    show(frame, target, pitch, read(frame + at.FINAL_TAP), me, team)
