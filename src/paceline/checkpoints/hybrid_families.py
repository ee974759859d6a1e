"""Families with short convolutions or delta rules beside attention; see `checkpoints.families`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from paceline.checkpoints.config_keys import FULL, ConfigKeys, sparse_layers
from paceline.checkpoints.model_family import (
    LINEAR,
    ModelFamily,
    Rename,
    expert_groups,
    latent_fields,
    mixed_layers,
    moe_spec,
)
from paceline.errors import CheckpointError, UnsupportedModelError
from paceline.models import DeltaSpec, KimiDeltaSpec, LayerSpec, LightNetSpec, ShortConvSpec


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


def _lfm2_moe_layers(keys: ConfigKeys) -> tuple[LayerSpec, ...]:
    layers = _lfm2_layers(keys)
    return tuple(replace(layer, moe=moe) for layer, moe in zip(layers, sparse_layers(keys, len(layers)), strict=True))


def _lfm2_moe(keys: ConfigKeys) -> dict[str, Any]:
    if not keys.flag("use_expert_bias"):
        raise UnsupportedModelError(f"{keys.family}: use_expert_bias=False is not implemented")
    moe = moe_spec(keys, "num_experts", keys.size("moe_intermediate_size"), norm_top_k=keys.flag("norm_topk_prob"))
    return _lfm2(keys) | {"moe": replace(moe, sigmoid=True, scaling=keys.positive("routed_scaling_factor"))}


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
_LFM2_MOE = {key: value for key, value in _LFM2.items() if not key.startswith("block_")} | {
    "hidden_size": 2048,
    "intermediate_size": 7168,
    "moe_intermediate_size": 1792,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "first_k_dense_replace": 2,
    "use_expert_bias": True,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
}
_LFM2_MOE_NAMES: Rename = (
    *_LFM2_NAMES,
    (re.compile(r"\.feed_forward\.expert_bias$"), ".mlp.gate.expert_bias"),
    (re.compile(r"\.feed_forward\."), ".mlp."),
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
        in_turn=keys.flag("linear_value_heads_in_turn"),
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


def _light_net_layers(keys: ConfigKeys) -> tuple[LayerSpec, ...]:
    hidden, heads = keys.size("hidden_size"), keys.optional_size("num_heads")
    width = keys.optional_size("expand_ratio") or hidden // (heads or 1)
    heads = heads or max(1, hidden // width)
    if hidden % heads:
        raise CheckpointError(f"config.json: {heads} heads cannot share {hidden} dimensions evenly; repair it")
    mixer = LightNetSpec(heads=heads, key_dim=width, value_dim=hidden // heads, rank=keys.size("gate_low_rank_dim"))
    return (LayerSpec(rope=None, attention=False, mixer=mixer),) * keys.size("num_hidden_layers")


def _light_net(keys: ConfigKeys) -> dict[str, Any]:
    fine = {"use_short_conv": (None, False), "elementwise_affine": (True,), "attn": (None,)}
    for key, values in {**fine, "attnres_block_size": (None,)}.items():
        if keys.get(key) not in values:
            raise UnsupportedModelError(f"{keys.family}: {key}={keys.get(key)!r} is not implemented")
    inner = 256 * -(-int(keys.size("hidden_size") * keys.positive("hidden_ratio") * 2 / 3) // 256)
    return {"intermediate_size": keys.optional_size("intermediate_size") or inner}


def _kimi_layers(keys: ConfigKeys) -> tuple[LayerSpec, ...]:
    count = keys.size("num_hidden_layers")
    linear = ConfigKeys(keys.mapping("linear_attn_config"), {}, keys.family)
    mixer = KimiDeltaSpec(
        heads=linear.optional_size("num_heads") or keys.size("linear_num_heads"),
        head_dim=linear.optional_size("head_dim") or keys.size("linear_head_dim"),
        taps=linear.optional_size("short_conv_kernel_size") or keys.size("linear_conv_kernel_dim"),
    )
    layers, sparse = mixed_layers(keys, {LINEAR: mixer}, _kimi_types(keys, linear, count)), _kimi_sparse(keys, count)
    return tuple(replace(layer, rope=None, moe=moe) for layer, moe in zip(layers, sparse, strict=True))


def _kimi_types(keys: ConfigKeys, linear: ConfigKeys, count: int) -> list[str]:
    """By `layer_types`, or by the numbers of layers, which `linear_attn_config` counts from 1."""
    types = keys.items("layer_types", count)
    if types is not None:
        return types
    attention = linear.integers("full_attn_layers")
    if attention is None:
        return [FULL if layer and layer % 4 == 0 else LINEAR for layer in range(count)]
    return [FULL if layer + 1 in attention else LINEAR for layer in range(count)]


def _kimi_sparse(keys: ConfigKeys, count: int) -> list[bool]:
    """Which layers are mixtures of experts."""
    kinds = keys.items("mlp_layer_types", count)
    if kinds is None:
        return sparse_layers(keys, count)
    if unknown := [kind for kind in kinds if kind not in ("dense", "sparse")]:
        raise UnsupportedModelError(f"{keys.family}: MLPs of type {unknown[0]!r} are not implemented")
    return [kind == "sparse" for kind in kinds]


def _kimi(keys: ConfigKeys) -> dict[str, Any]:
    fine = {"mla_use_nope": (None, True), "moe_router_activation_func": (None, "sigmoid"), "moe_layer_freq": (None, 1)}
    for key, values in fine.items():
        if keys.get(key) not in values:
            raise UnsupportedModelError(f"{keys.family}: {key}={keys.get(key)!r} is not implemented")
    inner = keys.size("moe_intermediate_size")
    moe = moe_spec(keys, "num_experts", inner, norm_top_k=keys.flag("norm_topk_prob"))
    moe = replace(
        moe,
        shared=inner * keys.count("n_shared_experts"),
        scaling=keys.positive("routed_scaling_factor"),
        groups=expert_groups(keys, moe.experts),
        sigmoid=True,
    )
    return latent_fields(keys) | {"ropes": {}, "moe": moe}


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
_KIMI_KEYS = {
    "model_max_length": "max_position_embeddings",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
    "num_expert_group": "n_group",
    "moe_renormalize": "norm_topk_prob",
}
_KIMI = {
    "vocab_size": 163840,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 27,
    "num_attention_heads": 32,
    "max_position_embeddings": 2**20,
    "rms_norm_eps": 1e-5,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "linear_num_heads": 32,
    "linear_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "first_k_dense_replace": 1,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 1024,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.446,
}
_KIMI_NAMES: Rename = (
    (re.compile(r"\.self_attn\.forget_gate\."), ".self_attn."),
    (re.compile(r"\.block_sparse_moe\."), ".mlp."),
)
_LIGHT_NET = {
    "vocab_size": 32000,
    "hidden_size": 2048,
    "num_hidden_layers": 24,
    "expand_ratio": 128,
    "gate_low_rank_dim": 128,
    "hidden_ratio": 4,
    "elementwise_affine": True,
    "max_position_embeddings": 2048,
}
_LIGHT_NET_NAMES: Rename = (
    (re.compile(r"(^|\.)embeddings\."), r"\1embed_tokens."),
    (re.compile(r"\.attn_norm\."), ".input_layernorm."),
    (re.compile(r"\.mlp_norm\."), ".post_attention_layernorm."),
    (re.compile(r"(layers\.\d+)\.attn\."), r"\1.mixer."),
)


def _with_delta_nets(defaults: Mapping[str, Any]) -> ModelFamily:
    """A family of Qwen's that has gated delta nets beside attention."""
    return ModelFamily(
        names=_DELTA_NAMES,
        defaults=defaults,
        norm_offset=True,
        qk_norm="head",
        layers=_delta_layers,
        extra=_qwen3_next,
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
    "lfm2_moe": ModelFamily(
        keys={"norm_eps": "rms_norm_eps", "num_dense_layers": "first_k_dense_replace"},
        names=_LFM2_MOE_NAMES,
        defaults=_LFM2_MOE,
        qk_norm="head",
        attention_bias="no",
        layers=_lfm2_moe_layers,
        extra=_lfm2_moe,
    ),
    "qwen3_next": _with_delta_nets(_QWEN3_NEXT | _QWEN3_NEXT_MOE),
    "qwen3_5_text": _with_delta_nets(_QWEN3_5),
    "qwen3_5_moe_text": _with_delta_nets(_QWEN3_5_MOE),
    "kimi_linear": ModelFamily(
        keys=_KIMI_KEYS,
        names=_KIMI_NAMES,
        defaults=_KIMI,
        attention_bias="no",
        layers=_kimi_layers,
        extra=_kimi,
    ),
    "lightnet": ModelFamily(
        keys={"norm_eps": "rms_norm_eps"},
        names=_LIGHT_NET_NAMES,
        defaults=_LIGHT_NET,
        attention=False,
        layers=_light_net_layers,
        extra=_light_net,
    ),
}
