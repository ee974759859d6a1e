"""The weights of one layer, as the maps and norms that they become; each is taken out of all once."""

from __future__ import annotations

from collections.abc import Callable

import torch

from paceline.models.layers.experts import make_mlp, make_moe, sigmoid_by_row
from paceline.models.layers.latent import LatentAttention, make_latent_norm
from paceline.models.layers.linear import (
    Map,
    RowInvariance,
    in_float32,
    make_head_norm,
    make_layer_norm,
    make_linear,
    make_norm,
    make_quantized_linear,
)
from paceline.models.spec import AttentionShape, LatentSpec, ModelSpec

Weights = dict[str, torch.Tensor]
MakesMaps = Callable[[torch.Tensor, torch.Tensor | None, torch.Tensor | None], Map]
"""Makes the linear map of a weight (out, in), its scales (out,) where it is int8, and its bias, if there is one."""


def norm_of(spec: ModelSpec, weights: Weights, name: str) -> Map | None:
    """The norm of that name, if there is one; its weights are taken out."""
    weight, bias = weights.pop(f"{name}.weight", None), weights.pop(f"{name}.bias", None)
    if weight is None:
        return None
    if spec.norm == "layer":
        norm = make_layer_norm(weight, bias, spec.norm_eps)
    else:
        norm = make_norm(weight, spec.norm_eps, offset=spec.norm_offset)
    if not spec.wide_sums:
        return norm
    return lambda x: norm(x.to(weight.dtype))


class OwnWeights:
    """One layer's part of the weights, handed out once each.

    Args:
        prefix: of the layer's canonical names.
        dtype: of the activations.
        maps: makes linear maps; None: `make_linear` and `make_quantized_linear`.

    Attributes:
        norm_eps: of the layer's norms.
    """

    def __init__(
        self,
        weights: Weights,
        prefix: str,
        spec: ModelSpec,
        row_invariant: RowInvariance,
        dtype: torch.dtype,
        *,
        maps: MakesMaps | None = None,
    ) -> None:
        self._weights, self._prefix, self._spec = weights, prefix, spec
        self._row_invariant, self._dtype, self._maps = row_invariant, dtype, maps
        self.norm_eps = spec.norm_eps

    def take(self, name: str) -> torch.Tensor:
        """The tensor itself."""
        return self._weights.pop(self._prefix + name)

    def norm(self, name: str) -> Map | None:
        """The norm of that name, if the layer has it."""
        return norm_of(self._spec, self._weights, self._prefix + name)

    def linear(self, name: str, *, rows: torch.Tensor | None = None, columns: torch.Tensor | None = None) -> Map:
        """The linear map of that name, its outputs and inputs reordered."""
        weight, bias = self.take(f"{name}.weight"), self._weights.pop(f"{self._prefix}{name}.bias", None)
        scale = self._weights.pop(f"{self._prefix}{name}.scale", None)
        if rows is not None:
            weight = weight[rows.to(weight.device)]
            scale = None if scale is None else scale[rows.to(scale.device)]
            bias = None if bias is None else bias[rows.to(bias.device)]
        if columns is not None and (scale is None or self._maps is not None):
            weight = weight[:, columns.to(weight.device)]
        return self._product(weight, scale, bias, columns)

    def experts(self, name: str) -> list[Map]:
        """The maps of all experts, from a stack of weights."""
        weights = self.take(f"experts.{name}")
        scales, biases = (self._weights.pop(f"{self._prefix}experts.{name}.{kind}", None) for kind in ("scale", "bias"))
        return [
            self._product(weight, None if scales is None else scales[e], None if biases is None else biases[e])
            for e, weight in enumerate(weights)
        ]

    def mlp(self) -> Map:
        """The MLP."""
        xielu = self.take("xielu") if self._spec.activation == "xielu" else None
        return make_mlp(self._spec, self.linear("gate_up"), self.linear("down"), xielu)

    def mixture(self) -> Map:
        """The mixture of experts, with what every token goes through beside them."""
        spec, preference = self._spec, None
        if spec.moe is not None and spec.moe.ranks:
            preference = self._weights.pop(f"{self._prefix}router.bias", None)
            router = self._wide_router()
        else:
            router = self.linear("router")
        experts = make_moe(spec, router, self.experts("gate_up"), self.experts("down"), preference)
        if spec.moe is None or not spec.moe.shared:
            return experts
        shared = make_mlp(spec, self.linear("shared.gate_up"), self.linear("shared.down"))
        if not spec.moe.shared_gate:
            return lambda x: experts(x).add_(shared(x))
        gate = self.linear("shared.gate")
        return lambda x: experts(x).add_(shared(x).mul_(sigmoid_by_row(gate(x))))

    def _wide_router(self) -> Map:
        """The router in float32, or in float64 for a float64 model."""
        weight = in_float32(self.take("router.weight"))
        linear = make_linear(weight, row_invariant=self._row_invariant)
        return lambda x: linear(x.to(weight.dtype))

    def _product(
        self,
        weight: torch.Tensor,
        scale: torch.Tensor | None,
        bias: torch.Tensor | None = None,
        columns: torch.Tensor | None = None,
    ) -> Map:
        if self._maps is not None:
            return self._maps(weight, scale, bias)
        if scale is None:
            return make_linear(weight, bias, row_invariant=self._row_invariant)
        return make_quantized_linear(
            weight, scale, bias, dtype=self._dtype, row_invariant=self._row_invariant, columns=columns
        )

    def latent(self, latent: LatentSpec, heads: int) -> LatentAttention:
        """The maps of latent attention."""
        query: Map | None = None
        if latent.query_rank is not None:
            query = _in_turn(make_latent_norm(self.take("q_norm.weight")), self.linear("q_b"))
        return LatentAttention(
            latent,
            heads,
            both=self.linear("qkv"),
            query=query,
            norm=make_latent_norm(self.take("kv_norm.weight")),
            kv_b=self.take("kv_b.weight"),
            o=self.linear("o"),
            row_invariant=self._row_invariant,
        )

    def qk_norm(self, shape: AttentionShape, order: torch.Tensor) -> Callable[[torch.Tensor], None] | None:
        """In place on the first heads + kv_heads rows of (r, heads + 2 * kv_heads, head dim)."""
        spec = self._spec
        kind, eps, offset = spec.qk_norm, spec.qk_norm_eps or spec.norm_eps, spec.norm_offset
        if kind is None:
            return None
        q, k = self.take("q_norm.weight"), self.take("k_norm.weight")
        if kind == "head":
            by_head = torch.cat([q.expand(shape.heads, -1), k.expand(shape.kv_heads, -1)])
            return _in_place(make_head_norm(by_head, eps, offset=offset), (0, shape.heads + shape.kv_heads), flat=False)
        q_norm = _in_place(make_norm(q[order.to(q.device)], eps, offset=offset), (0, shape.heads), flat=True)
        k_norm = _in_place(make_norm(k, eps, offset=offset), (shape.heads, shape.kv_heads), flat=True)

        def both(qkv: torch.Tensor) -> None:
            q_norm(qkv)
            k_norm(qkv)

        return both


def _in_turn(first: Map, second: Map) -> Map:
    return lambda x: second(first(x))


def _in_place(norm: Map, heads: tuple[int, int], *, flat: bool) -> Callable[[torch.Tensor], None]:
    def apply(qkv: torch.Tensor) -> None:
        part = qkv.narrow(1, *heads)
        part.copy_(norm(part.flatten(1)).view_as(part) if flat else norm(part))

    return apply
