"""Mixtures of experts in compiled code: rows of a pass are grouped by the expert that they go to.

The router multiplies in float32, its rows and strips divided among the threads; then each thread chooses for all rows,
which costs less than another meeting, and keeps three lists: where each expert's rows begin, and in that order the rows
and their shares. Experts take their rows together; threads divide the strips of every expert. A thread owns its columns
of the output, to which experts add in ascending order, so that a row's bits do not depend on its neighbours. An MLP
that every row goes through is one more expert, the last, whose share is 1 or the sigmoid of the router's last output.

Sources: Mixtral of experts (arXiv:2401.04088); shared experts and groups of experts: DeepSeek-V2 (arXiv:2405.04434).
"""

from __future__ import annotations

import numpy as np

from paceline.models.cpu import offsets as at
from paceline.models.cpu.attention import LOWEST, softmax
from paceline.models.cpu.matrix import convert_rows, own_rows, steps_of, strip_size, strip_sums, when_prepared
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
from paceline.models.cpu.vectors import (
    LANES,
    add,
    broadcast,
    div,
    exponential,
    fma,
    load,
    mul,
    read,
    read_float,
    store,
    write,
    write_float,
)  # fmt: skip
from paceline.models.spec import MoeSpec
from paceline.utils import part_of_compiled


@part_of_compiled
def _route(frame: int, layer: int, me: int, team: int) -> None:
    """This thread's part of the router's logits, row by row and strip by strip."""
    spare = own_rows(frame, me) + read(frame + at.SPARE)
    strips, rows = (read(frame + at.EXPERTS) + read(frame + at.SHARED_GATE) + STRIP - 1) // STRIP, read(frame + at.ROWS)
    hidden, source = read(frame + at.HIDDEN), read(frame + at.X)
    bias, norm, normed = read(layer + at.ROUTER_BIAS), read(layer + at.MLP_NORM), -1
    if read(frame + at.RANKED) == 1:
        bias = 0  # it ranks, and weighs nothing
    for item in range(rows * strips * me // team, rows * strips * (me + 1) // team):
        row, strip = item // strips, item % strips
        if row != normed:
            norm_or_copy(frame, source + row * read(frame + at.X_PITCH), norm, spare, False)
            normed = row
        target = read(frame + at.ROUTE) + row * read(frame + at.ROUTE_PITCH) + strip * STRIP_BYTES
        strip_sums(FULL, read(layer + at.ROUTER) + strip * hidden * STRIP_BYTES, hidden, spare, 0, 1, target)
        add_bias(target, 1, 0 if bias == 0 else bias + strip * STRIP_BYTES)


@part_of_compiled
def _rank_of_group(scores: int, size: int, group: int, two: bool) -> np.float32:
    """The largest score of a group, or the sum of its two largest."""
    most, next_most = LOWEST, LOWEST
    for i in range(size * group, size * (group + 1)):
        value = read_float(scores + 4 * i)
        next_most = max(next_most, min(most, value))
        most = max(most, value)
    return most + next_most if two and size > 1 else most


@part_of_compiled
def _keep_best_groups(scores: int, size: int, groups: int, best: int, two: bool) -> None:
    """Close all but the `best` groups of highest `_rank_of_group`: their scores become 0, or LOWEST with `two`."""
    closed = LOWEST if two else np.float32(0.0)
    for group in range(groups):
        largest, before = _rank_of_group(scores, size, group, two), 0
        for other in range(groups):  # closed ones do not count: before each of them stand all the best
            most = _rank_of_group(scores, size, other, two)
            before += 1 if most > largest or (most == largest and other < group) else 0
        for i in range(size * group, size * (group + 1) if before >= best else 0):
            write_float(scores + 4 * i, closed)


@part_of_compiled
def _take_best(ranks: int, experts: int) -> tuple[int, np.float32]:
    """The expert of the highest rank, and that rank, which becomes LOWEST."""
    best, most = 0, LOWEST
    for expert in range(experts):
        value = read_float(ranks + 4 * expert)
        if value > most:
            best, most = expert, value
    write_float(ranks + 4 * best, LOWEST)
    return best, most


@part_of_compiled
def _choose(frame: int, preference: int, scores: int, chosen: int, shares: int) -> np.float32:
    """The likeliest experts of one row and their shares, likeliest first; returns the sum of these. A bias
    (`preference`, 0: none) is added for choosing alone; these ranks stand behind the scores.
    """
    experts, top_k, groups = read(frame + at.EXPERTS), read(frame + at.TOP_K), read(frame + at.GROUPS)
    whole, taken = softmax(scores, experts, np.float32(1.0)), np.float32(0.0)
    if not whole > 0:  # logits that are not finite
        for rank in range(top_k):
            write(chosen + 8 * rank, rank)
            write_float(shares + 4 * rank, whole)
        return whole
    ranks = scores
    if preference != 0:
        ranks, part = scores + (experts + LANES - 1) // LANES * 64, broadcast(np.float32(1.0) / whole)
        for i in range(0, 4 * experts, 64):
            store(ranks + i, fma(load(scores + i), part, load(preference + i)))
    if groups > 0:
        _keep_best_groups(ranks, experts // groups, groups, read(frame + at.BEST_GROUPS), False)
    for rank in range(top_k):
        best, most = _take_best(ranks, experts)
        share = (most if preference == 0 else read_float(scores + 4 * best)) / whole
        write(chosen + 8 * rank, best)
        write_float(shares + 4 * rank, share)
        taken += share
    return taken


@part_of_compiled
def _choose_by_sigmoid(frame: int, preference: int, scores: int, chosen: int, shares: int) -> np.float32:
    """As `_choose`, by sigmoids, to which the router's bias (`preference`, 0: none) is added for choosing alone; these
    ranks stand behind the scores.
    """
    experts, top_k, groups = read(frame + at.EXPERTS), read(frame + at.TOP_K), read(frame + at.GROUPS)
    ranks, ones = scores + (experts + LANES - 1) // LANES * 64, broadcast(np.float32(1.0))
    for i in range(0, 4 * experts, 64):
        share = div(ones, add(ones, exponential(mul(load(scores + i), broadcast(np.float32(-1.0))))))
        store(scores + i, share)
        store(ranks + i, share if preference == 0 else add(share, load(preference + i)))
    if groups > 0:
        _keep_best_groups(ranks, experts // groups, groups, read(frame + at.BEST_GROUPS), True)
    taken = np.float32(1e-20)
    for rank in range(top_k):
        best, _ = _take_best(ranks, experts)
        write(chosen + 8 * rank, best)
        write_float(shares + 4 * rank, read_float(scores + 4 * best))
        taken += read_float(scores + 4 * best)
    return taken


@part_of_compiled
def _entries(frame: int) -> tuple[int, int]:
    """How many experts there are, and of a row, the MLP beside them included."""
    return read(frame + at.EXPERTS) + read(frame + at.SHARED_MLP), read(frame + at.TOP_K) + read(frame + at.SHARED_MLP)


@part_of_compiled
def _lists(frame: int, me: int) -> tuple[int, int, int]:
    """Addresses of this thread's lists: starts (entries + 1,), rows and shares (rows * each,), 8 bytes each; see
    `_entries`.
    """
    entries, each = _entries(frame)
    starts = read(frame + at.CHOICE) + me * read(frame + at.CHOICE_SIZE)
    rows = starts + 8 * (entries + 1)
    return starts, rows, rows + 8 * read(frame + at.ROWS) * each


@part_of_compiled
def _choose_of_row(frame: int, layer: int, row: int, scores: int, chosen: int, shares: int) -> None:
    """What one row goes through, and its shares.

    `scores`: room for those of all experts, twice where they are ranked by others.
    """
    experts, top_k = read(frame + at.EXPERTS), read(frame + at.TOP_K)
    source, factor = read(frame + at.ROUTE) + row * read(frame + at.ROUTE_PITCH), read_float(frame + at.SHARE_SCALE)
    for i in range(0, 4 * experts, 64):
        store(scores + i, load(source + i))
    preference = read(layer + at.ROUTER_BIAS) if read(frame + at.RANKED) == 1 else 0
    if read(frame + at.SIGMOID) == 1:
        taken = _choose_by_sigmoid(frame, preference, scores, chosen, shares)
    else:
        taken = _choose(frame, preference, scores, chosen, shares)
    for i in range(top_k):
        share = read_float(shares + 4 * i)
        if read(frame + at.NORM_SHARES) == 1:
            share /= taken
        write_float(shares + 4 * i, share * factor)
    if read(frame + at.SHARED_MLP) == 1:
        ones = broadcast(np.float32(1.0))
        store(scores, ones)
        if read(frame + at.SHARED_GATE) == 1:
            store(scores, div(ones, add(ones, exponential(broadcast(-read_float(source + 4 * experts))))))
        write(chosen + 8 * top_k, experts)
        write_float(shares + 4 * top_k, read_float(scores))


@part_of_compiled
def _group(frame: int, layer: int, me: int) -> None:
    """Fill this thread's lists from the router's logits."""
    (entries, each), rows = _entries(frame), read(frame + at.ROWS)
    starts, own_rows, own_shares = _lists(frame, me)
    chosen = own_shares + 8 * rows * each
    shares, scores = chosen + 8 * rows * each, chosen + 16 * rows * each
    for expert in range(entries + 1):
        write(starts + 8 * expert, 0)
    for row in range(rows):
        place = row * each
        _choose_of_row(frame, layer, row, scores, chosen + 8 * place, shares + 4 * place)
        for i in range(place, place + each):
            count = starts + 8 * (read(chosen + 8 * i) + 1)
            write(count, read(count) + 1)
    for expert in range(entries):
        write(starts + 8 * (expert + 1), read(starts + 8 * expert) + read(starts + 8 * (expert + 1)))
    for i in range(rows * each):  # each start moves to the end of its expert's rows, where the next expert's begin
        start = starts + 8 * read(chosen + 8 * i)
        place = read(start)
        write(own_rows + 8 * place, i // each)
        write_float(own_shares + 8 * place, read_float(shares + 4 * i))
        write(start, place + 1)
    for expert in range(entries, 0, -1):
        write(starts + 8 * expert, read(starts + 8 * (expert - 1)))
    write(starts, 0)


@part_of_compiled
def _gathered(frame: int, me: int, x: int, rows: int, count: int) -> int:
    """Address of the rows of one expert, side by side; `rows`: address of their indices."""
    pitch = read(frame + at.NORMED_PITCH)
    if count == 1 or count == read(frame + at.ROWS):
        return x + read(rows) * pitch
    target = own_rows(frame, me) + read(frame + at.SPARE) + read(frame + at.X_PITCH)
    for i in range(count):
        source = x + read(rows + 8 * i) * pitch
        for byte in range(0, pitch, 64):
            store(target + i * pitch + byte, load(source + byte))
    return target


@part_of_compiled
def _inner(frame: int, layer: int, me: int, team: int) -> None:
    """Inner activations, in the order of the lists."""
    sums = read(frame + at.SUMS) + me * read(frame + at.SUMS_SIZE)
    pitch, inner_pitch = read(frame + at.NORMED_PITCH), read(frame + at.INNER_PITCH)
    starts, rows, _ = _lists(frame, me)
    each, item = STRIP // 2 if read(frame + at.GATED) == 1 else STRIP, 2 if read(frame + at.KIND) == DOT else 4
    x, prepared = 0, -1
    for expert in range(_entries(frame)[0]):
        first, stop = read(starts + 8 * expert), read(starts + 8 * expert + 8)
        if first == stop:
            continue
        record = read(layer + at.EXPERT_RECORDS) + at.EXPERT_FIELDS * expert
        kind = read(record + at.EXPERT_GATE_UP_KIND)
        if kind != prepared:
            if prepared >= 0:
                when_prepared(frame, team, read(frame + at.ROWS))  # rows that threads share give way to others
            x, prepared = normed_rows(frame, me, team, read(layer + at.MLP_NORM), kind, 0), kind
        gathered = _gathered(frame, me, x, rows + 8 * first, stop - first)
        steps = steps_of(kind, read(frame + at.HIDDEN))
        strips = (read(record + at.EXPERT_INNER) + each - 1) // each
        weights, bias = read(record + at.EXPERT_GATE_UP), read(record + at.EXPERT_GATE_UP_BIAS)
        for strip in range(strips * me // team, strips * (me + 1) // team):
            strip_sums(kind, weights + strip * strip_size(kind, steps), steps, gathered, pitch, stop - first, sums)
            add_bias(sums, stop - first, 0 if bias == 0 else bias + strip * STRIP_BYTES)
            target = read(frame + at.INNER) + first * inner_pitch + strip * each * item
            put_inner(frame, layer, sums, target, stop - first)


@part_of_compiled
def _add_shares(sums: int, rows: int, shares: int, count: int, out: int, pitch: int) -> None:
    """Add a strip's sums (count, 64), each row times its share, to the rows of `out`."""
    for i in range(count):
        target, share = out + read(rows + 8 * i) * pitch, broadcast(read_float(shares + 8 * i))
        for byte in range(0, STRIP_BYTES, 64):
            store(target + byte, fma(load(sums + i * STRIP_BYTES + byte), share, load(target + byte)))


@part_of_compiled
def _outer(frame: int, layer: int, me: int, team: int, rounded: bool) -> None:
    """Outputs of all experts, added up in this thread's columns of the buffer of queries, keys and values."""
    sums, inner_pitch = read(frame + at.SUMS) + me * read(frame + at.SUMS_SIZE), read(frame + at.INNER_PITCH)
    strips = (read(frame + at.HIDDEN) + STRIP - 1) // STRIP
    begin, end = strips * me // team, strips * (me + 1) // team
    starts, rows, shares = _lists(frame, me)
    out, out_pitch, norm = read(frame + at.QKV), read(frame + at.QKV_PITCH), read(layer + at.POST_MLP_NORM)
    for row in range(read(frame + at.ROWS)):
        for byte in range(begin * STRIP_BYTES, end * STRIP_BYTES, 64):
            store(out + row * out_pitch + byte, broadcast(np.float32(0.0)))
    for expert in range(_entries(frame)[0]):
        first, stop = read(starts + 8 * expert), read(starts + 8 * expert + 8)
        if first == stop:
            continue
        record = read(layer + at.EXPERT_RECORDS) + at.EXPERT_FIELDS * expert
        kind, inner = read(record + at.EXPERT_DOWN_KIND), read(record + at.EXPERT_INNER)
        x, pitch = read(frame + at.INNER) + first * inner_pitch, inner_pitch
        if kind >= BYTES:
            converted = own_rows(frame, me)
            convert_rows(frame, kind, x, pitch, inner, converted, 0, stop - first, False, 0)
            x, pitch = converted, read(frame + at.NORMED_PITCH)
        weights, bias, steps = read(record + at.EXPERT_DOWN), read(record + at.EXPERT_DOWN_BIAS), steps_of(kind, inner)
        for strip in range(begin, end):
            strip_sums(kind, weights + strip * strip_size(kind, steps), steps, x, pitch, stop - first, sums)
            add_bias(sums, stop - first, 0 if bias == 0 else bias + strip * STRIP_BYTES)
            _add_shares(sums, rows + 8 * first, shares + 8 * first, stop - first, out + strip * STRIP_BYTES, out_pitch)
    for row in range(read(frame + at.ROWS) if norm == 0 else 0):
        x, out_row = read(frame + at.X) + row * read(frame + at.X_PITCH), out + row * out_pitch
        first, size = begin * STRIP_BYTES, (end - begin) * STRIP_BYTES
        add_residual(frame, x + first, out_row + first, size, rounded, sums)
    add_normed(frame, me, team, norm, rounded)


@part_of_compiled
def mixture(frame: int, layer: int, me: int, team: int, rounded: bool) -> None:
    """The mixture of experts of all rows."""
    _route(frame, layer, me, team)
    wait_for_all(frame, team)
    _group(frame, layer, me)
    _inner(frame, layer, me, team)
    wait_for_all(frame, team)
    _outer(frame, layer, me, team, rounded)


def routing(moe: MoeSpec) -> dict[int, int | float]:
    """The frame's fields of a mixture."""
    groups, best = moe.groups or (0, 0)
    return {
        at.EXPERTS: moe.experts, at.TOP_K: moe.top_k, at.GROUPS: groups, at.BEST_GROUPS: best,
        at.NORM_SHARES: int(moe.norm_top_k), at.SHARE_SCALE: float(moe.scaling),
        at.SHARED_MLP: int(moe.shared > 0), at.SHARED_GATE: int(moe.shared_gate), at.SIGMOID: int(moe.sigmoid),
        at.RANKED: int(moe.ranks),
    }  # fmt: skip
