"""Products of a strip by the matrix unit of Intel's server CPUs (AMX): sixteen rows cost about as much as one.

The unit multiplies up to 16 rows by 16 outputs of 64 bytes of inputs each. Strips lie in its order already: 16 steps of
a strip are four of its right-hand tiles. Pairs of bfloat16 are summed in another order than by models.cpu.tiles; sums
of bytes are whole numbers and the same.

A thread must `release` the tiles after its last product, or the system saves and restores them from then on.

Source: Intel 64 and IA-32 architectures software developer's manual, volume 1, chapter 18.
"""

from __future__ import annotations

import ctypes
import functools
import platform
from typing import Any

from llvmlite import ir

from paceline.models.cpu.processor import features
from paceline.models.cpu.tiles import BYTES, COLUMNS, DOT, STEP, STRIP, prefetch
from paceline.models.cpu.vectors import (
    I8,
    I32V,
    I64,
    Builder,
    Int,
    Nothing,
    Value,
    call_named,
    counted,
    load_at,
    lowered,
    pointer,
    stack_memory,
    store_at,
)

TILE_STEPS, TILE_ROWS = 16, 16
"""Steps of a strip that are one block of tiles, and the most rows of a tile."""

REQUEST_PERMISSION, ARCH_PRCTL, TILE_DATA = 0x1023, 158, 18
"""Linux gives tiles to processes that ask: arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA)."""

LEFT, RIGHT = 4, (5, 6, 7)
"""Tiles 0 to 3 hold sums of the four columns; the others activations, and weights in turn."""

AHEAD = 1024
"""Bytes that the first block of rows fetches ahead."""

VOID, WIDTH = ir.VoidType(), 64


@functools.cache
def has_matrix_unit() -> bool:
    """Whether the processor multiplies tiles of bfloat16 and of bytes, and this process may."""
    if platform.system() != "Linux" or not (features().get("amx-bf16") and features().get("amx-int8")):
        return False
    return ctypes.CDLL(None).syscall(ARCH_PRCTL, REQUEST_PERMISSION, TILE_DATA) == 0


def _tile(number: int) -> Value:
    return ir.Constant(I8, number)


def _load(builder: Builder, tile: int, address: Value, pitch: Value) -> None:
    call_named(builder, "llvm.x86.tileloadd64", VOID, _tile(tile), pointer(builder, address), pitch)


def _store(builder: Builder, column: int, address: Value, pitch: Value) -> None:
    call_named(builder, "llvm.x86.tilestored64", VOID, _tile(column), pointer(builder, address), pitch)


def _configure(builder: Builder, rows: Value, *, inputs: int = WIDTH) -> None:
    """Emit the sizes of all tiles: 64 bytes wide, `rows` rows in sums and activations, 16 in weights.

    `inputs`: bytes of activations of one block, fewer than 64 where weights have fewer rows.
    """
    start = stack_memory(builder, 64)
    each = builder.mul(rows, ir.Constant(I64, 0x01_01_01_01_01))
    widths, right = WIDTH * 0x0001_0001_0001_0001, (inputs // 4 * 0x01_01_01) << 40
    words = [1, 0, widths, widths - WIDTH + inputs, 0, 0, builder.add(each, ir.Constant(I64, right)), 0]
    for i, word in enumerate(words):
        store_at(builder, start, ir.Constant(I64, word) if isinstance(word, int) else word, 8 * i)
    call_named(builder, "llvm.x86.ldtilecfg", VOID, pointer(builder, start))


class GroupTiles:
    """Emits products of bytes of one group of 32 inputs: `put` the weights of all steps, `multiply`, read `products`.

    Args:
        rows: of bytes, up to TILE_ROWS. pitch: bytes between them.
    """

    INPUTS = 32

    def __init__(self, builder: Builder, rows: Value, pitch: Value) -> None:
        self._builder, self._pitch = builder, pitch
        self._weights = stack_memory(builder, self.INPUTS // 4 * STEP)
        self._sums = stack_memory(builder, TILE_ROWS * 4 * STRIP)
        _configure(builder, rows, inputs=self.INPUTS)

    def put(self, step: int, columns: list[Value]) -> None:
        """The bytes of four inputs for each column."""
        for column, weight in enumerate(columns):
            self.put_one(step, column, weight)

    def put_one(self, step: int, column: int, weight: Value) -> None:
        """The bytes of four inputs for one column."""
        store_at(self._builder, self._weights, weight, step * STEP + WIDTH * column)

    def multiply(self, x: Value) -> None:
        """Multiply with the activations at `x`."""
        builder = self._builder
        _load(builder, LEFT, x, self._pitch)
        for column in range(COLUMNS):
            offset = ir.Constant(I64, WIDTH * column)
            call_named(builder, "llvm.x86.tilezero", VOID, _tile(column))
            _multiply_column(builder, "tdpbsud", column, builder.add(self._weights, offset))
            _store(builder, column, builder.add(self._sums, offset), ir.Constant(I64, 4 * STRIP))

    def products(self, row: Value) -> list[Value]:
        """The sums of one row of bytes."""
        builder = self._builder
        at = builder.add(self._sums, builder.mul(row, ir.Constant(I64, 4 * STRIP)))
        return [load_at(builder, at, I32V, WIDTH * column) for column in range(COLUMNS)]


@lowered(Nothing)
def release(builder: Builder) -> None:
    """Give the tiles back."""
    if has_matrix_unit():
        call_named(builder, "llvm.x86.tilerelease", VOID)


@lowered(Nothing, Int, outlined=True)
def configure(builder: Builder, rows: Value) -> None:
    """Sizes of tiles with 1 to TILE_ROWS rows, for `accumulate_tiles` and `multiply_strips`; they last until others are
    set.
    """
    if has_matrix_unit():
        _configure(builder, rows)


def _start(builder: Builder, fresh: Value, columns: list[Value], pitch: Value) -> None:
    """Emit sums of 0 where `fresh` is 1, else those at the addresses of their columns."""
    with builder.if_else(builder.icmp_signed("==", fresh, ir.Constant(I64, 1))) as (new, old):
        with new:
            for column in range(COLUMNS):
                call_named(builder, "llvm.x86.tilezero", VOID, _tile(column))
        with old:
            for column, address in enumerate(columns):
                _load(builder, column, address, pitch)


def _columns(builder: Builder, sums: Value) -> list[Value]:
    return [builder.add(sums, ir.Constant(I64, WIDTH * column)) for column in range(COLUMNS)]


@lowered(Nothing, *[Int] * 8, outlined=True)
def accumulate_tiles(
    builder: Builder, kind: Value, fresh: Value, weights: Value, blocks: Value, x: Value, pitch: Value, sums: Value,
    ahead: Value,
) -> Any:  # fmt: skip
    """Add a stretch of a strip to sums (rows, 64), float32 or for bytes int32, of as many rows as `configure` was told.

    `kind`: DOT or BYTES. `fresh`: 1 where the sums are 0, whatever is there. `blocks`: stretch of the strip, TILE_STEPS
    steps each. `pitch`: bytes between rows of activations. `ahead`: 1 where what follows in memory is fetched.
    """
    if not has_matrix_unit():
        return
    columns, sums_pitch = _columns(builder, sums), ir.Constant(I64, 4 * STRIP)
    _start(builder, fresh, columns, sums_pitch)
    done = builder.append_basic_block()
    switch = builder.switch(builder.add(builder.mul(kind, ir.Constant(I64, 2)), ahead), done)
    for number, product in ((DOT, "tdpbf16ps"), (BYTES, "tdpbsud")):
        for fetching in (0, 1):
            start = builder.append_basic_block()
            switch.add_case(ir.Constant(I64, 2 * number + fetching), start)
            builder.position_at_end(start)
            _blocks(builder, product, weights, blocks, x, pitch, fetching)
            builder.branch(done)
    builder.position_at_end(done)
    for column, address in enumerate(columns):
        _store(builder, column, address, sums_pitch)


@lowered(Nothing, *[Int] * 8, outlined=True)
def multiply_strips(
    builder: Builder, fresh: Value, strips: Value, weights: Value, blocks: Value, x: Value, pitch: Value, sums: Value,
    sums_pitch: Value,
) -> Any:  # fmt: skip
    """Add products of rows of bfloat16 with strips of `blocks` blocks each to sums, 64 of a row behind those of the
    strip before; see `accumulate_tiles`.
    """
    if not has_matrix_unit():
        return
    size = builder.mul(blocks, ir.Constant(I64, TILE_STEPS * STEP))
    with counted(builder, strips) as strip:
        columns = _columns(builder, builder.add(sums, builder.mul(strip, ir.Constant(I64, 4 * STRIP))))
        _start(builder, fresh, columns, sums_pitch)
        _blocks(builder, "tdpbf16ps", builder.add(weights, builder.mul(strip, size)), blocks, x, pitch, 0)
        for column, address in enumerate(columns):
            _store(builder, column, address, sums_pitch)


def _blocks(
    builder: Builder, product: str, weights: Value, blocks: Value, x: Value, pitch: Value, fetching: int
) -> None:  # fmt: skip
    with counted(builder, blocks) as index:
        at = builder.add(weights, builder.mul(index, ir.Constant(I64, TILE_STEPS * STEP)))
        _load(builder, LEFT, builder.add(x, builder.mul(index, ir.Constant(I64, WIDTH))), pitch)
        for column in range(COLUMNS):
            for line in range(TILE_STEPS if fetching else 0):
                prefetch(builder, at, AHEAD + (TILE_STEPS * column + line) * 64, 2)
            _multiply_column(builder, product, column, builder.add(at, ir.Constant(I64, WIDTH * column)))


def _multiply_column(builder: Builder, product: str, column: int, weights: Value) -> None:
    right = RIGHT[column % len(RIGHT)]
    _load(builder, right, weights, ir.Constant(I64, STEP))
    call_named(builder, f"llvm.x86.{product}", VOID, _tile(column), _tile(LEFT), _tile(right))
