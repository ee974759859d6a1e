"""The gated delta net of Qwen3-Next and Qwen3.5 (arXiv:2412.06464)."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from paceline.models.layers.linear import in_float32, make_norm
from paceline.models.layers.mixers.step import RecurrentStep
from paceline.models.layers.own_weights import OwnWeights
from paceline.models.mixer_spec import KEY_EPS, DeltaSpec
from paceline.models.state.recurrence import Recurrence


class GatedDelta:
    """out(norm(read) * silu(z)): what is read by convolved queries of what convolved keys and values have written."""

    def __init__(self, spec: DeltaSpec, weights: OwnWeights) -> None:
        self._spec = spec
        self._in, self._gates, self._out = (weights.linear(f"mixer.{name}") for name in ("in", "gates", "out"))
        self._taps = weights.take("mixer.conv.weight")
        self._rate, self._step_bias = -weights.take("mixer.decay").exp(), weights.take("mixer.step_bias")
        self._norm = make_norm(weights.take("mixer.norm.weight"), weights.norm_eps)

    def run(self, normed: torch.Tensor, step: RecurrentStep, layer: int) -> torch.Tensor:
        """See `models.layers.mixers.kinds.Mixer`."""
        spec = self._spec
        columns, gate = self._in(normed).split([2 * spec.keys + spec.values, spec.values], -1)
        columns = F.silu(step.convolve(layer, columns, self._taps))
        betas, steps = in_float32(self._gates(normed)).split(spec.value_heads, -1)
        queries, keys, values = in_float32(columns).split([spec.keys, spec.keys, spec.values], -1)
        decays = self._rate * F.softplus(steps + self._step_bias)
        read = step.recur(
            layer,
            Recurrence(
                self._by_head(queries) * spec.key_dim**-0.5, self._by_head(keys),
                values.reshape(len(values), spec.value_heads, -1), decays.unsqueeze(-1), betas.sigmoid(),
            ),
        )  # fmt: skip
        gated = self._norm(read) * F.silu(in_float32(gate).reshape(len(gate), spec.value_heads, -1))
        return self._out(gated.flatten(1).to(normed.dtype))

    def _by_head(self, keys: torch.Tensor) -> torch.Tensor:
        """(rows, value heads, key dim) of length 1, for each value head those of its key head."""
        heads = of_length_one(keys.reshape(len(keys), self._spec.key_heads, -1))
        times = self._spec.value_heads // self._spec.key_heads
        return heads.repeat(1, times, 1) if self._spec.in_turn else heads.repeat_interleave(times, 1)


def of_length_one(heads: torch.Tensor) -> torch.Tensor:
    """Queries or keys (rows, heads, key dim), each divided by its length."""
    return heads * (heads.square().sum(-1, keepdim=True) + KEY_EPS).rsqrt()
