"""Layers of diffusion language models: grouped sigmoid routing, and angles that lose nothing on long canvases.

Angles are computed in float64 from float32 frequencies, and applied in float32 (float64 for a float64 model).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.nn import functional as F

from paceline.models.layers.experts import make_mlp, make_moe, through_experts
from paceline.models.layers.linear import Map, RowInvariance, make_linear, make_norm
from paceline.models.layers.rope import Rope
from paceline.models.spec import DenoiserSpec, MoeSpec, RopeSpec, RoutingSpec

Weights = Mapping[str, torch.Tensor]
Rotation = tuple[torch.Tensor, torch.Tensor]


def rotation(spec: RopeSpec, positions: torch.Tensor, dtype: torch.dtype) -> Rotation:
    """Cosines and sines (r, 1, dims) of positions (r,), in the dtype that they are applied in."""
    rope = Rope(spec, positions.device)
    length = int(positions.max()) + 1 if len(positions) else 1
    angles = torch.outer(positions.double(), rope.inverse_frequencies(length).double())
    angles = torch.cat((angles, angles), -1).unsqueeze(1)
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    return (angles.cos() * rope.attention_scaling).to(wide), (angles.sin() * rope.attention_scaling).to(wide)


def rotate(heads: torch.Tensor, by: Rotation) -> torch.Tensor:
    """Rotary embedding of (r, heads, head dim), pairs being (i, i + dims / 2); dims beyond the table pass unchanged."""
    cos, sin = by
    dims = cos.shape[-1]
    turned, rest = heads[..., :dims].to(cos.dtype), heads[..., dims:]
    first, second = turned.chunk(2, -1)
    out = (turned * cos + torch.cat((-second, first), -1) * sin).to(heads.dtype)
    return torch.cat((out, rest), -1) if rest.shape[-1] else out


def norm(weight: torch.Tensor, eps: float) -> Map:
    """RMS norm over the last axis, in float32, or float64 for float64 weights."""
    if weight.dtype is not torch.float64:
        return make_norm(weight, eps)

    def wide(x: torch.Tensor) -> torch.Tensor:
        return x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * weight

    return wide


def choose_experts(
    scores: torch.Tensor, prefer: torch.Tensor | None, moe: MoeSpec, routing: RoutingSpec
) -> tuple[torch.Tensor, torch.Tensor]:
    """Experts and their shares, each (r, top_k), from scores (r, experts) in 0..1 and a bias (experts,)."""
    ranked = scores if prefer is None else scores + prefer
    grouped = ranked.view(len(scores), routing.groups, -1)
    best = grouped.topk(min(2, grouped.shape[-1]), -1)[0].sum(-1)
    open_ = torch.zeros_like(best, dtype=torch.bool).scatter_(1, best.topk(routing.top_groups, -1)[1], True)
    chosen = grouped.masked_fill(~open_.unsqueeze(-1), -torch.inf).flatten(1).topk(moe.top_k, -1)[1]
    share = scores.gather(1, chosen)
    if moe.norm_top_k and moe.top_k > 1:
        share = share / (share.sum(-1, keepdim=True) + 1e-20)
    return chosen, share * routing.scale


def make_routed(moe: MoeSpec, routing: RoutingSpec, route: Map, prefer: torch.Tensor | None, experts: list[Map]) -> Map:
    """x (r, hidden) -> (r, hidden) through the experts that grouped sigmoid scores choose (see RoutingSpec).

    Args:
        route: (r, hidden) -> (r, experts), in float32, or float64 for a float64 model.
    """

    def mixture(x: torch.Tensor) -> torch.Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        chosen, share = choose_experts(route(x.to(wide)).sigmoid(), prefer, moe, routing)
        return through_experts(x, experts, chosen, share.to(x.dtype))

    return mixture


class DenoiserLayer:
    """One block: attention in two halves around the caller's attention, then the MLP or mixture."""

    def __init__(self, spec: DenoiserSpec, index: int, weights: Weights, invariant: RowInvariance) -> None:
        model, self._at, self._weights, self._invariant = spec.model, f"layers.{index}.", weights, invariant
        self._sizes = (model.num_heads, model.num_kv_heads, model.num_kv_heads)
        self._head_dim = model.head_dim
        self._norms = [norm(weights[f"{self._at}{name}.weight"], model.norm_eps) for name in ("attn_norm", "mlp_norm")]
        self._qk_norms = (
            [norm(weights[f"{self._at}{name}_norm.weight"], model.norm_eps) for name in "qk"] if model.qk_norm else None
        )
        self._qkv, self._o = self._linear("qkv"), self._linear("o")
        if model.layers[index].moe and model.moe is not None:
            self._mlp = self._mixture(spec, model.moe)
        else:
            self._mlp = make_mlp(model, self._linear("gate_up"), self._linear("down"))
        del self._weights

    def _linear(self, name: str) -> Map:
        weight, bias = self._weights[f"{self._at}{name}.weight"], self._weights.get(f"{self._at}{name}.bias")
        return make_linear(weight, bias, row_invariant=self._invariant)

    def _mixture(self, spec: DenoiserSpec, moe: MoeSpec) -> Map:
        stacks = [self._weights[f"{self._at}experts.{name}"].unbind(0) for name in ("gate_up", "down")]
        maps = [[make_linear(weight, row_invariant=self._invariant) for weight in stack] for stack in stacks]
        if spec.routing is None:
            return make_moe(spec.model, self._linear("router"), maps[0], maps[1])
        experts = [make_mlp(spec.model, up, down) for up, down in zip(*maps, strict=True)]
        router, bias = self._weights[f"{self._at}router.weight"], self._weights.get(f"{self._at}router.bias")
        wide = torch.promote_types(router.dtype, torch.float32)
        route = make_linear(router.to(wide), row_invariant=self._invariant)
        routed = make_routed(moe, spec.routing, route, None if bias is None else bias.to(wide), experts)
        if not spec.routing.shared:
            return routed
        shared = make_mlp(spec.model, self._linear("shared.gate_up"), self._linear("shared.down"))
        return lambda x: routed(x) + shared(x)

    def open(self, x: torch.Tensor, by: Rotation) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rotated queries (r, h, d), rotated keys and values (r, kv, d) of hidden states (r, hidden)."""
        heads = self._qkv(self._norms[0](x)).view(len(x), -1, self._head_dim)
        q, k, v = heads.split(self._sizes, 1)
        if self._qk_norms is not None:
            q, k = self._qk_norms[0](q), self._qk_norms[1](k)
        return rotate(q, by), rotate(k, by), v

    def close(self, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """Hidden states after the layer, from those before it and what attention gave (r, h * d)."""
        x = x + self._o(attended)
        return x + self._mlp(self._norms[1](x))


def head(weight: torch.Tensor, invariant: RowInvariance) -> Map:
    """Hidden states (r, hidden) -> logits (r, v) in float32, or float64 for float64 weights."""
    linear = make_linear(weight, row_invariant=invariant)

    def logits(x: torch.Tensor) -> torch.Tensor:
        out = linear(x)
        return out if out.dtype is torch.float64 else out.float()

    return logits


def embed(ids: torch.Tensor, table: torch.Tensor, factor: float) -> torch.Tensor:
    """Rows of the table (v, hidden)."""
    x = F.embedding(ids, table)
    return x if factor == 1.0 else x * factor
