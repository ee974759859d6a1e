"""Attention to a part of the text in compiled code: each query of a row chooses among the slots that the row sees.

Labels of all committed positions lie sixteen positions together, channel by channel, so that sixteen scores are one
sum of products. Of a row's list (models.cpu.visible_slots) the first and the last slots are always read; among the
others those with the largest scores are. The least of these is found exactly: at least as many of the largest scores of
sixteen lie above their own least, so that few scores are looked at twice. What is chosen is attended to in the order of
the list. This is an entry of its own, so that it is compiled only where a selection runs.

Source: Post-Training Sparse Attention with Double Sparsity (arXiv:2408.07092).
"""

from __future__ import annotations

import functools
from typing import Any, Final

import numpy as np

from paceline.models.cpu import offsets as at
from paceline.models.cpu.attention import LOWEST, copy_row, prepare, put_mixed, to_shares, write_cache
from paceline.models.cpu.attention_tiles import MAX_QUERIES, fetch, score, weigh
from paceline.models.cpu.compilation import machine_code, source_number
from paceline.models.cpu.threads import wait_for_all
from paceline.models.cpu.tiles import DOT
from paceline.models.cpu.vectors import (
    LANES,
    broadcast,
    fma,
    largest,
    load,
    load_half,
    read,
    read_float,
    store,
    write,
    write_float,
)  # fmt: skip
from paceline.models.cpu.visible_slots import own_slots, shared_slots
from paceline.utils import part_of_compiled

BINS: Final = 128
LEAST_ROOM: Final = 16 * BINS
"""Positions for which there must be room in the rows of a thread's scores."""

ENDLESS = np.float32(np.inf)
LABELS_AT, HEAD_BYTES, LAYER_BYTES, SELECTED_ROW = 0, 8, 16, 24
"""Of each row: address of its text's labels, bytes of a head's and of a layer's; and bytes of this record."""

MAXIMA, FOUND, PLACES, CHOSEN, COUNTS = 1, 2, 3, 5, 7
"""Rows of a thread's scores beside row 0, the scores themselves: largest of sixteen, then scores of what is chosen;
candidates' scores, their places (two rows), slots that are chosen (two rows), and counts."""


@part_of_compiled
def _label_scores(labels: int, channels: int, narrow: bool, query: int, scores: int, count: int) -> None:
    """Scores of positions 0 .. count - 1, and up to fifteen of no meaning behind them."""
    pitch = channels * LANES * (2 if narrow else 4)
    for block in range((count + LANES - 1) // LANES):
        sums, entry = broadcast(np.float32(0.0)), labels + block * pitch
        for channel in range(channels):
            lanes = load_half(entry + 32 * channel) if narrow else load(entry + 64 * channel)
            sums = fma(lanes, broadcast(read_float(query + 4 * channel)), sums)
        store(scores + 64 * block, sums)


@part_of_compiled
def _own_score(frame: int, key: int, table: int, channels: int, query: int, spare: int) -> np.float32:
    """The same of one key in its slot. `table`: of channels."""
    total, narrow = np.float32(0.0), read(frame + at.NARROW) == 1
    for channel in range(channels):
        place = read(table + 8 * channel)
        store(spare, load_half(key + 2 * place) if narrow else load(key + 4 * place))
        total += read_float(spare) * read_float(query + 4 * channel)
    return total


@part_of_compiled
def _range(values: int, count: int) -> tuple[np.float32, np.float32]:
    """Least and largest of those of `count` numbers that are none of LOWEST."""
    low, high = ENDLESS, LOWEST
    for i in range(count):
        value = read_float(values + 4 * i)
        if value > LOWEST:
            low, high = min(low, value), max(high, value)
    return low, high


@part_of_compiled
def _bin(value: np.float32, low: np.float32, scale: np.float32) -> int:
    return min(int((value - low) * scale), BINS - 1)


@part_of_compiled
def _threshold(values: int, count: int, wanted: int, counts: int) -> np.float32:
    """The `wanted`-th largest of `count` numbers: by counting them in bins, and those of its bin again.

    Where numbers lie too far apart or too close together for bins, it may be less.
    """
    low, high = _range(values, count)
    while low < high:
        scale = np.float32(BINS) / (high - low)
        if not np.float32(0.0) < scale < ENDLESS:
            return low
        for i in range(BINS):
            write(counts + 8 * i, 0)
        for i in range(count):
            value = read_float(values + 4 * i)
            if low <= value <= high:
                entry = counts + 8 * _bin(value, low, scale)
                write(entry, read(entry) + 1)
        place = BINS - 1
        while place > 0 and read(counts + 8 * place) < wanted:
            wanted -= read(counts + 8 * place)
            place -= 1
        least, most = ENDLESS, LOWEST
        for i in range(count):
            value = read_float(values + 4 * i)
            if low <= value <= high and _bin(value, low, scale) == place:
                least, most = min(least, value), max(most, value)
        low, high = least, most
    return low


@part_of_compiled
def _candidates(scores: int, pitch: int, count: int, wanted: int) -> int:
    """How many of the scores 0 .. count - 1 can be among the `wanted` largest; they and their places follow in FOUND
    and PLACES.
    """
    blocks, least = (count + LANES - 1) // LANES, LOWEST
    for i in range(count, LANES * blocks):
        write_float(scores + 4 * i, LOWEST)
    for block in range(blocks):
        write_float(scores + MAXIMA * pitch + 4 * block, largest(load(scores + 64 * block)))
    if blocks > wanted:
        least = _threshold(scores + MAXIMA * pitch, blocks, wanted, scores + COUNTS * pitch)
    found = 0
    for block in range(blocks):
        if read_float(scores + MAXIMA * pitch + 4 * block) >= least:
            for i in range(LANES * block, min(LANES * (block + 1), count)):
                value = read_float(scores + 4 * i)
                if value >= least and value > LOWEST:
                    write_float(scores + FOUND * pitch + 4 * found, value)
                    write(scores + PLACES * pitch + 8 * found, i)
                    found += 1
    return found


@part_of_compiled
def _choose(scores: int, pitch: int, count: int, wanted: int, chosen: int) -> int:
    """The places of the `wanted` largest of `count` scores, in order, to `chosen`; of equal ones the first. Returns how
    many.
    """
    found = _candidates(scores, pitch, count, wanted)
    values = scores + FOUND * pitch
    least = _threshold(values, found, wanted, scores + COUNTS * pitch)
    equal = wanted
    for i in range(found):
        if read_float(values + 4 * i) > least:
            equal -= 1
    taken = 0
    for i in range(found):
        value = read_float(values + 4 * i)
        if taken < wanted and (value > least or (value == least and equal > 0)):
            if value == least:
                equal -= 1
            write(chosen + 8 * taken, read(scores + PLACES * pitch + 8 * i))
            taken += 1
    return taken


@part_of_compiled
def _score_all(frame: int, layer: int, row: int, kv_head: int, query: int, scores: int, stop: int) -> None:
    """Scores of a row's list up to place `stop`: by labels as far as these go, then by keys."""
    _, count = shared_slots(read(layer + at.SEEN), row)
    own, _ = own_slots(read(layer + at.SEEN), row)
    channels, narrow, size = read(frame + at.LABEL_CHANNELS), read(frame + at.NARROW) == 1, read(frame + at.HEAD_DIM)
    table, record = read(layer + at.CHANNELS) + 8 * kv_head * channels, read(frame + at.SELECTED) + row * SELECTED_ROW
    asked = query + 8 * size
    for channel in range(channels):
        write_float(asked + 4 * channel, read_float(query + 4 * read(table + 8 * channel)))
    labels = read(record + LABELS_AT) + read(layer + at.LABEL_LAYER) * read(record + LAYER_BYTES)
    labels += kv_head * read(record + HEAD_BYTES)
    _label_scores(labels, channels, narrow, asked, scores, min(count, stop))
    keys = read(layer + at.CACHE) + kv_head * size * (2 if narrow else 4)
    for i in range(count, stop):
        key = keys + read(own + 8 * (i - count)) * read(frame + at.SLOT_PITCH)
        spare = asked + 4 * channels
        write_float(scores + 4 * i, _own_score(frame, key, table, channels, asked, spare))


@part_of_compiled
def _selected(frame: int, layer: int, row: int, kv_head: int, query: int, scores: int) -> int:
    """The slots that a query attends to, to CHOSEN, those of sixteen behind the last being the last; their number."""
    shared, count = shared_slots(read(layer + at.SEEN), row)
    own, more = own_slots(read(layer + at.SEEN), row)
    pitch, total = read(frame + at.SCORES_PITCH), count + more
    most, sinks = read(frame + at.SELECTED_MOST), read(frame + at.SELECTED_SINKS)
    recent = read(frame + at.SELECTED_RECENT)
    chosen, taken = scores + CHOSEN * pitch, 0
    first, stop = (total, total) if total <= most else (sinks, total - recent)
    for i in range(first):
        write(chosen + 8 * taken, i)
        taken += 1
    if stop > first:
        _score_all(frame, layer, row, kv_head, query, scores, stop)
        for i in range(first):
            write_float(scores + 4 * i, LOWEST)
        taken += _choose(scores, pitch, stop, most - sinks - recent, chosen + 8 * taken)
    for i in range(stop, total):
        write(chosen + 8 * taken, i)
        taken += 1
    for i in range(taken):
        place = read(chosen + 8 * i)
        write(chosen + 8 * i, read(shared + 8 * place) if place < count else read(own + 8 * (place - count)))
    for i in range(taken, taken + LANES):
        write(chosen + 8 * i, read(chosen + 8 * (taken - 1)))
    return taken


@part_of_compiled
def _attend(frame: int, layer: int, row: int, head: int, query: int, scores: int, count: int) -> None:
    """Attention of one query to `count` chosen slots, to its place in the mixed values."""
    size, slot_pitch, kind = read(frame + at.HEAD_DIM), read(frame + at.SLOT_PITCH), read(frame + at.KIND)
    half, narrow = kind == DOT, read(frame + at.NARROW) == 1
    item, cached = 2 if half else 4, 2 if narrow else 4
    pitch, chosen = read(frame + at.SCORES_PITCH), scores + CHOSEN * read(frame + at.SCORES_PITCH)
    keys = read(layer + at.CACHE) + head % read(frame + at.KV_HEADS) * size * cached
    weights, sums = scores + MAXIMA * pitch, query + MAX_QUERIES * 4 * size
    for i in range(0, count, LANES):
        fetch(keys, chosen + 8 * i, slot_pitch, size * cached, read(frame + at.VALUES))
    for i in range(0, count, LANES):
        score(kind, size, 1, query, item * size, keys, chosen + 8 * i, slot_pitch, weights + 4 * i, pitch)
    whole = broadcast(to_shares(frame, layer, row, weights, count, head, False))
    for part in range(0, size, 2 * LANES):
        store(sums, broadcast(np.float32(0.0)))
        store(sums + 64, broadcast(np.float32(0.0)))
        values = keys + read(frame + at.VALUES) + part * cached
        weigh(0 if narrow else 1, 1, weights, pitch, values, chosen, count, slot_pitch, sums, 8 * LANES)
        target = read(frame + at.MIXED) + row * read(frame + at.MIXED_PITCH) + item * (head * size + part)
        put_mixed(sums, 2 * LANES, whole, target, half)


@part_of_compiled
def selected_attention(frame: int, layer: int, me: int, team: int) -> None:
    """Keys and values to the cache, then attention of all rows, their queries divided among the threads."""
    rows, heads, kv_heads = read(frame + at.ROWS), read(frame + at.HEADS), read(frame + at.KV_HEADS)
    size, half, groups = read(frame + at.HEAD_DIM), read(frame + at.KIND) == DOT, heads // kv_heads
    write_cache(frame, layer, kv_heads * rows * me // team, kv_heads * rows * (me + 1) // team)
    wait_for_all(frame, team)
    query = read(frame + at.QUERY) + me * read(frame + at.QUERY_SIZE)
    scores = read(frame + at.SCORES) + me * read(frame + at.SCORES_SIZE)
    for item in range(rows * heads * me // team, rows * heads * (me + 1) // team):
        row, of_row = item // heads, item % heads
        kv_head = of_row // groups  # queries of one key and value head in turn: some of what they choose is the same
        head = of_row % groups * kv_heads + kv_head
        prepare(frame, layer, row, head, read(layer + at.Q_NORM), query, False)
        count = _selected(frame, layer, row, kv_head, query, scores)
        if half:
            copy_row(query, size, query, True)
        _attend(frame, layer, row, head, query, scores, count)


@functools.cache
def compiled_selection() -> Any:
    """Attention that chooses, as machine code, in the place of models.cpu.attention.attend; the last argument is
    not read.
    """
    sources = source_number()

    def entry(frame: int, layer: int, me: int, team: int, unused: int) -> None:
        if sources != 0:  # see forward.compiled
            selected_attention(frame, layer, me, team)

    return machine_code(entry, "kernels of selected attention", "some seconds", arguments=5)
