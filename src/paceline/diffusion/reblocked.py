"""A block-causal model run with other blocks than it was loaded with: the same weights, another mask.

In: a block-causal denoiser, a block length. Out: a denoiser with blocks of that length; length 1 is the autoregressive
model. Not
here: whether the weights bear it, which depends on how they were trained.
Source: the two phases of TCCF in TDAR (arXiv:2602.09555).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from paceline.diffusion.base import NONE
from paceline.models.denoiser import Call, Denoiser, SlotCache
from paceline.utils import need


class Reblocked:
    """Every call gets the mask of the new blocks: a slot sees its own block and those before it.

    Caches are those of the model, but keys and values stored under other blocks differ; begin with an empty one.

    Raises:
        ConfigError: a model with full attention, a length below 1.
    """

    def __init__(self, inner: Denoiser, block_length: int) -> None:
        need(
            inner.attention == "block",
            "the model's attention",
            "be causal between blocks to be given others",
            inner.attention,
        )
        need(block_length >= 1, "block_length", "be at least 1", block_length)
        self.inner = inner
        self.block_length: int | None = block_length
        self.attention = inner.attention
        self.vocab_size, self.mask_token_id = inner.vocab_size, inner.mask_token_id
        self.eos_token_ids, self.max_length = inner.eos_token_ids, inner.max_length
        self.needs_left = inner.needs_left

    @property
    def slot_bytes(self) -> int:
        """See `models.denoiser.base.Denoiser`."""
        return self.inner.slot_bytes

    def new_cache(self, length: int) -> SlotCache:
        """See `models.denoiser.base.Denoiser`."""
        return self.inner.new_cache(length)

    def forward(self, calls: Sequence[Call]) -> list[torch.Tensor]:
        """See `models.denoiser.base.Denoiser`."""
        return self.inner.forward([call if call.mask is not None else self._masked(call) for call in calls])

    def _masked(self, call: Call) -> Call:
        assert self.block_length is not None
        read = call.read if call.read is not None else NONE
        keys = np.concatenate([read, call.slots]) // self.block_length
        return replace(call, mask=keys[None, :] <= (call.slots // self.block_length)[:, None])
