"""The gated MLP, and the sparse mixture of experts in its place.

In: linear maps. Out: a callable over rows. Not here: where it sits (models.decoder.decoder).
Source: Mixtral of experts (arXiv:2401.04088).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch.nn import functional as F

from paceline.errors import ConfigError
from paceline.models.decoder.linear import Map
from paceline.models.spec import ModelSpec

ACTIVATIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


def gated_mlp(gate_up: Map, down: Map, activation: str) -> Map:
    """down(act(gate) * up) with gate and up from one matrix."""
    act = ACTIVATIONS[activation]

    def mlp(x: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up(x).chunk(2, -1)
        return down(act(gate).mul_(up))

    return mlp


def make_moe(spec: ModelSpec, route: Map, gate_up: Sequence[Map], down: Sequence[Map]) -> Map:
    """x (r, hidden) -> (r, hidden): each row goes through its `top_k` experts, weighted by the router's probabilities.

    Args:
        route: (r, hidden) -> (r, experts). gate_up: (r, hidden) -> (r, 2 * inner) of each expert, gate first. down:
        back.
    Raises:
        ConfigError: the spec has no mixture.
    """
    moe = spec.moe
    if moe is None:
        raise ConfigError("a layer is marked as a mixture of experts, but ModelSpec.moe is None; fill it in")
    experts = [gated_mlp(*maps, spec.activation) for maps in zip(gate_up, down, strict=True)]
    top_k, normed = moe.top_k, moe.norm_top_k

    def mixture(x: torch.Tensor) -> torch.Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        share, chosen = torch.softmax(route(x), -1, dtype=wide).topk(top_k, -1)
        if normed:
            share = share / share.sum(-1, keepdim=True)
        share = share.to(x.dtype)
        out = torch.zeros_like(x)
        for expert in chosen.unique().tolist():
            rows, rank = (chosen == expert).nonzero(as_tuple=True)
            out.index_add_(0, rows, experts[expert](x[rows]) * share[rows, rank].unsqueeze(1))
        return out

    return mixture
