"""Canonical weights on their way into a decoder: each is taken out once and becomes a linear map or a norm.

In: canonical weights (models.loading.weights), quantised (models.loading.quantization) or not. Out: maps over rows. Not
here: what the maps compute (models.decoder.linear, models.decoder.quantized_linear), where they sit
(models.decoder.decoder).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from paceline.models.decoder.linear import Map, RowInvariance, make_head_norm, make_linear, make_norm
from paceline.models.decoder.quantized_linear import make_quantized_linear
from paceline.models.decoder.tree_attention import AttentionShape
from paceline.models.spec import ModelSpec

Weights = dict[str, torch.Tensor]


class OwnWeights:
    """One layer's part of the weights, handed out once each.

    Args:
        prefix: of the layer's canonical names.
        dtype: of the activations.
    """

    def __init__(
        self, weights: Weights, prefix: str, spec: ModelSpec, row_invariant: RowInvariance, dtype: torch.dtype
    ) -> None:
        self._weights, self._prefix, self._spec = weights, prefix, spec
        self._row_invariant, self._dtype = row_invariant, dtype

    def take(self, name: str) -> torch.Tensor:
        """The tensor itself."""
        return self._weights.pop(self._prefix + name)

    def norm(self, name: str) -> Map | None:
        """The norm of that name, if the layer has it."""
        weight = self._weights.pop(f"{self._prefix}{name}.weight", None)
        return None if weight is None else make_norm(weight, self._spec.norm_eps, offset=self._spec.norm_offset)

    def linear(self, name: str, *, rows: torch.Tensor | None = None, columns: torch.Tensor | None = None) -> Map:
        """The linear map of that name, its outputs and inputs reordered."""
        weight, bias = self.take(f"{name}.weight"), self._weights.pop(f"{self._prefix}{name}.bias", None)
        scale = self._weights.pop(f"{self._prefix}{name}.scale", None)
        if rows is not None:
            weight = weight[rows.to(weight.device)]
            scale = None if scale is None else scale[rows.to(scale.device)]
            bias = None if bias is None else bias[rows.to(bias.device)]
        if scale is None and columns is not None:
            weight = weight[:, columns.to(weight.device)]
        return self._product(weight, scale, bias, columns)

    def experts(self, name: str) -> list[Map]:
        """The maps of all experts, from a stack of weights."""
        weights, scales = self.take(f"experts.{name}"), self._weights.pop(f"{self._prefix}experts.{name}.scale", None)
        return [self._product(weight, None if scales is None else scales[e]) for e, weight in enumerate(weights)]

    def _product(
        self,
        weight: torch.Tensor,
        scale: torch.Tensor | None,
        bias: torch.Tensor | None = None,
        columns: torch.Tensor | None = None,
    ) -> Map:
        if scale is None:
            return make_linear(weight, bias, row_invariant=self._row_invariant)
        return make_quantized_linear(
            weight, scale, bias, dtype=self._dtype, row_invariant=self._row_invariant, columns=columns
        )

    def qk_norm(self, shape: AttentionShape, order: torch.Tensor) -> Callable[[torch.Tensor], None] | None:
        """In place on the first heads + kv_heads rows of (r, heads + 2 * kv_heads, head dim)."""
        kind, eps, offset = self._spec.qk_norm, self._spec.norm_eps, self._spec.norm_offset
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


def _in_place(norm: Map, heads: tuple[int, int], *, flat: bool) -> Callable[[torch.Tensor], None]:
    def apply(qkv: torch.Tensor) -> None:
        part = qkv.narrow(1, *heads)
        part.copy_(norm(part.flatten(1)).view_as(part) if flat else norm(part))

    return apply


def head_of(spec: ModelSpec, weights: Weights, embedding: torch.Tensor, row_invariant: RowInvariance) -> Map:
    """The head's map, without norm; a tied head takes the embedding unless it is quantised."""
    scale = weights.pop("head.scale", None)
    if scale is None:
        return make_linear(embedding if spec.tied else weights.pop("head.weight"), row_invariant=row_invariant)
    return make_quantized_linear(weights.pop("head.weight"), scale, dtype=embedding.dtype, row_invariant=row_invariant)
