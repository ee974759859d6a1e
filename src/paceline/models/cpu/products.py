"""Products of many rows with a packed matrix, such as those of an encoder.

Weights of float32 multiply rows of float32, those of bfloat16 rows of bfloat16 in pairs: each sum runs from the bias
through the inputs in their order, in float32, and is rounded once. Weights of int8 multiply rows of both. Where the
processor multiplies four pairs of bytes in one instruction, activations are rounded to bytes, relative to the largest
of their row; elsewhere weights are widened to two bytes, and activations have as many bits as sums of 32 bits leave
them. Each row is rounded on its own, and such sums are exact. So a row's bits depend on nothing else.

Threads divide blocks of rows or, of fewer, the strips.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from torch.nn import functional as F

from paceline.models.cpu.compilation import machine_code, source_number
from paceline.models.cpu.integer_products import HEADER, TOP, pack_bytes, rounded
from paceline.models.cpu.matrix import add_products, multiply, pack
from paceline.models.cpu.matrix_unit import release
from paceline.models.cpu.pages import Pages, address
from paceline.models.cpu.processor import has_dot_bytes
from paceline.models.cpu.threads import find_team
from paceline.models.cpu.tiles import BYTES, DOT, FULL, GROUP, INPUTS, SHORTS, STEP, STRIP
from paceline.models.cpu.vectors import (
    F32V,
    I16,
    I32,
    I32V,
    LANES,
    Builder,
    Float,
    Int,
    Lanes,
    Nothing,
    Value,
    absolute,
    add,
    broadcast,
    call_int,
    fma,
    larger,
    largest,
    load,
    load_at,
    load_half,
    lowered,
    mul,
    read,
    read_float,
    splat,
    store,
    store_at,
    store_bytes,
    store_half,
    total,
    write_float,
)  # fmt: skip
from paceline.utils import part_of_compiled

ONE_BYTE = has_dot_bytes()
"""Whether activations are bytes."""
KIND, ITEM = (BYTES, 1) if ONE_BYTE else (SHORTS, 2)
"""Of product with int8, and bytes of an activation."""
FLOAT_KINDS = {torch.float32: FULL, torch.bfloat16: DOT}
"""Of product, by the dtype of weights and rows."""
MOST_BYTE, MOST_SUM = 127, 2**31 - 1
BLOCK = 96
"""Rows that a thread takes through all strips; a multiple of the rows of a tile."""

(
    THREAD, TEAM,  # addresses of omp_get_thread_num and omp_get_num_threads; THREAD 0: one thread
    NARROW, OF,  # 1 where rows and results are bfloat16, else float32; the kind of product
    X, ROWS, INPUTS_OF, OUT, STRIPS,  # (rows, inputs) and (rows, 64 * strips)
    WEIGHTS, STEPS, BIAS,  # strips, of int8 with their scales behind them; (64 * strips,) float32
    ROOM, ROOM_SIZE, PITCH,  # for rounded rows and sums, one copy a thread; bytes from one rounded row to the next
    FIELDS,
) = range(0, 16 * 8, 8)  # fmt: skip


def steps_of(inputs: int) -> int:
    """Steps of a strip, the one of scales left out."""
    whole = INPUTS[KIND] * GROUP
    return -(-inputs // whole) * GROUP


def pack_shorts(weight: torch.Tensor, scale: torch.Tensor, pages: Pages) -> torch.Tensor:
    """Strips as of `pack_bytes`, of weights widened to two bytes: per step 64 outputs of 2 inputs."""
    count, steps = len(weight) // STRIP, steps_of(weight.shape[1])
    strips = pages.take(count * (steps + 1) * STEP).view(count, steps + 1, STEP)
    filled = F.pad(weight, (0, steps * INPUTS[SHORTS] - weight.shape[1]))
    moved = filled.view(count, STRIP, steps, INPUTS[SHORTS]).transpose(1, 2).short().contiguous()
    strips[:, :steps] = moved.view(count, steps, -1).view(torch.uint8)
    strips[:, steps].view(torch.float32).copy_(scale.view(-1, STRIP))
    return strips


class MatrixProduct:
    """The linear map of a weight (out, in): (r, in) -> (r, out), in the dtype of its input. Compiled for this CPU.

    Args:
        weight: float32 or bfloat16, as the input is to be, or int8 for inputs of both.
        scale: (out,) float32, of int8; else None.
        bias: (out,), or None. pages: for the packed weights; those of several products may share them.
    """

    def __init__(
        self, weight: torch.Tensor, scale: torch.Tensor | None, bias: torch.Tensor | None, *, pages: Pages
    ) -> None:
        self._outputs, inputs = weight.shape
        more, rows = -inputs % LANES, -self._outputs % STRIP
        weight = F.pad(weight, (0, more, 0, rows))
        self._bias, self._inputs = torch.zeros(len(weight)), weight.shape[1]
        if bias is not None:
            self._bias[: self._outputs] = bias
        if scale is None:
            self._kind, self._strips = FLOAT_KINDS[weight.dtype], pack(weight, pages).strips
            self._steps = self._inputs // INPUTS[self._kind]
        else:
            packed = pack_bytes if ONE_BYTE else pack_shorts
            self._kind, self._strips = KIND, packed(weight, F.pad(scale, (0, rows)), pages)
            self._steps = steps_of(self._inputs)
        self._pitch = _pitch(self._steps)
        self._team, self._entry = find_team(), compiled_product()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The product."""
        if x.shape[1] < self._inputs:
            x = F.pad(x, (0, self._inputs - x.shape[1]))
        x = x.contiguous()
        threads, width = 1 if self._team is None else torch.get_num_threads(), len(self._bias)
        out = torch.empty(len(x), width, dtype=x.dtype)
        size = BLOCK * (self._pitch + 4 * STRIP)
        room = torch.empty(threads * size + 64, dtype=torch.uint8)
        told = np.zeros(FIELDS // 8, np.int64)
        told[NARROW // 8 :] = [
            int(x.dtype is torch.bfloat16), self._kind, x.data_ptr(), len(x), self._inputs, out.data_ptr(),
            len(self._strips), self._strips.data_ptr(), self._steps, self._bias.data_ptr(),
            -(-room.data_ptr() // 64) * 64, size, self._pitch,
        ]  # fmt: skip
        if self._team is None or threads == 1:
            self._entry.ctypes(address(told))
        else:
            told[:2] = self._team.thread, self._team.size
            self._team.run(self._entry.address, address(told), threads)
        return out if width == self._outputs else out[:, : self._outputs].contiguous()


def _pitch(steps: int) -> int:
    """Bytes of a rounded row with its header: an odd number of lines, so that rows spread over the sets of a cache."""
    return (-(-(HEADER + steps * INPUTS[KIND] * ITEM) // 128) * 2 + 1) * 64


@lowered(Nothing, Int, Lanes)
def _store_shorts(builder: Builder, place: Value, whole: Value) -> None:
    store_at(builder, place, builder.trunc(builder.fptosi(whole, I32V), ir.VectorType(I16, LANES)))


@lowered(Lanes, Int, Float)
def _exact(builder: Builder, sums: Value, taken: Value) -> Value:
    """Sixteen sums of int32, less 128 * taken, as float32."""
    offset = builder.shl(builder.fptosi(taken, I32), ir.Constant(I32, 7))
    return builder.sitofp(builder.sub(load_at(builder, sums, I32V), splat(builder, offset)), F32V)


@part_of_compiled
def _load_lanes(narrow: bool, row: int, i: int) -> Any:
    return load_half(row + 2 * i) if narrow else load(row + 4 * i)


@part_of_compiled
def _round_row(narrow: bool, source: int, size: int, target: int) -> None:
    """A row in whole numbers, behind a header: what they are multiples of, and the sum of those that are bytes.

    Where a value is not finite, the former is NaN.
    """
    zero, limit = broadcast(np.float32(0.0)), np.float32(MOST_BYTE)
    if not ONE_BYTE:
        limit = np.float32(min(TOP, MOST_SUM // (MOST_BYTE * size)))
    top, odd = zero, zero
    for i in range(0, size, LANES):
        lanes = _load_lanes(narrow, source, i)
        top, odd = larger(top, absolute(lanes)), fma(lanes, zero, odd)
    most = largest(top)
    factor, sums = broadcast(limit / most if most > 0 else np.float32(0.0)), zero
    for i in range(0, size, LANES):
        whole = rounded(mul(_load_lanes(narrow, source, i), factor))
        if ONE_BYTE:
            store_bytes(target + HEADER + i, whole)
            sums = add(sums, whole)
        else:
            _store_shorts(target + HEADER + 2 * i, whole)
    write_float(target, most / limit + total(odd))
    write_float(target + 4, total(sums))


@part_of_compiled
def _put_strip(task: int, x: int, pitch: int, rows: int, sums: int, scales: int, strip: int, first: int) -> None:
    """Products of a strip, from its whole sums, to the rows of the result from `first` on."""
    narrow, width, bias = read(task + NARROW) == 1, read(task + STRIPS) * STRIP, read(task + BIAS) + strip * 4 * STRIP
    for row in range(rows):
        factor, taken = broadcast(read_float(x + row * pitch)), read_float(x + row * pitch + 4)
        place = read(task + OUT) + ((first + row) * width + strip * STRIP) * (2 if narrow else 4)
        for i in range(0, STRIP, LANES):
            value = mul(_exact(sums + 4 * (row * STRIP + i), taken), factor)
            value = fma(value, load(scales + 4 * i), load(bias + 4 * i))
            if narrow:
                store_half(place + 2 * i, value)
            else:
                store(place + 4 * i, value)


@part_of_compiled
def _float_block(task: int, room: int, first: int, begin: int, end: int) -> None:
    """`_block_of_rows` of weights that are not whole numbers: sums of float32 are the result, others are rounded."""
    kind, steps, strips = read(task + OF), read(task + STEPS), read(task + STRIPS)
    rows, pitch, item = min(BLOCK, read(task + ROWS) - first), 4 * steps, 4 if kind == FULL else 2
    for strip in range(begin, end):
        out = read(task + OUT) + item * (first * strips + strip) * STRIP
        sums, to_next = (out, 4 * STRIP * strips) if kind == FULL else (room, 4 * STRIP)
        for row in range(rows):
            for i in range(0, STRIP, LANES):
                store(sums + row * to_next + 4 * i, load(read(task + BIAS) + 4 * (strip * STRIP + i)))
        x, weights = read(task + X) + first * pitch, read(task + WEIGHTS) + strip * steps * STEP
        add_products(kind, weights, steps, x, pitch, rows, sums, to_next)
        for row in range(0 if kind == FULL else rows):
            for i in range(0, STRIP, LANES):
                store_half(out + 2 * (row * strips * STRIP + i), load(room + row * to_next + 4 * i))


@part_of_compiled
def _whole_block(task: int, room: int, first: int, begin: int, end: int) -> None:
    """`_block_of_rows` of int8 weights."""
    narrow, size, steps = read(task + NARROW) == 1, read(task + INPUTS_OF), read(task + STEPS)
    rows, pitch = min(BLOCK, read(task + ROWS) - first), read(task + PITCH)
    for row in range(rows):
        _round_row(narrow, read(task + X) + (first + row) * size * (2 if narrow else 4), size, room + row * pitch)
    sums = room + BLOCK * pitch
    for strip in range(begin, end):
        weights = read(task + WEIGHTS) + strip * (steps + 1) * STEP
        multiply(KIND, weights, steps, room + HEADER, pitch, rows, sums)
        _put_strip(task, room, pitch, rows, sums, weights + steps * STEP, strip, first)


@part_of_compiled
def _block_of_rows(task: int, room: int, first: int, begin: int, end: int) -> None:
    """Strips begin .. end - 1 of a block of rows."""
    if read(task + OF) == KIND:
        _whole_block(task, room, first, begin, end)
    else:
        _float_block(task, room, first, begin, end)


@part_of_compiled
def _product(task: int) -> None:
    me, team = 0, 1
    if read(task + THREAD) != 0:
        me, team = call_int(read(task + THREAD)), call_int(read(task + TEAM))
    blocks, strips = (read(task + ROWS) + BLOCK - 1) // BLOCK, read(task + STRIPS)
    room = read(task + ROOM) + me * read(task + ROOM_SIZE)
    if blocks >= team:
        for block in range(blocks * me // team, blocks * (me + 1) // team):
            _block_of_rows(task, room, block * BLOCK, 0, strips)
    else:
        for block in range(blocks):
            _block_of_rows(task, room, block * BLOCK, strips * me // team, strips * (me + 1) // team)
    release()


@functools.cache
def compiled_product() -> Any:
    """The product as machine code; its argument: the address of the fields of a task."""
    sources = source_number()

    def entry(task: int) -> None:
        if sources != 0:  # see forward.compiled
            _product(task)

    return machine_code(entry, "products of encoders", "some seconds")
