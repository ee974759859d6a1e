"""The delta net with decays by channel of Kimi Linear (arXiv:2510.26692)."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from paceline.models.layers.linear import in_float32, make_norm
from paceline.models.layers.mixers.gated_delta import of_length_one
from paceline.models.layers.mixers.step import RecurrentStep
from paceline.models.layers.own_weights import OwnWeights
from paceline.models.mixer_spec import KimiDeltaSpec
from paceline.models.state.recurrence import Recurrence


class KimiDelta:
    """out(norm(read) * sigmoid(z)): what is read by convolved queries of what convolved keys and values have written.

    Decays and z come from maps of low rank.
    """

    def __init__(self, spec: KimiDeltaSpec, weights: OwnWeights) -> None:
        self._spec = spec
        self._in, self._gates, self._out = (weights.linear(f"mixer.{name}") for name in ("in", "gates", "out"))
        self._decays, self._gate = weights.linear("mixer.decays"), weights.linear("mixer.gate")
        self._taps = torch.cat([weights.take(f"mixer.{name}_conv.weight") for name in ("query", "key", "value")], 1)
        self._rate = -weights.take("mixer.decay").exp().unsqueeze(-1)
        self._step_bias = weights.take("mixer.step_bias")
        self._norm = make_norm(weights.take("mixer.norm.weight"), weights.norm_eps)

    def run(self, normed: torch.Tensor, step: RecurrentStep, layer: int) -> torch.Tensor:
        """See `models.layers.mixers.kinds.Mixer`."""
        head_dim = self._spec.head_dim
        columns = F.silu(step.convolve(layer, self._in(normed), self._taps))
        queries, keys, values = (self._by_head(part) for part in columns.chunk(3, -1))
        decayed, gated, betas = self._gates(normed).split([head_dim, head_dim, self._spec.heads], -1)
        steps = F.softplus(in_float32(self._decays(decayed)) + self._step_bias)
        read = step.recur(
            layer,
            Recurrence(
                of_length_one(queries) * head_dim**-0.5, of_length_one(keys), values,
                self._rate * self._by_head(steps), in_float32(betas).sigmoid(),
            ),
        )  # fmt: skip
        gated = self._norm(read) * self._by_head(self._gate(gated)).sigmoid()
        return self._out(gated.flatten(1).to(normed.dtype))

    def _by_head(self, inner: torch.Tensor) -> torch.Tensor:
        """(rows, heads, head dim), float32 or wider."""
        return in_float32(inner).reshape(len(inner), self._spec.heads, -1)
