"""Attention at fixed shapes over long contexts: the cached prefix in chunks, the fed inputs apart, merged by
log-sum-exp.

Every row of a sequence sees the same committed slots, so the prefix needs one mask a sequence instead of one a row;
only the inputs, 64 at most, need who sees whom. The prefix is cut at multiples of CHUNK positions, whatever the rows
are, and all chunks are computed at once, each giving an output o and the logarithm of its sum of weights l; o is added
up from left to right with weights exp(l - max l). Layers with a window read only the chunks that it can reach. Sources:
online softmax (arXiv:1805.02867), Flash-Decoding (Dao et al. 2023), cascade inference over shared prefixes (Ye et al.).

Axes: b sequences, n rows and m inputs of one, g query heads per kv head, h kv heads, c chunks, d head dim.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from paceline.models.attention.segments import first_in_window
from paceline.models.attention.strict_attention import sinks_of_rows
from paceline.models.attention.tree_attention import attention
from paceline.models.cuda.partial_attention import CHUNK, PartialOutput, by_definition, far, merged, prefix_attention
from paceline.models.spec import AttentionShape
from paceline.models.state.window_slots import BLOCK

LONG_CONTEXT = 4096
"""Slots from which a bucket is computed this way."""

Given = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class _PrefixMasks:
    """Of one window kind: slots of the prefix (b, c, CHUNK), masks of prefix and inputs (b * c or b, 1, 1 or n * g,
    keys).
    """

    slots: torch.Tensor
    prefix: torch.Tensor
    inputs: torch.Tensor


class ChunkedPrefixStep:
    """See the module. All tensors are computed from buffers that a captured graph reads.

    Args:
        layers: the arena's keys and values, (slots, 2 h, d) each.
        buffers: write (b * n,), lengths (b,), depths (b, m), sees (b, n, m), positions (b, n), tables
            (b, slots / BLOCK), int64.
        dtype: of the masks, the model's.
    """

    def __init__(
        self, shape: AttentionShape, layers: Sequence[torch.Tensor], buffers: Given, dtype: torch.dtype
    ) -> None:
        self._shape, self._layers, self._write = shape, layers, buffers["write"]
        within = torch.arange(BLOCK, device=self._write.device)
        slots = (buffers["tables"].unsqueeze(-1) * BLOCK + within).flatten(1)
        pending = buffers["lengths"].unsqueeze(1) + torch.arange(buffers["sees"].shape[2], device=slots.device)
        self._inputs = slots.gather(1, pending.clamp_max(slots.shape[1] - 1))
        self._kinds = [self._kind(buffers, slots, window, dtype) for window in shape.windows]

    def _kind(self, buffers: Given, slots: torch.Tensor, window: int | None, dtype: torch.dtype) -> _PrefixMasks:
        lengths, positions = buffers["lengths"], buffers["positions"]
        batch, whole = len(slots), slots.shape[1] // CHUNK
        count = whole if window is None else min(whole, -(-window // CHUNK) + 1)
        first = (
            torch.zeros_like(lengths)
            if window is None
            else (first_in_window(lengths, window) // CHUNK).clamp(0, whole - count)
        )
        chunks = first.unsqueeze(1) + torch.arange(count, device=slots.device)
        keys = chunks.unsqueeze(-1) * CHUNK + torch.arange(CHUNK, device=slots.device)
        seen = (keys < lengths.view(-1, 1, 1)).unsqueeze(2)
        tree = buffers["sees"].bool()
        if window is not None:
            low = first_in_window(positions, window)
            seen = seen & (keys.unsqueeze(2) >= low.view(batch, 1, -1, 1))
            tree = tree & ((lengths.unsqueeze(1) + buffers["depths"]).unsqueeze(1) >= low.unsqueeze(2))
        return _PrefixMasks(
            slots.view(batch, whole, CHUNK).gather(1, chunks.unsqueeze(-1).expand(-1, -1, CHUNK)),
            self._mask(seen.flatten(0, 1), dtype),
            self._mask(tree, dtype),
        )

    def _mask(self, seen: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Additive (x, 1, rows, keys) of (x, n or 1, keys); rows are n * g, or 1 for all."""
        mask = torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, far(dtype))
        return (mask if mask.shape[1] == 1 else mask.repeat_interleave(self._shape.groups, 1)).unsqueeze(1)

    def attend(self, layer: int, qkv: torch.Tensor, sinks: torch.Tensor | None = None) -> torch.Tensor:
        """See `models.attention.tree_attention.AttentionStep`; rows are b * n, sequence by sequence."""
        shape, cached, kind = self._shape, self._layers[layer], self._kinds[self._shape.kind_of[layer]]
        cached.index_copy_(0, self._write, qkv[:, shape.heads :])
        batch, count, _ = kind.slots.shape
        queries = qkv[:, : shape.heads].reshape(batch, -1, shape.kv_heads, shape.head_dim).transpose(1, 2)
        many = queries.unsqueeze(1).expand(-1, count, -1, -1, -1).flatten(0, 1)
        outs, sums = prefix_attention(many, *self._read(cached, kind.slots.flatten(0, 1)), kind.prefix, shape)
        tree = by_definition(queries, *self._read(cached, self._inputs), kind.inputs, shape)
        parts = [
            (out, weight_sums)
            for out, weight_sums in zip(*(x.unflatten(0, (batch, count)).unbind(1) for x in (outs, sums)), strict=True)
        ]
        if sinks is not None:  # a part without values
            parts.append((torch.zeros_like(parts[0][0]), sinks_of_rows(sinks, queries.shape[2]).expand_as(tree[1])))
        return merged([*parts, tree]).to(qkv.dtype).transpose(1, 2).reshape(len(qkv), -1)

    def _read(self, cached: torch.Tensor, slots: torch.Tensor) -> PartialOutput:
        """Keys and values (x, h, s, d) of slots (x, s)."""
        kv = cached.index_select(0, slots.flatten()).unflatten(0, slots.shape).transpose(1, 2)
        return kv[:, : self._shape.kv_heads], kv[:, self._shape.kv_heads :]


class PaddedStep:
    """Many sequences as one padded block of fixed shape (b sequences, n rows each, s slots).

    The GPU's form, fit for capture.

    All tensors are buffers that a captured graph reads; padding rows write to the arena's spare block and see one slot
    of it.
    """

    def __init__(
        self,
        shape: AttentionShape,
        layers: Sequence[torch.Tensor],
        write_r: torch.Tensor,
        read_bs: torch.Tensor,
        masks: Sequence[torch.Tensor],
    ) -> None:
        self._shape, self._layers = shape, layers
        self.write_r, self.read_bs, self.masks = write_r, read_bs, list(masks)

    def attend(self, layer: int, qkv: torch.Tensor, sinks: torch.Tensor | None = None) -> torch.Tensor:
        """See `AttentionStep`; rows are b * n, sequence by sequence."""
        shape, cached = self._shape, self._layers[layer]
        batch, slots = self.read_bs.shape
        heads, kv_heads, head_dim = shape.heads, shape.kv_heads, shape.head_dim
        cached.index_copy_(0, self.write_r, qkv[:, heads:])
        kv = cached.index_select(0, self.read_bs.view(-1)).view(batch, slots, 2 * kv_heads, head_dim).transpose(1, 2)
        queries = qkv[:, :heads].reshape(batch, -1, kv_heads, head_dim).transpose(1, 2)
        mask = self.masks[shape.kind_of[layer]]
        by_row = None if sinks is None else sinks_of_rows(sinks, queries.shape[2])
        out = attention(queries, kv[:, :kv_heads], kv[:, kv_heads:], mask, shape, sinks=by_row)
        return out.transpose(1, 2).reshape(qkv.shape[0], heads * head_dim)


def padded_masks(
    buffers: dict[str, torch.Tensor], shape: AttentionShape, slots: int, dtype: torch.dtype
) -> list[torch.Tensor]:
    """Additive masks (b, 1, n * g, s), one per window kind, from the uploaded lengths, depths and visibility."""
    lengths, depths, sees, positions = (buffers[name] for name in ("lengths", "depths", "sees", "positions"))
    batch, rows, inputs = sees.shape
    slot = torch.arange(slots, device=lengths.device)
    behind = slot - lengths.unsqueeze(1)
    node = behind.clamp(0, inputs - 1)
    of_tree = sees.bool().gather(2, node.unsqueeze(1).expand(batch, rows, slots)) & (behind < inputs).unsqueeze(1)
    visible = torch.where((behind < 0).unsqueeze(1), True, of_tree)
    key = torch.where(behind < 0, slot, lengths.unsqueeze(1) + depths.gather(1, node)).unsqueeze(1)
    masks = []
    for window in shape.windows:
        near = visible if window is None else visible & (key >= first_in_window(positions, window).unsqueeze(2))
        mask = torch.zeros(near.shape, dtype=dtype, device=slot.device).masked_fill_(~near, -torch.inf)
        masks.append(
            mask.unsqueeze(2).expand(batch, rows, shape.groups, slots).reshape(batch, 1, rows * shape.groups, slots)
        )
    return masks
