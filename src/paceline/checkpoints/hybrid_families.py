"""Families with mixers beside attention, or instead; see `checkpoints.families`."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from paceline.checkpoints.config_keys import FULL, ConfigKeys, sparse_layers
from paceline.checkpoints.model_family import ModelFamily, Rename, moe_spec
from paceline.errors import CheckpointError, UnsupportedModelError
from paceline.models import DeltaSpec, LayerSpec, Mamba2Spec, MixerSpec, ShortConvSpec


def mixed_layers(keys: ConfigKeys, mixers: Mapping[str, MixerSpec], types: list[str]) -> tuple[LayerSpec, ...]:
    """Layers of attention or of a mixer, by their types."""
    layers = {kind: LayerSpec(attention=False, rope=None, mixer=mixer) for kind, mixer in mixers.items()}
    layers[FULL] = LayerSpec()
    if unknown := [kind for kind in types if kind not in layers]:
        raise UnsupportedModelError(f"{keys.family}: layers of type {unknown[0]!r} are not implemented")
    return tuple(layers[kind] for kind in types)


def _lfm2_layers(keys: ConfigKeys) -> tuple[LayerSpec, ...]:
    count = keys.size("num_hidden_layers")
    types = keys.items("layer_types", count)
    if types is None:
        attention = keys.integers("full_attn_idxs")
        types = [FULL if attention is None or layer in attention else "conv" for layer in range(count)]
    mixer = ShortConvSpec(
        channels=keys.size("hidden_size"), taps=keys.size("conv_L_cache"), bias=keys.flag("conv_bias")
    )
    return mixed_layers(keys, {"conv": mixer}, types)


def _lfm2(keys: ConfigKeys) -> dict[str, Any]:
    inner = keys.optional_size("block_ff_dim") or keys.size("intermediate_size")
    if keys.flag("block_auto_adjust_ff_dim"):
        inner = int(keys.positive("block_ffn_dim_multiplier") * int(2 * inner / 3))
        multiple = keys.size("block_multiple_of")
        inner = multiple * -(-inner // multiple)
    if inner < 1:
        raise CheckpointError(f"config.json: the inner width of {keys.family} comes out as {inner}; repair it")
    tied = keys.flag("tie_embedding" if keys.given("tie_embedding") else "tie_word_embeddings")
    return {"intermediate_size": inner, "tied": tied}


_LFM2 = {
    "vocab_size": 65536,
    "hidden_size": 2560,
    "intermediate_size": 12288,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 128_000,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "conv_bias": False,
    "conv_L_cache": 3,
    "block_multiple_of": 256,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": True,
}
_LFM2_NAMES: Rename = (
    (re.compile(r"\bembedding_norm\."), "norm."),
    (re.compile(r"\.operator_norm\."), ".input_layernorm."),
    (re.compile(r"\.ffn_norm\."), ".post_attention_layernorm."),
    (re.compile(r"\.self_attn\.out_proj\."), ".self_attn.o_proj."),
    (re.compile(r"\.self_attn\.([qk])_layernorm\."), r".self_attn.\1_norm."),
    (re.compile(r"(layers\.\d+)\.conv\."), r"\1.mixer."),
    (re.compile(r"\.feed_forward\.w1\."), ".mlp.gate_proj."),
    (re.compile(r"\.feed_forward\.w3\."), ".mlp.up_proj."),
    (re.compile(r"\.feed_forward\.w2\."), ".mlp.down_proj."),
)


def _delta_layers(keys: ConfigKeys) -> tuple[LayerSpec, ...]:
    count = keys.size("num_hidden_layers")
    types = keys.items("layer_types", count)
    if types is None:
        interval = keys.size("full_attention_interval")
        types = [LINEAR if (layer + 1) % interval else FULL for layer in range(count)]
    mixer = DeltaSpec(
        key_heads=keys.size("linear_num_key_heads"),
        value_heads=keys.size("linear_num_value_heads"),
        key_dim=keys.size("linear_key_head_dim"),
        value_dim=keys.size("linear_value_head_dim"),
        taps=keys.size("linear_conv_kernel_dim"),
    )
    if mixer.value_heads % mixer.key_heads:
        raise CheckpointError(
            f"config.json: {mixer.value_heads} value heads cannot share {mixer.key_heads} key heads evenly; repair it"
        )
    sparse = sparse_layers(keys, count) if keys.given("num_experts") else [False] * count
    layers = mixed_layers(keys, {LINEAR: mixer}, types)
    return tuple(replace(layer, moe=moe) for layer, moe in zip(layers, sparse, strict=True))


def _qwen3_next(keys: ConfigKeys) -> dict[str, Any]:
    fields: dict[str, Any] = {"attention_gate": True}
    if keys.given("num_experts"):
        norm = keys.flag("norm_topk_prob") if keys.known("norm_topk_prob") else True
        moe = moe_spec(keys, "num_experts", keys.size("moe_intermediate_size"), norm_top_k=norm)
        fields["moe"] = replace(moe, shared=keys.size("shared_expert_intermediate_size"), shared_gate=True)
    return fields


def _mamba2(keys: ConfigKeys, inner: int, **more: Any) -> Mamba2Spec:
    """The mixer of an inner width, by the keys that Granite 4, Falcon-H1 and Bamba share."""
    heads, head_dim, groups = keys.size("mamba_n_heads"), keys.get("mamba_d_head"), keys.size("mamba_n_groups")
    head_dim = inner // heads if head_dim in (None, "auto") else keys.size("mamba_d_head")
    if heads * head_dim != inner or heads % groups:
        raise CheckpointError(
            f"config.json: {heads} heads of {head_dim} in {groups} groups do not make up a mixer of {inner}; repair it"
        )
    return Mamba2Spec(
        heads=heads, head_dim=head_dim, state_dim=keys.size("mamba_d_state"), groups=groups,
        taps=keys.size("mamba_d_conv"), conv_bias=keys.flag("mamba_conv_bias"), bias=keys.flag("mamba_proj_bias"),
        steps=_steps(keys), **more,
    )  # fmt: skip


def _steps(keys: ConfigKeys) -> tuple[float, float]:
    """Least and largest step; transformers writes an infinite one as an object."""
    limits = keys.items("time_step_limit", 2) or [0.0, math.inf]
    least, most = (math.inf if limit == {"__float__": "Infinity"} else limit for limit in limits)
    numbers = not any(isinstance(one, bool) or not isinstance(one, int | float) for one in (least, most))
    if not (numbers and 0 <= least <= most):
        raise keys.wrong("time_step_limit", "two numbers of 0 or more, the smaller one first")
    return float(least), float(most)


def _granite_layers(keys: ConfigKeys) -> tuple[LayerSpec, ...]:
    count = keys.size("num_hidden_layers")
    types = keys.items("layers_block_type" if keys.given("layers_block_type") else "layer_types", count)
    types = [{"attention": FULL, "mamba": LINEAR}.get(kind, kind) for kind in types or [LINEAR] * count]
    bias = keys.flag("mamba_proj_bias")
    mixer = _mamba2(keys, keys.size("mamba_expand") * keys.size("hidden_size"), out_bias=bias)
    mixer = replace(mixer, norm_groups=mixer.groups)
    position, sparse = keys.get("position_embedding_type"), keys.count("num_local_experts") > 0
    if position not in (None, "nope", "rope"):
        raise UnsupportedModelError(f"{keys.family}: position_embedding_type={position!r} is not implemented")
    layers = mixed_layers(keys, {LINEAR: mixer}, types)
    turned = position == "rope"
    return tuple(replace(layer, moe=sparse, rope=layer.rope if turned else None) for layer in layers)


def _granite_hybrid(keys: ConfigKeys) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "embedding_multiplier": keys.positive("embedding_multiplier"),
        "residual_multiplier": keys.positive("residual_multiplier"),
        "attention_scale": keys.positive("attention_multiplier"),
        "logit_multiplier": 1.0 / keys.positive("logits_scaling"),
    }
    shared = keys.size("shared_intermediate_size")
    if not keys.count("num_local_experts"):
        return fields | {"intermediate_size": shared}
    moe = moe_spec(keys, "num_local_experts", keys.size("intermediate_size"), norm_top_k=True)
    return fields | {"moe": replace(moe, shared=shared)}


def _falcon_layers(keys: ConfigKeys) -> tuple[LayerSpec, ...]:
    norm = "gated_after" if keys.flag("mamba_norm_before_gate") else "gated_before"
    mixer = _mamba2(
        keys, _falcon_inner(keys), norm=norm if keys.flag("mamba_rms_norm") else None,
        norm_groups=keys.size("mamba_n_groups"), out_bias=keys.flag("projectors_bias"),
    )  # fmt: skip
    return (LayerSpec(mixer=mixer),) * keys.size("num_hidden_layers")


def _falcon_inner(keys: ConfigKeys) -> int:
    return keys.optional_size("mamba_d_ssm") or keys.size("mamba_expand") * keys.size("hidden_size")


def _falcon_h1(keys: ConfigKeys) -> dict[str, Any]:
    """Its multipliers belong to linear maps, and are weighed into these."""
    inner, wide = _falcon_inner(keys), keys.size("intermediate_size")
    shared, heads = keys.size("mamba_n_groups") * keys.size("mamba_d_state"), keys.size("mamba_n_heads")
    gate, down = keys.numbers("mlp_multipliers", 2) or [1.0, 1.0]
    parts = keys.numbers("ssm_multipliers", 5) or [1.0] * 5
    z, x, b, c, steps = (keys.number("ssm_in_multiplier") * part for part in parts)
    into, hidden = keys.number("attention_in_multiplier"), keys.size("hidden_size")
    head_dim = keys.optional_size("head_dim") or hidden // keys.size("num_attention_heads")
    return {
        "embedding_multiplier": keys.number("embedding_multiplier"),
        "logit_multiplier": keys.number("lm_head_multiplier"),
        "attention_scale": head_dim**-0.5 * into**2 * keys.number("key_multiplier"),
        "factors": {
            "o.weight": ((hidden, into * keys.number("attention_out_multiplier")),),
            "gate_up.weight": ((wide, gate), (wide, 1.0)),
            "down.weight": ((hidden, down),),
            "mixer.in.weight": ((inner, z), (inner, x), (shared, b), (shared, c)),
            "mixer.gates.weight": ((heads, steps),),
            "mixer.out.weight": ((hidden, keys.number("ssm_out_multiplier")),),
        },
    }


LINEAR = "linear_attention"
_QWEN3_NEXT = {
    "head_dim": 256,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "partial_rotary_factor": 0.25,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
_QWEN3_NEXT_MOE = {
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "norm_topk_prob": True,
}
_QWEN3_5 = _QWEN3_NEXT | {"num_key_value_heads": 4, "vocab_size": 248320, "hidden_size": 4096}
_QWEN3_5 |= {"intermediate_size": 12288, "num_hidden_layers": 32}
_QWEN3_5_MOE = _QWEN3_NEXT | _QWEN3_NEXT_MOE | {"num_experts": 256, "num_experts_per_tok": 8, "intermediate_size": 512}
_QWEN3_5_MOE |= {"vocab_size": 248320, "hidden_size": 2048, "num_hidden_layers": 40}
_DELTA_NAMES: Rename = ((re.compile(r"\.linear_attn\."), ".mixer."),)
_MAMBA2 = {
    "mamba_n_heads": 128,
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_head": "auto",
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
}
_MULTIPLIERS = ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling")
_GRANITE_HYBRID = _MAMBA2 | dict.fromkeys(_MULTIPLIERS, 1.0) | {"intermediate_size": 11008}
_GRANITE_HYBRID |= {"num_local_experts": 8, "num_experts_per_tok": 2, "shared_intermediate_size": 1024}
_GRANITE_NAMES: Rename = (
    (re.compile(r"(layers\.\d+)\.mamba\."), r"\1.mixer."),
    (re.compile(r"\.shared_mlp\.input_linear\."), ".mlp.gate_up_proj."),
    (re.compile(r"\.shared_mlp\.output_linear\."), ".mlp.down_proj."),
    (re.compile(r"\.block_sparse_moe\.router\.layer\."), ".block_sparse_moe.gate."),
    (re.compile(r"\.block_sparse_moe\.router\."), ".block_sparse_moe.gate."),
    (re.compile(r"\.block_sparse_moe\.input_linear\.weight$"), ".block_sparse_moe.experts.gate_up_proj"),
    (re.compile(r"\.block_sparse_moe\.output_linear\.weight$"), ".block_sparse_moe.experts.down_proj"),
)
_FALCON_H1 = _MAMBA2 | {
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 8192,
    "mamba_d_ssm": 1024,
    "mamba_norm_before_gate": True,
    "mamba_rms_norm": False,
    "projectors_bias": False,
    "lm_head_multiplier": 1.0,
    "embedding_multiplier": 1.0,
    "key_multiplier": 1.0,
    "attention_in_multiplier": 1.0,
    "attention_out_multiplier": 1.0,
    "ssm_in_multiplier": 1.0,
    "ssm_out_multiplier": 1.0,
}
_FALCON_NAMES: Rename = (
    (re.compile(r"\bfinal_layernorm\."), "norm."),
    (re.compile(r"\.pre_ff_layernorm\."), ".post_attention_layernorm."),
    (re.compile(r"(layers\.\d+)\.mamba\."), r"\1.mixer."),
    (re.compile(r"\.feed_forward\."), ".mlp."),
)

HYBRID_FAMILIES: Mapping[str, ModelFamily] = {
    "lfm2": ModelFamily(
        keys={"norm_eps": "rms_norm_eps"},
        names=_LFM2_NAMES,
        defaults=_LFM2,
        qk_norm="head",
        attention_bias="no",
        layers=_lfm2_layers,
        extra=_lfm2,
    ),
    "qwen3_next": ModelFamily(
        names=_DELTA_NAMES,
        defaults=_QWEN3_NEXT | _QWEN3_NEXT_MOE,
        norm_offset=True,
        qk_norm="head",
        layers=_delta_layers,
        extra=_qwen3_next,
    ),
    "qwen3_5_text": ModelFamily(
        names=_DELTA_NAMES,
        defaults=_QWEN3_5,
        norm_offset=True,
        qk_norm="head",
        layers=_delta_layers,
        extra=_qwen3_next,
    ),
    "qwen3_5_moe_text": ModelFamily(
        names=_DELTA_NAMES,
        defaults=_QWEN3_5_MOE,
        norm_offset=True,
        qk_norm="head",
        layers=_delta_layers,
        extra=_qwen3_next,
    ),
    "granitemoehybrid": ModelFamily(
        names=_GRANITE_NAMES, defaults=_GRANITE_HYBRID, layers=_granite_layers, extra=_granite_hybrid
    ),
    "falcon_h1": ModelFamily(
        names=_FALCON_NAMES, defaults=_FALCON_H1, mlp_bias=True, layers=_falcon_layers, extra=_falcon_h1
    ),
}
