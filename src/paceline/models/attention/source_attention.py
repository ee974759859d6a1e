"""Attention of encoder-decoder models: of a decoder's rows to their sources, of an encoder's to each other, and of rows
whose scores depend on distances.

Axes as in models.attention.tree_attention.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import numpy as np
import torch
from torch.nn import functional as F

from paceline.models.attention.relative_bias import RelativeBias
from paceline.models.attention.segments import Segment
from paceline.models.attention.tree_attention import Masks, span
from paceline.models.spec import AttentionShape
from paceline.models.state.cross_memory import CrossMemory


class SourceAttention:
    """What the rows of a pass see of their sources: all of it, each row alike.

    Args:
        memories: of each sequence. rows: how many of its rows are fed.
        watched: layers whose queries are wanted.

    Attributes:
        queries: of these layers, each (r, g * h, d).
    """

    def __init__(
        self,
        shape: AttentionShape,
        memories: Sequence[CrossMemory],
        rows: Sequence[int],
        watched: Collection[int] = (),
    ) -> None:
        self._shape, self._memories, self._rows, self._watched = shape, memories, list(rows), watched
        self.queries: dict[int, torch.Tensor] = {}

    def attend(self, layer: int, queries: torch.Tensor) -> torch.Tensor:
        """(r, g * h, d) -> (r, g * h * d)."""
        if layer in self._watched:
            self.queries[layer] = queries
        parts = queries.split(self._rows)
        attended = [
            _over(self._shape, part, memory.read(layer)) for part, memory in zip(parts, self._memories, strict=True)
        ]
        return attended[0] if len(attended) == 1 else torch.cat(attended)


def _over(
    shape: AttentionShape, queries: torch.Tensor, keys_values: torch.Tensor, mask: torch.Tensor | None = None
) -> torch.Tensor:
    """Queries (n, g * h, d) over keys and values (s, 2 * h, d), with an additive mask (1, h, n, s) or (n, s)."""
    n, heads = len(queries), shape.kv_heads
    folded = queries.reshape(n * shape.groups, heads, shape.head_dim).transpose(0, 1).unsqueeze(0)
    keys, values = keys_values.transpose(0, 1).unsqueeze(0).split(heads, 1)
    if mask is not None and shape.groups > 1:
        mask = mask.repeat_interleave(shape.groups, -2)
    out = F.scaled_dot_product_attention(folded, keys, values, mask, scale=shape.scale)
    return out[0].transpose(0, 1).reshape(n, shape.heads * shape.head_dim)


Attention = Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]
"""Attention of one source, compiled: (r, heads + 2 * kv heads, d) -> (r, heads * d), with what distances 1 - r .. r - 1
add to scores, (heads, 2 * r - 1), if they do.
"""


class EncoderStep:
    """Attention of sources, one after the other: every row of one sees all of them (`AttentionStep`).

    Args:
        rows: of each source. biases: what distances add, by layer; empty where they do not.
        compiled: in place of PyTorch's.
    """

    def __init__(
        self,
        shape: AttentionShape,
        rows: Sequence[int],
        biases: Sequence[RelativeBias],
        compiled: Attention | None = None,
    ) -> None:
        self._shape, self._rows, self._biases, self._compiled = shape, list(rows), biases, compiled
        self._made: dict[tuple[int, int], torch.Tensor] = {}

    def attend(self, layer: int, qkv: torch.Tensor, sinks: torch.Tensor | None = None) -> torch.Tensor:
        """See `AttentionStep.attend`; nothing is cached, and there are no sinks."""
        return torch.cat([self._of_one(part, self._added(layer, len(part))) for part in qkv.split(self._rows)])

    def _of_one(self, part: torch.Tensor, added: torch.Tensor | None) -> torch.Tensor:
        if self._compiled is not None:
            return self._compiled(part, added)
        heads = self._shape.heads
        return _over(self._shape, part[:, :heads], part[:, heads:], added)

    def _added(self, layer: int, rows: int) -> torch.Tensor | None:
        """What is added to a source's scores: by distance for compiled attention, else of each query and key."""
        if not self._biases:
            return None
        bias = self._biases[layer]
        added = self._made.get((id(bias), rows))
        if added is None:
            by_distance = bias.of(torch.arange(1 - rows, rows))
            added = by_distance if self._compiled is not None else _of_pairs(by_distance, rows)
            self._made[id(bias), rows] = added
        return added


def _of_pairs(by_distance: torch.Tensor, rows: int) -> torch.Tensor:
    """(heads, 2 * rows - 1) -> (1, heads, queries, keys)."""
    index = torch.arange(rows)
    return by_distance[:, index[None] - index[:, None] + rows - 1].unsqueeze(0)


class RelativeStep:
    """The rows of one sequence whose scores depend on distances (`AttentionStep`).

    Args:
        biases: what distances add, by layer.
    """

    def __init__(self, shape: AttentionShape, masks: Masks, segment: Segment, biases: Sequence[RelativeBias]) -> None:
        cache, (start, stop) = segment.cache, span(segment, None)
        self._shape, self._biases, self._arena = shape, biases, cache.arena
        length, slots = cache.length, segment.slots
        depths = segment.depths
        keys = np.concatenate([np.arange(start, length), length + depths, np.full(stop - length - slots, length)])
        queries = length + depths[segment.done :]
        self._distances = torch.from_numpy(keys[None] - queries[:, None])
        self._mask = masks.build(segment, start, stop, None)
        self._read = torch.from_numpy(cache.slot_index(start, stop))
        self._write = torch.from_numpy(cache.slot_index(length + segment.done, length + slots))
        self._masks: dict[int, torch.Tensor] = {}

    def attend(self, layer: int, qkv: torch.Tensor, sinks: torch.Tensor | None = None) -> torch.Tensor:
        """See `AttentionStep.attend`; there are no sinks."""
        cached, heads = self._arena.layers[layer], self._shape.heads
        cached.index_copy_(0, self._write, qkv[:, heads:])
        return _over(self._shape, qkv[:, :heads], cached[self._read], self._biased(self._biases[layer]))

    def _biased(self, bias: RelativeBias) -> torch.Tensor:
        mask = self._masks.get(id(bias))
        if mask is None:
            mask = self._masks[id(bias)] = (bias.of(self._distances) + self._mask).unsqueeze(0)
        return mask


class RelativeSteps:
    """The same of several sequences, one after the other."""

    def __init__(
        self, shape: AttentionShape, masks: Masks, segments: Sequence[Segment], biases: Sequence[RelativeBias]
    ) -> None:
        self._steps = [RelativeStep(shape, masks, segment, biases) for segment in segments]
        self._rows = [segment.rows for segment in segments]

    def attend(self, layer: int, qkv: torch.Tensor, sinks: torch.Tensor | None = None) -> torch.Tensor:
        """See `AttentionStep.attend`."""
        parts = qkv.split(self._rows)
        return torch.cat([step.attend(layer, part) for step, part in zip(self._steps, parts, strict=True)])
