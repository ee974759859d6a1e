"""Keys and values of one canvas of a diffusion language model, by slot."""

from __future__ import annotations

import numpy as np
import torch

from paceline.models.denoiser_base import Ints


class NativeSlotCache:
    """A `SlotCache` of fixed length.

    Args:
        layers, length, heads, size: of the tensors (layers, length, heads, size).
    """

    def __init__(
        self, layers: int, length: int, heads: int, size: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.keys = torch.empty((layers, length, heads, size), dtype=dtype, device=device)
        self.values = torch.empty_like(self.keys)
        self._holds = np.zeros(length, np.bool_)

    @property
    def stored(self) -> Ints:
        """Slots that hold keys and values, ascending."""
        return np.flatnonzero(self._holds)

    def truncate(self, length: int) -> None:
        """Forget slots from `length` on."""
        self._holds[length:] = False

    def clear(self) -> None:
        """Forget everything."""
        self._holds[:] = False

    def holds(self, slots: Ints) -> bool:
        """Whether all of `slots` are stored."""
        return bool(slots.size == 0 or (slots.max() < self._holds.size and self._holds[slots].all()))

    def mark(self, slots: Ints) -> None:
        """Note that a pass has stored `slots` in every layer."""
        self._holds[slots] = True
