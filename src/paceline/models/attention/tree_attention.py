"""Who attends to whom in one forward pass, and the attention itself.

An `AttentionStep` writes the new keys and values of the fed tokens (a prompt chunk, or a root with its tree) into the
cache and returns the attention output. Masks are built once a step and window kind, shared by layers.

Axes: r = rows fed in this pass, n = rows of one sequence, s = cache slots seen, g = query heads per kv head, h = kv
heads, d = head dim. Query heads come ordered (g, h): the heads of all groups for kv head order, so that (r, g * h, d)
read as (r * g, h, d) needs no copy, neither in nor out; the packing of the weights sees to that order.
Sources: SpecInfer's tree attention (arXiv:2305.09781), grouped queries (arXiv:2305.13245), soft caps of Gemma 2
(arXiv:2408.00118).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch.nn import functional as F

from paceline.models.attention.segments import Segment, first_in_window
from paceline.models.attention.strict_attention import StrictAttention, StrictWorkspace, sinks_of_rows
from paceline.models.spec import AttentionShape
from paceline.models.state.cache import Views
from paceline.models.state.window_slots import BLOCK

FOLD_ROWS = 64
"""Up to this many rows, query heads of a group are folded into rows; beyond, kv heads are expanded (a view, shared
mask).
"""

STRICT_ROWS = 1024
"""Most query rows of one kv head in a pass that is computed in the order of positions; larger ones are prompts, not
trees.
"""

TILE_ROWS, MIN_TILE_ROWS = 32, 4
"""The CPU kernel works on tiles of 32 query rows, and a tile of 1 to 3 rows rounds differently from all others. Spare
rows fill it up to 4, so that a row has the same bits whatever number of rows is scored with it.
"""


class AttentionStep(Protocol):
    """The attention of one forward pass."""

    def attend(self, layer: int, qkv: torch.Tensor, sinks: torch.Tensor | None = None) -> torch.Tensor:
        """Write keys and values of (r, g * h + 2 * h, d) to the cache and return (r, g * h * d); queries alone, (r, g *
        h, d), read what the pass has written there before.

        `sinks` (h, g) float32: a logit of each head that takes part in the softmax and has no value.
        """


class KeyWriter(Protocol):
    """Takes the keys and values of a pass."""

    def write(self, layer: int, qkv: torch.Tensor) -> None:
        """Write those of (r, g * h + 2 * h, d)."""


class WritingStep(AttentionStep, KeyWriter, Protocol):
    """Takes keys and values without attending to them as well."""


class Masks:
    """Additive masks in the model's dtype, with constant parts made once.

    Args:
        row_invariant: on the CPU, sum every row's attention in the order of positions (see
            models.attention.strict_attention), so that its bits depend on its own path alone; False takes the fastest
            form, whose bits may depend on the tree beside a row.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device, *, row_invariant: bool = False) -> None:
        self.dtype, self.device, self.row_invariant = dtype, device, row_invariant
        self.work = StrictWorkspace()
        self._row = torch.empty(0, dtype=dtype, device=device)

    def row(self, visible: int, width: int) -> torch.Tensor:
        """(1, 1, 1, width): the first `visible` slots are seen; a view of a constant, or on GPUs, whose kernels want an
        aligned address, a copy.
        """
        half = len(self._row) // 2
        if half < width:
            half = max(4096, 2 * width)
            self._row = torch.zeros(2 * half, dtype=self.dtype, device=self.device)
            self._row[half:] = -torch.inf
        row = self._row.narrow(0, half - visible, width).view(1, 1, 1, width)
        return row if self.device.type == "cpu" else row.clone()

    def build(self, segment: Segment, start: int, stop: int, window: int | None) -> torch.Tensor:
        """(n, stop - start): what each fed row sees of the positions start .. stop - 1."""
        length, (first, inputs) = segment.cache.length, segment.visible(window)
        mask = torch.full((segment.rows, stop - start), -torch.inf, dtype=self.dtype, device=self.device)
        mask[:, : length - start] = 0
        mask.narrow(1, length - start, segment.slots).masked_fill_(torch.from_numpy(inputs).to(self.device), 0.0)
        if first.any():
            behind = torch.from_numpy(np.arange(start, length) < first[:, None]).to(self.device)
            mask[:, : length - start].masked_fill_(behind, -torch.inf)
        return mask


def span(segment: Segment, window: int | None) -> tuple[int, int]:
    """Positions [start, stop) that the fed rows may see, on block borders."""
    length = segment.cache.length
    stop = -(-(length + segment.slots) // BLOCK) * BLOCK
    if window is None:
        return 0, stop
    lowest = length + (segment.done if segment.tree is None else 0)
    return min(max(0, first_in_window(lowest, window)), length) // BLOCK * BLOCK, stop


@dataclass(slots=True)
class _Slots:
    """Slots `start` .. `start + count - 1` of the layers of a window kind, or the slots `index`."""

    start: int
    count: int
    index: torch.Tensor | None = None

    @classmethod
    def of(cls, segment: Segment, start: int, stop: int, window: int | None, device: torch.device) -> _Slots:
        """Those of the positions start .. stop - 1."""
        cache = segment.cache
        if cache.in_order(window):
            return cls(cache.base + start, stop - start)
        slots = cache.slots_of_kind(start, stop, window)
        if window is not None and (np.diff(slots) == 1).all():
            return cls(int(slots[0]), stop - start)
        return cls(0, stop - start, torch.from_numpy(slots).to(device))


@dataclass(slots=True)
class _WindowMask:
    """Mask of one window kind, where its keys are read, and views of them that are at hand."""

    mask: torch.Tensor
    slots: _Slots
    views: Views = field(default_factory=dict)


class SequenceStep:
    """The rows of one sequence, attending to views of the arena; the CPU's hot path."""

    __slots__ = ("_arena", "_fold", "_kinds", "_n", "_shape", "_spare", "_strict", "_write")

    def __init__(self, shape: AttentionShape, masks: Masks, segment: Segment) -> None:
        cache, n = segment.cache, segment.rows
        self._shape, self._arena, self._n = shape, cache.arena, n
        self._fold = n * shape.groups <= FOLD_ROWS
        self._spare = spare_rows(n * shape.groups if self._fold else n)
        at = cache.length + segment.done
        self._write = [_Slots.of(segment, at, at + n, window, masks.device) for window in shape.windows]
        self._strict: StrictAttention | None = None
        self._kinds: list[_WindowMask] = []
        if takes_strict_attention(shape, masks, segment):
            self._strict = StrictAttention(shape, masks.work, segment)
        else:
            self._kinds = [self._kind(masks, segment, window) for window in shape.windows]

    def _kind(self, masks: Masks, segment: Segment, window: int | None) -> _WindowMask:
        start, stop = span(segment, window)
        cache, slots = segment.cache, _Slots.of(segment, start, stop, window, masks.device)
        kind = _WindowMask(self._mask(masks, segment, start, stop, window), slots)
        if cache.in_order(window):
            kind.views = cache.views(start, stop)
        return kind

    def _mask(self, masks: Masks, segment: Segment, start: int, stop: int, window: int | None) -> torch.Tensor:
        visible = segment.cache.length + segment.slots
        whole = window is None or first_in_window(visible - 1, window) <= 0
        if self._n == 1 and segment.tree is None and whole:
            return masks.row(visible - start, stop - start)
        mask = masks.build(segment, start, stop, window)
        if self._n == 1:
            return mask.view(1, 1, 1, stop - start)
        if self._fold:
            n, width, groups = self._n, stop - start, self._shape.groups
            mask = mask.unsqueeze(1).expand(n, groups, width).reshape(n * groups, width)
        return torch.cat((mask, mask[: self._spare])) if self._spare else mask

    def write(self, layer: int, qkv: torch.Tensor) -> None:
        """Write the keys and values of (r, g * h + 2 * h, d) to the cache."""
        shape = self._shape
        cached, new = self._arena.layers[layer], qkv.narrow(1, shape.heads, 2 * shape.kv_heads)
        write = self._write[shape.kind_of[layer]]
        if write.index is None:
            cached.narrow(0, write.start, self._n).copy_(new)
        else:
            cached.index_copy_(0, write.index, new)

    def attend(self, layer: int, qkv: torch.Tensor, sinks: torch.Tensor | None = None) -> torch.Tensor:
        """See `AttentionStep`."""
        shape, cached = self._shape, self._arena.layers[layer]
        if qkv.shape[1] > shape.heads:
            self.write(layer, qkv)
        if self._strict is not None:
            return self._strict.attend(layer, qkv, cached, sinks)
        kind = self._kinds[shape.kind_of[layer]]
        if kind.views:
            keys, values = kind.views[layer]
        else:
            slots = kind.slots
            rows_read = cached.narrow(0, slots.start, slots.count) if slots.index is None else cached[slots.index]
            by_head = rows_read.transpose(0, 1).unsqueeze(0)
            keys, values = by_head[:, : shape.kv_heads], by_head[:, shape.kv_heads :]
        return (self._folded if self._fold else self._by_head)(qkv, keys, values, kind.mask, sinks)

    def _folded(
        self,
        qkv: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        mask: torch.Tensor,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        shape, n, spare = self._shape, self._n, self._spare
        kv_heads, head_dim, rows = shape.kv_heads, shape.head_dim, n * shape.groups
        own = qkv.shape[1] > shape.heads
        if n == 1 and own and 0 < spare <= 2:  # the row's keys and values, right behind its queries, are the spare rows
            queries = qkv.view(1, rows + 2, kv_heads, head_dim).narrow(1, 0, MIN_TILE_ROWS)
        else:
            queries = qkv.narrow(1, 0, shape.heads).reshape(1, rows, kv_heads, head_dim)
            if spare:
                queries = torch.cat((queries, queries[:, :1].expand(1, spare, kv_heads, head_dim)), 1)
        by_row = None if sinks is None else sinks_of_rows(sinks, queries.shape[1])
        out = attention(queries.transpose(1, 2), keys, values, mask, shape, sinks=by_row).transpose(1, 2)
        return (out.narrow(1, 0, rows) if spare else out).reshape(n, shape.heads * head_dim)

    def _by_head(
        self,
        qkv: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        mask: torch.Tensor,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        shape, n = self._shape, self._n
        kv_heads, head_dim = shape.kv_heads, shape.head_dim
        queries = qkv.narrow(1, 0, shape.heads).view(n, shape.groups, kv_heads, head_dim).permute(2, 1, 0, 3)
        if self._spare:
            queries = torch.cat((queries, queries[:, :, : self._spare]), 2)
        sizes = (kv_heads, shape.groups, keys.shape[2], head_dim)
        by_row = None if sinks is None else sinks[..., None, None]
        keys, values = keys[0].unsqueeze(1).expand(sizes), values[0].unsqueeze(1).expand(sizes)
        out = attention(queries, keys, values, mask, shape, sinks=by_row)
        return out[:, :, :n].permute(2, 1, 0, 3).reshape(n, shape.heads * head_dim)


def takes_strict_attention(shape: AttentionShape, masks: Masks, segment: Segment) -> bool:
    """Whether a pass is computed chunk by chunk, so that its rows keep their bits."""
    return masks.row_invariant and masks.device.type == "cpu" and segment.rows * shape.groups <= STRICT_ROWS


def spare_rows(rows: int) -> int:
    """Rows to add so that no tile has 1 to 3 rows."""
    return MIN_TILE_ROWS - rows % TILE_ROWS if 0 < rows % TILE_ROWS < MIN_TILE_ROWS else 0


class BatchStep:
    """Many sequences, one after the other: a sequence's result cannot depend on its neighbours.

    Args:
        one: makes the step of each.
    """

    def __init__(
        self,
        shape: AttentionShape,
        masks: Masks,
        segments: Sequence[Segment],
        one: Callable[[AttentionShape, Masks, Segment], WritingStep],
    ) -> None:
        self._steps = [one(shape, masks, segment) for segment in segments]
        self._rows = [segment.rows for segment in segments]

    def write(self, layer: int, qkv: torch.Tensor) -> None:
        """See `SequenceStep.write`."""
        for step, part in zip(self._steps, qkv.split(self._rows), strict=True):
            step.write(layer, part)

    def attend(self, layer: int, qkv: torch.Tensor, sinks: torch.Tensor | None = None) -> torch.Tensor:
        """See `AttentionStep`."""
        parts = qkv.split(self._rows)
        return torch.cat([step.attend(layer, part, sinks) for step, part in zip(self._steps, parts, strict=True)])


def attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    shape: AttentionShape,
    *,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """softmax(scale * q k^T [soft-capped] + mask) v over (b, h, n, d) and (b, h, s, d), with the softmax in float32;
    `sinks` (h, n or 1, 1): see `AttentionStep`.
    """
    if shape.softcap is None and sinks is None:
        return F.scaled_dot_product_attention(queries, keys, values, mask, scale=shape.scale)
    scores = torch.matmul(queries, keys.transpose(-1, -2)).float().mul_(shape.scale)
    if shape.softcap is not None:
        scores = scores.div_(shape.softcap).tanh_().mul_(shape.softcap)
    scores = scores.add_(mask)
    if sinks is not None:
        scores = torch.cat((scores, sinks.expand(*scores.shape[:-1], 1)), -1)
    shares = torch.softmax(scores, -1).to(values.dtype)
    return torch.matmul(shares if sinks is None else shares[..., :-1], values)
