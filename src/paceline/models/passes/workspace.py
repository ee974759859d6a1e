"""The memory that compiled passes work in: the activations of a pass, and what each thread has for itself."""

from __future__ import annotations

import torch

from paceline.models.cpu import offsets as at
from paceline.models.cpu.attention_strips import BLOCK, CHUNK, ITEM, QUERIES
from paceline.models.cpu.attention_tiles import MAX_QUERIES
from paceline.models.cpu.block_products import row_pitch
from paceline.models.cpu.integer_products import half_pitch
from paceline.models.cpu.latent import projection
from paceline.models.cpu.matrix import OWN_ROWS
from paceline.models.cpu.tiles import ACTIVATION, STRIP
from paceline.models.cpu.vectors import LANES
from paceline.models.passes.mixer_constants import mixer_widths, row_of_head
from paceline.models.passes.packing import ROWS
from paceline.models.spec import ModelSpec, MoeSpec

PITCHES = {
    at.X: at.X_PITCH, at.NORMED: at.NORMED_PITCH, at.QKV: at.QKV_PITCH, at.MIXED: at.MIXED_PITCH,
    at.INNER: at.INNER_PITCH,
}  # fmt: skip
"""Where the frame has the address of rows of activations -> where it has their distance."""

SIZES = {
    at.MIX_SPARE: at.MIX_SPARE_SIZE, at.OWN_NORMED: at.OWN_SIZE, at.SUMS: at.SUMS_SIZE, at.QUERY: at.QUERY_SIZE,
    at.CHOICE: at.CHOICE_SIZE,
}  # fmt: skip
"""Where it has the address of what threads have for themselves -> where it has the bytes of one thread."""


class PassWorkspace:
    """Memory for the activations of a pass, in one piece; `threads` copies of what each thread has for itself.

    Attributes:
        fields: addresses, distances of rows and sizes, by their place in the frame.
    """

    def __init__(self, spec: ModelSpec, kind: int, threads: int, *, quantized: bool) -> None:
        self.threads, moe = threads, spec.moe
        pitches = _pitches(spec, ACTIVATION[kind], quantized=quantized)
        spare = (ROWS if moe or spec.latent else OWN_ROWS) * pitches[at.NORMED]
        own = {
            at.MIX_SPARE: row_of_head(spec),
            at.OWN_NORMED: spare + pitches[at.X] + (spare if moe else 0),
            at.SUMS: ROWS * 4 * STRIP * (1 + quantized),
            at.QUERY: _query_bytes(spec.head_dim),
        }
        sizes = {field: ROWS * pitch for field, pitch in pitches.items()}
        if moe is not None:
            sizes |= {at.INNER: _chosen(moe) * pitches[at.INNER], at.ROUTE: ROWS * 4 * _experts(moe)}
            own[at.CHOICE] = _choice_bytes(moe)
        self.fields = self._laid_out(sizes | {field: threads * size for field, size in own.items()})
        for field, pitch, own_field in (
            (at.PROJECTED, at.PROJECTED_PITCH, at.QKV), (at.ATTENDED, at.ATTENDED_PITCH, at.MIXED),
        ):  # fmt: skip
            buffer = own_field if spec.latent is None else at.PROJECTED
            self.fields |= {field: self.fields[buffer], pitch: pitches[buffer]}
        pitch_of = PITCHES | {field: field + at.FIELD for field in mixer_widths(spec)}
        self.fields |= {other: pitches[field] for field, other in pitch_of.items()}
        self.fields |= {SIZES[field]: size for field, size in own.items()} | {at.SPARE: spare}
        if moe is not None:
            self.fields[at.ROUTE_PITCH] = 4 * _experts(moe)

    def _laid_out(self, sizes: dict[int, int]) -> dict[int, int]:
        """Addresses of so many bytes each, one behind the other."""
        self._memory = torch.zeros(sum(sizes.values()) + 64, dtype=torch.uint8)
        places, start = dict[int, int](), -(-self._memory.data_ptr() // 64) * 64
        for field, size in sizes.items():
            places[field] = start
            start += size
        return places


def _pitches(spec: ModelSpec, item: int, *, quantized: bool) -> dict[int, int]:
    """Bytes from one row of activations to the next, of `item` bytes each where they are read by products."""
    inner, heads, latent = max(spec.inner_sizes), spec.num_heads * spec.head_dim, spec.latent
    qkv = heads * (2 if spec.attention_gate else 1) + 2 * spec.num_kv_heads * spec.head_dim
    widest = max(spec.hidden_size, 0 if latent is None else latent.query_rank or 0)
    widths = {
        at.X: 4 * widest, at.NORMED: item * widest, at.MIXED: item * heads,
        at.QKV: 4 * max(qkv, spec.hidden_size), at.INNER: item * inner,
    } | mixer_widths(spec)  # fmt: skip
    if latent is not None:
        projected, queries = projection(spec), spec.num_heads * (latent.rope + latent.nope)
        scratch = max(4 * projected[at.PROJECTED_SIZE], projected[at.LATENT_QUERIES] + 4 * queries)
        widths[at.PROJECTED] = int(max(scratch, item * spec.attended_size))
        widths[at.NORMED] = item * max(widest, latent.nope)
    # An odd number of lines: rows of one column spread over the sets of the first-level cache.
    pitches = {field: (-(-width // 256) * 4 + 1) * 64 for field, width in widths.items()}
    if quantized:
        longest = max(widest, spec.attended_size, inner, widths.get(at.READ, 0) // 4)
        pitches[at.NORMED] = 2 * max(half_pitch(longest), row_pitch(longest))
    return pitches


def _query_bytes(head_dim: int) -> int:
    """Of the queries that a thread attends with at a time, and what it sums for them."""
    return max(
        MAX_QUERIES * (4 * head_dim + 128 + 64),
        QUERIES * (ITEM * head_dim + 4 * STRIP + 64) + 8 * BLOCK + 2 * CHUNK * max(STRIP, head_dim),
    )


def _experts(moe: MoeSpec) -> int:
    """Outputs of the router, in whole strips."""
    return -(-(moe.experts + moe.shared_gate) // STRIP) * STRIP


def _chosen(moe: MoeSpec) -> int:
    """Rows of experts that the rows of a pass go to."""
    return ROWS * (moe.top_k + (1 if moe.shared else 0))


def _choice_bytes(moe: MoeSpec) -> int:
    """Of a thread's lists of rows and shares by expert, and of the scores of a row."""
    scores = 4 * (1 + moe.ranks) * (_experts(moe) + LANES)
    return -(-(8 * (_experts(moe) + 2) + 32 * _chosen(moe) + scores) // 64) * 64
