"""Families with short convolutions or delta rules beside attention; see `checkpoints.families`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from paceline.checkpoints.config_keys import FULL, ConfigKeys, sparse_layers
from paceline.checkpoints.model_family import LINEAR, ModelFamily, Rename, mixed_layers, moe_spec
from paceline.errors import CheckpointError, UnsupportedModelError
from paceline.models import DeltaSpec, LayerSpec, ShortConvSpec


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
}
