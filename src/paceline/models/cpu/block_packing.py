"""Strips of GGUF's blocks (models.cpu.blocks) out of rows of a mapped file, in compiled code on all threads."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from paceline.checkpoints import BlockRows, Blocks
from paceline.models.cpu.block_products import HEADER_BYTES, SUBS, sub_bytes
from paceline.models.cpu.blocks import GROUP, KINDS, LANES
from paceline.models.cpu.compilation import machine_code, source_number
from paceline.models.cpu.pages import Pages
from paceline.models.cpu.tiles import STRIP
from paceline.models.cpu.vectors import I8, I64, Builder, Int, Nothing, Value, load_at, lowered, read, store_at
from paceline.utils import part_of_compiled

(Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K, INT4_ZEROS, MXFP4, FP4_HALVES) = range(11)
SIZES = (18, 20, 22, 24, 34, 144, 176, 210, 19, 17, 20)
"""Bytes of a block in a file."""
BITS = tuple(kind.bits for kind in KINDS.values())
SCALE_BYTES = tuple(kind.scale_bytes for kind in KINDS.values())


@lowered(Int, Int)
def byte_at(builder: Builder, address: Value) -> Value:
    """The unsigned byte at an address."""
    return builder.zext(load_at(builder, address, I8), I64)


@lowered(Nothing, Int, Int)
def put_byte(builder: Builder, address: Value, value: Value) -> None:
    """The lowest byte of a number to an address."""
    store_at(builder, address, builder.trunc(value, I8))


@part_of_compiled
def copy_bytes(source: int, target: int, count: int) -> None:
    """As many bytes, one by one."""
    for i in range(count):
        put_byte(target + i, byte_at(source + i))


@part_of_compiled
def _numbers(kind: int, row: int, group: int, numbers: int) -> None:
    """The 32 numbers of a group, a byte each."""
    if kind == Q8_0:
        copy_bytes(row + group * SIZES[Q8_0] + 2, numbers, GROUP)
    elif kind < Q4_K or kind >= INT4_ZEROS:
        low = row + (group + 1) * SIZES[kind] - 16
        for i in range(GROUP // 2):
            put_byte(numbers + i, byte_at(low + i) & 15)
            put_byte(numbers + 16 + i, byte_at(low + i) >> 4)
        _add_upper_bits(kind, low, group, numbers)
    else:
        block, within = row + (group >> 3) * SIZES[kind], group & 7
        if kind == Q6_K:
            low, shift = block + (within >> 2) * 64 + (within & 1) * 32, 4 * ((within & 3) >> 1)
        else:
            low, shift = block + (16 if kind == Q4_K else 48) + (within >> 1) * 32, 4 * (within & 1)
        for i in range(GROUP):
            put_byte(numbers + i, (byte_at(low + i) >> shift) & 15)
        _add_upper_bits(kind, block, group, numbers)


@part_of_compiled
def _add_upper_bits(kind: int, place: int, group: int, numbers: int) -> None:
    """The bits above the fourth; `place`: of a K-quant's block, else of the lower bits."""
    within = group & 7
    for i in range(0 if kind in (Q4_0, Q4_1, Q4_K) or kind >= INT4_ZEROS else GROUP):
        if kind == Q6_K:
            upper = (byte_at(place + 128 + (within >> 2) * 32 + i) >> (2 * (within & 3))) & 3
        elif kind == Q5_K:
            upper = (byte_at(place + 16 + i) >> within) & 1
        else:
            upper = (byte_at(place - 4 + (i >> 3)) >> (i & 7)) & 1
        put_byte(numbers + i, byte_at(numbers + i) | upper << 4)


@part_of_compiled
def _put_numbers(kind: int, numbers: int, target: int, lane: int) -> None:
    """The numbers of a group and output where products want them."""
    size, at = 4 * LANES, target + 4 * lane
    for step in range(GROUP // 4):
        for place in range(4):
            number = byte_at(numbers + 4 * step + place)
            if kind == Q8_0:
                put_byte(at + step * size + place, number)
                continue
            low = at + (step >> 1) * size + place
            put_byte(low, number & 15 if step & 1 == 0 else byte_at(low) | (number & 15) << 4)
            if BITS[kind] == 5:
                high = at + 4 * size + place
                put_byte(high, (0 if step == 0 else byte_at(high)) | (number >> 4) << step)
            elif BITS[kind] == 6:
                high, field = at + (4 + step // 4) * size + place, step & 3
                put_byte(high, (0 if field == 0 else byte_at(high)) | (number >> 4) << (2 * field))


@part_of_compiled
def _put_scales(kind: int, row: int, group: int, target: int, lane: int) -> None:
    """The scales of a group and output, where they are the group's own."""
    block, within = row + (group >> 3) * SIZES[kind], group & 7
    if kind == MXFP4:
        copy_bytes(row + group * SIZES[kind], target + lane, 1)
    elif kind < Q4_K or kind >= INT4_ZEROS:
        copy_bytes(row + group * SIZES[kind], target + 2 * lane, 2)
        if kind in (Q4_1, Q5_1, FP4_HALVES):
            copy_bytes(row + group * SIZES[kind] + 2, target + 2 * LANES + 2 * lane, 2)
        elif kind == INT4_ZEROS:
            put_byte(target + 2 * LANES + lane, byte_at(row + group * SIZES[kind] + 2))
    elif kind == Q6_K:
        copy_bytes(block + 192 + 2 * within, target + 2 * lane, 2)
    elif within < 4:
        put_byte(target + lane, byte_at(block + 4 + within) & 63)
        put_byte(target + LANES + lane, byte_at(block + 8 + within) & 63)
    else:
        mixed = byte_at(block + 8 + within)
        put_byte(target + lane, (mixed & 15) | (byte_at(block + within) >> 6) << 4)
        put_byte(target + LANES + lane, (mixed >> 4) | (byte_at(block + 4 + within) >> 6) << 4)


@part_of_compiled
def pack_strip(kind: int, rows: int, groups: int, target: int, spare: int) -> None:
    """One strip of the rows whose addresses are at `rows`, 0 for one of zeros; `spare`: room for 32 bytes."""
    size, header = sub_bytes(kind, groups), HEADER_BYTES[kind]
    for sub in range(SUBS):
        for lane in range(LANES):
            row = read(rows + 8 * (sub * LANES + lane))
            if row == 0:
                continue
            for group in range(groups):
                above = target + sub * size + sub_bytes(kind, group & -8) if header else 0
                at = target + sub * size + sub_bytes(kind, group)
                if header:
                    at = above + header + (group & 7) * (sub_bytes(kind, 1))
                    if group & 7 == 0:
                        block = row + (group >> 3) * SIZES[kind]
                        copy_bytes(block + (208 if kind == Q6_K else 0), above + 2 * lane, 2)
                        if kind != Q6_K:
                            copy_bytes(block + 2, above + 2 * LANES + 2 * lane, 2)
                _put_scales(kind, row, group, at, lane)
                _numbers(kind, row, group, spare)
                _put_numbers(kind, spare, at + SCALE_BYTES[kind], lane)


@functools.cache
def packer() -> Any:
    """`pack_strip` as machine code."""
    sources = source_number()

    def entry(kind: int, rows: int, groups: int, target: int, spare: int) -> None:
        if sources != 0:
            pack_strip(kind, rows, groups, target, spare)

    return machine_code(entry, "the code that packs weights", "some seconds", arguments=5)


def strip_table(rows: BlockRows, whole: torch.Tensor) -> torch.Tensor:
    """(strips, 2) int64, the address and the kind of each strip of a packed matrix, `whole`."""
    kinds = kinds_of_strips(rows)
    table = torch.zeros(len(kinds), 2, dtype=torch.int64)
    table[:, 0] = torch.from_numpy(_starts(kinds, rows.inputs)[:-1] + whole.data_ptr())
    table[:, 1] = torch.tensor(kinds)
    return table


def _starts(kinds: Sequence[int], inputs: int) -> npt.NDArray[np.int64]:
    """Bytes before each strip, and of all."""
    sizes = np.array([kind.strip_bytes(inputs) for kind in KINDS.values()])
    return np.concatenate(([0], np.cumsum(sizes[list(kinds)])))


def pack_strips(rows: BlockRows, pages: Pages) -> torch.Tensor:
    """(bytes,) uint8 of all strips of rows that are in their order; the pages of their files are given back.

    Raises:
        ValueError: a strip of rows of several types.
    """
    groups, kinds, sources = rows.inputs // GROUP, kinds_of_strips(rows), rows.read()
    begins = np.array([source.ctypes.data for source in sources])
    addresses = np.where(rows.places[:, 0] < 0, 0, begins[rows.places[:, 0]] + rows.places[:, 1])
    starts = _starts(kinds, rows.inputs)
    whole = pages.take(int(starts[-1]))
    entry = packer()

    def pack(strips: Sequence[int]) -> None:
        spare = np.zeros(GROUP, np.uint8)
        for strip in strips:
            strip_addresses = np.ascontiguousarray(addresses[strip * STRIP : (strip + 1) * STRIP])
            at = whole.data_ptr() + int(starts[strip])
            entry.ctypes(kinds[strip], strip_addresses.ctypes.data, groups, at, spare.ctypes.data)

    workers = min(torch.get_num_threads(), len(kinds))
    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(pack, [range(first, len(kinds), workers) for first in range(workers)]))
    rows.rest()
    return whole


def can_pack(blocks: Blocks, *, gated: bool) -> bool:
    """Whether no strip of any matrix would hold rows of several types.

    Args:
        gated: gates are packed beside ups.
    """
    try:
        for name, rows in blocks.items():
            kinds_of_strips(in_strips(rows, paired=gated and name.endswith("gate_up.weight")))
    except ValueError:
        return False
    return True


def in_strips(rows: BlockRows, *, paired: bool) -> BlockRows:
    """The rows in the order of strips, filled up with rows of zeros to whole ones."""
    width = STRIP // 2 if paired else STRIP
    parts = np.split(np.arange(len(rows)), 2) if paired else [np.arange(len(rows))]
    filled = [np.pad(part, (0, -len(part) % width), constant_values=-1).reshape(-1, width) for part in parts]
    return rows.take(np.concatenate(filled, 1).reshape(-1))


def kinds_of_strips(rows: BlockRows) -> list[int]:
    """Of rows in the order of strips the type of each one.

    Raises:
        ValueError: a strip of rows of several types.
    """
    strips = rows.places.reshape(-1, STRIP, 3)
    there, source_kinds = strips[:, :, 0] >= 0, strips[:, :, 2]
    highest = np.where(there, source_kinds, 0).max(1)
    if (np.where(there, source_kinds, highest[:, None]) != highest[:, None]).any():
        raise ValueError("a strip of several types")
    kinds_by_strip: list[int] = highest.tolist()
    return kinds_by_strip
