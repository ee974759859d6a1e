"""Which slots of a canvas a pass of a diffusion language model attends to, and that attention (`CanvasStep`).

Queries and keys are rotated here, not by the layer: in float32, or float64 for a float64 model, whatever the dtype of
the activations.

Where attention is block-causal, every block's attention is a product of its own, over keys in the order of their
slots: a block's bits are the same whether the blocks before it are computed in the same pass or read from a cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional as F

from paceline.models.denoiser_base import Call, Ints
from paceline.models.spec import AttentionShape
from paceline.models.state.slot_cache import NativeSlotCache


@dataclass(frozen=True, slots=True)
class QueryGroup:
    """Queries that see the same keys, or as `mask` says.

    Attributes:
        rows: (g,) rows of the call; None for all of them in order.
        keys: the first `keys` of the pass's keys in their order.
        mask: (g, keys) True where a query sees a key; None for all.
    """

    rows: torch.Tensor | None
    keys: int
    mask: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class AttentionView:
    """What a pass attends to.

    Attributes:
        read: (r,) stored slots, or None.
        order: (r + q,) order of the keys, over read ones and then computed ones; None leaves it as it is.
        groups: cover all rows of the call once.
    """

    read: torch.Tensor | None
    order: torch.Tensor | None
    groups: tuple[QueryGroup, ...]


def view_of(call: Call, block_length: int | None, device: torch.device) -> AttentionView:
    """The AttentionView of a call under a family; `block_length` None is full attention."""
    read = np.empty(0, np.int64) if call.read is None else np.asarray(call.read, np.int64)
    stored = torch.from_numpy(read).to(device) if read.size else None
    count = read.size + call.slots.size
    if call.mask is not None:
        assert call.mask.shape == (call.slots.size, count), "a mask has a row for each query and a column for each key"
        return AttentionView(stored, None, (QueryGroup(None, count, torch.from_numpy(call.mask).to(device)),))
    if block_length is None:
        return AttentionView(stored, None, (QueryGroup(None, count),))
    return _by_block(read, call.slots, block_length, stored, device)


def _by_block(
    read: Ints, slots: Ints, block_length: int, stored: torch.Tensor | None, device: torch.device
) -> AttentionView:
    keys = np.concatenate([read, slots])
    order = np.argsort(keys, kind="stable")
    blocks, query_blocks = keys[order] // block_length, slots // block_length
    groups = []
    for block in np.unique(query_blocks):
        rows = np.flatnonzero(query_blocks == block)
        rows = rows[np.argsort(slots[rows], kind="stable")]
        groups.append(QueryGroup(torch.from_numpy(rows).to(device), int(np.searchsorted(blocks, block, side="right"))))
    return AttentionView(stored, torch.from_numpy(order).to(device), tuple(groups))


class CanvasStep:
    """The attention of one call, as `models.attention.tree_attention.AttentionStep` has it.

    Args:
        rotation: cosines and sines (q, 1, dims) of the call's slots.
        cache: read and written where the call says so.
        write: (q,) slots that keys and values are stored at, or None.
    """

    def __init__(
        self,
        shape: AttentionShape,
        view: AttentionView,
        rotation: tuple[torch.Tensor, torch.Tensor],
        cache: NativeSlotCache | None,
        write: torch.Tensor | None,
    ) -> None:
        self._view, self._rotation, self._cache, self._write = view, rotation, cache, write
        self._sizes, self._scale = (shape.heads, shape.kv_heads, shape.kv_heads), shape.scale

    def attend(self, layer: int, qkv: torch.Tensor, sinks: torch.Tensor | None = None) -> torch.Tensor:
        """See `AttentionStep`; denoisers have no sinks."""
        assert sinks is None, "attention over a canvas has no sinks"
        view, cache = self._view, self._cache
        q, k, v = qkv.split(self._sizes, 1)
        q, k = rotate(q, self._rotation), rotate(k, self._rotation)
        keys, values = k, v
        if cache is not None and view.read is not None:
            keys = torch.cat((cache.keys[layer].index_select(0, view.read), k))
            values = torch.cat((cache.values[layer].index_select(0, view.read), v))
        if view.order is not None:
            keys, values = keys.index_select(0, view.order), values.index_select(0, view.order)
        if cache is not None and self._write is not None:
            cache.keys[layer].index_copy_(0, self._write, k)
            cache.values[layer].index_copy_(0, self._write, v)
        return attend_groups(q, keys, values, view.groups, self._scale)


def rotate(heads: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Rotary embedding of (r, heads, head dim), pairs being (i, i + dims / 2); dims beyond the table pass unchanged."""
    cos, sin = rotation
    dims = cos.shape[-1]
    turned, rest = heads[..., :dims].to(cos.dtype), heads[..., dims:]
    first, second = turned.chunk(2, -1)
    out = (turned * cos + torch.cat((-second, first), -1) * sin).to(heads.dtype)
    return torch.cat((out, rest), -1) if rest.shape[-1] else out


def attend_groups(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, groups: Sequence[QueryGroup], scale: float
) -> torch.Tensor:
    """Attention of queries (r, g * h, d), see `AttentionStep`, over keys and values (s, h, d): (r, g * h * d)."""
    if len(groups) == 1 and groups[0].rows is None:
        return _attend(q, k, v, groups[0].mask, scale)
    out = q.new_empty(q.shape[0], q.shape[1] * q.shape[2])
    for group in groups:
        out[group.rows] = _attend(q[group.rows], k[: group.keys], v[: group.keys], group.mask, scale)
    return out


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float) -> torch.Tensor:
    share = q.shape[1] // k.shape[1]
    if share > 1:
        k, v = k.repeat(1, share, 1), v.repeat(1, share, 1)
    q_, k_, v_ = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    out: torch.Tensor = F.scaled_dot_product_attention(q_, k_, v_, attn_mask=mask, scale=scale)
    return out[0].transpose(0, 1).reshape(q.shape[0], -1)
