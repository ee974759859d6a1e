"""The transformer, one implementation for all families of decoders and denoisers, driven by a ModelSpec.

Canonical weights (checkpoints.weights), quantised or not, are taken out once each and become maps and norms. Layers
work in place on the residual stream x (r, hidden). Query heads are reordered at packing from (h, g) to (g, h), see
models.attention.tree_attention. Sources: Llama 2 (arXiv:2307.09288), rotary embedding (arXiv:2104.09864).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from paceline.models.attention.source_attention import SourceAttention
from paceline.models.attention.tree_attention import AttentionStep, WritingStep
from paceline.models.base import ALL_LAYERS, LayerPlan
from paceline.models.layers.differential import DifferentialHeads
from paceline.models.layers.linear import (
    Map,
    RowInvariance,
    make_linear,
    make_quantized_linear,
)
from paceline.models.layers.mixers.kinds import make_mixer
from paceline.models.layers.mixers.step import RecurrentStep
from paceline.models.layers.own_weights import OwnWeights, Weights, norm_of
from paceline.models.layers.positions import Placement, position_table, relative_biases
from paceline.models.layers.rope import Rotation, Rotations
from paceline.models.spec import AttentionShape, ModelSpec, attention_shape


def placement_of(spec: ModelSpec, weights: Weights, dtype: torch.dtype, device: torch.device) -> Placement:
    """What embeddings get for their positions; its weights are taken out."""
    table, norm = position_table(spec, weights, dtype, device), norm_of(spec, weights, "embed_norm")
    return Placement(table, norm, empty_start=spec.empty_start)


def head_of(spec: ModelSpec, weights: Weights, embedding: torch.Tensor, row_invariant: RowInvariance) -> Map:
    """The head's map, without norm; a tied head takes the embedding unless it is quantised."""
    scale, bias = weights.pop("head.scale", None), weights.pop("head.bias", None)
    if scale is None:
        return make_linear(embedding if spec.tied else weights.pop("head.weight"), bias, row_invariant=row_invariant)
    return make_quantized_linear(
        weights.pop("head.weight"), scale, bias, dtype=embedding.dtype, row_invariant=row_invariant
    )


def rotate_(heads: torch.Tensor, rotation: Rotation) -> None:
    """Rotary embedding in place on (r, heads, head dim), pairs being (i, i + dims / 2).

    Dims beyond the table pass unchanged.
    """
    cos, signed_sin, _ = rotation
    dims = cos.shape[-1]
    if dims != heads.shape[-1]:
        heads = heads.narrow(-1, 0, dims)
    swapped = heads.roll(dims // 2, -1)
    heads.mul_(cos).addcmul_(swapped, signed_sin)


class PackedLayer:
    """One layer; takes its weights out of `layer_weights` as it packs them."""

    __slots__ = (
        "_attention", "_attn_norm", "_cross", "_differential", "_gate", "_index", "_keys_of", "_mixer", "_mixes",
        "_mlp_norm", "_norms_rotated", "_o", "_parallel", "_post_attn_norm", "_post_mlp_norm", "_qk_norm", "_qkv",
        "_queries", "_residual", "_residual_norms", "_rope", "_rotated", "_shape", "_sinks", "feed_forward",
    )  # fmt: skip

    def __init__(self, spec: ModelSpec, shape: AttentionShape, index: int, layer_weights: OwnWeights) -> None:
        layer = spec.layers[index]
        self._index, self._rope, self._residual = index, layer.rope, spec.residual_multiplier
        self._keys_of = index if layer.kv_of is None else layer.kv_of
        self._queries, self._rotated = shape.heads, shape.heads + (shape.kv_heads if layer.kv_of is None else 0)
        self._shape = (-1, shape.heads + (2 * shape.kv_heads if layer.kv_of is None else 0), shape.head_dim)
        self._attn_norm, self._post_attn_norm = layer_weights.norm("attn_norm"), layer_weights.norm("post_attn_norm")
        self._mlp_norm, self._post_mlp_norm = layer_weights.norm("mlp_norm"), layer_weights.norm("post_mlp_norm")
        self._residual_norms = [layer_weights.norm(f"residual_{name}_norm") for name in ("attn", "mlp")]
        self._cross = None if spec.encoder is None else CrossAttention(spec, shape, index, layer_weights)
        self._parallel = spec.parallel
        if spec.parallel:
            self._mlp_norm = self._attn_norm
        self._mixer = None if layer.mixer is None else make_mixer(layer.mixer, layer_weights)
        self._attention, self._mixes = layer.attention, layer.attention or layer.mixer is not None
        if layer.attention:
            self._take_attention(spec, shape, index, layer_weights)
        self.feed_forward = None
        if layer.moe:
            self.feed_forward = layer_weights.mixture()
        elif layer.mlp:
            self.feed_forward = layer_weights.mlp()

    def _take_attention(self, spec: ModelSpec, shape: AttentionShape, index: int, layer_weights: OwnWeights) -> None:
        self._sinks = sinks_by_head(layer_weights.take("sinks"), shape) if spec.attention_sinks else None
        differential = DifferentialHeads(shape, index, layer_weights) if spec.differential else None
        order = head_order(shape if differential is None else differential.queries)
        self._differential = differential
        if spec.latent is None:
            keys = 2 * shape.kv_heads * shape.head_dim if self._keys_of == index else 0
            rows = torch.cat([order, torch.arange(len(order), len(order) + keys)])
            columns = order if differential is None else head_order(differential.outputs)
            self._qkv, self._o = layer_weights.linear("qkv", rows=rows), layer_weights.linear("o", columns=columns)
        else:
            latent = layer_weights.latent(spec.latent, shape.heads)
            self._qkv, self._o = latent.qkv, latent.output
        self._qk_norm, self._norms_rotated = layer_weights.qk_norm(shape, order), spec.qk_norm_rotated
        self._gate = layer_weights.linear("attn_gate", rows=order) if spec.attention_gate else None

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
        recurrent: RecurrentStep | None = None,
    ) -> None:
        """Add the outputs of all sub-layers that there are, or of some of them, to x (r, hidden).

        Args:
            attention: those of attention, to the source too, and of the mixer. mlp: that of the MLP.
            added_qkv: as of `Passes.run`. source: what rows see of their sources, of an encoder-decoder model.
            recurrent: what they read of states, of a model with mixers.
        """
        beside = self._transformed(x) if mlp and self._parallel else None
        attn_norm, mlp_norm = self._residual_norms
        if attention and self._mixes:
            self._add(x, self._mixed(x, step, rotations, added_qkv, recurrent), self._post_attn_norm)
            if attn_norm is not None:
                x.copy_(attn_norm(x))
            if self._cross is not None and source is not None:
                self._cross.run(x, source)
        if mlp and self.feed_forward is not None:
            self._add(x, self._transformed(x) if beside is None else beside, self._post_mlp_norm)
            if mlp_norm is not None:
                x.copy_(mlp_norm(x))

    def write_keys(self, x: torch.Tensor, step: WritingStep, rotations: Rotations) -> None:
        """Write keys and values of x (r, hidden) to the cache, which is all that a layer without a mixer keeps."""
        step.write(self._index, self._projected(self._normed(x), rotations, None))

    def _mixed(
        self,
        x: torch.Tensor,
        step: AttentionStep,
        rotations: Rotations,
        added_qkv: torch.Tensor | None,
        recurrent: RecurrentStep | None,
    ) -> torch.Tensor:
        """What attention and the mixer make of x, as far as there are such."""
        normed = self._normed(x)
        if self._mixer is None:
            return self._attended(normed, step, rotations, added_qkv)
        assert recurrent is not None, "sequences without the states of the model's mixers"
        mixed = self._mixer.run(normed, recurrent, self._index)
        return mixed.add_(self._attended(normed, step, rotations, added_qkv)) if self._attention else mixed

    def _normed(self, x: torch.Tensor) -> torch.Tensor:
        return x if self._attn_norm is None else self._attn_norm(x)

    def _attended(
        self, normed: torch.Tensor, step: AttentionStep, rotations: Rotations, added_qkv: torch.Tensor | None
    ) -> torch.Tensor:
        attended = step.attend(self._keys_of, self._projected(normed, rotations, added_qkv), self._sinks)
        if self._differential is not None:
            attended = self._differential.difference(attended)
        return self._o(attended if self._gate is None else attended.mul_(self._gate(normed).sigmoid_()))

    def _projected(self, normed: torch.Tensor, rotations: Rotations, added_qkv: torch.Tensor | None) -> torch.Tensor:
        """Queries (r, g * h, d), and keys and values behind them where the layer has its own."""
        qkv = self._qkv(normed)
        if self._differential is not None:
            return self._differential.filled(qkv)
        qkv = (qkv if added_qkv is None else qkv + added_qkv).view(self._shape)
        self._turn(qkv, None if self._rope is None else rotations[self._rope])
        return qkv

    def _turn(self, qkv: torch.Tensor, rotation: Rotation | None) -> None:
        """Norm, rotate and grow queries and keys in place."""
        if self._qk_norm is not None and not self._norms_rotated:
            self._qk_norm(qkv)
        if rotation is not None:
            rotate_(qkv.narrow(1, 0, self._rotated), rotation)
        if self._qk_norm is not None and self._norms_rotated:
            self._qk_norm(qkv)
        if rotation is not None and rotation.growth is not None:
            qkv.narrow(1, 0, self._queries).mul_(rotation.growth)

    def _transformed(self, x: torch.Tensor) -> torch.Tensor:
        assert self.feed_forward is not None, "a layer without an MLP"
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
        sums: the dtype of states between layers.
        optional: layers from this one on need run only for rows of which something is wanted: they keep nothing of a
            text but the keys and values of the first one, which `keep` writes for all rows. The number of layers where
            there are none.
    """

    def __init__(self, spec: ModelSpec, weights: Weights, *, row_invariant: RowInvariance = True) -> None:
        self.spec, self.shape = spec, attention_shape(spec)
        self.embedding = weights.pop("embed.weight")
        self.dtype = self.embedding.dtype
        self.sums = torch.promote_types(self.dtype, torch.float32) if spec.wide_sums else self.dtype
        self.to_logits = head_of(spec, weights, self.embedding, row_invariant or True)
        self.placement = placement_of(spec, weights, self.dtype, self.embedding.device)
        self._norm = norm_of(spec, weights, "final_norm") or torch.clone
        self._scale = torch.tensor(spec.embedding_multiplier, dtype=self.dtype).item()
        self.biases = relative_biases(spec, weights)
        self.layers = [
            PackedLayer(spec, self.shape, i, OwnWeights(weights, f"layers.{i}.", spec, row_invariant, self.dtype))
            for i in range(spec.num_layers)
        ]
        self.optional = spec.num_layers if spec.encoder is not None else _first_optional(spec)

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
        recurrent: RecurrentStep | None = None,
    ) -> dict[int, torch.Tensor]:
        """Run the planned layers in place on x (r, hidden); the last three as of `PackedLayer.run`.

        Returns copies of x after the layers in `taps` (-1: before all).
        """
        if plan is ALL_LAYERS and not taps:
            for layer in self.layers:
                layer.run(x, step, rotations, added_qkv=added_qkv, source=source, recurrent=recurrent)
            return {}
        kept = {-1: x.to(self.dtype, copy=True)} if -1 in taps and plan.first == 0 else {}
        for index in range(plan.first, len(self.layers) if plan.stop is None else plan.stop):
            attention, mlp = index not in plan.skip_attention, index not in plan.skip_mlp
            self.layers[index].run(
                x, step, rotations, attention=attention, mlp=mlp, added_qkv=added_qkv, source=source,
                recurrent=recurrent,
            )  # fmt: skip
            if index in taps:
                kept[index] = x.to(self.dtype, copy=True)
        return kept

    def keep(
        self,
        x: torch.Tensor,
        step: WritingStep,
        rotations: Rotations,
        taps: Collection[int] = (),
        *,
        recurrent: RecurrentStep | None = None,
    ) -> dict[int, torch.Tensor]:
        """Run the layers before `optional` in place on x (r, hidden), and leave all that the others keep of it.

        Args:
            taps: layers before `optional`; see `run`.
        """
        kept = self.run(x, step, rotations, LayerPlan(stop=self.optional), taps, recurrent=recurrent)
        if self.optional < self.spec.tail:
            self.layers[self.optional].write_keys(x, step, rotations)
        return kept


def _first_optional(spec: ModelSpec) -> int:
    """See `Decoder.optional`: the tail, and the layer before it where that keeps keys and values alone."""
    before = spec.layers[spec.tail - 1]
    return spec.tail - 1 if 0 < spec.tail < spec.num_layers and before.mixer is None else spec.tail
