"""Products of a draft in 8 bits: rows of float32 become bytes, strips of packed weights multiply them.

In: float32 activations, weights of models.kernels.draft_tiles. Out: sums as float32; the projections of the layer with them. Not
here: the inner loop (models.kernels.draft_tiles), the head (models.kernels.draft_head), the same with other weights
(models.kernels.forward).
"""

from __future__ import annotations

import numpy as np
from numba import njit

from paceline.models.kernels import draft_frame as of
from paceline.models.kernels import frame as at
from paceline.models.kernels.attention import scaled_norm
from paceline.models.kernels.draft_tiles import INPUTS, TOP, accumulate_bytes, load_sums, size_of, store_bytes
from paceline.models.kernels.forward import put_gated, put_residual
from paceline.models.kernels.matrix import AHEAD
from paceline.models.kernels.tiles import GROUP, MOST_ROWS, STEP, STRIP
from paceline.models.kernels.vectors import LANES, broadcast, larger, largest, load, mul, read, read_float, store, sub

STRIP_BYTES = 4 * STRIP


@njit(error_model="numpy")
def shrink(source: int, size: int, target: int) -> None:
    """A row of float32 as bytes of models.kernels.draft_tiles; their scale follows them."""
    top = broadcast(np.float32(1e-30))
    for i in range(0, size, LANES):
        top = larger(top, size_of(load(source + 4 * i)))
    most = largest(top)
    factor = broadcast(np.float32(TOP) / most)
    for i in range(0, size, LANES):
        store_bytes(target + i, mul(load(source + 4 * i), factor))
    store(target + size, broadcast(most / np.float32(TOP)))


@njit(error_model="numpy")
def byte_strip(
    strips: int, scales: int, strip: int, size: int, x: int, pitch: int, rows: int, sums: int, out: int, out_pitch: int
) -> None:  # fmt: skip
    """64 outputs of all rows of bytes, float32 to out (rows, 64), which may be `sums`, scratch of (rows, 64)."""
    groups, scales = size // (INPUTS * GROUP), scales + strip * 2 * STRIP_BYTES
    weights = strips + strip * groups * GROUP * STEP
    for first in range(0, rows, MOST_ROWS):
        count, own = min(MOST_ROWS, rows - first), sums + first * STRIP_BYTES
        accumulate_bytes(count, weights, groups, x + first * pitch, pitch, own, weights + AHEAD)
        for row in range(count):
            scale, target = load(x + (first + row) * pitch + size), out + (first + row) * out_pitch
            for i in range(0, STRIP_BYTES, 64):
                value = sub(load_sums(own + row * STRIP_BYTES + i), load(scales + i))
                store(target + i, mul(mul(value, load(scales + STRIP_BYTES + i)), scale))


@njit(error_model="numpy")
def small_project(data: int, me: int, team: int, strips: int, scales: int, source: int, source_pitch: int, inputs: int) -> None:
    """This thread's strips of a projection back to the residual stream."""
    frame = read(data + of.FRAME)
    rows, pitch, x = read(frame + at.ROWS), read(data + of.BYTES_PITCH), read(data + of.BYTES) + me * read(data + of.BYTES_SIZE)
    sums, count = read(frame + at.SUMS) + me * read(frame + at.SUMS_SIZE), (read(frame + at.HIDDEN) + STRIP - 1) // STRIP
    for row in range(rows):
        shrink(source + row * source_pitch, inputs, x + row * pitch)
    for strip in range(count * me // team, count * (me + 1) // team):
        byte_strip(strips, scales, strip, inputs, x, pitch, rows, sums, sums, STRIP_BYTES)
        put_residual(frame, sums, strip * STRIP, False)


@njit(error_model="numpy")
def small_normed(data: int, me: int, weight: int) -> int:
    """This thread's own normed bytes of all rows."""
    frame, target = read(data + of.FRAME), read(data + of.BYTES) + me * read(data + of.BYTES_SIZE)
    hidden, fine = read(frame + at.HIDDEN), read(data + of.FINE) + me * read(data + of.FINE_SIZE)
    for row in range(read(frame + at.ROWS)):
        x = read(frame + at.X) + row * read(frame + at.X_PITCH)
        scaled_norm(x, hidden, weight, read_float(frame + at.EPSILON), fine, False)
        shrink(fine, hidden, target + row * read(data + of.BYTES_PITCH))
    return target


@njit(error_model="numpy")
def small_gate_up(data: int, me: int, team: int) -> None:
    """This thread's strips of the MLP's inner activations."""
    frame, x = read(data + of.FRAME), small_normed(data, me, read(read(data + of.LAYER) + at.MLP_NORM))
    sums, rows = read(frame + at.SUMS) + me * read(frame + at.SUMS_SIZE), read(frame + at.ROWS)
    strips, scales, pitch = read(data + of.GATE_UP_STRIPS), read(data + of.GATE_UP_SCALES), read(data + of.BYTES_PITCH)
    count = (2 * read(frame + at.INTERMEDIATE) + STRIP - 1) // STRIP
    for strip in range(count * me // team, count * (me + 1) // team):
        byte_strip(strips, scales, strip, read(frame + at.HIDDEN), x, pitch, rows, sums, sums, STRIP_BYTES)
        put_gated(frame, sums, strip * (STRIP // 2))
