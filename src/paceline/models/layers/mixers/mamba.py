"""Mamba, as Jamba and Falcon-Mamba have it too (arXiv:2312.00752)."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from paceline.models.layers.linear import Map, in_float32, make_norm
from paceline.models.layers.mixers.step import RecurrentStep
from paceline.models.layers.own_weights import OwnWeights
from paceline.models.mixer_spec import MambaSpec
from paceline.models.state.recurrence import Recurrence


class Mamba:
    """out((read + skip * x) * silu(z)): what is read by C of what B has written of x, both of them made of x."""

    def __init__(self, spec: MambaSpec, weights: OwnWeights) -> None:
        self._spec = spec
        self._in, self._out = weights.linear("mixer.in"), weights.linear("mixer.out")
        self._selection, self._steps = weights.linear("mixer.selection"), weights.linear("mixer.steps")
        self._taps = weights.take("mixer.conv.weight")
        self._bias = weights.take("mixer.conv.bias") if spec.conv_bias else None
        self._rate, self._step_bias = -weights.take("mixer.decay").exp(), weights.take("mixer.step_bias")
        self._skip = weights.take("mixer.skip")
        self._sizes = [spec.rank, spec.state_dim, spec.state_dim]
        self._norms = self._take_norms(weights)

    def _take_norms(self, weights: OwnWeights) -> list[Map]:
        """Of what steps are made of, of B and of C; empty without."""
        spec = self._spec
        if spec.norm is None:
            return []
        if spec.norm == "weighed":
            given = [weights.take(f"mixer.{name}_norm.weight") for name in ("step", "key", "query")]
        else:
            given = [self._taps.new_ones(size) for size in self._sizes]
        return [make_norm(weight, spec.norm_eps) for weight in given]

    def run(self, normed: torch.Tensor, step: RecurrentStep, layer: int) -> torch.Tensor:
        """See `models.layers.mixers.kinds.Mixer`."""
        columns, gate = self._in(normed).chunk(2, -1)
        columns = step.convolve(layer, columns, self._taps)
        columns = F.silu(columns if self._bias is None else columns.add_(self._bias))
        parts = self._selection(columns).split(self._sizes, -1)
        if self._norms:
            parts = [norm(part) for norm, part in zip(self._norms, parts, strict=True)]
        steps = F.softplus(in_float32(self._steps(parts[0])) + self._step_bias)
        keys, queries = (in_float32(part).unsqueeze(1).expand(-1, self._spec.channels, -1) for part in parts[1:])
        x = in_float32(columns)
        new = Recurrence(queries, keys, (steps * x).unsqueeze(-1), steps.unsqueeze(-1) * self._rate)
        read = step.recur(layer, new).squeeze(-1) + self._skip * x
        if self._spec.publishes:
            step.published = read
        return self._out((read * F.silu(in_float32(gate))).to(normed.dtype))
