"""Multi-head latent attention in compiled code: what is done before and behind attention with its one key-value head.

The projection leaves, in each row, queries (or the latent vector that a second map makes them of), the rotated key and
the latent vector. Every head has a map of its own to the latent vector's dimensions and another one from there to its
values: blocks of whole strips, each block with inputs of its own, divided among the threads like one matrix. This is
an entry of its own, so that it is compiled for models that have it only. See models.layers.latent.
"""

from __future__ import annotations

import functools
from typing import Any

from paceline.models.cpu import offsets as at
from paceline.models.cpu.attention import copy_row, scaled_norm
from paceline.models.cpu.compilation import machine_code, source_number
from paceline.models.cpu.matrix import convert_row, own_rows, share_of, steps_of, strip_size, strip_sums, when_prepared
from paceline.models.cpu.sublayers import STRIP_BYTES
from paceline.models.cpu.threads import wait_for_all
from paceline.models.cpu.tiles import BYTES, DOT, STRIP
from paceline.models.cpu.vectors import read, read_float
from paceline.models.spec import LATENT_EPS, ModelSpec
from paceline.utils import part_of_compiled


@part_of_compiled
def _normed_latents(frame: int, layer: int, me: int, team: int, kind: int) -> int:
    """Address of all rows' latent vectors of queries, normed, for a kind of product."""
    rows, pitch, size = read(frame + at.ROWS), read(frame + at.NORMED_PITCH), read(frame + at.QUERY_RANK)
    weight, epsilon = read(layer + at.QUERY_NORM), read_float(frame + at.LATENT_EPSILON)
    target, first, stop = share_of(frame, me, team, rows)
    spare = own_rows(frame, me) + read(frame + at.SPARE)
    for row in range(first, stop):
        x, out = read(frame + at.PROJECTED) + row * read(frame + at.PROJECTED_PITCH), target + row * pitch
        scaled_norm(x, size, weight, epsilon, spare if kind >= BYTES else out, kind == DOT)
        if kind >= BYTES:
            convert_row(kind, spare, size, out, pitch, 0)
    when_prepared(frame, team, rows)
    return target


@part_of_compiled
def _put_rotated(frame: int, layer: int, row: int) -> None:
    """The parts of a row's queries and key that will be rotated, and its normed latent vector, to their places."""
    source = read(frame + at.PROJECTED) + row * read(frame + at.PROJECTED_PITCH)
    target, size = read(frame + at.QKV) + row * read(frame + at.QKV_PITCH), 4 * read(frame + at.HEAD_DIM)
    rope, heads, epsilon = read(frame + at.ROPE_DIM), read(frame + at.HEADS), read_float(frame + at.LATENT_EPSILON)
    query, step = source + read(frame + at.LATENT_QUERIES), 4 * (rope + read(frame + at.NOPE_DIM))
    for head in range(heads):
        copy_row(query + head * step, rope, target + head * size, False)
    source, target = source + read(frame + at.LATENT_KEY), target + heads * size
    copy_row(source, rope, target, False)
    source, target = source + 4 * rope, target + 4 * rope
    scaled_norm(source, read(frame + at.RANK), read(layer + at.LATENT_NORM), epsilon, target, False)


@part_of_compiled
def _strips(
    frame: int, me: int, team: int, kind: int, heads: int, strips: int, weights: int, inputs: int,
    x: int, pitch: int, step: int, target: int, target_pitch: int, target_step: int, convert: bool, half: bool,
) -> None:  # fmt: skip
    """All rows times `strips` strips of each head, whose inputs and outputs are `step` and `target_step` bytes apart.

    `convert`: inputs are float32 and the product wants bfloat16. `half`: outputs are bfloat16.
    """
    rows, converted_rows, own_pitch = read(frame + at.ROWS), own_rows(frame, me), read(frame + at.NORMED_PITCH)
    sums, steps, converted = read(frame + at.SUMS) + me * read(frame + at.SUMS_SIZE), steps_of(kind, inputs), -1
    for item in range(heads * strips * me // team, heads * strips * (me + 1) // team):
        head = item // strips
        source, source_pitch = x + head * step, pitch
        if convert:
            for row in range(rows if head != converted else 0):
                copy_row(source + row * pitch, inputs, converted_rows + row * own_pitch, True)
            source, source_pitch, converted = converted_rows, own_pitch, head
        strip_sums(kind, weights + item * strip_size(kind, steps), steps, source, source_pitch, rows, sums)
        out = target + head * target_step + item % strips * STRIP * (2 if half else 4)
        for row in range(rows):
            copy_row(sums + row * 4 * STRIP, STRIP, out + row * target_pitch, half)


@part_of_compiled
def _before(frame: int, layer: int, me: int, team: int) -> None:
    """Queries and the key of all rows, not yet rotated, to where attention takes them.

    A key is made by the thread that writes it to the cache; for queries attention waits.
    """
    rows, heads, kind = read(frame + at.ROWS), read(frame + at.HEADS), read(frame + at.KIND)
    pitch, rope, nope = read(frame + at.PROJECTED_PITCH), read(frame + at.ROPE_DIM), read(frame + at.NOPE_DIM)
    queries, size = read(frame + at.PROJECTED) + read(frame + at.LATENT_QUERIES), read(frame + at.QUERY_RANK)
    if size != 0:
        query_kind, strips = read(layer + at.QUERY_KIND), (heads * (rope + nope) + STRIP - 1) // STRIP
        x, x_pitch = _normed_latents(frame, layer, me, team, query_kind), read(frame + at.NORMED_PITCH)
        weights = read(layer + at.QUERY_WEIGHT)
        _strips(frame, me, team, query_kind, 1, strips, weights, size, x, x_pitch, 0, queries, pitch, 0, False, False)
        wait_for_all(frame, team)
    for row in range(rows * me // team, rows * (me + 1) // team):
        _put_rotated(frame, layer, row)
    _strips(
        frame, me, team, kind, heads, read(frame + at.RANK) // STRIP, read(layer + at.TO_LATENT), nope,
        queries + 4 * rope, pitch, 4 * (rope + nope),
        read(frame + at.QKV) + 4 * rope, read(frame + at.QKV_PITCH), 4 * read(frame + at.HEAD_DIM), kind == DOT, False,
    )  # fmt: skip


@part_of_compiled
def _behind(frame: int, layer: int, me: int, team: int) -> None:
    """Values of all heads, as the last projection takes them, from the latent vectors that attention has mixed."""
    kind, value, x = read(frame + at.KIND), read(frame + at.VALUE_DIM), read(frame + at.MIXED)
    item, rank = 2 if kind == DOT else 4, read(frame + at.RANK)
    _strips(
        frame, me, team, kind, read(frame + at.HEADS), value // STRIP, read(layer + at.TO_VALUES), rank,
        x + item * read(frame + at.ROPE_DIM), read(frame + at.MIXED_PITCH), item * read(frame + at.HEAD_DIM),
        read(frame + at.ATTENDED), read(frame + at.ATTENDED_PITCH), item * value, False, kind == DOT,
    )  # fmt: skip


@functools.cache
def compiled_latent() -> Any:
    """What latent attention adds to a layer's pass as machine code; the last argument: 0 before attention, 1 behind."""
    sources = source_number()

    def entry(frame: int, layer: int, me: int, team: int, behind: int) -> None:
        if sources == 0:  # see forward.compiled
            return
        if behind == 0:
            _before(frame, layer, me, team)
        else:
            _behind(frame, layer, me, team)

    return machine_code(entry, "kernels of latent attention", "some seconds", arguments=5)


def projection(spec: ModelSpec) -> dict[int, int | float]:
    """The frame's fields of what is projected before attention, latent or not."""
    latent = spec.latent
    if latent is None:
        size = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
        if not spec.attention_gate:
            return {at.PROJECTED_SIZE: size}
        return {at.PROJECTED_SIZE: size + spec.num_heads * spec.head_dim, at.ATTENTION_GATE: 4 * size}
    queries = spec.num_heads * (latent.rope + latent.nope)
    first = latent.query_rank or queries
    size = first + latent.rope + latent.rank
    return {
        at.PROJECTED_SIZE: size, at.LATENT_KEY: 4 * first,
        at.LATENT_QUERIES: 0 if latent.query_rank is None else -(-size // STRIP) * STRIP_BYTES,
        at.RANK: latent.rank, at.QUERY_RANK: latent.query_rank or 0, at.ROPE_DIM: latent.rope,
        at.NOPE_DIM: latent.nope, at.VALUE_DIM: latent.value, at.LATENT_EPSILON: LATENT_EPS,
    }  # fmt: skip
