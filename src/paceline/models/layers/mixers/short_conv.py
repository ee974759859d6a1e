"""The gated short convolution of LFM2 (arXiv:2511.23404)."""

from __future__ import annotations

import torch

from paceline.models.layers.mixers.step import RecurrentStep
from paceline.models.layers.own_weights import OwnWeights
from paceline.models.mixer_spec import ShortConvSpec


class ShortConv:
    """out(c * conv(b * x)); what the convolution keeps of a token is b * x."""

    def __init__(self, spec: ShortConvSpec, weights: OwnWeights) -> None:
        self._channels = spec.channels
        self._in, self._out = weights.linear("mixer.in"), weights.linear("mixer.out")
        self._taps = weights.take("mixer.conv.weight")
        self._bias = weights.take("mixer.conv.bias") if spec.bias else None

    def run(self, normed: torch.Tensor, step: RecurrentStep, layer: int) -> torch.Tensor:
        """See `models.layers.mixers.kinds.Mixer`."""
        into, out, x = self._in(normed).split(self._channels, -1)
        mixed = step.convolve(layer, into * x, self._taps)
        if self._bias is not None:
            mixed.add_(self._bias)
        return self._out(mixed.mul_(out))
