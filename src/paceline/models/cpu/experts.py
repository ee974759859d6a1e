"""Mixtures of experts in compiled code: rows of a pass are grouped by the expert that they go to.

The router multiplies in float32, its rows and strips divided among the threads; then each thread chooses for all rows,
which costs less than another meeting, and keeps three lists: where each expert's rows begin, and in that order the rows
and their shares. Experts take their rows together; threads divide the strips of every expert. A thread owns its columns
of the output, to which experts add in ascending order, so that a row's bits do not depend on its neighbours.

Source: Mixtral of experts (arXiv:2401.04088).
"""

from __future__ import annotations

import numpy as np
from numba import njit

from paceline.models.cpu import offsets as at
from paceline.models.cpu.attention import LOWEST, softmax
from paceline.models.cpu.matrix import convert_rows, own_rows, steps_of, strip_size, strip_sums
from paceline.models.cpu.sublayers import (
    STRIP_BYTES,
    add_bias,
    add_normed,
    add_residual,
    norm_or_copy,
    normed_rows,
    put_inner,
)
from paceline.models.cpu.threads import wait_for_all
from paceline.models.cpu.tiles import BYTES, DOT, FULL, STRIP
from paceline.models.cpu.vectors import broadcast, fma, load, read, read_float, store, write, write_float


@njit(error_model="numpy")
def _route(frame: int, layer: int, me: int, team: int) -> None:
    """This thread's part of the router's logits, row by row and strip by strip."""
    spare = own_rows(frame, me) + read(frame + at.SPARE)
    strips, rows = (read(frame + at.EXPERTS) + STRIP - 1) // STRIP, read(frame + at.ROWS)
    hidden, source = read(frame + at.HIDDEN), read(frame + at.X)
    bias, norm, normed = read(layer + at.ROUTER_BIAS), read(layer + at.MLP_NORM), -1
    for item in range(rows * strips * me // team, rows * strips * (me + 1) // team):
        row, strip = item // strips, item % strips
        if row != normed:
            norm_or_copy(frame, source + row * read(frame + at.X_PITCH), norm, spare, False)
            normed = row
        target = read(frame + at.ROUTE) + row * read(frame + at.ROUTE_PITCH) + strip * STRIP_BYTES
        strip_sums(FULL, read(layer + at.ROUTER) + strip * hidden * STRIP_BYTES, hidden, spare, 0, 1, target)
        add_bias(target, 1, 0 if bias == 0 else bias + strip * STRIP_BYTES)


@njit(error_model="numpy")
def _choose(scores: int, experts: int, top_k: int, chosen: int, shares: int) -> np.float32:
    """The likeliest experts of one row and their shares, likeliest first; returns the sum of these."""
    whole, taken = softmax(scores, experts, np.float32(1.0)), np.float32(0.0)
    if not whole > 0:  # logits that are not finite
        for rank in range(top_k):
            write(chosen + 8 * rank, rank)
            write_float(shares + 4 * rank, whole)
        return whole
    for rank in range(top_k):
        best, most = 0, LOWEST
        for expert in range(experts):
            value = read_float(scores + 4 * expert)
            if value > most:
                best, most = expert, value
        write_float(scores + 4 * best, LOWEST)
        write(chosen + 8 * rank, best)
        write_float(shares + 4 * rank, most / whole)
        taken += most / whole
    return taken


@njit(error_model="numpy")
def _lists(frame: int, me: int) -> tuple[int, int, int]:
    """Addresses of this thread's lists: starts (experts + 1,), rows and shares (rows * top_k,), 8 bytes each."""
    starts = read(frame + at.CHOICE) + me * read(frame + at.CHOICE_SIZE)
    rows = starts + 8 * (read(frame + at.EXPERTS) + 1)
    return starts, rows, rows + 8 * read(frame + at.ROWS) * read(frame + at.TOP_K)


@njit(error_model="numpy")
def _group(frame: int, me: int) -> None:
    """Fill this thread's lists from the router's logits."""
    experts, top_k, rows = read(frame + at.EXPERTS), read(frame + at.TOP_K), read(frame + at.ROWS)
    starts, own_rows, own_shares = _lists(frame, me)
    chosen = own_shares + 8 * rows * top_k
    shares, scores = chosen + 8 * rows * top_k, chosen + 16 * rows * top_k
    for expert in range(experts + 1):
        write(starts + 8 * expert, 0)
    for row in range(rows):
        source = read(frame + at.ROUTE) + row * read(frame + at.ROUTE_PITCH)
        for i in range(0, 4 * experts, 64):
            store(scores + i, load(source + i))
        place = row * top_k
        taken = _choose(scores, experts, top_k, chosen + 8 * place, shares + 4 * place)
        for i in range(place, place + top_k):
            if read(frame + at.NORM_SHARES) == 1:
                write_float(shares + 4 * i, read_float(shares + 4 * i) / taken)
            count = starts + 8 * (read(chosen + 8 * i) + 1)
            write(count, read(count) + 1)
    for expert in range(experts):
        write(starts + 8 * (expert + 1), read(starts + 8 * expert) + read(starts + 8 * (expert + 1)))
    for i in range(rows * top_k):  # each start moves to the end of its expert's rows, where the next expert's begin
        start = starts + 8 * read(chosen + 8 * i)
        place = read(start)
        write(own_rows + 8 * place, i // top_k)
        write_float(own_shares + 8 * place, read_float(shares + 4 * i))
        write(start, place + 1)
    for expert in range(experts, 0, -1):
        write(starts + 8 * expert, read(starts + 8 * (expert - 1)))
    write(starts, 0)


@njit(error_model="numpy")
def _gathered(frame: int, me: int, x: int, rows: int, count: int) -> int:
    """Address of the rows of one expert, side by side; `rows`: address of their indices."""
    pitch = read(frame + at.NORMED_PITCH)
    if count == 1:
        return x + read(rows) * pitch
    target = own_rows(frame, me) + read(frame + at.SPARE) + read(frame + at.X_PITCH)
    for i in range(count):
        source = x + read(rows + 8 * i) * pitch
        for byte in range(0, pitch, 64):
            store(target + i * pitch + byte, load(source + byte))
    return target


@njit(error_model="numpy")
def _inner(frame: int, layer: int, me: int, team: int) -> None:
    """Inner activations, in the order of the lists."""
    kind = read(layer + at.GATE_UP_KIND)
    x = normed_rows(frame, me, team, read(layer + at.MLP_NORM), kind)
    sums = read(frame + at.SUMS) + me * read(frame + at.SUMS_SIZE)
    pitch, inner_pitch = read(frame + at.NORMED_PITCH), read(frame + at.INNER_PITCH)
    strips, steps = (2 * read(frame + at.EXPERT_INNER) + STRIP - 1) // STRIP, steps_of(kind, read(frame + at.HIDDEN))
    starts, rows, _ = _lists(frame, me)
    item = 2 if read(frame + at.KIND) == DOT else 4
    for expert in range(read(frame + at.EXPERTS)):
        first, stop = read(starts + 8 * expert), read(starts + 8 * expert + 8)
        if first == stop:
            continue
        own = _gathered(frame, me, x, rows + 8 * first, stop - first)
        entry = read(layer + at.EXPERT_WEIGHTS) + 32 * expert
        weights, bias = read(entry), read(entry + 16)
        for strip in range(strips * me // team, strips * (me + 1) // team):
            strip_sums(kind, weights + strip * strip_size(kind, steps), steps, own, pitch, stop - first, sums)
            add_bias(sums, stop - first, 0 if bias == 0 else bias + strip * STRIP_BYTES)
            target = read(frame + at.INNER) + first * inner_pitch + strip * (STRIP // 2) * item
            put_inner(frame, sums, target, stop - first)


@njit(error_model="numpy")
def _add_shares(sums: int, rows: int, shares: int, count: int, out: int, pitch: int) -> None:
    """Add a strip's sums (count, 64), each row times its share, to the rows of `out`."""
    for i in range(count):
        target, share = out + read(rows + 8 * i) * pitch, broadcast(read_float(shares + 8 * i))
        for byte in range(0, STRIP_BYTES, 64):
            store(target + byte, fma(load(sums + i * STRIP_BYTES + byte), share, load(target + byte)))


@njit(error_model="numpy")
def _outer(frame: int, layer: int, me: int, team: int, rounded: bool) -> None:
    """Outputs of all experts, added up in this thread's columns of the buffer of queries, keys and values."""
    sums, kind = read(frame + at.SUMS) + me * read(frame + at.SUMS_SIZE), read(layer + at.DOWN_KIND)
    inner, inner_pitch = read(frame + at.EXPERT_INNER), read(frame + at.INNER_PITCH)
    strips, steps = (read(frame + at.HIDDEN) + STRIP - 1) // STRIP, steps_of(kind, inner)
    begin, end = strips * me // team, strips * (me + 1) // team
    starts, rows, shares = _lists(frame, me)
    out, out_pitch, norm = read(frame + at.QKV), read(frame + at.QKV_PITCH), read(layer + at.POST_MLP_NORM)
    for row in range(read(frame + at.ROWS)):
        for byte in range(begin * STRIP_BYTES, end * STRIP_BYTES, 64):
            store(out + row * out_pitch + byte, broadcast(np.float32(0.0)))
    for expert in range(read(frame + at.EXPERTS)):
        first, stop = read(starts + 8 * expert), read(starts + 8 * expert + 8)
        if first == stop:
            continue
        x, pitch = read(frame + at.INNER) + first * inner_pitch, inner_pitch
        if kind >= BYTES:
            own = own_rows(frame, me)
            convert_rows(frame, kind, x, pitch, inner, own, 0, stop - first)
            x, pitch = own, read(frame + at.NORMED_PITCH)
        entry = read(layer + at.EXPERT_WEIGHTS) + 32 * expert
        weights, bias = read(entry + 8), read(entry + 24)
        for strip in range(begin, end):
            strip_sums(kind, weights + strip * strip_size(kind, steps), steps, x, pitch, stop - first, sums)
            add_bias(sums, stop - first, 0 if bias == 0 else bias + strip * STRIP_BYTES)
            _add_shares(sums, rows + 8 * first, shares + 8 * first, stop - first, out + strip * STRIP_BYTES, out_pitch)
    for row in range(read(frame + at.ROWS) if norm == 0 else 0):
        x, own = read(frame + at.X) + row * read(frame + at.X_PITCH), out + row * out_pitch
        first, size = begin * STRIP_BYTES, (end - begin) * STRIP_BYTES
        add_residual(frame, x + first, own + first, size, rounded, sums)
    add_normed(frame, me, team, norm, rounded)


@njit(error_model="numpy")
def mixture(frame: int, layer: int, me: int, team: int, rounded: bool) -> None:
    """The mixture of experts of all rows."""
    _route(frame, layer, me, team)
    wait_for_all(frame, team)
    _group(frame, me)
    _inner(frame, layer, me, team)
    wait_for_all(frame, team)
    _outer(frame, layer, me, team, rounded)
