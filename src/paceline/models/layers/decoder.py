"""The transformer, one implementation for all families of decoders and denoisers, driven by a ModelSpec.

Canonical weights (checkpoints.weights), quantised or not, are taken out once each and become maps and norms. Layers
work in place on the residual stream x (r, hidden). Query heads are reordered at packing from (h, g) to (g, h), see
models.attention.tree_attention. Sources: Llama 2 (arXiv:2307.09288), rotary embedding (arXiv:2104.09864).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch
from torch.nn import functional as F

from paceline.models.attention.source_attention import SourceAttention
from paceline.models.attention.tree_attention import AttentionStep
from paceline.models.base import ALL_LAYERS, LayerPlan
from paceline.models.layers.experts import make_mlp, make_moe
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
from paceline.models.layers.positions import Placement, position_table, relative_biases
from paceline.models.layers.rope import Rotation, Rotations
from paceline.models.spec import AttentionShape, LatentSpec, ModelSpec, attention_shape

Weights = dict[str, torch.Tensor]
WholeMaps = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], Map]
"""Makes a linear map of an int8 weight (out, in), its scales (out,) and its bias (out,), if there is one."""


def norm_of(spec: ModelSpec, weights: Weights, name: str) -> Map | None:
    """The norm of that name, if there is one; its weights are taken out."""
    weight, bias = weights.pop(f"{name}.weight", None), weights.pop(f"{name}.bias", None)
    if weight is None:
        return None
    if spec.norm == "layer":
        return make_layer_norm(weight, bias, spec.norm_eps)
    return make_norm(weight, spec.norm_eps, offset=spec.norm_offset)


def placement_of(spec: ModelSpec, weights: Weights, dtype: torch.dtype, device: torch.device) -> Placement:
    """What embeddings get for their positions; its weights are taken out."""
    return Placement(position_table(spec, weights, dtype, device), norm_of(spec, weights, "embed_norm"))


class OwnWeights:
    """One layer's part of the weights, handed out once each.

    Args:
        prefix: of the layer's canonical names.
        dtype: of the activations.
        whole: makes the maps of int8 weights; None: `make_quantized_linear`.
    """

    def __init__(
        self,
        weights: Weights,
        prefix: str,
        spec: ModelSpec,
        row_invariant: RowInvariance,
        dtype: torch.dtype,
        *,
        whole: WholeMaps | None = None,
    ) -> None:
        self._weights, self._prefix, self._spec = weights, prefix, spec
        self._row_invariant, self._dtype, self._whole = row_invariant, dtype, whole

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
        if scale is None and columns is not None:
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

    def mixture(self) -> Map:
        """The mixture of experts, with what every token goes through beside them."""
        spec, preference = self._spec, None
        if spec.moe is not None and spec.moe.sigmoid:
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
        return lambda x: experts(x).add_(shared(x).mul_(_sigmoid_by_row(gate(x))))

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
        if scale is None:
            return make_linear(weight, bias, row_invariant=self._row_invariant)
        if self._whole is not None:
            return self._whole(weight if columns is None else weight[:, columns.to(weight.device)], scale, bias)
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


def head_of(spec: ModelSpec, weights: Weights, embedding: torch.Tensor, row_invariant: RowInvariance) -> Map:
    """The head's map, without norm; a tied head takes the embedding unless it is quantised."""
    scale, bias = weights.pop("head.scale", None), weights.pop("head.bias", None)
    if scale is None:
        return make_linear(embedding if spec.tied else weights.pop("head.weight"), bias, row_invariant=row_invariant)
    return make_quantized_linear(
        weights.pop("head.weight"), scale, bias, dtype=embedding.dtype, row_invariant=row_invariant
    )


def _sigmoid_by_row(x: torch.Tensor) -> torch.Tensor:
    """The sigmoid of (r, 1); that of a view goes row by row, so that a row keeps its bits."""
    return F.pad(x, (0, 1))[:, :1].sigmoid_()


def rotate_(heads: torch.Tensor, rotation: Rotation) -> None:
    """Rotary embedding in place on (r, heads, head dim), pairs being (i, i + dims / 2).

    Dims beyond the table pass unchanged.
    """
    cos, signed_sin = rotation
    dims = cos.shape[-1]
    if dims != heads.shape[-1]:
        heads = heads.narrow(-1, 0, dims)
    swapped = heads.roll(dims // 2, -1)
    heads.mul_(cos).addcmul_(swapped, signed_sin)


class PackedLayer:
    """One layer; takes its weights out of `layer_weights` as it packs them."""

    __slots__ = (
        "_attn_norm", "_cross", "_heads", "_index", "_mlp_norm", "_o", "_parallel", "_post_attn_norm",
        "_post_mlp_norm", "_qk_norm", "_qkv", "_residual", "_residual_norms", "_rope", "_rotated", "_shape", "_sinks",
        "feed_forward",
    )  # fmt: skip

    def __init__(self, spec: ModelSpec, shape: AttentionShape, index: int, layer_weights: OwnWeights) -> None:
        layer = spec.layers[index]
        self._index, self._rope, self._residual = index, layer.rope, spec.residual_multiplier
        self._heads, self._rotated = shape.heads + 2 * shape.kv_heads, shape.heads + shape.kv_heads
        self._shape = (-1, self._heads, shape.head_dim)
        self._attn_norm, self._post_attn_norm = layer_weights.norm("attn_norm"), layer_weights.norm("post_attn_norm")
        self._mlp_norm, self._post_mlp_norm = layer_weights.norm("mlp_norm"), layer_weights.norm("post_mlp_norm")
        self._residual_norms = [layer_weights.norm(f"residual_{name}_norm") for name in ("attn", "mlp")]
        self._cross = None if spec.encoder is None else CrossAttention(spec, shape, index, layer_weights)
        self._parallel = spec.parallel
        if spec.parallel:
            self._mlp_norm = self._attn_norm
        self._sinks = sinks_by_head(layer_weights.take("sinks"), shape) if spec.attention_sinks else None
        order = head_order(shape)
        if spec.latent is None:
            rows = torch.cat([order, torch.arange(len(order), len(order) + 2 * shape.kv_heads * shape.head_dim)])
            self._qkv, self._o = layer_weights.linear("qkv", rows=rows), layer_weights.linear("o", columns=order)
        else:
            latent = layer_weights.latent(spec.latent, shape.heads)
            self._qkv, self._o = latent.qkv, latent.output
        self._qk_norm = layer_weights.qk_norm(shape, order)
        self.feed_forward = (
            layer_weights.mixture()
            if layer.moe
            else make_mlp(spec, layer_weights.linear("gate_up"), layer_weights.linear("down"))
        )

    def run(
        self,
        x: torch.Tensor,
        step: AttentionStep,
        rotations: Rotations,
        *,
        attention: bool = True,
        mlp: bool = True,
        added_qkv: torch.Tensor | None = None,
        source: SourceAttention | None = None,
    ) -> None:
        """Add the outputs of all sub-layers, or of some of them, to x (r, hidden).

        Args:
            attention: those of attention, to the source too. mlp: that of the MLP.
            added_qkv: as of `Passes.run`. source: what rows see of their sources, of an encoder-decoder model.
        """
        beside = self._transformed(x) if mlp and self._parallel else None
        attn_norm, mlp_norm = self._residual_norms
        if attention:
            self._add(x, self._attended(x, step, rotations, added_qkv), self._post_attn_norm)
            if attn_norm is not None:
                x.copy_(attn_norm(x))
            if self._cross is not None and source is not None:
                self._cross.run(x, source)
        if mlp:
            self._add(x, self._transformed(x) if beside is None else beside, self._post_mlp_norm)
            if mlp_norm is not None:
                x.copy_(mlp_norm(x))

    def _attended(
        self, x: torch.Tensor, step: AttentionStep, rotations: Rotations, added_qkv: torch.Tensor | None
    ) -> torch.Tensor:
        qkv = self._qkv(x if self._attn_norm is None else self._attn_norm(x))
        qkv = (qkv if added_qkv is None else qkv + added_qkv).view(self._shape)
        if self._qk_norm is not None:
            self._qk_norm(qkv)
        if self._rope is not None:
            rotate_(qkv.narrow(1, 0, self._rotated), rotations[self._rope])
        return self._o(step.attend(self._index, qkv, self._sinks))

    def _transformed(self, x: torch.Tensor) -> torch.Tensor:
        return self.feed_forward(x if self._mlp_norm is None else self._mlp_norm(x))

    def _add(self, x: torch.Tensor, out: torch.Tensor, norm: Map | None) -> None:
        if norm is not None:
            out = norm(out)
        if self._residual == 1.0:
            x.add_(out)
        else:
            x.add_(out, alpha=self._residual)


class CrossAttention:
    """Attention of a decoder's rows to what the encoder made of their source.

    Args:
        layer_weights: of the layer. The map of keys and values is for the encoder's states (models.layers.encoder).
    """

    __slots__ = ("_index", "_norm", "_o", "_q", "_residual_norm", "_shape")

    def __init__(self, spec: ModelSpec, shape: AttentionShape, index: int, layer_weights: OwnWeights) -> None:
        order = head_order(shape)
        self._index, self._shape = index, (-1, shape.heads, shape.head_dim)
        self._norm, self._residual_norm = layer_weights.norm("cross_norm"), layer_weights.norm("residual_cross_norm")
        self._q = layer_weights.linear("cross_q", rows=order)
        self._o = layer_weights.linear("cross_o", columns=order)

    def run(self, x: torch.Tensor, source: SourceAttention) -> None:
        """Add what attention gives to x (r, hidden)."""
        queries = self._q(x if self._norm is None else self._norm(x)).view(self._shape)
        x.add_(self._o(source.attend(self._index, queries)))
        if self._residual_norm is not None:
            x.copy_(self._residual_norm(x))


def head_order(shape: AttentionShape) -> torch.Tensor:
    """Row order that turns query heads stored (h, g, d) into (g, h, d)."""
    index = torch.arange(shape.heads * shape.head_dim).view(shape.kv_heads, shape.groups, shape.head_dim)
    return index.transpose(0, 1).reshape(-1)


def sinks_by_head(sinks: torch.Tensor, shape: AttentionShape) -> torch.Tensor:
    """Sinks (h, g), float32, of heads stored kv head by kv head."""
    return sinks.view(shape.kv_heads, shape.groups).float()


class Decoder:
    """All layers, the embedding and the head.

    Attributes:
        placement: what embeddings get for their positions.
        biases: what distances add to the scores of attention, by layer; empty where they do not.
    """

    def __init__(self, spec: ModelSpec, weights: Weights, *, row_invariant: RowInvariance = True) -> None:
        self.spec, self.shape = spec, attention_shape(spec)
        self.embedding = weights.pop("embed.weight")
        self.dtype = self.embedding.dtype
        self.to_logits = head_of(spec, weights, self.embedding, row_invariant or True)
        self.placement = placement_of(spec, weights, self.dtype, self.embedding.device)
        self._norm = norm_of(spec, weights, "final_norm") or torch.clone
        self._scale = torch.tensor(spec.embedding_multiplier, dtype=self.dtype).item()
        self.biases = relative_biases(spec, weights)
        self.layers = [
            PackedLayer(spec, self.shape, i, OwnWeights(weights, f"layers.{i}.", spec, row_invariant, self.dtype))
            for i in range(spec.num_layers)
        ]

    def embed(self, tokens: Sequence[int]) -> torch.Tensor:
        """(r, hidden) new tensor."""
        if len(tokens) == 1:
            x = self.embedding.narrow(0, tokens[0], 1).clone()
            return x if self._scale == 1.0 else x.mul_(self._scale)
        return self.embed_index(torch.tensor(tokens, dtype=torch.int64, device=self.embedding.device))

    def embed_index(self, tokens: torch.Tensor) -> torch.Tensor:
        """(r, hidden) new tensor, from (r,) int64 tokens on the model's device."""
        x = self.embedding.index_select(0, tokens)
        return x if self._scale == 1.0 else x.mul_(self._scale)

    def head(self, hidden: torch.Tensor, *, norm: bool = True) -> torch.Tensor:
        """Logits (r, v) of hidden states (r, hidden), after the final norm unless `norm` is False."""
        logits = self.to_logits(self._norm(hidden) if norm else hidden)
        if self.spec.logit_multiplier != 1.0:
            logits.mul_(self.spec.logit_multiplier)
        if (cap := self.spec.logit_softcap) is not None:
            logits.div_(cap).tanh_().mul_(cap)
        return logits

    def final_norm(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._norm(hidden)

    def run(
        self,
        x: torch.Tensor,
        step: AttentionStep,
        rotations: Rotations,
        plan: LayerPlan = ALL_LAYERS,
        taps: Collection[int] = (),
        *,
        added_qkv: torch.Tensor | None = None,
        source: SourceAttention | None = None,
    ) -> dict[int, torch.Tensor]:
        """Run the planned layers in place on x (r, hidden); `added_qkv` and `source` as of `PackedLayer.run`.

        Returns copies of x after the layers in `taps` (-1: before all).
        """
        if plan is ALL_LAYERS and not taps:
            for layer in self.layers:
                layer.run(x, step, rotations, added_qkv=added_qkv, source=source)
            return {}
        kept = {-1: x.clone()} if -1 in taps and plan.first == 0 else {}
        for index in range(plan.first, len(self.layers) if plan.stop is None else plan.stop):
            attention, mlp = index not in plan.skip_attention, index not in plan.skip_mlp
            self.layers[index].run(x, step, rotations, attention=attention, mlp=mlp, added_qkv=added_qkv, source=source)
            if index in taps:
                kept[index] = x.clone()
        return kept
