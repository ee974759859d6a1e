"""The gated memory unit of SambaY (arXiv:2507.06607)."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from paceline.models.layers.linear import in_float32
from paceline.models.layers.mixers.step import RecurrentStep
from paceline.models.layers.own_weights import OwnWeights
from paceline.models.mixer_spec import GatedMemorySpec


class GatedMemory:
    """out(silu(in(x)) * m); m is what an earlier layer has published for the same row."""

    def __init__(self, spec: GatedMemorySpec, weights: OwnWeights) -> None:
        self._in, self._out = weights.linear("mixer.in"), weights.linear("mixer.out")

    def run(self, normed: torch.Tensor, step: RecurrentStep, layer: int) -> torch.Tensor:
        """See `models.layers.mixers.kinds.Mixer`."""
        return self._out((F.silu(in_float32(self._in(normed))) * step.published).to(normed.dtype))
