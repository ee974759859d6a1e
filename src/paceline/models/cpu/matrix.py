"""Packed matrices, and their product with rows of activations strip by strip."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from paceline.checkpoints import GROUP as WIDTH
from paceline.checkpoints import empty
from paceline.models.cpu import offsets as at
from paceline.models.cpu.block_products import block_sums, to_signed_bytes
from paceline.models.cpu.integer_products import (
    HEADER,
    NIBBLE_BLOCK,
    WHOLE,
    nibble_sums,
    pack_bytes,
    pack_nibbles,
    settle_bytes,
    to_bytes,
)
from paceline.models.cpu.matrix_unit import TILE_ROWS, TILE_STEPS, accumulate_tiles, configure, has_matrix_unit
from paceline.models.cpu.pages import Pages
from paceline.models.cpu.threads import wait_for_all
from paceline.models.cpu.tiles import (
    AHEAD,
    BLOCKS,
    BYTES,
    COLUMNS,
    DOT,
    FINE_BLOCKS,
    FULL,
    GROUP,
    HALF,
    INPUTS,
    MAX_ROWS,
    NARROW,
    NIBBLES,
    STEP,
    STRIP,
    accumulate,
)
from paceline.models.cpu.vectors import add, broadcast, load, read, store
from paceline.utils import part_of_compiled

CHUNK = 64
"""Steps of a strip (16 KiB) that all rows take before the next: with their activations they fit into the first-level
cache.
"""

LONG_CHUNK = 256
"""The same where so many rows take them that weights may come from the second-level cache (64 KiB)."""

TILE_CHUNK = 256
"""The same for the matrix unit."""

MATRIX_UNIT = has_matrix_unit()


@dataclass(frozen=True, slots=True)
class Packed:
    """A weight in strips: (strips, steps, 64 outputs, inputs per step), outputs padded with zeros; of bytes and
    half bytes, see `pack_bytes` and `pack_nibbles`."""

    strips: torch.Tensor
    inputs: int
    outputs: int

    @property
    def address(self) -> int:
        return self.strips.data_ptr()

    @property
    def count(self) -> int:
        return self.strips.shape[0]


def pack(weight: torch.Tensor, pages: Pages, *, paired: bool = False, scale: torch.Tensor | None = None) -> Packed:
    """Strips of a weight (out, in), float32 or bfloat16, or int8 with `scale` (out,) float32, or pairs of int4 with
    theirs (out, groups, 2).

    With `paired` (gate over up, each half of the rows), a strip holds 32 outputs of each, so that one thread has both
    at hand.
    """
    outputs, inputs = weight.shape
    if scale is not None and weight.dtype is torch.uint8:
        ordered = _in_strips(scale.flatten(1), paired=paired).unflatten(1, (-1, 2))
        strips = pack_nibbles(_in_strips(weight, paired=paired), ordered, pages)
        return Packed(strips, 2 * inputs, outputs)
    if scale is not None:
        ordered = _in_strips(scale[:, None], paired=paired)[:, 0]
        return Packed(pack_bytes(_in_strips(weight, paired=paired), ordered, pages), inputs, outputs)
    depth = INPUTS[FULL] if weight.dtype is torch.float32 else INPUTS[HALF]
    rows = _in_strips(weight, paired=paired).view(-1, STRIP, inputs // depth, depth)
    shape = (len(rows), inputs // depth, STRIP, depth)
    strips = pages.take(rows.numel() * weight.itemsize).view(weight.dtype).view(shape)
    strips.copy_(rows.transpose(1, 2))
    return Packed(strips, inputs, outputs)


def _in_strips(weight: torch.Tensor, *, paired: bool) -> torch.Tensor:
    """Rows in the order of strips, filled up to whole ones."""
    if paired:
        halves = [
            _padded(half, STRIP // 2).view(-1, STRIP // 2, weight.shape[1]) for half in weight.split(len(weight) // 2)
        ]
        whole = empty((len(halves[0]), STRIP, weight.shape[1]), weight.dtype, weight.device)
        weight = torch.cat(halves, 1, out=whole).view(-1, weight.shape[1])
    return _padded(weight, STRIP)


def _padded(weight: torch.Tensor, multiple: int) -> torch.Tensor:
    extra = -len(weight) % multiple
    return torch.cat((weight, weight.new_zeros(extra, weight.shape[1]))) if extra else weight


@part_of_compiled
def strip_sums(kind: int, weights: int, steps: int, x: int, pitch: int, rows: int, sums: int) -> None:
    """Products of one strip with all rows: sums (rows, 64) float32.

    Rows of BYTES and NIBBLES are those of `quantized.to_bytes`; `sums` then needs twice the room. Scales of bytes lie
    behind the strip's steps. Of BLOCKS, there are the strip's address and type, and rows of `to_signed_bytes`; of
    FINE_BLOCKS two for each row, whose sums need twice the room.
    """
    if kind == BLOCKS:
        block_sums(read(weights + 8), read(weights), steps, x, pitch, rows, sums)
    elif kind == FINE_BLOCKS:
        block_sums(read(weights + 8), read(weights), steps, x, pitch // 2, 2 * rows, sums)
        _add_pairs(rows, sums)
    elif kind == NIBBLES:
        nibble_sums(weights, steps // GROUP, x, pitch, rows, sums)
    elif kind == BYTES:
        multiply(kind, weights, steps, x + HEADER, pitch // 2, 2 * rows, sums)
        settle_bytes(weights + steps * STEP, x, pitch, rows, sums)
    else:
        multiply(kind, weights, steps, x, pitch, rows, sums)


@part_of_compiled
def _add_pairs(rows: int, sums: int) -> None:
    """Sums (rows, 64) of each two of (2 * rows, 64), in their place."""
    for row in range(rows):
        for i in range(0, 4 * STRIP, 64):
            first = sums + 2 * row * (4 * STRIP) + i
            store(sums + row * (4 * STRIP) + i, add(load(first), load(first + 4 * STRIP)))


@part_of_compiled
def _multiply_tiles(kind: int, weights: int, steps: int, x: int, pitch: int, rows: int, sums: int) -> None:
    """`multiply` by the matrix unit: rows in blocks of up to sixteen."""
    blocks = (rows + TILE_ROWS - 1) // TILE_ROWS
    size, configured = (rows + blocks - 1) // blocks, 0
    for first in range(0, steps, TILE_CHUNK):
        count = min(TILE_CHUNK, steps - first) // TILE_STEPS
        for block in range(blocks):
            row = block * size
            here = min(size, rows - row)
            if here != configured:
                configure(here)
                configured = here
            accumulate_tiles(
                kind, 1 if first == 0 else 0, weights + first * STEP, count, x + row * pitch + 4 * first, pitch,
                sums + row * (4 * STRIP), 1 if block == 0 else 0,
            )  # fmt: skip


@part_of_compiled
def multiply(kind: int, weights: int, steps: int, x: int, pitch: int, rows: int, sums: int) -> None:
    """Products (rows, 64) of a strip of a kind whose steps `accumulate` takes: float32, of whole numbers int32."""
    if MATRIX_UNIT and (kind == DOT or (kind == BYTES and rows > MAX_ROWS)) and steps % TILE_STEPS == 0:
        _multiply_tiles(kind, weights, steps, x, pitch, rows, sums)
        return
    for i in range(4 * rows):
        store(sums + 64 * i, broadcast(np.float32(0.0)))
    passes, parts = (rows + MAX_ROWS - 1) // MAX_ROWS, COLUMNS if NARROW and rows > 1 else 1
    step_bytes = 8 if kind == HALF else 4
    at = 0
    while at < steps:
        count = min(CHUNK, steps - at)
        done, step_weights = 0, weights + at * STEP
        for turn in range(passes):
            take = (rows - done + passes - turn - 1) // (passes - turn)
            ahead = step_weights + count * STEP + (turn & 1) * (count * STEP // 2)
            if parts > 1 and turn > 0:
                ahead = step_weights  # the first pass has fetched all
            elif parts == 1 and passes == 1:
                ahead = step_weights + AHEAD
            row = x + done * pitch + at * step_bytes
            for part in range(0, 64 * parts, 64):
                accumulate(
                    kind, take, 1 if passes == 1 else 0, step_weights + part, count // GROUP, row, pitch,
                    sums + done * (4 * STRIP) + part, 4 * STRIP, ahead + part,
                )  # fmt: skip
            done += take
        at += count


@part_of_compiled
def add_products(kind: int, weights: int, steps: int, x: int, pitch: int, rows: int, sums: int, to_next: int) -> None:
    """Add products of many rows with one strip of float32 or bfloat16 pairs to sums (rows, 64), which are `to_next`
    bytes apart.
    """
    passes, parts = (rows + MAX_ROWS - 1) // MAX_ROWS, COLUMNS if NARROW else 1
    for begin in range(0, steps, LONG_CHUNK):
        done, count, chunk = 0, min(LONG_CHUNK, steps - begin), weights + begin * STEP
        for turn in range(passes):
            take, row = (rows - done + passes - turn - 1) // (passes - turn), x + done * pitch + 4 * begin
            ahead = chunk  # what the first two have fetched
            if turn < 2:
                ahead += count * STEP + turn * (count * STEP // 2)
            for part in range(0, 64 * parts, 64):
                out = sums + done * to_next + part
                accumulate(kind, take, 0, chunk + part, count // GROUP, row, pitch, out, to_next, ahead + part)
            done += take


@part_of_compiled
def steps_of(kind: int, inputs: int) -> int:
    """Steps of a strip."""
    if kind >= BLOCKS:
        return inputs // WIDTH
    if kind == BYTES:
        return (inputs + WHOLE - 1) // WHOLE * GROUP
    if kind == NIBBLES:
        return (inputs + WIDTH - 1) // WIDTH * GROUP
    return inputs if kind == FULL else inputs // 2


@part_of_compiled
def strip_size(kind: int, steps: int) -> int:
    """Bytes from one strip to the next, or from what says where one is."""
    if kind >= BLOCKS:
        return 16
    if kind == NIBBLES:
        return steps // GROUP * NIBBLE_BLOCK
    return (steps + 1) * STEP if kind == BYTES else steps * STEP


OWN_ROWS = 16
"""Rows that every thread prepares for itself; of more, threads prepare a part each and meet."""


@part_of_compiled
def own_rows(frame: int, me: int) -> int:
    """Address of the activations that a thread has for itself."""
    return read(frame + at.OWN_NORMED) + me * read(frame + at.OWN_SIZE)


@part_of_compiled
def share_of(frame: int, me: int, team: int, rows: int) -> tuple[int, int, int]:
    """Where activations of `rows` rows go, and the first and last of them that this thread prepares."""
    if rows <= OWN_ROWS:
        return own_rows(frame, me), 0, rows
    return read(frame + at.NORMED), rows * me // team, rows * (me + 1) // team


@part_of_compiled
def when_prepared(frame: int, team: int, rows: int) -> None:
    """Wait until all threads have prepared their part."""
    if rows > OWN_ROWS:
        wait_for_all(frame, team)


@part_of_compiled
def convert_row(kind: int, source: int, size: int, target: int, pitch: int, order: int) -> None:
    """One row of float32 in whole numbers, for a kind of product; `order`: see `to_signed_bytes`, 0 but for BLOCKS."""
    if kind >= BLOCKS:
        to_signed_bytes(source, size, target, 0, 0, 0, target + pitch // 2 if kind == FINE_BLOCKS else 0, order)
    else:
        to_bytes(source, size, target, pitch, kind == NIBBLES)


@part_of_compiled
def convert_rows(
    frame: int, kind: int, source: int, pitch: int, size: int, target: int, first: int, stop: int, heads: bool,
    order: int,
) -> None:  # fmt: skip
    """Rows first .. stop - 1; with `heads`, those that attention leaves, for BLOCKS in the order of their file, unless
    `order` says another.
    """
    normed_pitch, dim, keys = read(frame + at.NORMED_PITCH), read(frame + at.HEAD_DIM), read(frame + at.KV_HEADS)
    each = read(frame + at.HEADS) // keys if heads and read(frame + at.LATENT) == 0 and order == 0 else 0
    for row in range(first, stop):
        if kind >= BLOCKS:
            to = target + row * normed_pitch
            to_signed_bytes(
                source + row * pitch, size, to, dim, keys, each,
                to + normed_pitch // 2 if kind == FINE_BLOCKS else 0, order,
            )  # fmt: skip
        else:
            convert_row(kind, source + row * pitch, size, target + row * normed_pitch, normed_pitch, 0)


@part_of_compiled
def as_bytes(
    frame: int, me: int, team: int, kind: int, source: int, pitch: int, rows: int, size: int, heads: bool,
    order: int,
) -> int:  # fmt: skip
    """Address of rows of float32 in whole numbers, for a kind of product; see `convert_rows`."""
    target, first, stop = share_of(frame, me, team, rows)
    convert_rows(frame, kind, source, pitch, size, target, first, stop, heads, order)
    when_prepared(frame, team, rows)
    return target
