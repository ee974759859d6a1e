"""The simpler simple recurrent unit of Marian's students (D19-5632)."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from paceline.models.layers.linear import in_float32
from paceline.models.layers.mixers.step import RecurrentStep
from paceline.models.layers.own_weights import OwnWeights
from paceline.models.mixer_spec import SimpleUnitSpec
from paceline.models.state.recurrence import Recurrence


class SimpleUnit:
    """relu(c), with c = g * last c + (1 - g) * input, the gate g being a sigmoid; no map follows."""

    def __init__(self, spec: SimpleUnitSpec, weights: OwnWeights) -> None:
        self._width, self._in = spec.width, weights.linear("mixer.in")

    def run(self, normed: torch.Tensor, step: RecurrentStep, layer: int) -> torch.Tensor:
        """See `models.layers.mixers.kinds.Mixer`."""
        inputs, gates = in_float32(self._in(normed)).unsqueeze(-1).split(self._width, 1)
        ones, written = torch.ones_like(inputs), gates.neg().sigmoid() * inputs
        read = step.recur(layer, Recurrence(ones, ones, written.contiguous(), F.logsigmoid(gates)))
        return read.flatten(1).relu().to(normed.dtype)
