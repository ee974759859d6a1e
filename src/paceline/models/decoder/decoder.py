"""The decoder-only transformer, one implementation for all families, driven by a ModelSpec.

In: canonical weights, hidden states, a `Step` (what the rows attend to). Out: hidden states, logits. Not here: caches
and masks (models.decoder.cache, models.decoder.tree_attention), tokens and sequences (models.decoder.native),
checkpoints (models.loading.families).

Layers work in place on the residual stream x (r, hidden). Query heads are reordered at packing from (h, g) to (g, h),
see models.decoder.tree_attention. Sources: Llama 2 (arXiv:2307.09288), rotary embedding (arXiv:2104.09864), SwiGLU
(arXiv:2002.05202).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from paceline.models.decoder.layer_weights import OwnWeights, Weights, head_of
from paceline.models.decoder.linear import Map, RowInvariance, make_norm
from paceline.models.decoder.moe import gated_mlp, make_moe
from paceline.models.decoder.rope import Rope
from paceline.models.decoder.tree_attention import AttentionShape, Step
from paceline.models.spec import ModelSpec, RopeSpec

Rotation = tuple[torch.Tensor, torch.Tensor]
Rotations = Mapping[str, Rotation]

NOTHING: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPlan:
    """Which part of the stack a pass runs.

    Attributes:
        first, stop: layers first .. stop - 1 (None: all that follow); the input is the hidden state before layer
        `first`.
        skip_attention, skip_mlp: layers whose sub-layer is left out; a layer in both is skipped as a whole.
    """

    first: int = 0
    stop: int | None = None
    skip_attention: Collection[int] = NOTHING
    skip_mlp: Collection[int] = NOTHING


ALL_LAYERS = LayerPlan()


def attention_shape(spec: ModelSpec) -> AttentionShape:
    """The spec's attention, layers sorted into window kinds."""
    windows = tuple(dict.fromkeys(layer.window for layer in spec.layers))
    return AttentionShape(
        groups=spec.num_heads // spec.num_kv_heads,
        kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        scale=spec.scale,
        softcap=spec.attention_softcap,
        windows=windows,
        kind_of=tuple(windows.index(layer.window) for layer in spec.layers),
    )


class Rotary:
    """Cosines and signed sines for given positions, in the model's dtype, each (r, 1, dims).

    Tables are kept for the kinds whose angles depend on the position alone; dynamic and longrope also depend on the
    length.
    """

    def __init__(self, specs: Mapping[str, RopeSpec], device: torch.device, dtype: torch.dtype) -> None:
        self._device, self._dtype = device, dtype
        self._ropes = {key: Rope(spec, device) for key, spec in specs.items()}
        self._by_length = {key for key, spec in specs.items() if spec.kind in {"dynamic", "longrope"}}
        self._tables: dict[str, Rotation] = {}
        self.size = 0

    @property
    def depends_on_length(self) -> bool:
        return bool(self._by_length)

    @property
    def tables(self) -> Mapping[str, Rotation]:
        """The tables, each (size, 1, dims), of the kinds whose angles depend on the position alone."""
        return self._tables

    def by_length(self, positions: Sequence[int], lengths: Sequence[tuple[int, int]]) -> dict[str, Rotation]:
        """Rotations of the kinds that also depend on the length; see `at`."""
        return {key: self._dynamic(key, positions, lengths) for key in self._by_length}

    def at(self, positions: range | Sequence[int], lengths: Sequence[tuple[int, int]]) -> Rotations:
        """Rotations of the rows; `lengths` gives runs of (rows, sequence length) for the kinds that depend on it."""
        if not self._ropes:
            return {}
        self.reserve((positions[-1] if isinstance(positions, range) else max(positions)) + 1)
        if isinstance(positions, range):
            start, count = positions[0], len(positions)
            found = {
                key: (c.narrow(0, start, count), s.narrow(0, start, count)) for key, (c, s) in self._tables.items()
            }
        else:
            found = self.select(torch.tensor(positions, device=self._device))
        return found | self.by_length(positions, lengths)

    def select(self, positions: torch.Tensor) -> dict[str, Rotation]:
        """Rotations of the kinds that depend on the position alone, for (r,) int64 positions below `size`."""
        return {
            key: (c.index_select(0, positions), s.index_select(0, positions)) for key, (c, s) in self._tables.items()
        }

    def reserve(self, size: int) -> None:
        """Grow the tables to at least `size` positions."""
        if size <= self.size:
            return
        self.size = max(512, 2 * size)
        positions = torch.arange(self.size, device=self._device)
        for key, rope in self._ropes.items():
            if key not in self._by_length:
                self._tables[key] = self._cast(rope.cos_sin(positions, self.size))

    def _dynamic(self, key: str, positions: Sequence[int], lengths: Sequence[tuple[int, int]]) -> Rotation:
        index, rope = torch.tensor(list(positions), device=self._device), self._ropes[key]
        parts = [
            rope.cos_sin(part, length)
            for part, (_, length) in zip(index.split([n for n, _ in lengths]), lengths, strict=True)
        ]
        return self._cast((torch.cat([cos for cos, _ in parts]), torch.cat([sin for _, sin in parts])))

    def _cast(self, cos_sin: Rotation) -> Rotation:
        cos, sin = (table.unsqueeze(1) for table in cos_sin)
        half = sin.shape[-1] // 2
        signed = torch.cat((-sin[..., :half], sin[..., half:]), -1)
        return cos.to(self._dtype), signed.to(self._dtype)


def rotate_(heads: torch.Tensor, rotation: Rotation) -> None:
    """Rotary embedding in place on (r, heads, head dim), pairs being (i, i + dims / 2); dims beyond the table pass
    unchanged.
    """
    cos, signed_sin = rotation
    dims = cos.shape[-1]
    if dims != heads.shape[-1]:
        heads = heads.narrow(-1, 0, dims)
    swapped = heads.roll(dims // 2, -1)
    heads.mul_(cos).addcmul_(swapped, signed_sin)


class DecoderLayer:
    """One layer; takes its weights out of `own` as it packs them."""

    __slots__ = (
        "_attn_norm", "_heads", "_index", "_mlp", "_mlp_norm", "_o", "_post_attn_norm", "_post_mlp_norm",
        "_qk_norm", "_qkv",
        "_residual", "_rope", "_rotated", "_shape",
    )  # fmt: skip

    def __init__(self, spec: ModelSpec, shape: AttentionShape, index: int, own: OwnWeights) -> None:
        layer = spec.layers[index]
        self._index, self._rope, self._residual = index, layer.rope, spec.residual_multiplier
        self._heads, self._rotated = shape.heads + 2 * shape.kv_heads, shape.heads + shape.kv_heads
        self._shape = (-1, self._heads, shape.head_dim)
        self._attn_norm, self._post_attn_norm = own.norm("attn_norm"), own.norm("post_attn_norm")
        self._mlp_norm, self._post_mlp_norm = own.norm("mlp_norm"), own.norm("post_mlp_norm")
        order = head_order(shape)
        rows = torch.cat([order, torch.arange(len(order), len(order) + 2 * shape.kv_heads * shape.head_dim)])
        self._qkv, self._o = own.linear("qkv", rows=rows), own.linear("o", columns=order)
        self._qk_norm = own.qk_norm(shape, order)
        self._mlp = (
            make_moe(spec, own.linear("router"), own.experts("gate_up"), own.experts("down"))
            if layer.moe
            else gated_mlp(own.linear("gate_up"), own.linear("down"), spec.activation)
        )

    def attention(self, x: torch.Tensor, step: Step, rotations: Rotations) -> None:
        """Add the attention sub-layer's output to x (r, hidden)."""
        self.add_attended(x, self.attended(x, step, rotations))

    def attended(self, x: torch.Tensor, step: Step, rotations: Rotations) -> torch.Tensor:
        """(r, hidden) what the attention sub-layer makes of x (r, hidden), for `add_attended`."""
        h = x if self._attn_norm is None else self._attn_norm(x)
        qkv = self._qkv(h).view(self._shape)
        if self._qk_norm is not None:
            self._qk_norm(qkv)
        if self._rope is not None:
            rotate_(qkv.narrow(1, 0, self._rotated), rotations[self._rope])
        return self._o(step.attend(self._index, qkv))

    def add_attended(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """Add what `attended` returned to x (r, hidden)."""
        self._add(x, out, self._post_attn_norm)

    def mlp(self, x: torch.Tensor) -> None:
        """Add the MLP sub-layer's output to x (r, hidden)."""
        h = x if self._mlp_norm is None else self._mlp_norm(x)
        self._add(x, self._mlp(h), self._post_mlp_norm)

    def _add(self, x: torch.Tensor, out: torch.Tensor, norm: Map | None) -> None:
        if norm is not None:
            out = norm(out)
        if self._residual == 1.0:
            x.add_(out)
        else:
            x.add_(out, alpha=self._residual)


def head_order(shape: AttentionShape) -> torch.Tensor:
    """Row order that turns query heads stored (h, g, d) into (g, h, d)."""
    index = torch.arange(shape.heads * shape.head_dim).view(shape.kv_heads, shape.groups, shape.head_dim)
    return index.transpose(0, 1).reshape(-1)


class Decoder:
    """All layers, the embedding and the head."""

    def __init__(self, spec: ModelSpec, weights: Weights, *, row_invariant: RowInvariance = True) -> None:
        self.spec, self.shape = spec, attention_shape(spec)
        self.embedding = weights.pop("embed.weight")
        self.dtype = self.embedding.dtype
        self._head, self._norm = (
            head_of(spec, weights, self.embedding, row_invariant or True),
            _final_norm(spec, weights),
        )
        self._scale = torch.tensor(spec.embedding_multiplier, dtype=self.dtype).item()
        self.layers = [
            DecoderLayer(spec, self.shape, i, OwnWeights(weights, f"layers.{i}.", spec, row_invariant, self.dtype))
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
        logits = self._head(self._norm(hidden) if norm else hidden)
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
        step: Step,
        rotations: Rotations,
        plan: LayerPlan = ALL_LAYERS,
        taps: Collection[int] = (),
    ) -> dict[int, torch.Tensor]:
        """Run the planned layers in place on x (r, hidden); returns copies of x after the layers in `taps` (-1: before
        all).
        """
        if plan is ALL_LAYERS and not taps:
            for layer in self.layers:
                layer.attention(x, step, rotations)
                layer.mlp(x)
            return {}
        kept = {-1: x.clone()} if -1 in taps and plan.first == 0 else {}
        for index in range(plan.first, len(self.layers) if plan.stop is None else plan.stop):
            if index not in plan.skip_attention:
                self.layers[index].attention(x, step, rotations)
            if index not in plan.skip_mlp:
                self.layers[index].mlp(x)
            if index in taps:
                kept[index] = x.clone()
        return kept


def _final_norm(spec: ModelSpec, weights: Weights) -> Map:
    return make_norm(weights.pop("final_norm.weight"), spec.norm_eps, offset=spec.norm_offset)
