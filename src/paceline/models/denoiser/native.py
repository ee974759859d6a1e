"""The native denoiser: one readable transformer for all families of diffusion language models.

Calls of one `forward` are computed one by one, each with its own shapes, so that the bits of a canvas do not depend on
its company. Where attention is block-causal, rows keep their bits whatever the number of other rows, and every block's
attention is a product of its own, over keys in the order of their slots: a block's bits are the same whether the blocks
before it are computed in the same pass or read from a cache, so decoding with the exact block cache is bit-equal to
decoding without.

Weights have the names of `checkpoints.weights`; besides, a mixture of experts may have `layers.N.router.bias` (e,),
`layers.N.shared.gate_up.weight` and `layers.N.shared.down.weight`. Angles are computed in float64 from float32
frequencies, and applied in float32 (float64 for a float64 model), so that long canvases lose nothing to bfloat16.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional as F

from paceline.models.denoiser.base import Call, Ints, SlotCache
from paceline.models.layers.experts import make_mlp, make_moe, through_experts
from paceline.models.layers.linear import Map, RowInvariance, make_linear, make_norm
from paceline.models.layers.rope import Rope
from paceline.models.spec import DenoiserSpec, MoeSpec, RopeSpec, RoutingSpec


@dataclass(frozen=True, slots=True)
class QueryGroup:
    """Queries that see the same keys, or as `mask` says.

    Attributes:
        rows: (g,) rows of the call; None for all of them in order.
        keys: the first `keys` of the pass's keys in their order.
        mask: (g, keys) True where a query sees a key; None for all.
    """

    rows: torch.Tensor | None
    keys: int
    mask: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class AttentionView:
    """What a pass attends to.

    Attributes:
        read: (r,) stored slots, or None.
        order: (r + q,) order of the keys, over read ones and then computed ones; None leaves it as it is.
        groups: cover all rows of the call once.
    """

    read: torch.Tensor | None
    order: torch.Tensor | None
    groups: tuple[QueryGroup, ...]


def view_of(call: Call, block_length: int | None, device: torch.device) -> AttentionView:
    """The AttentionView of a call under a family; `block_length` None is full attention."""
    read = np.empty(0, np.int64) if call.read is None else np.asarray(call.read, np.int64)
    stored = torch.from_numpy(read).to(device) if read.size else None
    count = read.size + call.slots.size
    if call.mask is not None:
        assert call.mask.shape == (call.slots.size, count), "a mask has a row for each query and a column for each key"
        return AttentionView(stored, None, (QueryGroup(None, count, torch.from_numpy(call.mask).to(device)),))
    if block_length is None:
        return AttentionView(stored, None, (QueryGroup(None, count),))
    return _by_block(read, call.slots, block_length, stored, device)


def _by_block(
    read: Ints, slots: Ints, block_length: int, stored: torch.Tensor | None, device: torch.device
) -> AttentionView:
    keys = np.concatenate([read, slots])
    order = np.argsort(keys, kind="stable")
    blocks, own = keys[order] // block_length, slots // block_length
    groups = []
    for block in np.unique(own):
        rows = np.flatnonzero(own == block)
        rows = rows[np.argsort(slots[rows], kind="stable")]
        groups.append(QueryGroup(torch.from_numpy(rows).to(device), int(np.searchsorted(blocks, block, side="right"))))
    return AttentionView(stored, torch.from_numpy(order).to(device), tuple(groups))


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, groups: Sequence[QueryGroup], scale: float
) -> torch.Tensor:
    """Attention of queries (r, h, d) over keys and values (s, kv, d), with h a multiple of kv: (r, h * d)."""
    if len(groups) == 1 and groups[0].rows is None:
        return _attend(q, k, v, groups[0].mask, scale)
    out = q.new_empty(q.shape[0], q.shape[1] * q.shape[2])
    for group in groups:
        out[group.rows] = _attend(q[group.rows], k[: group.keys], v[: group.keys], group.mask, scale)
    return out


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float) -> torch.Tensor:
    share = q.shape[1] // k.shape[1]
    if share > 1:
        k, v = k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)
    q_, k_, v_ = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    out: torch.Tensor = F.scaled_dot_product_attention(q_, k_, v_, attn_mask=mask, scale=scale)
    return out[0].transpose(0, 1).reshape(q.shape[0], -1)


class NativeSlotCache:
    """A `SlotCache` of fixed length.

    Args:
        layers, length, heads, size: of the tensors (layers, length, heads, size).
    """

    def __init__(
        self, layers: int, length: int, heads: int, size: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.keys = torch.empty((layers, length, heads, size), dtype=dtype, device=device)
        self.values = torch.empty_like(self.keys)
        self._holds = np.zeros(length, np.bool_)

    @property
    def stored(self) -> Ints:
        """Slots that hold keys and values, ascending."""
        return np.flatnonzero(self._holds)

    def truncate(self, length: int) -> None:
        """Forget slots from `length` on."""
        self._holds[length:] = False

    def clear(self) -> None:
        """Forget everything."""
        self._holds[:] = False

    def holds(self, slots: Ints) -> bool:
        """Whether all of `slots` are stored."""
        return bool(slots.size == 0 or (slots.max() < self._holds.size and self._holds[slots].all()))

    def mark(self, slots: Ints) -> None:
        """Note that a pass has stored `slots` in every layer."""
        self._holds[slots] = True


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
        if model.layers[index].moe:
            self._mlp = self._mixture(spec)
        else:
            self._mlp = make_mlp(model, self._linear("gate_up"), self._linear("down"))
        del self._weights

    def _linear(self, name: str) -> Map:
        weight, bias = self._weights[f"{self._at}{name}.weight"], self._weights.get(f"{self._at}{name}.bias")
        return make_linear(weight, bias, row_invariant=self._invariant)

    def _mixture(self, spec: DenoiserSpec) -> Map:
        moe = spec.model.moe
        assert moe is not None
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


class NativeDenoiser:
    """A `Denoiser` of any family.

    Args:
        spec: the shape.
        weights: under the names of `checkpoints.weights` and `models.denoiser.native`, on one device, in one dtype.
    """

    def __init__(self, spec: DenoiserSpec, weights: Mapping[str, torch.Tensor]) -> None:
        self.spec = spec
        model = spec.model
        self.vocab_size = model.vocab_size
        self.mask_token_id, self.eos_token_ids = spec.mask_token_id, spec.eos_token_ids
        self.max_length, self.attention, self.block_length = model.max_context, spec.attention, spec.block_length
        self.needs_left = spec.shifted
        self._table = weights["embed.weight"]
        self.device, self.dtype = self._table.device, self._table.dtype
        self._never = torch.tensor([spec.mask_token_id], device=self.device)
        invariant: RowInvariance = "proven" if spec.block_length is not None else True
        self._layers = [DenoiserLayer(spec, index, weights, invariant) for index in range(model.num_layers)]
        self._norm = norm(weights["final_norm.weight"], model.norm_eps)
        self._head = head(self._table if model.tied else weights["head.weight"], invariant)

    def without(self, ids: Sequence[int]) -> NativeDenoiser:
        """The same model, by which some ids are never written: their logits are -inf, as the mask token's is."""
        other = copy(self)
        other._never = torch.tensor([self.mask_token_id, *ids], device=self.device)
        return other

    @property
    def slot_bytes(self) -> int:
        """Keys and values of one slot, all layers."""
        model = self.spec.model
        return 2 * model.num_layers * model.num_kv_heads * model.head_dim * self.dtype.itemsize

    def new_cache(self, length: int) -> NativeSlotCache:
        """An empty cache for a canvas of at most `length` slots."""
        model = self.spec.model
        return NativeSlotCache(
            model.num_layers, length, model.num_kv_heads, model.head_dim, dtype=self.dtype, device=self.device
        )

    @torch.inference_mode()
    def forward(self, calls: Sequence[Call]) -> list[torch.Tensor]:
        """Logits (q, vocab_size) of each call, see `Denoiser.forward`."""
        return [self._logits(self._hidden(call), call) for call in calls]

    def _hidden(self, call: Call) -> torch.Tensor:
        """The normed states (q, hidden) of a call's rows; stores keys and values if it says so."""
        cache = _cache_of(call)
        slots = torch.from_numpy(call.slots).to(self.device)
        view = view_of(call, self.block_length, self.device)
        model = self.spec.model
        by = rotation(model.ropes["default"], slots, self.dtype)
        x = embed(torch.from_numpy(call.ids).to(self.device), self._table, model.embedding_multiplier)
        for index, layer in enumerate(self._layers):
            q, k, v = layer.open(x, by)
            keys, values = k, v
            if view.read is not None and cache is not None:
                keys = torch.cat((cache.keys[index].index_select(0, view.read), k))
                values = torch.cat((cache.values[index].index_select(0, view.read), v))
            if view.order is not None:
                keys, values = keys.index_select(0, view.order), values.index_select(0, view.order)
            if call.write and cache is not None:
                cache.keys[index].index_copy_(0, slots, k)
                cache.values[index].index_copy_(0, slots, v)
            x = layer.close(x, attend(q, keys, values, view.groups, model.scale))
        if call.write and cache is not None:
            cache.mark(call.slots)
        return self._norm(x)

    def _logits(self, states: torch.Tensor, call: Call) -> torch.Tensor:
        if call.wanted is not None and not call.wanted.size:
            return torch.empty(
                0, self.vocab_size, dtype=torch.promote_types(self.dtype, torch.float32), device=self.device
            )
        if not self.needs_left:
            return self._finish(self._head(states if call.wanted is None else self._rows(states, call.wanted)))
        left = left_rows(call.slots)
        left = left if call.wanted is None else left[call.wanted]
        known = torch.from_numpy(left >= 0).to(self.device)
        out = self._finish(self._head(self._rows(states, np.maximum(left, 0))))
        out[~known] = torch.nan
        return out

    def _rows(self, states: torch.Tensor, rows: Ints) -> torch.Tensor:
        return states[torch.from_numpy(rows).to(self.device)]

    def _finish(self, logits: torch.Tensor) -> torch.Tensor:
        if self.spec.model.logit_multiplier != 1.0:
            logits = logits * self.spec.model.logit_multiplier
        return logits.index_fill_(1, self._never, -torch.inf)


def _cache_of(call: Call) -> NativeSlotCache | None:
    """The call's cache, after a look at what it asks of it."""
    cache: SlotCache | None = call.cache
    reads = call.read is not None and call.read.size > 0
    unique = np.unique(call.slots).size == call.slots.size
    assert unique or (call.mask is not None and not call.write), "copies of a slot need a mask, and are never stored"
    assert cache is not None or not (reads or call.write), "reading and storing need a cache"
    if cache is None:
        return None
    assert isinstance(cache, NativeSlotCache), "a cache belongs to the denoiser that made it"
    assert call.read is None or cache.holds(call.read), "only stored slots are read"
    assert call.read is None or not np.isin(call.read, call.slots).any(), "a slot is read or computed, not both"
    return cache


def left_rows(slots: Ints) -> Ints:
    """For each row the row of the slot at its left: the one just before it, else the only one at that slot.

    -1 where there is none.

    Slot 0, which has no left neighbour, keeps its own row, as Dream's own sampler does.
    """
    rows = np.full(slots.size, -1, np.int64)
    for row, slot in enumerate(slots):
        if slot == 0:
            rows[row] = row
        elif row and slots[row - 1] == slot - 1:
            rows[row] = row - 1
        else:
            found = np.flatnonzero(slots == slot - 1)
            rows[row] = found[0] if found.size == 1 else -1
    return rows
