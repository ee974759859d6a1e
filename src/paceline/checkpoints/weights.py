"""The weights of a checkpoint under the decoder's names: fused, checked, cast, read tensor by tensor.

Canonical names and shapes (d hidden, i inner, v vocabulary, e experts, h heads, q and k the widths of all query and of
all key-value heads):

    embed.weight (v, d)    final_norm (d,)    head.weight (v, d), unless tied
    layers.N.attn_norm, .mlp_norm, .post_attn_norm, .post_mlp_norm (d,), as far as the placement has them
    layers.N.qkv (q + 2k, d), or (q, d) where the keys are another layer's, .o (d, q)
    layers.N.gate_up (2i, d), or (i, d) without a gate, .down (d, i)
    layers.N.xielu (3,), in float32 whatever the dtype: what its numbers p, n and b are made of (`xielu_numbers`)
    layers.N.q_norm.weight, .k_norm.weight    (head dim,), or (q,) and (k,)
    layers.N.sinks (h,), .attn_gate (q, d)
    layers.N.lambdas (4, head dim / 2), .heads_norm.weight (head dim,) of differential attention
    layers.N.mixer.* (checkpoints.mixer_tensors)
    layers.N.kv_norm.weight, .q_norm.weight, .kv_b.weight, .q_b.weight of latent attention, see `_latent_attention`
    layers.N.router (e, d), .experts.gate_up (e, 2i, d), .experts.down (e, d, i), the experts' without `.weight`; where
        `MoeSpec.ranks`, router.bias (e,) ranks experts, in float32 whatever the dtype
    layers.N.shared.gate_up (2s, d), .shared.down (d, s), .shared.gate (1, d) of a shared MLP of s inner dimensions;
        without gates both gate_up have half as many rows

and of encoder-decoder models besides

    positions.weight (rows, d), embed_norm (d,), head.bias (v,), layers.N.relative_bias.weight (buckets, h)
    layers.N.cross_norm (d,), .cross_q (q, d), .cross_kv (2k, d), .cross_o (d, q)
    encoder.convolutions.N (outputs, inputs, kernel), .convolutions.N.norm (outputs,)
    encoder.* by the same names as the decoder's

Norms and matrices are each .weight and perhaps .bias. Stored names are Llama's, or a family's own (`Family.names`), and
may begin with `model.`, `language_model.model.` or `model.language_model.`; experts may be stored one by one or
stacked. Rows of rotary embeddings that pair neighbours are put into the order (evens, odds), and so are rows in which
gate and up take turns.
"""

from __future__ import annotations

import logging
import math
import mmap
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch

from paceline.checkpoints.canonical_tensors import Arrange, CanonicalTensor, Shape, StoredTensor, fused, same, with_bias
from paceline.checkpoints.checkpoint import Checkpoint, some
from paceline.checkpoints.encoder_decoder_families import ENCODER_DECODER_FAMILIES
from paceline.checkpoints.families import FAMILIES, renamed
from paceline.checkpoints.mixer_tensors import mixer_tensors
from paceline.errors import CheckpointError, UnsupportedModelError
from paceline.models import EncoderSpec, ModelSpec, MoeSpec
from paceline.utils import parts_of

log = logging.getLogger("paceline")

PREFIX = re.compile(r"^(model\.language_model\.|language_model\.model\.|language_model\.|model\.)")
IGNORED = re.compile(
    r"rotary_emb\.inv_freq$|\.act_fn\.eps$|^(vision_tower|multi_modal_projector|mm_projector|visual|mtp\w*)\."
)
"""Buffers that are computed or keep a gradient finite, parts of a multimodal model that text does not use, and
prediction modules (checkpoints.prediction_modules), but for those that lie behind the layers.
"""

FOREIGN: Mapping[str, str] = {
    "lora_": "LoRA weights; give the folder of the adapter as lora=FOLDER beside its base model",
    "qweight": "GPTQ or AWQ weights, of which its configuration says nothing; download config.json again",
    "weight_packed": "compressed-tensors weights, of which its configuration says nothing; download config.json again",
    "weight_scale": "FP8 or other scaled weights, of which its configuration says nothing; download config.json again",
    "quant_state": "bitsandbytes weights; use the checkpoint in bfloat16 or float16",
}

Replacement = Callable[[str, torch.Tensor], Iterable[tuple[str, torch.Tensor]]]


def targets(spec: ModelSpec) -> Iterator[CanonicalTensor]:
    """All canonical tensors of a model."""
    d, v, encoder = spec.hidden_size, spec.vocab_size, spec.encoder
    yield same("embed.weight", (v, d), "embed_tokens.weight", *(SHARED if encoder is not None else ()))
    yield from _around_layers(spec)
    if not spec.tied:
        yield same("head.weight", (v, d), "lm_head.weight")
    if spec.head_bias:
        stored = StoredTensor(("lm_head.bias",), (1, v), arrange=torch.flatten, length=v)
        yield CanonicalTensor("head.bias", (v,), ((stored,), ()))
    yield from _layers(spec)
    if encoder is not None:
        if encoder.reads == "encoder_tokens" and not encoder.shared_embedding:
            yield same("encoder.embed.weight", (encoder.model.vocab_size, d), "encoder.embed_tokens.weight")
        yield from _convolutions(encoder)
        for target in (*_around_layers(encoder.model), *_layers(encoder.model)):
            yield _of_encoder(target)


SHARED = ("shared.weight", "decoder.embed_tokens.weight", "encoder.embed_tokens.weight")
"""Other names of the table that embeds source and text; files may hold it under several."""

COMPUTED = tuple(f"{side}embed_positions.{name}" for side in ("", "encoder.") for name in ("weight", "weights"))
"""Sines and cosines that files may hold."""


def _of_encoder(target: CanonicalTensor) -> CanonicalTensor:
    """The same tensor of the encoder."""
    recipes = tuple(
        tuple(replace(piece, names=tuple(f"encoder.{name}" for name in piece.names)) for piece in recipe)
        for recipe in target.recipes
    )
    return CanonicalTensor(f"encoder.{target.name}", target.shape, recipes)


def _around_layers(spec: ModelSpec) -> Iterator[CanonicalTensor]:
    """What is done before the first layer and behind the last one."""
    if spec.positions is not None and spec.positions.kind == "learned":
        shape = (spec.positions.rows + spec.positions.offset, spec.hidden_size)
        yield same("positions.weight", shape, "embed_positions.weight")
    if spec.embed_norm:
        yield from _norm(spec, "embed_norm", "layernorm_embedding")
    if spec.final_norm:
        yield from _norm(spec, "final_norm", "norm")


def _layers(spec: ModelSpec) -> Iterator[CanonicalTensor]:
    for index in range(spec.num_layers):
        layer = f"layers.{index}."
        for target in _layer(spec, index, layer):
            factors = spec.factors.get(target.name.removeprefix(layer))
            yield target if factors is None else replace(target, factors=factors)


def _layer(spec: ModelSpec, index: int, layer: str) -> Iterator[CanonicalTensor]:
    if spec.layers[index].attention:
        if spec.latent:
            yield from _latent_attention(spec, layer)
        else:
            yield from _attention(spec, layer, own_keys=spec.layers[index].keeps_keys)
    if (mixer := spec.layers[index].mixer) is not None:
        yield from mixer_tensors(mixer, spec.hidden_size, layer)
    bias = spec.relative_bias
    if bias is not None and (index == 0 or bias.per_layer):
        yield same(f"{layer}relative_bias.weight", (bias.buckets, spec.num_heads), f"{layer}relative_bias.weight")
    if spec.encoder is not None:
        yield from _cross_attention(spec, layer)
    for name, stored in _norms(spec, index).items():
        yield from _norm(spec, f"{layer}{name}", *(f"{layer}{stored_name}" for stored_name in stored))
    if spec.layers[index].mlp:
        yield from _transformation(spec, index)


def _norms(spec: ModelSpec, index: int) -> Mapping[str, tuple[str, ...]]:
    """Those of a layer; one that is an MLP alone, or has none, has the first one alone."""
    layer, norms = spec.layers[index], NORMS["parallel" if spec.parallel else spec.norm_placement]
    if not layer.mlp:
        return {"attn_norm": norms["attn_norm"]}
    if not layer.attention and layer.mixer is None:
        return {"mlp_norm": norms["attn_norm"]}
    return norms


def _cross_attention(spec: ModelSpec, layer: str) -> Iterator[CanonicalTensor]:
    d, q, k = spec.hidden_size, spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    at, norm = f"{layer}cross_attn.", "cross_norm" if spec.norm_placement == "pre" else "residual_cross_norm"
    yield from _norm(spec, f"{layer}{norm}", f"{layer}cross_attn_layernorm")
    yield from with_bias(f"{layer}cross_q", (q, d), f"{at}q_proj", bias=spec.qkv_bias)
    parts = [(f"{at}{name}_proj.weight", k) for name in "kv"]
    yield fused(f"{layer}cross_kv.weight", parts, (d,), f"{at}kv_proj.weight")
    if spec.qkv_bias:
        yield _without_key_bias(
            fused(f"{layer}cross_kv.bias", [(f"{at}{name}_proj.bias", k) for name in "kv"], (), f"{at}kv_proj.bias")
        )
    yield from with_bias(f"{layer}cross_o", (d, q), f"{at}o_proj", bias=spec.o_bias)


def _without_key_bias(target: CanonicalTensor) -> CanonicalTensor:
    """The same, where the files may leave out the keys' part, which is zeros then (Whisper)."""
    pieces = target.recipes[-1]
    others = tuple(piece for piece in pieces if not piece.names[0].endswith("k_proj.bias"))
    return replace(target, recipes=(*target.recipes, others))


def _convolutions(encoder: EncoderSpec) -> Iterator[CanonicalTensor]:
    for number, conv in enumerate(encoder.convolutions, 1):
        name = f"encoder.convolutions.{number}"
        shape = (conv.outputs, conv.inputs, conv.kernel)
        yield from with_bias(name, shape, name, bias=conv.bias)
        if conv.norm:
            yield from with_bias(f"{name}.norm", (conv.outputs,), f"{name}.norm", bias=True)


NORMS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "pre": {"attn_norm": ("input_layernorm",), "mlp_norm": ("post_attention_layernorm",)},
    "post": {"post_attn_norm": ("post_attention_layernorm",), "post_mlp_norm": ("post_feedforward_layernorm",)},
    "sandwich": {
        "attn_norm": ("input_layernorm",),
        "post_attn_norm": ("post_self_attn_layernorm", "post_attention_layernorm"),
        "mlp_norm": ("pre_feedforward_layernorm", "post_attention_layernorm"),
        "post_mlp_norm": ("post_feedforward_layernorm", "post_mlp_layernorm"),
    },
    "parallel": {"attn_norm": ("input_layernorm",)},
    "residual": {
        "residual_attn_norm": ("input_layernorm",),
        "residual_mlp_norm": ("post_attention_layernorm",),
    },
}
"""The norms of a layer by placement, with their stored names; the first that is there counts."""


def _transformation(spec: ModelSpec, index: int) -> Iterator[CanonicalTensor]:
    if spec.moe is None or not spec.layers[index].moe:
        return _mlp(spec, f"layers.{index}.")
    return _biased_experts(spec, f"layers.{index}.") if spec.moe.bias else _experts(spec, f"layers.{index}.")


def _norm(spec: ModelSpec, name: str, *stored: str) -> Iterator[CanonicalTensor]:
    for kind in ("weight", "bias") if spec.norm_bias else ("weight",):
        yield same(f"{name}.{kind}", (spec.hidden_size,), *(f"{stored_name}.{kind}" for stored_name in stored))


def evens_then_odds(rows: torch.Tensor) -> torch.Tensor:
    """Rows 0, 2, 4 ..., then 1, 3, 5 ..."""
    return torch.cat((rows[::2], rows[1::2]))


def _halves(tensor: torch.Tensor, head_dim: int, dims: int) -> torch.Tensor:
    """Rows of heads whose pairs of neighbours become pairs (i, i + dims / 2) of the first `dims` of each."""
    order = torch.arange(head_dim)
    order[:dims] = evens_then_odds(order[:dims])
    return tensor.view(-1, head_dim, *tensor.shape[1:])[:, order].flatten(0, 1)


def _attention(spec: ModelSpec, layer: str, *, own_keys: bool) -> Iterator[CanonicalTensor]:
    d, q, k = spec.hidden_size, spec.query_size, spec.num_kv_heads * spec.head_dim
    at = f"{layer}self_attn."
    rope = next(iter(spec.ropes.values()), None)
    turn = partial(_halves, head_dim=spec.head_dim, dims=rope.dims) if rope and rope.interleaved else None
    for kind, rest, wanted in (("weight", (d,), True), ("bias", (), spec.qkv_bias)):
        if wanted:
            widths = (("q", q), ("k", k), ("v", k)) if own_keys else (("q", q),)
            parts = [(f"{at}{name}_proj.{kind}", width) for name, width in widths]
            turned = {} if turn is None else {part: turn for part, _ in parts[:2]}
            whole = fused(f"{layer}qkv.{kind}", parts, rest, f"{at}qkv_proj.{kind}", turned)
            if spec.attention_gate:
                query = partial(_half_of_heads, head_dim=spec.head_dim, half=0)
                whole = _from_both(whole, f"{at}q_proj.{kind}", query)
                gate = partial(_half_of_heads, head_dim=spec.head_dim, half=1)
                own = same(f"{layer}attn_gate.{kind}", (q, *rest), f"{at}q_proj.{kind}")
                yield _from_both(own, f"{at}q_proj.{kind}", gate)
            yield _without_key_bias(whole) if kind == "bias" and spec.family == "whisper" else whole
    yield same(f"{layer}o.weight", (d, q), f"{at}o_proj.weight")
    if spec.o_bias:
        yield same(f"{layer}o.bias", (d,), f"{at}o_proj.bias")
    if spec.qk_norm is not None:
        head = (spec.head_dim, spec.head_dim)
        for name, width in zip("qk", head if spec.qk_norm == "head" else (q, k), strict=True):
            yield same(f"{layer}{name}_norm.weight", (width,), f"{at}{name}_norm.weight", arrange=turn)
    if spec.attention_sinks:
        yield same(f"{layer}sinks", (spec.num_heads,), f"{at}sinks")
    if spec.differential:
        yield from _differential(spec, layer)


def _differential(spec: ModelSpec, layer: str) -> Iterator[CanonicalTensor]:
    """Two pairs of vectors, whose products say how much is subtracted, and the norm of what is left."""
    at, half = f"{layer}self_attn.", spec.head_dim // 2
    names = [f"{at}lambda_{name}" for name in ("q1", "k1", "q2", "k2")]
    rows = [StoredTensor((name,), (half,), i, arrange=_as_row, length=1) for i, name in enumerate(names)]
    yield CanonicalTensor(f"{layer}lambdas", (4, half), (tuple(rows),), wide=True)
    yield same(f"{layer}heads_norm.weight", (spec.head_dim,), f"{at}subln.weight")


def _as_row(vector: torch.Tensor) -> torch.Tensor:
    return vector.unsqueeze(0)


def _from_both(target: CanonicalTensor, stored: str, arrange: Arrange) -> CanonicalTensor:
    """The same, where queries are stored with gates between their heads."""

    def half(piece: StoredTensor) -> StoredTensor:
        both = (2 * piece.shape[0], *piece.shape[1:])
        return piece if piece.names != (stored,) else replace(piece, shape=both, arrange=arrange, length=piece.shape[0])

    return replace(target, recipes=tuple(tuple(half(piece) for piece in recipe) for recipe in target.recipes))


def _half_of_heads(rows: torch.Tensor, head_dim: int, half: int) -> torch.Tensor:
    """The first or second rows of heads that are stored with twice as many."""
    return rows.view(-1, 2, head_dim, *rows.shape[1:])[:, half].flatten(0, 1)


def _latent_attention(spec: ModelSpec, layer: str) -> Iterator[CanonicalTensor]:
    """Queries, or what they are made of, stand above (rotated key, latent); rotated rows come first in each head."""
    latent = spec.latent
    assert latent is not None
    d, heads, at = spec.hidden_size, spec.num_heads, f"{layer}self_attn."
    query, rank, rotated = latent.nope + latent.rope, latent.query_rank, f"{at}kv_a_proj_with_mqa.weight"
    turned = partial(_rotated_first, head_dim=query, dims=latent.rope)
    arrange = {rotated: partial(_rotated_first, head_dim=latent.rank + latent.rope, dims=latent.rope)}
    first = (f"{at}q_proj.weight", heads * query) if rank is None else (f"{at}q_a_proj.weight", rank)
    if rank is None:
        arrange[first[0]] = turned
    yield fused(f"{layer}qkv.weight", (first, (rotated, latent.rank + latent.rope)), (d,), "", arrange)
    if rank is not None:
        yield same(f"{layer}q_norm.weight", (rank,), f"{at}q_a_layernorm.weight")
        yield same(f"{layer}q_b.weight", (heads * query, rank), f"{at}q_b_proj.weight", arrange=turned)
    yield same(f"{layer}kv_norm.weight", (latent.rank,), f"{at}kv_a_layernorm.weight")
    yield same(f"{layer}kv_b.weight", (heads * (latent.nope + latent.value), latent.rank), f"{at}kv_b_proj.weight")
    yield same(f"{layer}o.weight", (d, heads * latent.value), f"{at}o_proj.weight")


def _rotated_first(tensor: torch.Tensor, head_dim: int, dims: int) -> torch.Tensor:
    """Rows of heads whose last `dims`, pairs of neighbours, come first, as pairs (i, i + dims / 2)."""
    index = torch.arange(head_dim)
    order = torch.cat((evens_then_odds(index[-dims:]), index[:-dims]))
    return tensor.view(-1, head_dim, *tensor.shape[1:])[:, order].flatten(0, 1)


def _mlp(spec: ModelSpec, layer: str) -> Iterator[CanonicalTensor]:
    d, inner = spec.hidden_size, spec.intermediate_size
    for kind, rest, wanted in (("weight", (d,), True), ("bias", (), spec.mlp_bias)):
        if wanted and spec.gated:
            parts = [(f"{layer}mlp.{name}_proj.{kind}", inner) for name in ("gate", "up")]
            whole = fused(f"{layer}gate_up.{kind}", parts, rest, f"{layer}mlp.gate_up_proj.{kind}")
            turned = StoredTensor((f"{layer}mlp.up_gate_proj.{kind}",), whole.shape, arrange=_second_half_first)
            yield replace(whole, recipes=(*whole.recipes, (turned,)))
        elif wanted:
            yield same(f"{layer}gate_up.{kind}", (inner, *rest), f"{layer}mlp.up_proj.{kind}")
    yield same(f"{layer}down.weight", (d, inner), f"{layer}mlp.down_proj.weight")
    if spec.mlp_bias:
        yield same(f"{layer}down.bias", (d,), f"{layer}mlp.down_proj.bias")
    if spec.activation == "xielu":
        yield _xielu_numbers(layer)


def _xielu_numbers(layer: str) -> CanonicalTensor:
    stored: Sequence[tuple[str, Shape]] = (("alpha_p", (1,)), ("alpha_n", (1,)), ("beta", ()))
    pieces = tuple(
        StoredTensor((f"{layer}mlp.act_fn.{name}",), shape, at, arrange=torch.flatten, length=1)
        for at, (name, shape) in enumerate(stored)
    )
    return CanonicalTensor(f"{layer}xielu", (3,), (pieces,), wide=True)


def _second_half_first(rows: torch.Tensor) -> torch.Tensor:
    return torch.cat(rows.chunk(2)[::-1])


GATE_UP, DOWN = (("gate_proj", "w1"), ("up_proj", "w3")), (("down_proj", "w2"),)


def _one_by_one(
    layer: str, count: int, parts: Sequence[Sequence[str]], shape: Shape, kind: str = "weight"
) -> tuple[StoredTensor, ...]:
    """Experts that are stored each by itself, in parts of `shape` one after another."""
    blocks = (f"{layer}mlp.", f"{layer}block_sparse_moe.")

    def names(expert: int, spellings: Sequence[str]) -> tuple[str, ...]:
        return tuple(f"{block}experts.{expert}.{name}.{kind}" for block in blocks for name in spellings)

    return tuple(
        StoredTensor(names(expert, spellings), shape, number * shape[0], expert)
        for number, spellings in enumerate(parts)
        for expert in range(count)
    )


def _experts(spec: ModelSpec, layer: str) -> Iterator[CanonicalTensor]:
    moe = spec.moe
    assert moe is not None
    d, count, inner = spec.hidden_size, moe.experts, moe.intermediate
    blocks = (f"{layer}mlp.", f"{layer}block_sparse_moe.")

    def whole(name: str, shape: Shape) -> tuple[StoredTensor, ...]:
        return (StoredTensor(tuple(f"{block}experts.{name}" for block in blocks), shape),)

    router = same(f"{layer}router.weight", (count, d), *(f"{block}gate.weight" for block in blocks))
    yield replace(router, wide=moe.biased_choice)
    if moe.ranks:
        yield _preference(moe, layer)
    parts, name = (GATE_UP, "gate_up_proj") if spec.gated else (GATE_UP[1:], "up_proj")
    shape, alone = (count, len(parts) * inner, d), _one_by_one(layer, count, parts, (inner, d))
    yield CanonicalTensor(f"{layer}experts.gate_up", shape, (whole(name, shape), alone))
    shape, alone = (count, d, inner), _one_by_one(layer, count, DOWN, (d, inner))
    yield CanonicalTensor(f"{layer}experts.down", shape, (whole("down_proj", shape), alone))
    if moe.shared:
        yield from _shared_mlp(spec, moe, layer)
    if moe.shared_gate:
        yield same(f"{layer}shared.gate.weight", (1, d), f"{layer}mlp.shared_expert_gate.weight")


def _preference(moe: MoeSpec, layer: str) -> CanonicalTensor:
    """What experts are ranked by besides; ERNIE's files have it as a matrix of one row."""
    own, other = (f"{layer}mlp.gate.{name}" for name in ("expert_bias", "e_score_correction_bias"))
    if not moe.biased_choice:
        return replace(same(f"{layer}router.bias", (moe.experts,), own, other), wide=True)
    row = StoredTensor((other,), (1, moe.experts), arrange=torch.flatten, length=moe.experts)
    flat = StoredTensor((own,), (moe.experts,))
    return CanonicalTensor(f"{layer}router.bias", (moe.experts,), ((flat,), (row,)), wide=True)


def _shared_mlp(spec: ModelSpec, moe: MoeSpec, layer: str) -> Iterator[CanonicalTensor]:
    d, at = spec.hidden_size, f"{layer}mlp.shared_expert{'' if moe.shared_gate else 's'}."
    if spec.gated:
        parts = [(f"{at}{name}_proj.weight", moe.shared) for name in ("gate", "up")]
        shared = fused(f"{layer}shared.gate_up.weight", parts, (d,), f"{at}gate_up_proj.weight")
        beside = StoredTensor((f"{layer}mlp.gate_up_proj.weight",), shared.shape)
        yield replace(shared, recipes=(*shared.recipes, (beside,)))
    else:
        yield same(f"{layer}shared.gate_up.weight", (moe.shared, d), f"{at}up_proj.weight")
    yield same(f"{layer}shared.down.weight", (d, moe.shared), f"{at}down_proj.weight", f"{layer}mlp.down_proj.weight")


def _biased_experts(spec: ModelSpec, layer: str) -> Iterator[CanonicalTensor]:
    """The mixture of gpt-oss: stacks whose rows of gate and up take turns, inputs before outputs unless in MXFP4; or
    one by one.
    """
    moe = spec.moe
    assert moe is not None
    d, count, inner = spec.hidden_size, moe.experts, moe.intermediate
    yield same(f"{layer}router.weight", (count, d), f"{layer}mlp.router.weight")
    yield same(f"{layer}router.bias", (count,), f"{layer}mlp.router.bias")
    for name, parts, width, inputs in (("gate_up", GATE_UP, inner, d), ("down", DOWN, d, inner)):
        stored, order = f"{layer}mlp.experts.{name}_proj", _gate_then_up if name == "gate_up" else None
        outputs = len(parts) * width
        flat = StoredTensor((stored,), (count, inputs, outputs), arrange=partial(_outputs_first, order=order))
        packed = StoredTensor((f"{stored}_blocks",), (count, outputs, inputs), arrange=order)
        alone = _one_by_one(layer, count, parts, (width, inputs))
        yield CanonicalTensor(f"{layer}experts.{name}", (count, outputs, inputs), (alone, (flat,), (packed,)))
        bias = StoredTensor((f"{stored}_bias",), (count, outputs), arrange=order)
        alone = _one_by_one(layer, count, parts, (width,), "bias")
        yield CanonicalTensor(f"{layer}experts.{name}.bias", (count, outputs), (alone, (bias,)))


def _gate_then_up(stack: torch.Tensor) -> torch.Tensor:
    """(e, 2i, ...) of rows in turns -> (e, 2i, ...) of all gates, then all ups."""
    return torch.cat((stack[:, ::2], stack[:, 1::2]), 1)


def _outputs_first(stack: torch.Tensor, order: Arrange | None) -> torch.Tensor:
    turned = stack.transpose(1, 2)
    return turned if order is None else order(turned)


def weight_bytes(spec: ModelSpec, dtype: torch.dtype) -> dict[str, int]:
    """Canonical name -> bytes in `dtype`."""
    return {target.name: torch.Size(target.shape).numel() * dtype.itemsize for target in targets(spec)}


class StoredNames:
    """A checkpoint's tensors by Llama's names (`Family.names`) without prefix; remembers which nobody asked for."""

    def __init__(self, checkpoint: Checkpoint, spec: ModelSpec) -> None:
        self.checkpoint = checkpoint
        family = ENCODER_DECODER_FAMILIES.get(spec.family) or FAMILIES.get(spec.family)
        names = () if family is None else family.names
        self.stored = {PREFIX.sub("", renamed(name, names)): name for name in checkpoint.entries}
        count = spec.num_layers
        behind = f"layers.{count}.eh_proj.weight" in self.stored
        self.unused = {
            name for name in self.stored if not (IGNORED.search(name) or (behind and _layer_of(name) >= count))
        }
        if len(self.stored) != len(checkpoint.entries):
            raise CheckpointError(
                f"{checkpoint.folder}: names that differ only in their prefix; the checkpoint holds two models"
            )

    def find(self, piece: StoredTensor) -> str | None:
        """The name without prefix under which a piece is stored."""
        return next((name for name in piece.names if name in self.stored), None)

    def read(self, name: str, piece: StoredTensor) -> torch.Tensor:
        """The tensor of a piece, its shape checked."""
        return self.checkpoint.tensor(self.checked(name, piece))

    def fill(self, name: str, piece: StoredTensor, out: torch.Tensor) -> None:
        """Copy the tensor of a piece, its shape checked, into `out`."""
        if piece.arrange is None:
            self.checkpoint.fill(self.checked(name, piece), out)
        else:
            out.copy_(piece.arrange(self.read(name, piece)))

    def checked(self, name: str, piece: StoredTensor) -> str:
        """The stored name of a piece, its shape checked."""
        self.unused.discard(name)
        stored = self.stored[name]
        if (shape := self.checkpoint.entries[stored].shape) != piece.shape:
            raise CheckpointError(
                f"{self.checkpoint.folder}: {stored} has shape {shape}, but its configuration asks for {piece.shape}; "
                f"download both again"
            )
        return stored


def _layer_of(name: str) -> int:
    """The number of the layer that a stored tensor belongs to; -1 where that is none."""
    found = re.match(r"layers\.(\d+)\.", name)
    return -1 if found is None else int(found[1])


def sources(checkpoint: Checkpoint, spec: ModelSpec) -> dict[str, list[str]]:
    """Canonical name -> the names that its pieces are stored under.

    Raises:
        CheckpointError, UnsupportedModelError: see `load_weights`.
    """
    names = StoredNames(checkpoint, spec)
    return {target.name: [names.stored[piece] for _, piece in chosen_pieces(names, target)] for target in targets(spec)}


def untie_if_different(checkpoint: Checkpoint, spec: ModelSpec) -> ModelSpec:
    """Untie a spec whose files hold another head than the embedding, whatever config.json says (as transformers)."""
    if not spec.tied:
        return spec
    names, shape = StoredNames(checkpoint, spec), (spec.vocab_size, spec.hidden_size)
    pieces = [
        StoredTensor(("lm_head.weight",), shape),
        StoredTensor(("embed_tokens.weight", *(() if spec.encoder is None else SHARED)), shape),
    ]
    found = [(name, piece) for piece in pieces if (name := names.find(piece)) is not None]
    if len(found) < len(pieces):
        return spec
    head, embed = (names.read(name, piece) for name, piece in found)
    if torch.equal(head, embed.to(head.dtype)):
        return spec
    log.warning("%s: config.json ties head and embedding, but the files hold two; both are used", checkpoint.folder)
    return replace(spec, tied=False)


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor for a weight, on the CPU in pages of its own, which go back to the system when it is freed.

    The heap keeps them, and lets it split the room of what was held for a moment. Runners free weights one by one as
    they pack them, and would need almost twice the memory.
    """
    size = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or size < mmap.PAGESIZE or not hasattr(mmap, "MAP_PRIVATE"):
        return torch.empty(*shape, dtype=dtype, device=device)
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=dtype).view(*shape)


def load_weights(
    checkpoint: Checkpoint,
    spec: ModelSpec,
    *,
    device: torch.device,
    dtype: torch.dtype,
    instead: Replacement | None = None,
    lacking: Sequence[str] = (),
    elsewhere: Collection[str] = (),
    shape_only: re.Pattern[str] | None = None,
) -> dict[str, torch.Tensor]:
    """The canonical weights of `spec` on `device` in `dtype`, each allocated once and filled from the mapped files.

    Args:
        instead: the tensors, by name, that take the place of one, which is then dropped (checkpoints.quantization).
        lacking: ends of canonical names that this checkpoint does without.
        elsewhere: canonical names of what is not read here.
        shape_only: canonical names that begin so are not read either, their tensors are on the meta device.
    Raises:
        CheckpointError: missing, surplus or wrongly shaped tensors.
        UnsupportedModelError: quantised ones, or an adapter.
    """
    names = StoredNames(checkpoint, spec)
    if spec.tied:
        names.unused.discard("lm_head.weight")
    if spec.encoder is not None:
        names.unused.difference_update(SHARED)
        if spec.positions is not None and spec.positions.kind != "learned":
            names.unused.difference_update(COMPUTED)
    weights: dict[str, torch.Tensor] = {}
    wanted = [target for target in targets(spec) if not target.name.endswith(tuple(lacking))]
    with parts_of(sum(target.size for target in wanted), "reading the weights") as done:
        for target in wanted:
            if target.name in elsewhere:
                for piece, name in chosen_pieces(names, target):
                    names.checked(name, piece)
            else:
                where = torch.device("meta") if shape_only is not None and shape_only.match(target.name) else device
                kept = torch.promote_types(dtype, torch.float32) if target.wide else dtype
                weight = _read(names, target, kept, where)
                weights.update([(target.name, weight)] if instead is None else instead(target.name, weight))
                del weight
            done(target.size)
    _check_surplus(names)
    return weights


def _read(names: StoredNames, target: CanonicalTensor, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """One canonical weight, of which nothing else keeps a reference."""
    recipe = chosen_pieces(names, target)
    out = empty(target.shape, dtype, device)
    if sum(math.prod(piece.shape) for piece, _ in recipe) < target.size:
        out.zero_()
    for piece, name in recipe:
        place = out if piece.expert is None else out[piece.expert]
        if out.is_meta:
            names.checked(name, piece)
        else:
            names.fill(name, piece, place.narrow(0, piece.at, piece.length or piece.shape[0]))
    at = 0
    for rows, factor in target.factors:
        if not out.is_meta:
            out.narrow(0, at, rows).mul_(factor)
        at += rows
    return out


def chosen_pieces(names: StoredNames, target: CanonicalTensor) -> list[tuple[StoredTensor, str]]:
    """The pieces of the first recipe that is stored in full, with their names."""
    missing: list[str] = []
    most = 0  # pieces that are there of the recipe that `missing` is about
    for recipe in target.recipes:
        stored = [(piece, names.find(piece)) for piece in recipe]
        found = [(piece, name) for piece, name in stored if name is not None]
        if len(found) == len(recipe):
            return found
        if len(found) >= most:
            most, missing = len(found), [piece.names[0] for piece, name in stored if name is None]
    _check_foreign(names)
    raise CheckpointError(
        f"{names.checkpoint.folder} lacks {some(missing)}; the checkpoint is incomplete or of another architecture"
    )


def _check_foreign(names: StoredNames) -> None:
    for name in names.unused:
        for mark, what in FOREIGN.items():
            if mark in name:
                raise UnsupportedModelError(f"{names.checkpoint.folder}: {name} belongs to {what}")


def _check_surplus(names: StoredNames) -> None:
    _check_foreign(names)
    if names.unused:
        raise CheckpointError(
            f"{names.checkpoint.folder} holds {some(sorted(names.unused))} which its architecture does not have; "
            "its configuration and weights do not belong together"
        )
