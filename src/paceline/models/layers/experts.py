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
from paceline.models.spec import ModelSpec, MoeSpec

ACTIVATIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square_(),
}


def make_mlp(spec: ModelSpec, gate_up: Map, down: Map, xielu: torch.Tensor | None = None) -> Map:
    """The spec's MLP; gate and up come from one matrix, or up alone where there is no gate.

    Args:
        xielu: (3,) of the layer where that is its activation, see `xielu_numbers`.
    """
    inner = _inner_of(spec) if xielu is None else partial(_xielu, numbers=xielu_numbers(xielu))
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


def xielu_numbers(stored: torch.Tensor) -> tuple[float, float, float]:
    """Factors of x^2 above 0, of exp(x) - 1 - x below and of x (models.spec), of the three that are stored: two through
    a softplus, the second of which the last one is added to.
    """
    above, below = F.softplus(stored[:2].double()).tolist()
    beta = float(stored[2])
    return above, beta + below, beta


def _xielu(x: torch.Tensor, numbers: tuple[float, float, float]) -> torch.Tensor:
    """Source: Deriving activation functions using integration (arXiv:2411.13010)."""
    above, below, beta = numbers
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    negative = wide.clamp(max=0.0)
    curve = F.pad(negative, (0, 1))[:, :-1].expm1_() - negative  # of a view, so that a row keeps its bits
    return (wide.clamp(min=0.0).square_().mul_(above) + curve.mul_(below) + wide * beta).to(x.dtype)


def _clamped_swiglu(both: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    """silu(alpha * gate) / alpha * (up + 1), in place; silu of a view goes row by row, so that a row keeps its bits."""
    gate, up = both.chunk(2, -1)
    gate.clamp_(max=limit).mul_(alpha)
    return F.silu(gate).mul_(up.clamp_(-limit, limit).add_(1)).div_(alpha)


def make_moe(
    spec: ModelSpec, route: Map, gate_up: Sequence[Map], down: Sequence[Map], preference: torch.Tensor | None = None
) -> Map:
    """x (r, hidden) -> (r, hidden): each row goes through its `top_k` experts, weighted by the router's scores.

    Args:
        route: (r, hidden) -> (r, experts). gate_up: (r, hidden) -> (r, 2 * inner) of each expert, gate first. down:
            back.
        preference: (experts,) bias that is added to scores for choosing, see `MoeSpec.ranks`.
    Raises:
        ConfigError: the spec has no mixture.
    """
    moe = spec.moe
    if moe is None:
        raise ConfigError("a layer is marked as a mixture of experts, but ModelSpec.moe is None; fill it in")
    experts = [make_mlp(spec, *maps) for maps in zip(gate_up, down, strict=True)]
    choose = partial(_by_sigmoid if moe.sigmoid else _by_softmax, moe, preference)

    def mixture(x: torch.Tensor) -> torch.Tensor:
        share, chosen = choose(route(x))
        return through_experts(x, experts, chosen, share.to(x.dtype))

    return mixture


def _by_softmax(
    moe: MoeSpec, preference: torch.Tensor | None, scores: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Shares and numbers of the chosen experts, each (r, top_k), from the router's output (r, experts)."""
    shares = torch.softmax(scores, -1, dtype=torch.promote_types(scores.dtype, torch.float32))
    ranked = shares if preference is None else shares + preference
    if moe.groups is not None:
        grouped = ranked.view(len(ranked), moe.groups[0], -1)
        ranked = _in_best_groups(grouped, grouped.amax(-1), moe.groups[1], 0.0)
    chosen = ranked.topk(moe.top_k, -1).indices
    share = shares.gather(1, chosen)
    if moe.norm_top_k:
        share = share / share.sum(-1, keepdim=True)
    if moe.scaling != 1.0:
        share = share * moe.scaling
    return share, chosen


def _by_sigmoid(
    moe: MoeSpec, preference: torch.Tensor | None, scores: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `_by_softmax`, see `MoeSpec.sigmoid`."""
    shares = sigmoid_by_row(scores)
    ranked = shares if preference is None else shares + preference
    if moe.groups is not None:
        grouped = ranked.view(len(ranked), moe.groups[0], -1)
        best_two = grouped.topk(min(2, grouped.shape[-1]), -1).values.sum(-1)
        ranked = _in_best_groups(grouped, best_two, moe.groups[1], -torch.inf)
    chosen = ranked.topk(moe.top_k, -1).indices
    share = shares.gather(1, chosen)
    if moe.norm_top_k:
        share = share / (share.sum(-1, keepdim=True) + 1e-20)
    return share * moe.scaling, chosen


def sigmoid_by_row(x: torch.Tensor) -> torch.Tensor:
    """The sigmoid of (r, n); that of a view goes row by row, so that a row keeps its bits."""
    return F.pad(x, (0, 1))[:, :-1].sigmoid_()


def _in_best_groups(grouped: torch.Tensor, ranks: torch.Tensor, best: int, outside: float) -> torch.Tensor:
    """(r, experts) of scores (r, groups, experts of each), those outside the groups that rank highest replaced."""
    closed = torch.ones_like(ranks, dtype=torch.bool).scatter_(1, ranks.topk(best, -1).indices, value=False)
    return grouped.masked_fill(closed[..., None], outside).flatten(1)


def through_experts(x: torch.Tensor, experts: Sequence[Map], chosen: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    """Sum of what the chosen experts (r, top_k) make of x (r, hidden), weighted by their shares (r, top_k)."""
    out = torch.zeros_like(x)
    for expert in chosen.unique().tolist():
        rows, rank = (chosen == expert).nonzero(as_tuple=True)
        out.index_add_(0, rows, experts[expert](x[rows]) * share[rows, rank].unsqueeze(1))
    return out
