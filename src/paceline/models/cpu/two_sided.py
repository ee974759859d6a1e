"""Attention of rows that all see each other, such as an encoder's, in products of pairs of bfloat16.

For processors whose instruction for these is the fastest (`processor.has_fast_bfloat`). Keys and values are strips, as
in models.cpu.attention_strips. A block of queries takes all keys, one strip of 64 after the other; then its shares,
rounded to bfloat16, take all values. Each row's numbers depend on its own query and on the keys and values alone, in
their order. Threads divide the heads and, within these, blocks of queries.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch

from paceline.models.cpu.attention import LOWEST
from paceline.models.cpu.attention_strips import BLOCK, half_softmax, pack_keys, pack_values
from paceline.models.cpu.compilation import machine_code, source_number
from paceline.models.cpu.pages import address
from paceline.models.cpu.threads import find_team
from paceline.models.cpu.tiles import DOT, GROUP, MAX_ROWS, STRIP, accumulate
from paceline.models.cpu.vectors import (
    LANES,
    broadcast,
    call_int,
    load,
    mul,
    read,
    read_float,
    store,
    store_half,
)  # fmt: skip
from paceline.utils import part_of_compiled

QUERIES = 48
"""Of a block; their scores, with a head's keys and values, fit into the second-level cache."""
CHUNK = 64
"""Steps of a strip (16 KiB) that all rows take before the next."""

(
    THREAD, TEAM,  # addresses of omp_get_thread_num and omp_get_num_threads; THREAD 0: one thread
    ROWS, HEADS, KV_HEADS, HEAD_DIM, SCALE,  # SCALE: float32
    QKV, SLOTS,  # (rows, heads + 2 * kv heads, head dim) bfloat16; (rows,) numbers of the rows
    OUT, NARROW,  # (rows, heads * head dim), bfloat16 where NARROW is 1, else float32
    ROOM, ROOM_SIZE,  # keys, values, sums and scores, one copy a thread
    FIELDS,
) = range(0, 14 * 8, 8)  # fmt: skip


class TwoSidedAttention:
    """Attention within one source.

    Args:
        heads, kv_heads: query heads in the order (group, kv head). head_dim: a multiple of 32. scale: of the scores.
    """

    def __init__(self, heads: int, kv_heads: int, head_dim: int, scale: float) -> None:
        self._heads, self._kv_heads, self._head_dim, self._scale = heads, kv_heads, head_dim, scale
        self._team, self._entry = find_team(), compiled_attention()

    def __call__(self, qkv: torch.Tensor) -> torch.Tensor:
        """(rows, heads + 2 * kv heads, head dim) -> (rows, heads * head dim), in the dtype of the input."""
        rows, threads = len(qkv), 1 if self._team is None else torch.get_num_threads()
        half, out = (
            qkv.to(torch.bfloat16).contiguous(),
            torch.empty(rows, self._heads * self._head_dim, dtype=qkv.dtype),
        )
        slots, size = np.arange(rows), _room(rows, self._head_dim)
        room = torch.empty(threads * size + 64, dtype=torch.uint8)
        told = np.zeros(FIELDS // 8, np.int64)
        told[ROWS // 8 : SCALE // 8] = rows, self._heads, self._kv_heads, self._head_dim
        told[SCALE // 8 :].view(np.float32)[0] = self._scale
        told[QKV // 8 :] = [
            half.data_ptr(), address(slots), out.data_ptr(), int(qkv.dtype is torch.bfloat16),
            -(-room.data_ptr() // 64) * 64, size,
        ]  # fmt: skip
        if self._team is None or threads == 1:
            self._entry.ctypes(address(told))
        else:
            told[:2] = self._team.thread, self._team.size
            self._team.run(self._entry.address, address(told), threads)
        return out


def _room(rows: int, head_dim: int) -> int:
    """Bytes that a thread needs, see `_places`."""
    strips = -(-head_dim // STRIP) * STRIP
    return 2 * _filled(rows) * (head_dim + strips) + 4 * QUERIES * STRIP + QUERIES * _score_pitch(rows)


@part_of_compiled
def _filled(rows: int) -> int:
    """Keys in whole strips."""
    return (rows + STRIP - 1) // STRIP * STRIP


@part_of_compiled
def _score_pitch(rows: int) -> int:
    """Bytes of a row of scores, with room behind them: an odd number of lines."""
    return ((rows + 2 * STRIP) // LANES | 1) * 64


@part_of_compiled
def _places(task: int, me: int) -> tuple[int, int, int, int]:
    """A thread's memory: packed keys and values of one head, sums of a block, and its scores."""
    rows, size = _filled(read(task + ROWS)), read(task + HEAD_DIM)
    keys = read(task + ROOM) + me * read(task + ROOM_SIZE)
    values = keys + 2 * rows * size
    sums = values + 2 * rows * ((size + STRIP - 1) // STRIP * STRIP)
    return keys, values, sums, sums + 4 * QUERIES * STRIP


@part_of_compiled
def _pack_head(task: int, me: int, kv_head: int) -> None:
    rows, size, slots = read(task + ROWS), read(task + HEAD_DIM), read(task + SLOTS)
    heads, kv_heads, (keys, values, _, _) = read(task + HEADS), read(task + KV_HEADS), _places(task, me)
    pitch = 2 * size * (heads + 2 * kv_heads)
    base = read(task + QKV) + 2 * size * (heads + kv_head)
    pack_keys(base, slots, pitch, rows, size // 32, keys)
    for part in range(0, size, STRIP):
        place, lines = base + 2 * size * kv_heads + 2 * part, min(STRIP, size - part) // 32
        pack_values(place, slots, pitch, rows, lines, values + 2 * part * _filled(rows))


@part_of_compiled
def _add_products(weights: int, steps: int, x: int, pitch: int, rows: int, sums: int, sums_pitch: int) -> None:
    """Add products of rows of bfloat16 with one strip to sums (rows, 64), chunk by chunk."""
    passes = (rows + MAX_ROWS - 1) // MAX_ROWS
    for at in range(0, steps, CHUNK):
        done, count, part = 0, min(CHUNK, steps - at), weights + at * 4 * STRIP
        for turn in range(passes):
            take, row = (rows - done + passes - turn - 1) // (passes - turn), x + done * pitch + 4 * at
            accumulate(DOT, take, 0, part, count // GROUP, row, pitch, sums + done * sums_pitch, sums_pitch, part)
            done += take


@part_of_compiled
def _set_to(value: np.float32, start: int, count: int) -> None:
    for i in range(0, count, LANES):
        store(start + 4 * i, broadcast(value))


@part_of_compiled
def _block_of_queries(task: int, me: int, head: int, first: int) -> None:
    """Attention of some rows of one query head, whose keys and values are packed."""
    rows, size, heads = read(task + ROWS), read(task + HEAD_DIM), read(task + HEADS)
    keys, values, sums, scores = _places(task, me)
    queries, pitch = min(QUERIES, rows - first), 2 * size * (heads + 2 * read(task + KV_HEADS))
    x, score_pitch = read(task + QKV) + first * pitch + 2 * size * head, _score_pitch(rows)
    for q in range(queries):
        _set_to(np.float32(0.0), scores + q * score_pitch, _filled(rows))
    for strip in range(0, rows, STRIP):
        _add_products(keys + 2 * strip * size, size // 2, x, pitch, queries, scores + 4 * strip, score_pitch)
    wholes = 0
    for q in range(queries):
        row = scores + q * score_pitch
        _set_to(LOWEST, row + 4 * rows, STRIP)
        whole = half_softmax(row, rows, read_float(task + SCALE))
        store_half(row + 2 * rows, broadcast(np.float32(0.0)))  # up to a whole block
        store(row + score_pitch - 64, broadcast(np.float32(1.0) / whole))
        wholes = score_pitch - 64
    steps = (rows + BLOCK - 1) // BLOCK * (BLOCK // 2)
    for part in range(0, size, STRIP):
        _set_to(np.float32(0.0), sums, queries * STRIP)
        _add_products(values + 2 * part * _filled(rows), steps, scores, score_pitch, queries, sums, 4 * STRIP)
        for q in range(queries):
            place = (first + q) * heads * size + head * size + part
            _put(task, sums + 4 * q * STRIP, load(scores + q * score_pitch + wholes), place, min(STRIP, size - part))


@part_of_compiled
def _put(task: int, sums: int, factor: Any, place: int, width: int) -> None:
    """A row's sums, divided by those of its shares, to their place in the result."""
    out = read(task + OUT)
    for i in range(0, width, LANES):
        value = mul(load(sums + 4 * i), factor)
        if read(task + NARROW) == 1:
            store_half(out + 2 * (place + i), value)
        else:
            store(out + 4 * (place + i), value)


@part_of_compiled
def _attend(task: int) -> None:
    me, team = 0, 1
    if read(task + THREAD) != 0:
        me, team = call_int(read(task + THREAD)), call_int(read(task + TEAM))
    kv_heads, blocks = read(task + KV_HEADS), (read(task + ROWS) + QUERIES - 1) // QUERIES
    groups = read(task + HEADS) // kv_heads
    items, packed = kv_heads * groups * blocks, -1
    for item in range(items * me // team, items * (me + 1) // team):
        kv_head, rest = item // (groups * blocks), item % (groups * blocks)
        if kv_head != packed:
            _pack_head(task, me, kv_head)
            packed = kv_head
        _block_of_queries(task, me, rest // blocks * kv_heads + kv_head, rest % blocks * QUERIES)


@functools.cache
def compiled_attention() -> Any:
    """The attention as machine code; its argument: the address of the fields of a task."""
    sources = source_number()

    def entry(task: int) -> None:
        if sources != 0:  # see forward.compiled
            _attend(task)

    return machine_code(entry, "attention of encoders", "some seconds")
