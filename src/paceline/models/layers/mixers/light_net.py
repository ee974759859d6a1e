"""The additive recurrence of LightNet (arXiv:2405.21022)."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from paceline.models.layers.linear import in_float32, make_norm
from paceline.models.layers.mixers.step import RecurrentStep
from paceline.models.layers.own_weights import OwnWeights
from paceline.models.mixer_spec import LightNetSpec
from paceline.models.state.recurrence import Recurrence


class LightNet:
    """out(norm(read) * silu(z)): what is read is, for each dimension of the keys, an average of all values so far.

    A value weighs e^logit, over the sum of all weights so far: what was averaged before decays as that sum grows.
    """

    def __init__(self, spec: LightNetSpec, weights: OwnWeights) -> None:
        self._spec = spec
        self._in, self._gates, self._gate = (weights.linear(f"mixer.{name}") for name in ("in", "gates", "gate"))
        self._norm = make_norm(weights.take("mixer.norm.weight"), weights.norm_eps)
        self._out = weights.linear("mixer.out")

    def run(self, normed: torch.Tensor, step: RecurrentStep, layer: int) -> torch.Tensor:
        """See `models.layers.mixers.kinds.Mixer`."""
        spec = self._spec
        queries, logits, values = in_float32(self._in(normed)).split([spec.keys, spec.keys, spec.values], -1)
        sums, before = step.log_sums(layer, logits)
        decays = torch.where(before.isneginf(), 0.0, before - sums)
        new = Recurrence(
            self._by_head(F.silu(queries)) * spec.key_dim**-0.5, self._by_head((logits - sums).exp()),
            self._by_head(values), self._by_head(decays),
        )  # fmt: skip
        read = self._norm(step.recur(layer, new).flatten(1))
        gate = F.silu(in_float32(self._gate(self._gates(normed))))
        return self._out((read * gate).to(normed.dtype))

    def _by_head(self, inner: torch.Tensor) -> torch.Tensor:
        """(rows, heads, dimensions of each)."""
        return inner.reshape(len(inner), self._spec.heads, -1)
