"""Tiny, randomly initialised checkpoints of every native family, written by transformers itself and again by hand in
the old style.

A case is given by its name. The transformers model is the oracle; folders hold `config.json` and safetensors: *new* as
transformers 5 saves it; *old* with a hand-written config and key list of earlier hub files; *module* with the names and
fused tensors that the module itself has.

All parameters are perturbed, so that no norm is one and no bias zero, and logits differ by several units.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from paceline.checkpoints.families import FAMILIES, MULTIMODAL

Tensors = dict[str, torch.Tensor]
Rewrite = Callable[[Tensors], Tensors]

SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
OLD = SIZES | {"torch_dtype": "float32", "transformers_version": "4.40.0", "use_cache": True, "initializer_range": 0.02}

SHORT_FACTOR, LONG_FACTOR = [1.0, 1.1, 1.3, 1.6], [1.5, 2.5, 4.0, 9.0]
LLAMA3 = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
YARN = {"factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 4.0, "beta_slow": 1.0}
LONGROPE = {"short_factor": SHORT_FACTOR, "long_factor": LONG_FACTOR}


def same(tensors: Tensors) -> Tensors:
    return tensors


def with_buffers(tensors: Tensors) -> Tensors:
    """Files of the Llama 2 era hold the rotary frequencies of each layer."""
    return tensors | {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(8) for i in range(3)}


def with_head(tensors: Tensors) -> Tensors:
    """Some files hold the head although it is tied."""
    return tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}


def mixtral_keys(tensors: Tensors) -> Tensors:
    """One tensor an expert, under block_sparse_moe."""
    out: Tensors = {}
    for name, tensor in tensors.items():
        layer, _, rest = name.partition(".mlp.")
        if rest == "gate.weight":
            out[f"{layer}.block_sparse_moe.gate.weight"] = tensor
        elif rest == "experts.gate_up_proj":
            for expert, (w1, w3) in enumerate(t.chunk(2) for t in tensor):
                out[f"{layer}.block_sparse_moe.experts.{expert}.w1.weight"] = w1.contiguous()
                out[f"{layer}.block_sparse_moe.experts.{expert}.w3.weight"] = w3.contiguous()
        elif rest == "experts.down_proj":
            for expert, w2 in enumerate(tensor):
                out[f"{layer}.block_sparse_moe.experts.{expert}.w2.weight"] = w2.contiguous()
        else:
            out[name] = tensor
    return out


def qwen_moe_keys(tensors: Tensors) -> Tensors:
    """One tensor an expert, under mlp.experts."""
    renamed = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
    out: Tensors = {}
    for name, tensor in mixtral_keys(tensors).items():
        stem, _, kind = name.removesuffix(".weight").rpartition(".")
        short = f"{stem}.{renamed[kind]}.weight" if kind in renamed else name
        out[short.replace(".block_sparse_moe.", ".mlp.")] = tensor
    return out


def language_model_keys(tensors: Tensors) -> Tensors:
    """The text part of a multimodal file of the time before transformers 4.52."""
    short = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    return {re.sub(r"^language_model\.", "language_model.model.", name): tensor for name, tensor in short.items()}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One checkpoint.

    Attributes:
        model_type: of the family.
        new: keyword arguments of the configuration of transformers, in today's names.
        old: what an older `config.json` says, written by hand; of `OLD`, what its family calls otherwise.
        keys: turns the module's tensors into an older file's.
        oracle: gives the class of the transformers model that computes the same, where transformers lacks the family;
            then all files are those of `old` and `keys`.
        afresh: the oracle's logits behind a cache are not those of one pass over the text, which ours are compared with
            then: with longrope tokens are read again by `generate`, and Bamba counts their positions from 0 again where
            nobody says them.
        by_length: the rotary angles depend on the length, so that a cache remembers how it was filled.
        tolerance: of logits; the delta rule amplifies rounding, in transformers as here.
    """

    model_type: str
    new: Mapping[str, Any] = field(default_factory=dict)
    old: Mapping[str, Any] = field(default_factory=dict)
    keys: Rewrite = same
    oracle: Callable[[], Any] | None = None
    afresh: bool = False
    by_length: bool = False
    tolerance: float = 1e-4


def _rope(kind: str, theta: float = 10000.0, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **more}}


def _text(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: value
        for key, value in config.items()
        if key not in {"torch_dtype", "transformers_version", "architectures"}
    }


_GEMMA = {"head_dim": 24, "query_pre_attn_scalar": 20, "sliding_window": 8, "hidden_activation": "gelu_pytorch_tanh"}
_GEMMA3_ROPE = {
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    }
}
_GEMMA3_OLD = _GEMMA | {
    "rope_theta": 5000.0,
    "rope_local_base_freq": 100.0,
    "rope_scaling": {"rope_type": "linear", "factor": 4.0},
    "sliding_window_pattern": 2,
}
_GEMMA3_TYPES = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
_QWEN_MOE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "head_dim": 16}
_GRANITE = {"embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.1, "logits_scaling": 0.5}
_COHERE2 = {"sliding_window": 8, "logit_scale": 0.5, "tie_word_embeddings": True}
_GLM4 = {"head_dim": 24, "partial_rotary_factor": 0.5, "attention_bias": True}
_GPT_OSS = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "sliding_window": 8}
_PHI3 = {"original_max_position_embeddings": 32}
_PHI4_MINI = _PHI3 | {"hidden_size": 128, "num_attention_heads": 1, "num_key_value_heads": 1}
_PHI4_MINI |= {"sliding_window": 262144, "tie_word_embeddings": True}
_PHI4_MINI_FACTORS = {"short_factor": [1.0] * 48, "long_factor": [1.0 + i / 8 for i in range(48)]}

CASES: dict[str, Case] = {
    "llama": Case(
        model_type="llama",
        new={"tie_word_embeddings": False} | _rope("default", 500.0),
        old={"rope_theta": 500.0, "rope_scaling": None, "pretraining_tp": 1},
        keys=with_buffers,
    ),
    "llama3": Case(
        model_type="llama",
        new={"attention_bias": True, "mlp_bias": True, "head_dim": 24, "tie_word_embeddings": True}
        | _rope("llama3", **LLAMA3),
        old={"attention_bias": True, "mlp_bias": True, "head_dim": 24, "tie_word_embeddings": True}
        | {"rope_theta": 10000.0, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
        keys=with_head,
    ),
    "llama-linear": Case(
        model_type="llama", new=_rope("linear", factor=3.0), old={"rope_scaling": {"type": "linear", "factor": 3.0}}
    ),
    "llama-dynamic": Case(
        model_type="llama",
        new={"max_position_embeddings": 32} | _rope("dynamic", factor=2.0),
        old={"max_position_embeddings": 32, "rope_scaling": {"type": "dynamic", "factor": 2.0}},
        by_length=True,
    ),
    "llama-yarn": Case(model_type="llama", new=_rope("yarn", **YARN), old={"rope_scaling": {"type": "yarn", **YARN}}),
    "mistral": Case(model_type="mistral", new={"sliding_window": 8}, old={"sliding_window": 8, "rope_theta": 10000.0}),
    "qwen2": Case(
        model_type="qwen2",
        new={"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1, "tie_word_embeddings": True}
        | _rope("default", 1e4),
        old={"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1, "tie_word_embeddings": True},
        keys=with_head,
    ),
    "qwen3": Case(
        model_type="qwen3",
        new={"head_dim": 24} | _rope("default", 1e6),
        old={
            "head_dim": 24,
            "rope_theta": 1e6,
            "attention_bias": False,
            "sliding_window": None,
            "max_window_layers": 3,
        },
    ),
    "gemma2": Case(
        model_type="gemma2",
        new=_GEMMA | {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 10.0},
        old=_GEMMA
        | {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 10.0, "hidden_act": "gelu_pytorch_tanh"},
    ),
    "gemma3_text": Case(model_type="gemma3_text", new=_GEMMA | _GEMMA3_TYPES | _GEMMA3_ROPE, old=_GEMMA3_OLD),
    "gemma3": Case(
        model_type="gemma3",
        new={"text_config": SIZES | _GEMMA | _GEMMA3_TYPES | _GEMMA3_ROPE},
        old={"text_config": _text(OLD) | _GEMMA3_OLD | {"model_type": "gemma3_text"}, "torch_dtype": "float32"},
        keys=language_model_keys,
    ),
    "phi3": Case(
        model_type="phi3",
        new={"sliding_window": 8} | _rope("default", partial_rotary_factor=0.5),
        old={"sliding_window": 8, "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5},
    ),
    "phi3-longrope": Case(
        model_type="phi3",
        new=_PHI3 | _rope("longrope", partial_rotary_factor=0.5, **LONGROPE),
        old=_PHI3
        | {"rope_theta": 10000.0, "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5}
        | {"rope_scaling": {"type": "su", **LONGROPE}, "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"}},
        afresh=True,
        by_length=True,
    ),
    "phi3-mini": Case(
        model_type="phi3",
        new=_PHI4_MINI | _rope("longrope", partial_rotary_factor=0.75, **_PHI4_MINI_FACTORS),
        old=_PHI4_MINI
        | {"rope_theta": 10000.0, "partial_rotary_factor": 0.75, "rms_norm_eps": 1e-5, "attention_bias": False}
        | {"rope_scaling": {"type": "longrope", **_PHI4_MINI_FACTORS}, "full_attn_mod": 1, "interpolate_factor": 1}
        | {"lm_head_bias": False, "mlp_bias": False},
        keys=with_head,
        afresh=True,
        by_length=True,
    ),
    "smollm3": Case(
        model_type="smollm3",
        new={"no_rope_layer_interval": 2, "tie_word_embeddings": True} | _rope("default", 5e3),
        old={"no_rope_layers": [1, 0, 1], "no_rope_layer_interval": 2, "tie_word_embeddings": True}
        | {
            "rope_theta": 5e3,
            "max_window_layers": 28,
            "use_sliding_window": False,
            "layer_types": ["full_attention"] * 3,
        },
    ),
    "olmo2": Case(model_type="olmo2", old={"rope_theta": 10000.0, "rms_norm_eps": 1e-5}),
    "granite": Case(model_type="granite", new=_GRANITE, old=_GRANITE | {"rope_theta": 10000.0, "rope_scaling": None}),
    "mixtral": Case(
        model_type="mixtral",
        new={"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8} | _rope("default", 1e6),
        old={
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 8,
            "rope_theta": 1e6,
            "rms_norm_eps": 1e-5,
        },
        keys=mixtral_keys,
    ),
    "qwen3_moe": Case(
        model_type="qwen3_moe",
        new=_QWEN_MOE | {"norm_topk_prob": True, "decoder_sparse_step": 2},
        old=_QWEN_MOE
        | {"norm_topk_prob": True, "decoder_sparse_step": 2, "mlp_only_layers": [], "rope_theta": 10000.0},
        keys=qwen_moe_keys,
    ),
    "qwen3_moe-unnormed": Case(
        model_type="qwen3_moe",
        new=_QWEN_MOE
        | {"norm_topk_prob": False, "mlp_only_layers": [1], "use_sliding_window": True, "sliding_window": 8},
        old=_QWEN_MOE
        | {"mlp_only_layers": [1], "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
        keys=qwen_moe_keys,
    ),
}
CASES |= {
    "starcoder2": Case(
        model_type="starcoder2",
        new={"sliding_window": 8, "tie_word_embeddings": True} | _rope("default", 500.0),
        old={"sliding_window": 8, "rope_theta": 500.0, "norm_epsilon": 1e-5, "use_bias": True}
        | {"hidden_act": "gelu_pytorch_tanh", "mlp_type": "default", "norm_type": "layer_norm"},
        keys=with_head,
    ),
    "starcoder2-full": Case(
        model_type="starcoder2",
        new={"use_bias": False, "tie_word_embeddings": False},
        old={"use_bias": False, "tie_word_embeddings": False, "rope_theta": 10000.0},
    ),
    "glm4": Case(
        model_type="glm4",
        new=_GLM4 | _rope("default", 500.0, partial_rotary_factor=0.5),
        old=_GLM4 | {"rope_theta": 500.0, "rms_norm_eps": 1.5625e-07},
    ),
    "cohere2": Case(
        model_type="cohere2",
        new=_COHERE2 | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
        old=_COHERE2 | {"sliding_window_pattern": 2, "rope_theta": 10000.0, "layer_norm_eps": 1e-5},
    ),
    "gpt_oss": Case(
        model_type="gpt_oss",
        new=_GPT_OSS | {"swiglu_limit": 1.5} | _rope("yarn", 150.0, truncate=False, **YARN),
        old=_GPT_OSS
        | {"swiglu_limit": 1.5, "rope_theta": 150.0, "rope_scaling": {"rope_type": "yarn", "truncate": False, **YARN}},
    ),
}
_LATENT = {"kv_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 20}
_LATENT |= {"num_key_value_heads": 4, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
_LATENT_ROPE = {"factor": 8.0, "original_max_position_embeddings": 8, "mscale": 0.9, "mscale_all_dim": 0.7}
_GROUPS = {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.5}
CASES |= {
    "deepseek_v2": Case(
        model_type="deepseek_v2",
        new=_LATENT | {"q_lora_rank": None, "first_k_dense_replace": 1} | _rope("yarn", 500.0, **_LATENT_ROPE),
        old=_LATENT
        | {"q_lora_rank": None, "first_k_dense_replace": 1, "moe_layer_freq": 1, "n_shared_experts": 2}
        | {"norm_topk_prob": False, "scoring_func": "softmax", "topk_method": "greedy", "n_group": 1, "topk_group": 1}
        | {"rope_theta": 500.0, "rope_scaling": {"type": "yarn", **_LATENT_ROPE}},
        keys=qwen_moe_keys,
    ),
    "deepseek_v2-groups": Case(
        model_type="deepseek_v2",
        new=_LATENT | _GROUPS | {"q_lora_rank": 28, "n_shared_experts": 1},
        old=_LATENT | _GROUPS | {"q_lora_rank": 28, "n_shared_experts": 1, "rope_theta": 10000.0},
        keys=qwen_moe_keys,
    ),
}
_SHARED = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "decoder_sparse_step": 2}
_SHARED |= {"shared_expert_intermediate_size": 56, "norm_topk_prob": False}
CASES["qwen2_moe"] = Case(
    model_type="qwen2_moe",
    new=_SHARED | _rope("default", 500.0),
    old=_SHARED | {"rope_theta": 500.0, "output_router_logits": False},
    keys=qwen_moe_keys,
)


def _qwen2_class() -> Any:
    from transformers import Qwen2ForCausalLM

    return Qwen2ForCausalLM


CASES["mimo"] = Case(
    model_type="mimo",
    oracle=_qwen2_class,
    new={"tie_word_embeddings": False} | _rope("default", 640.0),
    old={"attention_bias": True, "rope_theta": 640.0, "rope_scaling": None, "use_mrope": False, "head_dim": 16}
    | {"use_sliding_window": False, "sliding_window": None, "max_window_layers": 3, "num_nextn_predict_layers": 1},
)
_DEEPSEEK_V3 = {"kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 64, "q_lora_rank": 32}
_DEEPSEEK_V3 |= {"num_key_value_heads": 4, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
_DEEPSEEK_V3 |= {"n_group": 4, "topk_group": 2, "first_k_dense_replace": 1}
CASES["deepseek_v3"] = Case(
    model_type="deepseek_v3",
    new=_DEEPSEEK_V3 | _rope("yarn", 500.0, **_LATENT_ROPE),
    old=_DEEPSEEK_V3
    | {"n_shared_experts": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5, "moe_layer_freq": 1}
    | {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "num_nextn_predict_layers": 1}
    | {"rope_theta": 500.0, "rope_scaling": {"type": "yarn", **_LATENT_ROPE}},
    keys=qwen_moe_keys,
)
_GLM4_MOE = {"head_dim": 64, "attention_bias": True, "use_qk_norm": True, "n_routed_experts": 6}
_GLM4_MOE |= {
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "n_shared_experts": 2,
    "routed_scaling_factor": 1.5,
}
CASES["glm4_moe"] = Case(
    model_type="glm4_moe",
    new=_GLM4_MOE | _rope("default", 500.0, partial_rotary_factor=0.5),
    old=_GLM4_MOE
    | {"n_group": 1, "topk_group": 1, "norm_topk_prob": True, "partial_rotary_factor": 0.5}
    | {"rope_theta": 500.0, "rope_scaling": None, "rms_norm_eps": 1e-5, "first_k_dense_replace": 1},
    keys=qwen_moe_keys,
)
_GLM4_MOE_LITE = {key: value for key, value in _DEEPSEEK_V3.items() if key != "first_k_dense_replace"}
CASES["glm4_moe_lite"] = Case(
    model_type="glm4_moe_lite",
    new=_GLM4_MOE_LITE | {"mlp_layer_types": ["sparse", "dense", "sparse"]} | _rope("default", 500.0),
    old=_GLM4_MOE_LITE
    | {"n_shared_experts": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.8, "topk_method": "noaux_tc"}
    | {"rope_theta": 500.0, "rope_scaling": None, "rms_norm_eps": 1e-5, "mlp_only_layers": [1]}
    | {"first_k_dense_replace": 0, "num_nextn_predict_layers": 1, "partial_rotary_factor": 1.0},
    keys=qwen_moe_keys,
)
_MINISTRAL_ROPE = YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.4}
CASES["ministral3"] = Case(
    model_type="ministral3",
    new={"head_dim": 32} | _rope("yarn", 500.0, **_MINISTRAL_ROPE),
    old={"head_dim": 32, "rope_theta": 500.0, "rope_scaling": {"type": "yarn", **_MINISTRAL_ROPE}}
    | {"rms_norm_eps": 1e-5, "sliding_window": None},
)
_MISTRAL4 = {key: value for key, value in _DEEPSEEK_V3.items() if key not in ("n_group", "topk_group")}
CASES["mistral4"] = Case(
    model_type="mistral4",
    new=_MISTRAL4 | _rope("yarn", 500.0, **_MINISTRAL_ROPE),
    old=_MISTRAL4
    | {"n_group": 1, "topk_group": 1, "norm_topk_prob": True, "n_shared_experts": 1}
    | {"rope_theta": 500.0, "rope_scaling": {"type": "yarn", **_MINISTRAL_ROPE}},
    keys=qwen_moe_keys,
)
_WIDE_HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}
_OLMO3 = _WIDE_HEADS | {"sliding_window": 8}
_OLMO3 |= {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
_OLMO3_ROPE = {"full_attention": {"rope_type": "yarn", "rope_theta": 500000.0, **YARN}}
_OLMO3_ROPE |= {"sliding_attention": {"rope_type": "default", "rope_theta": 500000.0}}
CASES["olmo3"] = Case(
    model_type="olmo3",
    new=_OLMO3 | {"rope_parameters": _OLMO3_ROPE},
    old=_OLMO3 | {"rope_theta": 500000.0, "rope_scaling": {"rope_type": "yarn", **YARN}, "rms_norm_eps": 1e-5},
)
CASES["exaone4"] = Case(
    model_type="exaone4",
    new=_OLMO3 | _rope("llama3", **LLAMA3),
    old=_WIDE_HEADS
    | {"sliding_window": 8, "sliding_window_pattern": 2, "rms_norm_eps": 1e-5}
    | {"rope_theta": 10000.0, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
)
CASES["ernie4_5"] = Case(
    model_type="ernie4_5",
    new={"head_dim": 32, "use_bias": True} | _rope("default", 500.0),
    old={"head_dim": 32, "use_bias": True, "rope_theta": 500.0, "rms_norm_eps": 1e-5, "tie_word_embeddings": True},
    keys=with_head,
)
_HUNYUAN = {"head_dim": 32, "attention_bias": True}
_HUNYUAN_ROPE = {"type": "dynamic", "alpha": 8.0, "beta_fast": 32, "beta_slow": 1, "factor": 1.0, "mscale": 1.0}
_HUNYUAN_MOE = {"head_dim": 32, "num_experts": 6, "moe_topk": 2}
CASES["hunyuan_v1_dense"] = Case(
    model_type="hunyuan_v1_dense",
    new=_HUNYUAN | _rope("dynamic", 500.0, alpha=8.0, factor=1.0),
    old=_HUNYUAN | {"rope_theta": 500.0, "rope_scaling": _HUNYUAN_ROPE, "rms_norm_eps": 1e-5, "use_qk_norm": True},
)
CASES["hunyuan_v1_moe"] = Case(
    model_type="hunyuan_v1_moe",
    new=_HUNYUAN_MOE | _rope("default", 500.0),
    old=_HUNYUAN_MOE
    | {"moe_topk": [2, 2, 2], "moe_intermediate_size": [96] * 3, "num_shared_expert": [1] * 3}
    | {"rope_theta": 500.0, "rms_norm_eps": 1e-5},
    keys=qwen_moe_keys,
)
_ERNIE_MOE = {"head_dim": 32, "moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 40, "use_bias": False}
_ERNIE_MOE |= {"moe_num_shared_experts": 2, "moe_layer_start_index": 1}


def ernie_moe_keys(tensors: Tensors) -> Tensors:
    """One tensor an expert, and what ranks them beside the router."""
    return {name.replace(".gate.moe_statics.", ".moe_statics."): one for name, one in qwen_moe_keys(tensors).items()}


CASES["ernie4_5_moe"] = Case(
    model_type="ernie4_5_moe",
    new=_ERNIE_MOE | _rope("default", 500.0),
    old=_ERNIE_MOE
    | {"rope_theta": 500.0, "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "moe_use_aux_free": True}
    | {"moe_layer_end_index": 2, "moe_layer_interval": 1, "moe_gate": "topk", "moe_norm_min": 1e-12},
    keys=ernie_moe_keys,
)
CASES["apertus"] = Case(
    model_type="apertus",
    new=_WIDE_HEADS | {"attention_bias": True} | _rope("llama3", 500.0, **LLAMA3),
    old=_WIDE_HEADS
    | {"attention_bias": True, "rms_norm_eps": 1e-5, "hidden_act": "xielu", "mlp_bias": False, "post_norm": False}
    | {"rope_theta": 500.0, "rope_scaling": {"rope_type": "llama3", **LLAMA3}, "qk_norm": True},
)
_SEED_OSS = {"head_dim": 32, "attention_out_bias": True, "mlp_bias": True}
CASES["seed_oss"] = Case(
    model_type="seed_oss",
    new=_SEED_OSS | _rope("default", 500.0),
    old=_SEED_OSS | {"attention_bias": True, "rope_theta": 500.0, "rope_scaling": {"rope_type": "default"}},
)
_MINIMAX = {"head_dim": 64, "num_local_experts": 6, "num_experts_per_tok": 2, "rotary_dim": 32}


def minimax_keys(tensors: Tensors) -> Tensors:
    """One tensor an expert, and all within `block_sparse_moe`."""
    return {name.replace(".mlp.", ".block_sparse_moe."): one for name, one in mixtral_keys(tensors).items()}


CASES["minimax_m2"] = Case(
    model_type="minimax_m2",
    new=_MINIMAX | _rope("default", 500.0),
    old=_MINIMAX | {"rope_theta": 500.0, "scoring_func": "sigmoid", "use_qk_norm": True, "use_routing_bias": True},
    keys=minimax_keys,
)
_LFM2 = {"layer_types": ["conv", "full_attention", "conv"], "block_multiple_of": 32, "conv_L_cache": 4}
_LFM2_OLD = {"full_attn_idxs": [1], "block_ff_dim": 96, "block_multiple_of": 32, "conv_L_cache": 4}
_LFM2_MOE = {"layer_types": ["conv", "full_attention", "conv"], "conv_L_cache": 3, "num_dense_layers": 1}
_LFM2_MOE |= {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
_DELTA = {"head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16}
_DELTA |= {"linear_value_head_dim": 24}
_DELTA_TYPES = {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
_DELTA_OLD = {"full_attention_interval": 2, "partial_rotary_factor": 0.25, "rope_theta": 500.0}
_DELTA_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_DELTA_MOE |= {"shared_expert_intermediate_size": 48}
_QUARTER = _rope("default", 500.0, partial_rotary_factor=0.25)
_LIGHT_NET = {"expand_ratio": 16, "gate_low_rank_dim": 12, "norm_eps": 1e-5, "tie_word_embeddings": False}
_KIMI = {"kv_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 20, "num_experts": 8}
_KIMI |= {"moe_intermediate_size": 24, "num_shared_experts": 2, "num_expert_group": 4, "topk_group": 2}
_KIMI |= {"num_experts_per_token": 3, "routed_scaling_factor": 1.5, "num_key_value_heads": 4, "model_max_length": 64}
_KIMI_OLD = _KIMI | {"mla_use_nope": True, "moe_router_activation_func": "sigmoid", "moe_layer_freq": 1, "head_dim": 24}
_KIMI_OLD |= {"rope_theta": 10000.0, "rope_scaling": None, "rms_norm_eps": 1e-5, "moe_renormalize": True}
_KIMI_MIXER = {"full_attn_layers": [2], "kda_layers": [1, 3], "head_dim": 12, "num_heads": 3}
_KIMI_MIXER |= {"short_conv_kernel_size": 3}
_MAMBA2 = {"mamba_n_heads": 8, "mamba_d_state": 16, "mamba_n_groups": 2}
_HYBRID = {"layer_types": ["mamba", "attention", "mamba"], "shared_intermediate_size": 96}
_HYBRID_OLD = {"layers_block_type": ["mamba", "attention", "mamba"], "shared_intermediate_size": 96}
_HYBRID_MOE = {"num_local_experts": 4, "num_experts_per_tok": 2, "position_embedding_type": "rope"}
_FALCON = {"mamba_d_ssm": 128, "mlp_multipliers": [0.7, 1.3], "ssm_multipliers": [0.5, 0.7, 1.1, 1.3, 0.9]}
_FALCON |= {"ssm_in_multiplier": 1.2, "ssm_out_multiplier": 0.8, "key_multiplier": 0.6, "attention_in_multiplier": 1.1}
_FALCON |= {"attention_out_multiplier": 0.9, "lm_head_multiplier": 1.5, "embedding_multiplier": 2.0}
_FALCON_NORM = {"mamba_d_ssm": 128, "mamba_rms_norm": True, "mamba_norm_before_gate": False, "projectors_bias": True}
_FALCON_PLAIN = {"mamba_d_ssm": None, "mamba_rms_norm": True, "mamba_conv_bias": False}


def lfm2_moe_keys(tensors: Tensors) -> Tensors:
    """One tensor an expert."""
    short = {name.replace(".feed_forward.", ".mlp."): tensor for name, tensor in tensors.items()}
    return {
        name.replace(".mlp.", ".feed_forward.").replace(".block_sparse_moe.", ".feed_forward."): tensor
        for name, tensor in mixtral_keys(short).items()
    }


def _light_net_class() -> Any:
    from models.lightnet_reference import LightNetForCausalLM

    return LightNetForCausalLM


def _sambay_class() -> Any:
    from models.sambay_reference import Phi4FlashForCausalLM

    return Phi4FlashForCausalLM


def kimi_keys(tensors: Tensors) -> Tensors:
    """Three convolutions, and one tensor an expert."""
    out: Tensors = {}
    for name, tensor in mixtral_keys(tensors).items():
        stem, mark, _ = name.partition("conv1d.weight")
        if mark:
            out |= {f"{stem}{part}_{mark}": one.contiguous() for part, one in zip("qkv", tensor.chunk(3), strict=True)}
        else:
            out[name.replace(".forget_gate.", ".")] = tensor
    return {re.sub(r"\.mlp\.(?=gate\.|shared_experts)", ".block_sparse_moe.", name): out[name] for name in out}


def granite_hybrid_keys(tensors: Tensors) -> Tensors:
    """Experts and router as Granite's files hold them."""
    old = {"experts.gate_up_proj": "input_linear.weight", "experts.down_proj": "output_linear.weight"}
    old |= {"router.weight": "router.layer.weight"}
    out: Tensors = {}
    for name, tensor in tensors.items():
        layer, mark, rest = name.partition(".block_sparse_moe.")
        out[f"{layer}{mark}{old.get(rest, rest)}"] = tensor
    return out


CASES |= {
    "lfm2": Case(
        model_type="lfm2",
        new=_LFM2 | _rope("default", 500.0),
        old=_LFM2_OLD | {"rope_theta": 500.0, "block_auto_adjust_ff_dim": True, "tie_embedding": True},
        keys=with_head,
    ),
    "lfm2-bias": Case(
        model_type="lfm2",
        new=_LFM2 | {"conv_bias": True, "block_auto_adjust_ff_dim": False, "tie_word_embeddings": False},
        old=_LFM2_OLD | {"conv_bias": True, "block_auto_adjust_ff_dim": False, "tie_embedding": False},
    ),
    "lfm2_moe": Case(
        model_type="lfm2_moe",
        new=_LFM2_MOE | {"routed_scaling_factor": 1.5} | _rope("default", 500.0),
        old=_LFM2_MOE | {"routed_scaling_factor": 1.5, "rope_theta": 500.0, "tie_embedding": True},
        keys=lfm2_moe_keys,
    ),
    "lfm2_moe-unnormed": Case(
        model_type="lfm2_moe",
        new=_LFM2_MOE | {"norm_topk_prob": False, "tie_word_embeddings": False},
        old=_LFM2_MOE | {"norm_topk_prob": False, "tie_embedding": False, "rope_theta": 1e6},
        keys=lfm2_moe_keys,
    ),
    "qwen3_next": Case(
        model_type="qwen3_next",
        tolerance=1e-3,
        new=_DELTA | _DELTA_MOE | _DELTA_TYPES | {"mlp_only_layers": [1]} | _QUARTER,
        old=_DELTA | _DELTA_MOE | _DELTA_OLD | {"mlp_only_layers": [1], "norm_topk_prob": True},
        keys=qwen_moe_keys,
    ),
    "qwen3_5_text": Case(
        model_type="qwen3_5_text", tolerance=1e-3, new=_DELTA | _DELTA_TYPES | _QUARTER, old=_DELTA | _DELTA_OLD
    ),
    "qwen3_5_moe_text": Case(
        model_type="qwen3_5_moe_text",
        tolerance=1e-3,
        new=_DELTA | _DELTA_MOE | _DELTA_TYPES | _QUARTER,
        old=_DELTA | _DELTA_MOE | _DELTA_OLD,
        keys=qwen_moe_keys,
    ),
    "kimi_linear": Case(
        model_type="kimi_linear",
        tolerance=1e-3,
        new=_KIMI
        | {"linear_head_dim": 12, "linear_num_heads": 3, "linear_conv_kernel_dim": 3, "q_lora_rank": None}
        | {"layer_types": ["linear_attention", "full_attention", "linear_attention"]},
        old=_KIMI_OLD | {"q_lora_rank": None, "first_k_dense_replace": 1, "linear_attn_config": _KIMI_MIXER},
        keys=kimi_keys,
    ),
    "kimi_linear-ranked": Case(
        model_type="kimi_linear",
        tolerance=1e-3,
        new=_KIMI
        | {"linear_head_dim": 16, "linear_num_heads": 2, "q_lora_rank": 28, "num_hidden_layers": 5}
        | {"mlp_layer_types": ["sparse", "dense", "sparse", "dense", "sparse"], "num_experts_per_token": 1},
        old=_KIMI_OLD
        | {"linear_head_dim": 16, "linear_num_heads": 2, "q_lora_rank": 28, "num_hidden_layers": 5}
        | {"mlp_layer_types": ["sparse", "dense", "sparse", "dense", "sparse"], "num_experts_per_token": 1},
        keys=kimi_keys,
    ),
    "lightnet": Case(
        model_type="lightnet",
        afresh=True,
        oracle=_light_net_class,
        new=_LIGHT_NET,
        old=_LIGHT_NET | {"norm_eps": 1e-5, "hidden_act": "swish", "num_heads": None, "attn": None},
    ),
    "granitemoehybrid": Case(
        model_type="granitemoehybrid",
        new=_MAMBA2 | _HYBRID | _GRANITE | {"num_local_experts": 0},
        old=_MAMBA2 | _HYBRID_OLD | _GRANITE | {"num_local_experts": 0, "position_embedding_type": "nope"},
    ),
    "granitemoehybrid-moe": Case(
        model_type="granitemoehybrid",
        new=_MAMBA2 | _HYBRID | _HYBRID_MOE,
        old=_MAMBA2
        | _HYBRID_OLD
        | _HYBRID_MOE
        | {"rope_theta": 10000.0, "mamba_d_head": 16, "time_step_limit": [0.0, float("inf")]},
        keys=granite_hybrid_keys,
    ),
    "falcon_h1": Case(
        model_type="falcon_h1",
        new=_MAMBA2 | _FALCON | _rope("default", 500.0),
        old=_MAMBA2 | _FALCON | {"rope_theta": 500.0, "mamba_d_head": 16, "rms_norm_eps": 1e-5},
    ),
    "falcon_h1-normed": Case(
        model_type="falcon_h1",
        new=_MAMBA2 | _FALCON_NORM,
        old=_MAMBA2 | _FALCON_NORM | {"rope_theta": 10000.0, "mlp_multipliers": [1.0, 1.0]},
    ),
    "falcon_h1-gated": Case(
        model_type="falcon_h1", new=_MAMBA2 | _FALCON_PLAIN, old=_MAMBA2 | _FALCON_PLAIN | {"mamba_expand": 2}
    ),
}
_PURE_MAMBA = {"intermediate_size": 160, "state_size": 8, "time_step_rank": 5}
_PURE_MAMBA_OLD = _PURE_MAMBA | {"d_inner": 160, "d_model": 64, "n_layer": 3, "rms_norm": True, "ssm_cfg": {}}
_BAMBA_BIAS = {"attn_layer_indices": [0, 2], "attention_bias": True, "mlp_bias": True, "mamba_proj_bias": True}
_JAMBA = {"attn_layer_period": 3, "attn_layer_offset": 1, "num_experts": 4, "num_experts_per_tok": 2}
_JAMBA |= {"expert_layer_period": 2, "expert_layer_offset": 0, "mamba_d_state": 8}
_JAMBA_OLD = _JAMBA | {"mamba_dt_rank": 4, "mamba_inner_layernorms": True, "use_mamba_kernels": True}
_NEMOTRON = {"mamba_num_heads": 6, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 2, "head_dim": 24}
_NEMOTRON |= {"time_step_min": 1e-30}  # below which transformers takes no step in passes over more than one token
_NEMOTRON_OLD = _NEMOTRON | {"mlp_hidden_act": "relu2", "layer_norm_epsilon": 1e-5, "rms_norm_eps": 1e-2}
_NEMOTRON_OLD |= {"time_step_limit": [0.0, float("inf")], "use_bias": False, "conv_kernel": 4, "expand": 2}
_NEMOTRON_MOE = {"n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2, "use_bias": True}
_NEMOTRON_MOE |= {"moe_intermediate_size": 40, "moe_shared_expert_intermediate_size": 56, "routed_scaling_factor": 1.5}
_PURE_MAMBA2 = {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 2, "chunk_size": 16}
_SAMBAY = {"num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 4, "sliding_window": 8}
_SAMBAY |= {
    "tie_word_embeddings": True,
    "mb_per_layer": 2,
    "mamba_d_state": 8,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "layer_norm_eps": 1e-5,
}
_SAMBAY_OLD = _SAMBAY | {"hidden_act": "silu", "mlp_bias": False, "lm_head_bias": False}
_SAMBAY_OLD |= {"attention_dropout": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}


def jamba_keys(tensors: Tensors) -> Tensors:
    """One tensor an expert, beside the MLPs of other layers."""
    short = {name.replace(".feed_forward.", ".mlp."): tensor for name, tensor in tensors.items()}
    return {name.replace(".mlp.", ".feed_forward."): tensor for name, tensor in qwen_moe_keys(short).items()}


def backbone_keys(tensors: Tensors) -> Tensors:
    """One tensor an expert, and all within `backbone`."""
    out: Tensors = {}
    for name, tensor in tensors.items():
        stem, _, kind = name.rpartition(".")
        if stem.endswith(".experts"):
            out |= {f"{stem}.{expert}.{kind}.weight": one.contiguous() for expert, one in enumerate(tensor)}
        else:
            out[name] = tensor
    return {re.sub(r"^model\.", "backbone.", name): tensor for name, tensor in out.items()}


def early_mamba_keys(tensors: Tensors) -> Tensors:
    """The table's name in the first files."""
    return {name.replace("backbone.embeddings.", "backbone.embedding."): tensors[name] for name in tensors}


CASES |= {
    "bamba": Case(
        model_type="bamba",
        afresh=True,
        new=_MAMBA2 | {"attn_layer_indices": [1]} | _rope("default", 500.0),
        old=_MAMBA2 | {"attn_layer_indices": [1], "attn_rotary_emb": 8, "mamba_d_head": 16, "rope_theta": 500.0},
    ),
    "bamba-bias": Case(
        model_type="bamba",
        afresh=True,
        new=_MAMBA2 | _BAMBA_BIAS | _rope("default", partial_rotary_factor=0.5),
        old=_MAMBA2 | _BAMBA_BIAS | {"rms_norm_eps": 1e-5, "rope_theta": 10000.0},
    ),
    "jamba": Case(model_type="jamba", new=_JAMBA, old=_JAMBA_OLD, keys=jamba_keys),
    "jamba-dense": Case(
        model_type="jamba",
        new=_JAMBA | {"num_experts": 1, "mamba_proj_bias": True, "mamba_conv_bias": False},
        old=_JAMBA_OLD | {"num_experts": 1, "mamba_proj_bias": True, "mamba_conv_bias": False, "sliding_window": None},
    ),
    "nemotron_h": Case(
        model_type="nemotron_h",
        new=_NEMOTRON | {"layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention", "mlp"]},
        old=_NEMOTRON_OLD | {"hybrid_override_pattern": "M-*M-", "num_hidden_layers": 5},
        keys=backbone_keys,
    ),
    "nemotron_h-moe": Case(
        model_type="nemotron_h",
        new=_NEMOTRON
        | _NEMOTRON_MOE
        | {"layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "linear_attention"]},
        old=_NEMOTRON_OLD | _NEMOTRON_MOE | {"hybrid_override_pattern": "ME*-M", "num_hidden_layers": 5},
        keys=backbone_keys,
    ),
    "mamba": Case(model_type="mamba", new=_PURE_MAMBA, old=_PURE_MAMBA_OLD, keys=early_mamba_keys),
    "mamba-bias": Case(
        model_type="mamba",
        new={"intermediate_size": 128, "use_bias": True, "use_conv_bias": False, "tie_word_embeddings": False},
        old={"expand": 2, "use_bias": True, "use_conv_bias": False, "tie_word_embeddings": False}
        | {"intermediate_size": None, "time_step_rank": "auto", "state_size": 16},
    ),
    "falcon_mamba": Case(
        model_type="falcon_mamba",
        new=_PURE_MAMBA | {"mixer_rms_eps": 1e-3},
        old=_PURE_MAMBA | {"mixer_rms_eps": 1e-3, "use_mambapy": False, "layer_norm_epsilon": 1e-5},
    ),
    "mamba2": Case(model_type="mamba2", new=_PURE_MAMBA2, old=_PURE_MAMBA2 | {"expand": 2, "norm_before_gate": False}),
    "mamba2-bias": Case(
        model_type="mamba2",
        new=_PURE_MAMBA2 | {"use_bias": True, "use_conv_bias": False, "tie_word_embeddings": True},
        old=_PURE_MAMBA2 | {"use_bias": True, "use_conv_bias": False, "tie_word_embeddings": True},
    ),
    "phi4flash": Case(model_type="phi4flash", tolerance=1e-3, oracle=_sambay_class, new=_SAMBAY, old=_SAMBAY_OLD),
}
_WIDE_DELTA = {"head_dim": 128, "linear_value_head_dim": 32, "linear_key_head_dim": 32}
_WIDE_MAMBA2 = {"num_attention_heads": 2, "num_key_value_heads": 1, "mamba_d_state": 16}
WIDE: Mapping[str, Mapping[str, Any]] = {
    "starcoder2": {"num_attention_heads": 2, "num_key_value_heads": 1},
    "glm4": {"head_dim": 64},
    "cohere2": {"num_attention_heads": 2, "num_key_value_heads": 1},
    "gpt_oss": {"head_dim": 32},
    "qwen2_moe": {"num_attention_heads": 2, "num_key_value_heads": 1},
    "lfm2": {"num_attention_heads": 2, "num_key_value_heads": 1},
    "lfm2-bias": {"num_attention_heads": 2, "num_key_value_heads": 1},
    "qwen3_next": _WIDE_DELTA,
    "qwen3_5_text": _WIDE_DELTA,
    "granitemoehybrid": _WIDE_MAMBA2,
    "granitemoehybrid-moe": _WIDE_MAMBA2,
    "falcon_h1": _WIDE_MAMBA2,
    "falcon_h1-normed": _WIDE_MAMBA2,
    "falcon_h1-gated": _WIDE_MAMBA2,
    "bamba": _WIDE_MAMBA2 | {"num_attention_heads": 1},
}
"""Sizes that compiled passes take."""

COMPILED = (
    "phi3-mini",
    *(f"{name}-wide" for name in WIDE),
    "deepseek_v3",
    "glm4_moe",
    "glm4_moe_lite",
    "ministral3",
    "mistral4",
    "olmo3",
    "exaone4",
    "apertus",
    "ernie4_5",
    "ernie4_5_moe",
    "hunyuan_v1_dense",
    "hunyuan_v1_moe",
    "seed_oss",
    "minimax_m2",
)
"""Cases of such sizes."""

CASES |= {
    f"{name}-wide": replace(CASES[name], new={**CASES[name].new, **sizes}, old={**CASES[name].old, **sizes})
    for name, sizes in WIDE.items()
}
STYLES = ("new", "old", "module")
ARCHITECTURES = {
    "gemma3": "Gemma3ForConditionalGeneration",
    "gemma3_text": "Gemma3ForCausalLM",
    "ernie4_5": "Ernie4_5ForCausalLM",
    "ernie4_5_moe": "Ernie4_5_MoeForCausalLM",
    "hunyuan_v1_dense": "HunYuanDenseV1ForCausalLM",
    "minimax_m2": "MiniMaxM2ForCausalLM",
    "hunyuan_v1_moe": "HunYuanMoEV1ForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    "granitemoehybrid": "GraniteMoeHybridForCausalLM",
    "falcon_h1": "FalconH1ForCausalLM",
    "nemotron_h": "NemotronHForCausalLM",
    "phi4flash": "Phi4FlashForCausalLM",
    "mimo": "MiMoForCausalLM",
}


@cache
def oracle(name: str) -> Any:
    """The transformers model of a case, in float32, evaluating."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, Mistral4ForCausalLM

    case = CASES[name]
    if case.model_type == "gemma3":
        vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
        config = AutoConfig.for_model("gemma3", **case.new, vision_config=vision | {"image_size": 28, "patch_size": 14})
        model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager")
    elif case.oracle is not None:
        made = case.oracle()
        model = made(made.config_class(**{**SIZES, **case.new}, attn_implementation="eager"))
    else:
        config = AutoConfig.for_model(case.model_type, **{**SIZES, **case.new}, attn_implementation="eager")
        if case.model_type == "mistral4":  # which has no automatic class
            model = Mistral4ForCausalLM(config)
        else:
            model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    return perturb(model.float().eval())


def perturb(model: Any, seed: int = 0) -> Any:
    """Give every parameter a value that matters."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, value in model.named_parameters():
            noise = torch.randn(value.shape, generator=generator)
            if value.dim() == 1:
                value.add_(0.3 * noise)
            else:
                value.copy_(noise * (0.4 if "embed" in name else 1.3 * value.shape[-1] ** -0.5))
        for name, value in model.named_buffers():
            if name.endswith("_bias"):  # by which experts are chosen
                value.add_(0.3 * torch.randn(value.shape, generator=generator))
    return model


def old_config(name: str) -> dict[str, Any]:
    """The config.json that is written by hand."""
    case = CASES[name]
    if case.model_type in MULTIMODAL:
        return {"model_type": case.model_type, **case.old}
    own = FAMILIES[case.model_type].keys.values()
    return {"model_type": case.model_type, **{key: OLD[key] for key in OLD if key not in own}, **case.old}


def write(name: str, style: str, folder: Path) -> Path:
    """Write a case into a folder and return it."""
    case, model = CASES[name], oracle(name)
    model.save_pretrained(folder)
    if case.oracle is not None:
        style = "old"
    if style == "new":
        return folder
    tensors = {key: value.clone() for key, value in model.state_dict().items()}
    if model.config.get_text_config().tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    save_tensors(folder / "model.safetensors", case.keys(tensors) if style == "old" else tensors)
    if style == "old":
        title = "".join(part.capitalize() for part in case.model_type.split("_"))
        architecture = ARCHITECTURES.get(case.model_type, f"{title}ForCausalLM")
        save_json(folder / "config.json", {"architectures": [architecture], **old_config(name)})
    return folder


def pack_experts(packed: Path, plain: Path) -> None:
    """Give the experts of two folders the same random weights, as MXFP4 and as what transformers makes of it."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    tensors, generator = load_tensors(plain), torch.Generator().manual_seed(0)
    small = dict(tensors)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj")) and "experts" in name]:
        experts, inputs, outputs = tensors[name].shape
        shape = (experts, outputs, inputs // 32)
        blocks = torch.randint(256, (*shape, 16), dtype=torch.uint8, generator=generator)
        scales = torch.randint(122, 127, shape, dtype=torch.uint8, generator=generator)
        tensors[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        small |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        del small[name]
    save_tensors(plain / "model.safetensors", tensors)
    save_tensors(packed / "model.safetensors", small)
    config = load_json(packed / "config.json") | {"quantization_config": {"quant_method": "mxfp4"}}
    save_json(packed / "config.json", config)


def save_tensors(path: Path, tensors: Tensors) -> None:
    save_file({key: value.contiguous() for key, value in tensors.items()}, path, metadata={"format": "pt"})


def load_tensors(folder: Path) -> Tensors:
    return load_file(folder / "model.safetensors")


def save_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")


def load_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def reference(name: str, tokens: list[int]) -> torch.Tensor:
    """(n, v) logits of one forward pass of transformers over a whole sequence."""
    return _reference(name, tuple(tokens))


@cache
def _reference(name: str, tokens: tuple[int, ...]) -> torch.Tensor:
    model = fresh(name)
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([tokens])).logits[0]
    return logits


def fresh(name: str) -> Any:
    """The oracle; angles that depend on the length, where it has such, are forgotten by a pass over one token."""
    model = oracle(name)
    if _turns_by_length(name):
        with torch.no_grad():
            model(torch.tensor([[1]]))
    return model


@cache
def _turns_by_length(name: str) -> bool:
    return any(kind in str(oracle(name).config) for kind in ("dynamic", "longrope"))


def hub_cache(
    root: Path, repository: str, fill: Callable[[Path], object], commit: str = "0123456789abcdef" * 2 + "01234567"
) -> Path:
    """Lay out a snapshot as huggingface_hub keeps it and return its folder; `fill` writes the files."""
    base = root / f"models--{repository.replace('/', '--')}"
    snapshot = base / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (base / "refs").mkdir()
    (base / "refs" / "main").write_text(commit, encoding="ascii")
    fill(snapshot)
    return snapshot
