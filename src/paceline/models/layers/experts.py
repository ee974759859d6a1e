"""The MLP of a layer, and the mixture of experts in its place.

Sources: SwiGLU (arXiv:2002.05202), Mixtral of experts (arXiv:2401.04088).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch.nn import functional as F

from paceline.errors import ConfigError
from paceline.models.layers.linear import Map
from paceline.models.spec import ModelSpec

ACTIVATIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}


def make_mlp(spec: ModelSpec, gate_up: Map, down: Map) -> Map:
    """The spec's MLP; gate and up come from one matrix, or up alone where there is no gate."""
    inner = _inner_of(spec)
    return lambda x: down(inner(gate_up(x)))


def _inner_of(spec: ModelSpec) -> Map:
    """(r, 2 * inner) -> (r, inner) by the gate, or (r, inner) -> (r, inner) without one."""
    if spec.activation == "clamped_swiglu":
        return partial(_clamped_swiglu, alpha=spec.swiglu_alpha, limit=spec.swiglu_limit)
    act = ACTIVATIONS[spec.activation]

    def gated(both: torch.Tensor) -> torch.Tensor:
        gate, up = both.chunk(2, -1)
        return act(gate).mul_(up)

    return gated if spec.gated else act


def _clamped_swiglu(both: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    """silu(alpha * gate) / alpha * (up + 1), in place; silu of a view goes row by row, so that a row keeps its bits."""
    gate, up = both.chunk(2, -1)
    gate.clamp_(max=limit).mul_(alpha)
    return F.silu(gate).mul_(up.clamp_(-limit, limit).add_(1)).div_(alpha)


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
    experts = [make_mlp(spec, *maps) for maps in zip(gate_up, down, strict=True)]
    top_k, normed, groups, scaling = moe.top_k, moe.norm_top_k, moe.groups, moe.scaling

    def mixture(x: torch.Tensor) -> torch.Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        shares = torch.softmax(route(x), -1, dtype=wide)
        if groups is not None:
            shares = in_best_groups(shares, *groups)
        share, chosen = shares.topk(top_k, -1)
        if normed:
            share = share / share.sum(-1, keepdim=True)
        if scaling != 1.0:
            share = share * scaling
        share = share.to(x.dtype)
        return through_experts(x, experts, chosen, share)

    return mixture


def in_best_groups(shares: torch.Tensor, groups: int, best: int) -> torch.Tensor:
    """Shares (r, experts), 0 outside the groups whose largest shares are largest."""
    grouped = shares.view(len(shares), groups, -1)
    largest = grouped.amax(-1)
    outside = torch.ones_like(largest, dtype=torch.bool).scatter_(1, largest.topk(best, -1).indices, value=False)
    return grouped.masked_fill(outside[..., None], 0.0).view_as(shares)


def through_experts(x: torch.Tensor, experts: Sequence[Map], chosen: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    """Sum of what the chosen experts (r, top_k) make of x (r, hidden), weighted by their shares (r, top_k)."""
    out = torch.zeros_like(x)
    for expert in chosen.unique().tolist():
        rows, rank = (chosen == expert).nonzero(as_tuple=True)
        out.index_add_(0, rows, experts[expert](x[rows]) * share[rows, rank].unsqueeze(1))
    return out
