"""What a denoiser is: the shape of a masked diffusion language model, and one bidirectional (or block-causal) pass over
slots of a canvas, with keys and values kept by slot.

A call computes an arbitrary subset of a canvas' slots against stored keys and values of another subset, so that every
cache policy and every arrangement of drafts is one kind of call. Each call is computed on its own, whatever stands
beside it in the list: the bits of a canvas do not depend on how many others are decoded with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch


Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]


class SlotCache(Protocol):
    """Keys and values of one canvas by slot, all layers.

    Slots may be stored, overwritten and forgotten in any order.
    """

    @property
    def stored(self) -> Ints:
        """Slots that hold keys and values, ascending."""

    def truncate(self, length: int) -> None:
        """Forget slots from `length` on."""

    def clear(self) -> None:
        """Forget everything."""


@dataclass(frozen=True, slots=True)
class Call:
    """One pass for one canvas.

    Attributes:
        ids: (q,) tokens, the mask token where a slot is masked.
        slots: (q,) the canvas slot of each, its rotary position too. A slot may occur several times (copies of a
            window); then `mask` says who sees whom.
        cache: of this canvas; None computes without one.
        read: (r,) stored slots whose keys and values are attended besides those computed now; none of them is in
            `slots`.
        write: store the keys and values computed now at `slots`, over what is there.
        mask: (q, r + q) True where a query sees a key, keys in the order `read`, `slots`; None leaves it to the family:
            everything where attention is full, blocks up to its own where it is block-causal.
        wanted: (k,) rows of `slots` whose logits are wanted; None wants all.
    """

    ids: Ints
    slots: Ints
    cache: SlotCache | None = None
    read: Ints | None = None
    write: bool = False
    mask: Flags | None = None
    wanted: Ints | None = None


class Denoiser(Protocol):
    """A masked diffusion language model.

    Attributes:
        vocab_size: columns of the logits.
        mask_token_id: what stands at a masked slot; its own logit is always -inf.
        eos_token_ids: tokens that end a text.
        max_length: most slots of a canvas.
        attention: "full" sees the whole canvas, "block" the own block and those before it.
        block_length: of a block-causal family; None for full attention.
        needs_left: the logits of a slot come from the pass at the slot left of it (families adapted from autoregressive
            models, "shifted logits"): a slot has logits only if the one left of it is computed by the same call.
        slot_bytes: keys and values of one slot in a cache, all layers.
    """

    vocab_size: int
    mask_token_id: int
    eos_token_ids: tuple[int, ...]
    max_length: int
    attention: Literal["full", "block"]
    block_length: int | None
    needs_left: bool

    @property
    def slot_bytes(self) -> int: ...

    def new_cache(self, length: int) -> SlotCache:
        """An empty cache for a canvas of at most `length` slots."""

    def forward(self, calls: Sequence[Call]) -> list[torch.Tensor]:
        """One pass for each call.

        Returns:
            For each call (q, vocab_size) logits, float32 (float64 for a float64 model); row i belongs to `slots[i]`,
            shifted already. Rows that the family gives no logits (`needs_left`) are NaN. Of a call with `wanted` these
            rows alone; their last bits may depend on how many they are.
        """
