"""Attention in layers that some rows leave out: what these rows would have written is not there, and is not read.

Keys keep their true positions, with gaps between them.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import torch

from paceline.models.attention.kv_selection import KVSelection, attend_rows, slots_of
from paceline.models.attention.segments import Bools, Segment
from paceline.models.attention.tree_attention import Masks, SequenceStep, WritingStep
from paceline.models.spec import AttentionShape
from paceline.models.state.arena import Arena
from paceline.models.state.skipping_cache import SkippingCache


class Gaps(KVSelection):
    """Has rows of some layers see no rows that left these out; for `models.passes.skipping`.

    Attributes:
        layers: that some rows leave out; without a window.
    """

    name = "gaps"
    compiles = True

    def __init__(self) -> None:
        self.layers: frozenset[int] = frozenset()
        self._every = 1

    def follow(self, layers: Collection[int], every: int) -> None:
        """Say which layers these are, and that the first of every so many rows behind the border has run them."""
        self.layers, self._every = frozenset(layers), every

    def cache(self, arena: Arena, prompt_length: int) -> SkippingCache:
        """See `KVSelection`."""
        return SkippingCache(arena, prompt_length)

    def step(self, shape: AttentionShape, masks: Masks, segment: Segment) -> WritingStep:
        """See `KVSelection`."""
        if (seen := self.gaps_before(segment)) is None:
            return SequenceStep(shape, masks, segment)
        return GapStep(self, shape, masks, segment, seen)

    def gaps_before(self, segment: Segment) -> Bools | None:
        """As `seen`; None where nothing is lacking, or the rows themselves leave these layers out."""
        seen = self.seen(segment)
        return None if seen.all() or not seen[segment.cache.length + segment.done] else seen

    def seen(self, segment: Segment) -> Bools:
        """(length + slots,) whether the committed positions, then the inputs, have keys in these layers."""
        cache = segment.cache
        places = np.concatenate((np.arange(cache.length), cache.length + segment.depths))
        if not self.layers or not isinstance(cache, SkippingCache) or cache.border is None:
            return np.ones(len(places), np.bool_)
        behind = places - cache.border
        there: Bools = (behind < 0) | (behind % self._every == 0)
        return there


class GapStep:
    """The rows of one sequence, which all run these layers."""

    def __init__(
        self,
        gaps: Gaps,
        shape: AttentionShape,
        masks: Masks,
        segment: Segment,
        seen: Bools,
    ) -> None:
        self._gaps, self._shape, self._arena = gaps, shape, segment.cache.arena
        self._whole, length = SequenceStep(shape, masks, segment), segment.cache.length
        there = torch.from_numpy(np.nonzero(seen)[0]).to(masks.device)
        self._slots = slots_of(segment, 0, length + segment.slots, masks.device)[there]
        self._mask = masks.build(segment, 0, length + segment.slots, None)[:, there]

    def write(self, layer: int, qkv: torch.Tensor) -> None:
        """See `SequenceStep.write`."""
        self._whole.write(layer, qkv)

    def attend(self, layer: int, qkv: torch.Tensor, sinks: torch.Tensor | None = None) -> torch.Tensor:
        """See `AttentionStep`."""
        if layer not in self._gaps.layers:
            return self._whole.attend(layer, qkv, sinks)
        self._whole.write(layer, qkv)
        shape = self._shape
        queries = qkv.narrow(1, 0, shape.heads).view(-1, shape.groups, shape.kv_heads, shape.head_dim)
        kept = self._arena.layers[layer][self._slots].transpose(0, 1)
        return attend_rows(queries, kept[: shape.kv_heads], kept[shape.kv_heads :], self._mask, shape, sinks=sinks)
