"""Attention of rows that all see each other, such as an encoder's, in products of strips.

Of float32, or of pairs of bfloat16 for processors whose instruction for these is the fastest
(`processor.has_fast_bfloat`). Keys and values are strips of 64 outputs, as in models.cpu.tiles: a head's keys with its
dimensions as inputs, its dimensions with the values of all keys as inputs. A block of queries takes all keys, one strip
after the other; then its shares take all values, in the dtype of the products. What distances of a key and its query
add to scores is where these begin: a stretch of a table of each head. Each row's numbers depend on its own
query and on the keys and values alone, in their order. Threads divide the heads and, within these, blocks of queries.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from paceline.models.cpu.attention import LOWEST
from paceline.models.cpu.attention_strips import BLOCK, half_softmax, pack_keys, pack_values, whole_softmax
from paceline.models.cpu.compilation import machine_code, source_number
from paceline.models.cpu.matrix import add_products
from paceline.models.cpu.pages import address
from paceline.models.cpu.threads import find_team
from paceline.models.cpu.tiles import DOT, FULL, STRIP
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
"""Of a block; their scores, with a head's keys and values in bfloat16, fit into the second-level cache."""

(
    THREAD, TEAM,  # addresses of omp_get_thread_num and omp_get_num_threads; THREAD 0: one thread
    ROWS, HEADS, KV_HEADS, HEAD_DIM, KIND, ITEM,  # kind of product, DOT or FULL, and bytes of a number
    SCALE,  # float32
    BIASES, BIAS_PITCH,  # what the first row's distances add to scores, 0: nothing; bytes from one head's to the next
    QKV, SLOTS,  # (rows, heads + 2 * kv heads, head dim); (rows,) numbers of the rows
    OUT, ROUNDED,  # (rows, heads * head dim), bfloat16 where ROUNDED is 1, else float32
    ROOM, ROOM_SIZE,  # keys, values, queries, sums and scores, one copy a thread
    FIELDS,
) = range(0, 18 * 8, 8)  # fmt: skip


class TwoSidedAttention:
    """Attention within one source.

    Args:
        heads, kv_heads: query heads in the order (group, kv head). head_dim: a multiple of 16, of 32 for products of
            bfloat16. scale: of the scores.
        dtype: of the products, float32 or bfloat16; sums are float32.
    """

    def __init__(self, heads: int, kv_heads: int, head_dim: int, scale: float, dtype: torch.dtype) -> None:
        self._heads, self._kv_heads, self._head_dim, self._scale = heads, kv_heads, head_dim, scale
        self._dtype, self._kind = dtype, FULL if dtype is torch.float32 else DOT
        self._team, self._entry = find_team(), compiled_attention()

    def __call__(self, qkv: torch.Tensor, biases: torch.Tensor | None = None) -> torch.Tensor:
        """(rows, heads + 2 * kv heads, head dim) -> (rows, heads * head dim), in the dtype of the input.

        Args:
            biases: (heads, 2 * rows - 1), what distances 1 - rows .. rows - 1 of a key behind its query add to scores.
        """
        rows, threads = len(qkv), 1 if self._team is None else torch.get_num_threads()
        given, out = (
            qkv.to(self._dtype).contiguous(),
            torch.empty(rows, self._heads * self._head_dim, dtype=qkv.dtype),
        )
        item = self._dtype.itemsize
        slots, size = np.arange(rows), _room(rows, self._head_dim, item)
        room = torch.empty(threads * size + 64, dtype=torch.uint8)
        told = np.zeros(FIELDS // 8, np.int64)
        told[ROWS // 8 : SCALE // 8] = rows, self._heads, self._kv_heads, self._head_dim, self._kind, item
        told[SCALE // 8 :].view(np.float32)[0] = self._scale
        if biases is not None:  # sums of products begin with them, before they are scaled
            biases = F.pad(biases.float() / self._scale, (0, STRIP))
            told[BIASES // 8 : QKV // 8] = biases.data_ptr() + 4 * (rows - 1), 4 * biases.shape[1]
        told[QKV // 8 :] = [
            given.data_ptr(), address(slots), out.data_ptr(), int(qkv.dtype is torch.bfloat16),
            -(-room.data_ptr() // 64) * 64, size,
        ]  # fmt: skip
        if self._team is None or threads == 1:
            self._entry.ctypes(address(told))
        else:
            told[:2] = self._team.thread, self._team.size
            self._team.run(self._entry.address, address(told), threads)
        return out


def _room(rows: int, head_dim: int, item: int) -> int:
    """Bytes that a thread needs, see `_places`."""
    strips = -(-head_dim // STRIP) * STRIP
    each = 4 * STRIP + item * head_dim + _score_pitch(rows)
    return item * _filled(rows) * (head_dim + strips) + QUERIES * each


@part_of_compiled
def _filled(rows: int) -> int:
    """Keys in whole strips."""
    return (rows + STRIP - 1) // STRIP * STRIP


@part_of_compiled
def _score_pitch(rows: int) -> int:
    """Bytes of a row of scores, with room behind them: an odd number of lines."""
    return ((rows + 2 * STRIP) // LANES | 1) * 64


@part_of_compiled
def _places(task: int, me: int) -> tuple[int, int, int, int, int]:
    """A thread's memory: packed keys and values of one head, queries and sums of a block, and its scores."""
    rows, size, item = _filled(read(task + ROWS)), read(task + HEAD_DIM), read(task + ITEM)
    keys = read(task + ROOM) + me * read(task + ROOM_SIZE)
    values = keys + item * rows * size
    queries = values + item * rows * ((size + STRIP - 1) // STRIP * STRIP)
    sums = queries + item * QUERIES * size
    return keys, values, queries, sums, sums + 4 * QUERIES * STRIP


@part_of_compiled
def _copy_lines(source: int, pitch: int, rows: int, size: int, target: int, target_pitch: int) -> None:
    """Rows of `size` bytes, whole lines."""
    for row in range(rows):
        for i in range(0, size, 64):
            store(target + row * target_pitch + i, load(source + row * pitch + i))


@part_of_compiled
def _pack_head(task: int, me: int, kv_head: int) -> None:
    rows, size, item, slots = read(task + ROWS), read(task + HEAD_DIM), read(task + ITEM), read(task + SLOTS)
    heads, kv_heads, (keys, values, _, _, _) = read(task + HEADS), read(task + KV_HEADS), _places(task, me)
    pitch = item * size * (heads + 2 * kv_heads)
    base = read(task + QKV) + item * size * (heads + kv_head)
    pack_keys(base, slots, pitch, rows, item * size // 64, keys)
    for part in range(0, size, STRIP):
        place, target = base + item * (size * kv_heads + part), values + item * part * _filled(rows)
        lines = item * min(STRIP, size - part) // 64
        if read(task + KIND) == DOT:
            pack_values(place, slots, pitch, rows, lines, target)
        else:
            _copy_lines(place, pitch, rows, 64 * lines, target, 4 * STRIP)
            for i in range(rows, _filled(rows)):  # taken by shares of 0
                _copy_lines(place, pitch, 1, 64 * lines, target + i * 4 * STRIP, 4 * STRIP)


@part_of_compiled
def _set_to(value: np.float32, start: int, count: int) -> None:
    for i in range(0, count, LANES):
        store(start + 4 * i, broadcast(value))


@part_of_compiled
def _shares(task: int, row: int) -> np.float32:
    """Replace a row of scores by its shares, 0 up to a whole block; returns their sum."""
    rows, scale = read(task + ROWS), read_float(task + SCALE)
    _set_to(LOWEST, row + 4 * rows, STRIP)
    if read(task + KIND) == FULL:
        return whole_softmax(row, rows, scale)
    whole = half_softmax(row, rows, scale)
    store_half(row + 2 * rows, broadcast(np.float32(0.0)))
    return whole


@part_of_compiled
def _begin_scores(task: int, head: int, row: int, scores: int) -> None:
    """What a row's scores are before products are added: 0, or what distances add."""
    biases, keys = read(task + BIASES), _filled(read(task + ROWS))
    if biases == 0:
        _set_to(np.float32(0.0), scores, keys)
    else:
        _copy_lines(biases + head * read(task + BIAS_PITCH) - 4 * row, 0, 1, 4 * keys, scores, 0)


@part_of_compiled
def _block_of_queries(task: int, me: int, head: int, first: int) -> None:
    """Attention of some rows of one query head, whose keys and values are packed."""
    rows, size, heads, kind = read(task + ROWS), read(task + HEAD_DIM), read(task + HEADS), read(task + KIND)
    keys, values, x, sums, scores = _places(task, me)
    item, score_pitch, queries = read(task + ITEM), _score_pitch(rows), min(QUERIES, rows - first)
    pitch = item * size * (heads + 2 * read(task + KV_HEADS))
    _copy_lines(read(task + QKV) + first * pitch + item * size * head, pitch, queries, item * size, x, item * size)
    for q in range(queries):
        _begin_scores(task, head, first + q, scores + q * score_pitch)
    for strip in range(0, rows, STRIP):
        weights, out = keys + item * strip * size, scores + 4 * strip
        add_products(kind, weights, item * size // 4, x, item * size, queries, out, score_pitch)
    wholes = score_pitch - 64
    for q in range(queries):
        whole = _shares(task, scores + q * score_pitch)
        store(scores + q * score_pitch + wholes, broadcast(np.float32(1.0) / whole))
    steps = (rows + BLOCK - 1) // BLOCK * BLOCK * item // 4
    for part in range(0, size, STRIP):
        _set_to(np.float32(0.0), sums, queries * STRIP)
        weights = values + item * part * _filled(rows)
        add_products(kind, weights, steps, scores, score_pitch, queries, sums, 4 * STRIP)
        for q in range(queries):
            place = (first + q) * heads * size + head * size + part
            _put(task, sums + 4 * q * STRIP, load(scores + q * score_pitch + wholes), place, min(STRIP, size - part))


@part_of_compiled
def _put(task: int, sums: int, factor: Any, place: int, width: int) -> None:
    """A row's sums, divided by those of its shares, to their place in the result."""
    out = read(task + OUT)
    for i in range(0, width, LANES):
        value = mul(load(sums + 4 * i), factor)
        if read(task + ROUNDED) == 1:
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
