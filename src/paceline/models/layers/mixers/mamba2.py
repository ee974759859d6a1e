"""Mamba-2, as Granite 4, Falcon-H1, Bamba and Nemotron-H have it (arXiv:2405.21060)."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from paceline.models.layers.linear import in_float32, rms_norm
from paceline.models.layers.mixers.step import RecurrentStep
from paceline.models.layers.own_weights import OwnWeights
from paceline.models.mixer_spec import Mamba2Spec
from paceline.models.state.recurrence import Recurrence


class Mamba2:
    """out(gated(read + skip * x)): what is read by C of what B has written of x, all three convolved."""

    def __init__(self, spec: Mamba2Spec, weights: OwnWeights) -> None:
        self._spec = spec
        self._in, self._gates, self._out = (weights.linear(f"mixer.{name}") for name in ("in", "gates", "out"))
        self._taps = weights.take("mixer.conv.weight")
        self._bias = weights.take("mixer.conv.bias") if spec.conv_bias else None
        self._rate, self._step_bias = -weights.take("mixer.decay").exp(), weights.take("mixer.step_bias")
        self._skip = weights.take("mixer.skip").unsqueeze(-1)
        if spec.norm is not None:
            self._weight = in_float32(weights.take("mixer.norm.weight"))
            size = spec.inner // spec.norm_groups
            self._norm = rms_norm(torch.ones(size, dtype=self._weight.dtype), size, weights.norm_eps)

    def run(self, normed: torch.Tensor, step: RecurrentStep, layer: int) -> torch.Tensor:
        """See `models.layers.mixers.kinds.Mixer`."""
        spec = self._spec
        gate, columns = self._in(normed).split([spec.inner, spec.inner + 2 * spec.shared], -1)
        columns = step.convolve(layer, columns, self._taps)
        columns = in_float32(F.silu(columns if self._bias is None else columns.add_(self._bias)))
        steps = F.softplus(in_float32(self._gates(normed)) + self._step_bias).clamp(*spec.steps).unsqueeze(-1)
        x, keys, queries = columns.split([spec.inner, spec.shared, spec.shared], -1)
        x = x.reshape(len(x), spec.heads, -1)
        new = Recurrence(self._by_head(queries), self._by_head(keys), steps * x, steps * self._rate.unsqueeze(-1))
        read = (step.recur(layer, new) + self._skip * x).flatten(1)
        return self._out(self._gated(read, F.silu(in_float32(gate))).to(normed.dtype))

    def _by_head(self, shared: torch.Tensor) -> torch.Tensor:
        """(rows, heads, state dim), for each head those of its group."""
        groups = shared.reshape(len(shared), self._spec.groups, -1)
        return groups.repeat_interleave(self._spec.heads // self._spec.groups, 1)

    def _gated(self, read: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        if self._spec.norm is None:
            return read * gate
        if self._spec.norm == "gated_before":
            return self._normed(read * gate)
        return self._normed(read) * gate

    def _normed(self, read: torch.Tensor) -> torch.Tensor:
        return self._norm(read.view(len(read), self._spec.norm_groups, -1)).flatten(1) * self._weight
