"""Families with mixtures of experts in the place of MLPs, and attention in all layers; see `checkpoints.families`."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from paceline.checkpoints.config_keys import ConfigKeys, rope_spec
from paceline.checkpoints.model_family import ModelFamily, Rename, expert_groups, latent_fields, moe_spec
from paceline.errors import UnsupportedModelError
from paceline.models import MoeSpec, RopeSpec


def _mixtral(keys: ConfigKeys) -> dict[str, Any]:
    inner = keys.size("intermediate_size")
    return {"moe": moe_spec(keys, "num_local_experts", inner, norm_top_k=True)}


def _qwen3_moe(keys: ConfigKeys) -> dict[str, Any]:
    inner = keys.size("moe_intermediate_size")
    return {"moe": moe_spec(keys, "num_experts", inner, norm_top_k=keys.flag("norm_topk_prob"))}


def _qwen2_moe(keys: ConfigKeys) -> dict[str, Any]:
    moe = moe_spec(keys, "num_experts", keys.size("moe_intermediate_size"), norm_top_k=keys.flag("norm_topk_prob"))
    moe = replace(moe, shared=keys.size("shared_expert_intermediate_size"), shared_gate=True)
    if keys.flag("use_sliding_window"):
        raise UnsupportedModelError(f"{keys.family}: use_sliding_window=True is not implemented")
    return {"moe": moe, "qkv_bias": keys.flag("qkv_bias")}


def _gpt_oss(keys: ConfigKeys) -> dict[str, Any]:
    moe = moe_spec(keys, "num_local_experts", keys.size("intermediate_size"), norm_top_k=True)
    return {
        "moe": replace(moe, bias=True),
        "attention_sinks": True,
        "activation": "clamped_swiglu",
        "swiglu_alpha": keys.positive("swiglu_alpha"),
        "swiglu_limit": keys.positive("swiglu_limit"),
    }


def _deepseek_v2(keys: ConfigKeys) -> dict[str, Any]:
    method = keys.get("topk_method")
    keys.only({"moe_layer_freq": (1,), "scoring_func": ("softmax",), "norm_topk_prob": (False,)})
    if method not in ("greedy", "group_limited_greedy"):
        raise UnsupportedModelError(f"{keys.family}: topk_method={method!r} is not implemented")
    moe = _routed(keys)
    return _scaled_latent(keys) | {"moe": moe if method == "greedy" else replace(moe, groups=_groups(keys, moe))}


def _deepseek_v3(keys: ConfigKeys) -> dict[str, Any]:
    return _scaled_latent(keys) | {"moe": _sigmoid_moe(keys)}


def _glm4_moe(keys: ConfigKeys) -> dict[str, Any]:
    qk_norm = "head" if keys.flag("use_qk_norm") else None
    return {"moe": _sigmoid_moe(keys), "qkv_bias": keys.flag("attention_bias"), "qk_norm": qk_norm}


def _mistral4(keys: ConfigKeys) -> dict[str, Any]:
    keys.only({"n_group": (1,)})
    return _scaled_latent(keys) | {"moe": _routed(keys)}


def _hunyuan_moe(keys: ConfigKeys) -> dict[str, Any]:
    inner = keys.size("intermediate_size")
    counts = {name: _of_all_layers(keys, name) for name in ("num_experts", "num_experts_per_tok")}
    moe = moe_spec(ConfigKeys(counts, {}, keys.family), "num_experts", inner, norm_top_k=True)
    return {"moe": replace(moe, shared=inner)}


def _of_all_layers(keys: ConfigKeys, name: str) -> Any:
    """A value that may be given for each layer, where it is the same in all."""
    value = keys.get(name)
    if not isinstance(value, list) or not value:
        return value
    if value.count(value[0]) != len(value):
        raise UnsupportedModelError(f"{keys.family}: {name} that differs from layer to layer is not implemented")
    return value[0]


def _minimax_m2(keys: ConfigKeys) -> dict[str, Any]:
    keys.only({"scoring_func": ("sigmoid",), "norm_topk_prob": (True,)})
    keys.only({"use_qk_norm": (True,), "shared_intermediate_size": (0,)})
    return {"moe": replace(_mixtral(keys)["moe"], sigmoid=True)}


def _ernie4_5_moe(keys: ConfigKeys) -> dict[str, Any]:
    keys.only({"use_bias": (False,), "moe_layer_end_index": (-1, keys.size("num_hidden_layers") - 1)})
    inner = keys.size("moe_intermediate_size")
    moe = moe_spec(keys, "num_experts", inner, norm_top_k=True)
    return {"moe": replace(moe, biased_choice=True, shared=inner * keys.count("moe_num_shared_experts"))}


def _sigmoid_moe(keys: ConfigKeys) -> MoeSpec:
    """The mixture of DeepSeek-V3, and of those that follow it."""
    keys.only({"moe_layer_freq": (1,), "scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)})
    moe = _routed(keys)
    return replace(moe, groups=_groups(keys, moe), sigmoid=True)


def _routed(keys: ConfigKeys) -> MoeSpec:
    """DeepSeek's experts, with an MLP beside them that is as wide as some of them."""
    inner = keys.size("moe_intermediate_size")
    return replace(
        moe_spec(keys, "n_routed_experts", inner, norm_top_k=keys.flag("norm_topk_prob")),
        shared=inner * keys.count("n_shared_experts") if keys.given("n_shared_experts") else 0,
        scaling=keys.positive("routed_scaling_factor"),
    )


def _groups(keys: ConfigKeys, moe: MoeSpec) -> tuple[int, int] | None:
    """See `MoeSpec.groups`; None for one group."""
    groups = expert_groups(keys, moe.experts)
    return None if groups[0] == 1 else groups


def _scaled_latent(keys: ConfigKeys) -> dict[str, Any]:
    """Latent attention, its rotated dimensions in pairs of neighbours."""
    keys.only({"attention_bias": (False,), "rope_interleave": (True,)})
    fields = latent_fields(keys)
    latent = fields["latent"]
    rope = replace(rope_spec(keys, latent.nope + latent.rope), dims=latent.rope, interleaved=True)
    scale = fields["attention_scale"] * _length_scale(rope) ** 2
    return fields | {"attention_scale": scale, "ropes": {"default": rope}}


def _length_scale(rope: RopeSpec) -> float:
    """What DeepSeek multiplies queries and keys by where the context is stretched."""
    scaling: Any = rope.scaling
    factor, share = float(scaling.get("factor") or 1.0), float(scaling.get("mscale_all_dim") or 0.0)
    return 1.0 if factor <= 1 else 1.0 + 0.1 * share * math.log(factor)


QWEN = {"max_position_embeddings": 32768, "use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}
_MIXTRAL = {"rms_norm_eps": 1e-5, "rope_theta": 1e6, "max_position_embeddings": 131072, "num_key_value_heads": 8}
_MIXTRAL_MOE = {"num_local_experts": 8, "num_experts_per_tok": 2}
_QWEN3_MOE = {"num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
_QWEN2_MOE = {"num_key_value_heads": 16, "num_experts": 60, "num_experts_per_tok": 4, "qkv_bias": True}
_QWEN2_MOE |= {"moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632}
_GPT_OSS_ROPE = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
_GPT_OSS = {
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "head_dim": 64,
    "num_key_value_heads": 8,
    "sliding_window": 128,
    "sliding_window_pattern": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150000.0,
    "rope_parameters": _GPT_OSS_ROPE | {"original_max_position_embeddings": 4096},
    "max_position_embeddings": 131072,
    "attention_bias": True,
    "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
}
_DEEPSEEK_V2 = {
    "first_k_dense_replace": 0,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "moe_intermediate_size": 1407,
    "routed_scaling_factor": 1.0,
    "topk_method": "greedy",
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
_DEEPSEEK_V3 = {
    "max_position_embeddings": 4096,
    "num_key_value_heads": 128,
    "first_k_dense_replace": 3,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "topk_group": 4,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
_GLM4_MOE = {
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072,
    "num_key_value_heads": 8,
    "partial_rotary_factor": 0.5,
    "first_k_dense_replace": 1,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
}
_GLM4_MOE_LITE = {
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 202752,
    "num_key_value_heads": 20,
    "first_k_dense_replace": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1536,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.8,
    "kv_lora_rank": 512,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "v_head_dim": 256,
}
MINISTRAL_ROPE = {"rope_type": "yarn", "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}
MINISTRAL_ROPE |= {"llama_4_scaling_beta": 0.1}
_MISTRAL4 = {
    "max_position_embeddings": 1048576,
    "rope_parameters": MINISTRAL_ROPE | {"factor": 128.0, "original_max_position_embeddings": 8192},
    "num_key_value_heads": 32,
    "first_k_dense_replace": 0,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 2048,
    "n_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "kv_lora_rank": 256,
    "q_lora_rank": 1024,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
HUNYUAN_NAMES: Rename = (
    (re.compile(r"\.query_layernorm\."), ".q_norm."),
    (re.compile(r"\.key_layernorm\."), ".k_norm."),
    (re.compile(r"\.mlp\.gate\.wg\."), ".mlp.gate."),
    (re.compile(r"\.mlp\.shared_mlp\."), ".mlp.shared_experts."),
)
_MINIMAX_M2 = {
    "head_dim": 128,
    "num_key_value_heads": 8,
    "rope_theta": 5e6,
    "rotary_dim": None,
    "max_position_embeddings": 196608,
    "num_local_experts": 256,
    "num_experts_per_tok": 8,
}
_ERNIE4_5_MOE = {
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
    "num_experts": 64,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 1536,
    "moe_num_shared_experts": 2,
    "first_k_dense_replace": 1,
}
_ERNIE4_5_MOE_KEYS = {
    "moe_num_experts": "num_experts",
    "moe_k": "num_experts_per_tok",
    "moe_layer_start_index": "first_k_dense_replace",
    "moe_layer_interval": "decoder_sparse_step",
}
_ERNIE4_5_MOE_NAMES: Rename = ((re.compile(r"\.mlp\.(gate\.)?moe_statics\."), ".mlp.gate."),)
_MINIMAX_NAMES: Rename = (
    (re.compile(r"\.(mlp|block_sparse_moe)\.e_score_correction_bias$"), ".mlp.gate.e_score_correction_bias"),
)

MIXTURE_FAMILIES: Mapping[str, ModelFamily] = {
    "mixtral": ModelFamily(defaults=_MIXTRAL | _MIXTRAL_MOE, windows="all", attention_bias="no", extra=_mixtral),
    "qwen3_moe": ModelFamily(defaults=QWEN | _QWEN3_MOE, qk_norm="head", windows="all", extra=_qwen3_moe),
    "qwen2_moe": ModelFamily(defaults=QWEN | _QWEN2_MOE, attention_bias="no", extra=_qwen2_moe),
    "gpt_oss": ModelFamily(defaults=_GPT_OSS, windows="types", extra=_gpt_oss),
    "deepseek_v2": ModelFamily(defaults=_DEEPSEEK_V2, attention_bias="no", extra=_deepseek_v2),
    "deepseek_v3": ModelFamily(defaults=_DEEPSEEK_V3, attention_bias="no", extra=_deepseek_v3),
    "glm4_moe": ModelFamily(defaults=_GLM4_MOE, attention_bias="no", extra=_glm4_moe),
    "glm4_moe_lite": ModelFamily(defaults=_GLM4_MOE_LITE, attention_bias="no", extra=_deepseek_v3),
    "mistral4": ModelFamily(defaults=_MISTRAL4, attention_bias="no", extra=_mistral4),
    "minimax_m2": ModelFamily(
        names=_MINIMAX_NAMES, defaults=_MINIMAX_M2, qk_norm="full", attention_bias="no", extra=_minimax_m2
    ),
    "ernie4_5_moe": ModelFamily(
        keys=_ERNIE4_5_MOE_KEYS,
        names=_ERNIE4_5_MOE_NAMES,
        defaults=_ERNIE4_5_MOE,
        rope_interleaved=True,
        attention_bias="no",
        extra=_ernie4_5_moe,
    ),
    "hunyuan_v1_moe": ModelFamily(
        keys={"moe_topk": "num_experts_per_tok"},
        names=HUNYUAN_NAMES,
        defaults={"rms_norm_eps": 1e-5, "num_experts": 1, "num_experts_per_tok": 1},
        qk_norm="head",
        qk_norm_rotated=True,
        extra=_hunyuan_moe,
    ),
}
