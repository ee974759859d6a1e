"""The native denoiser: the decoder's layers (models.layers.decoder) with attention over a canvas.

Calls of one `forward` are computed one by one, each with its own shapes, so that the bits of a canvas do not depend on
its company. Where attention is block-causal, rows keep their bits whatever the number of other rows, and every block's
attention is a product of its own, over keys in the order of their slots: a block's bits are the same whether the blocks
before it are computed in the same pass or read from a cache, so decoding with the exact block cache is bit-equal to
decoding without.

Factors on embeddings and logits, and rotations, are this module's own: they are applied in float32 (float64 for a
float64 model), so that long canvases lose nothing to bfloat16.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import replace

import numpy as np
import torch

from paceline.models.attention.canvas_attention import CanvasStep, view_of
from paceline.models.denoiser_base import Call, Ints, SlotCache
from paceline.models.layers.decoder import Decoder
from paceline.models.layers.own_weights import Weights
from paceline.models.layers.rope import wide_rotation
from paceline.models.spec import DenoiserSpec, ModelSpec
from paceline.models.state.slot_cache import NativeSlotCache


class NativeDenoiser:
    """A `Denoiser` of any family.

    Args:
        spec: the shape.
        weights: under the names of `checkpoints.weights`, on one device, in one dtype but for the routers' biases;
            taken out of the mapping as they are packed.
    """

    def __init__(self, spec: DenoiserSpec, weights: Weights) -> None:
        self.spec = spec
        model = spec.model
        self.vocab_size = model.vocab_size
        self.mask_token_id, self.eos_token_ids = spec.mask_token_id, spec.eos_token_ids
        self.max_length, self.attention, self.block_length = model.max_context, spec.attention, spec.block_length
        self.needs_left = spec.shifted
        self._decoder = Decoder(
            _bare(model), weights, row_invariant="proven" if spec.block_length is not None else True
        )
        self.device, self.dtype = self._decoder.embedding.device, self._decoder.dtype
        self._wide = torch.promote_types(self.dtype, torch.float32)
        self._never = torch.tensor([spec.mask_token_id], device=self.device)

    def without(self, ids: Sequence[int]) -> NativeDenoiser:
        """The same model, by which some ids are never written: their logits are -inf, as the mask token's is."""
        other = copy(self)
        other._never = torch.tensor([self.mask_token_id, *ids], device=self.device)
        return other

    @property
    def slot_bytes(self) -> int:
        """Keys and values of one slot, all layers."""
        model = self.spec.model
        return 2 * model.num_layers * model.num_kv_heads * model.head_dim * self.dtype.itemsize

    def new_cache(self, length: int) -> NativeSlotCache:
        """An empty cache for a canvas of at most `length` slots."""
        model = self.spec.model
        return NativeSlotCache(
            model.num_layers, length, model.num_kv_heads, model.head_dim, dtype=self.dtype, device=self.device
        )

    @torch.inference_mode()
    def forward(self, calls: Sequence[Call]) -> list[torch.Tensor]:
        """Logits (q, vocab_size) of each call, see `Denoiser.forward`."""
        return [self._logits(self._hidden(call), call) for call in calls]

    def _hidden(self, call: Call) -> torch.Tensor:
        """The normed states (q, hidden) of a call's rows; stores keys and values if it says so."""
        cache, decoder, model = _cache_of(call), self._decoder, self.spec.model
        slots = torch.from_numpy(call.slots).to(self.device)
        rotation = wide_rotation(model.ropes["default"], slots, self.dtype)
        view = view_of(call, self.block_length, self.device)
        step = CanvasStep(decoder.shape, view, rotation, cache, slots if call.write else None)
        x = decoder.embed_index(torch.from_numpy(call.ids).to(self.device))
        if model.embedding_multiplier != 1.0:
            x.mul_(model.embedding_multiplier)
        decoder.run(x, step, {})
        if call.write and cache is not None:
            cache.mark(call.slots)
        return decoder.final_norm(x)

    def _logits(self, states: torch.Tensor, call: Call) -> torch.Tensor:
        if call.wanted is not None and not call.wanted.size:
            return torch.empty(0, self.vocab_size, dtype=self._wide, device=self.device)
        if not self.needs_left:
            return self._head(states if call.wanted is None else self._rows(states, call.wanted))
        left = left_rows(call.slots)
        left = left if call.wanted is None else left[call.wanted]
        known = torch.from_numpy(left >= 0).to(self.device)
        out = self._head(self._rows(states, np.maximum(left, 0)))
        out[~known] = torch.nan
        return out

    def _rows(self, states: torch.Tensor, rows: Ints) -> torch.Tensor:
        return states[torch.from_numpy(rows).to(self.device)]

    def _head(self, states: torch.Tensor) -> torch.Tensor:
        logits = self._decoder.head(states, norm=False).to(self._wide)
        if self.spec.model.logit_multiplier != 1.0:
            logits = logits * self.spec.model.logit_multiplier
        return logits.index_fill_(1, self._never, -torch.inf)


def _bare(model: ModelSpec) -> ModelSpec:
    """The shape without what is done here: rotations, and factors on embeddings and logits."""
    layers = tuple(replace(layer, rope=None) for layer in model.layers)
    return replace(model, layers=layers, embedding_multiplier=1.0, logit_multiplier=1.0)


def _cache_of(call: Call) -> NativeSlotCache | None:
    """The call's cache, after a look at what it asks of it."""
    cache: SlotCache | None = call.cache
    reads = call.read is not None and call.read.size > 0
    unique = np.unique(call.slots).size == call.slots.size
    assert unique or (call.mask is not None and not call.write), "copies of a slot need a mask, and are never stored"
    assert cache is not None or not (reads or call.write), "reading and storing need a cache"
    if cache is None:
        return None
    assert isinstance(cache, NativeSlotCache), "a cache belongs to the denoiser that made it"
    assert call.read is None or cache.holds(call.read), "only stored slots are read"
    assert call.read is None or not np.isin(call.read, call.slots).any(), "a slot is read or computed, not both"
    return cache


def left_rows(slots: Ints) -> Ints:
    """For each row the row of the slot at its left: the one just before it, else the only one at that slot.

    -1 where there is none.

    Slot 0, which has no left neighbour, keeps its own row, as Dream's own sampler does.
    """
    rows = np.full(slots.size, -1, np.int64)
    for row, slot in enumerate(slots):
        if slot == 0:
            rows[row] = row
        elif row and slots[row - 1] == slot - 1:
            rows[row] = row - 1
        else:
            before = np.flatnonzero(slots == slot - 1)
            rows[row] = before[0] if before.size == 1 else -1
    return rows
