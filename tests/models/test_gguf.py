"""GGUF files: every architecture against transformers on the same values, quantised types, tokenizers, and files that
are damaged.
"""

from __future__ import annotations

import re
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from models.checkpoints import SIZES, perturb
from tokenizers import Regex, pre_tokenizers

from paceline import LLM, SamplingParams
from paceline.checkpoints import (
    GenerationDefaults,
    Tokenizer,
    block_values,
    dequantized,
    gguf_architectures,
    read_config,
)
from paceline.checkpoints.gguf_file import read_gguf
from paceline.checkpoints.gguf_tokenizer import PRE
from paceline.checkpoints.quantization import quantize_groups
from paceline.errors import CheckpointError, ConfigError, PacelineError, UnsupportedModelError
from paceline.models import load_runner
from paceline.models.runners import NativeRunner

TEXT = torch.randint(3, 128, (40,), generator=torch.Generator().manual_seed(1)).tolist()
LETTERS = [chr(i) for i in range(33, 127)]
"""Printable ASCII, which byte-level BPE writes as itself."""

MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "o r"]
TOKENS = ["<unk>", "<s>", "</s>", *LETTERS, "Ġ", "Ċ", *(merge.replace(" ", "") for merge in MERGES)]
TOKENS += [f"<spare{i}>" for i in range(128 - len(TOKENS))]
KINDS = [2, 3, 3] + [1] * (len(TOKENS) - 3)

GEMMA = {"head_dim": 24, "query_pre_attn_scalar": 24, "sliding_window": 8, "hidden_activation": "gelu_pytorch_tanh"}
LLAMA3 = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
LONGROPE = {"short_factor": [1.0, 1.1, 1.3, 1.6], "long_factor": [1.5, 2.5, 4.0, 9.0]}
YARN = {"factor": 8.0, "original_max_position_embeddings": 16, "truncate": False}
GPT_OSS = {"intermediate_size": 64, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16,
           "sliding_window": 8} | {"rope_parameters": {"rope_type": "yarn", "rope_theta": 500.0, **YARN}}  # fmt: skip
LATENT = {"kv_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 20,
          "num_key_value_heads": 4, "n_routed_experts": 8, "num_experts_per_tok": 3,
          "moe_intermediate_size": 24}  # fmt: skip
SLIDING = ["sliding_attention", "full_attention"]


def rope(kind: str, theta: float = 10000.0, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **more}}


MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("llama", "llama", {"tie_word_embeddings": False} | rope("default", 500.0)),
    "llama3": ("llama", "llama", {"attention_bias": True, "tie_word_embeddings": True, "head_dim": 24}
               | rope("llama3", **LLAMA3)),
    "llama-linear": ("llama", "llama", rope("linear", factor=3.0)),
    "mixtral": ("llama", "mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "qwen2": ("qwen2", "qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", "qwen3", {"head_dim": 24} | rope("default", 1e6)),
    "qwen3_moe": ("qwen3moe", "qwen3_moe", {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
                                            "head_dim": 16, "norm_topk_prob": True}),
    "qwen2_moe": ("qwen2moe", "qwen2_moe", {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
                                            "shared_expert_intermediate_size": 96}),
    "gemma2": ("gemma2", "gemma2", GEMMA | {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 10.0}),
    "gemma3": ("gemma3", "gemma3_text", GEMMA | {"num_hidden_layers": 7, "layer_types": [SLIDING[0]] * 5 + [SLIDING[1],
               SLIDING[0]], "rope_parameters": {
                   "full_attention": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0},
                   "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}}),
    "phi3": ("phi3", "phi3", {"sliding_window": None} | rope("default", partial_rotary_factor=0.5)),
    "phi3-longrope": ("phi3", "phi3", {"sliding_window": None, "original_max_position_embeddings": 48}
                      | rope("longrope", partial_rotary_factor=0.5, **LONGROPE)),
    "smollm3": ("smollm3", "smollm3", {"num_hidden_layers": 5, "no_rope_layer_interval": 4,
                                       "tie_word_embeddings": True}),
    "olmo2": ("olmo2", "olmo2", {}),
    "granite": ("granite", "granite", {"embedding_multiplier": 3.0, "residual_multiplier": 0.4,
                                       "attention_multiplier": 0.1, "logits_scaling": 0.5}),
    "starcoder2": ("starcoder2", "starcoder2", {"sliding_window": None, "norm_epsilon": 1e-3}),
    "glm4": ("glm4", "glm4", {"head_dim": 24, "attention_bias": True}),
    "glm4-whole": ("glm4", "glm4", {"attention_bias": False} | rope("default", 500.0, partial_rotary_factor=1.0)),
    "cohere2": ("cohere2", "cohere2", {"num_hidden_layers": 5, "sliding_window": 8, "logit_scale": 0.5}),
    "gpt_oss": ("gpt-oss", "gpt_oss", GPT_OSS),
    "gpt_oss-unscaled": ("gpt-oss", "gpt_oss", GPT_OSS | rope("default", 500.0)),
    "gpt_oss-yarn": ("gpt-oss", "gpt_oss", GPT_OSS | rope("yarn", 500.0, **YARN, beta_fast=4.0, beta_slow=0.5)),
    "deepseek_v2": ("deepseek2", "deepseek_v2", LATENT | {"q_lora_rank": None, "first_k_dense_replace": 1}
                    | rope("yarn", 500.0, factor=8.0, original_max_position_embeddings=16, mscale=0.7,
                           mscale_all_dim=0.7)),
    "deepseek_v2-groups": ("deepseek2", "deepseek_v2", LATENT | {"q_lora_rank": 28, "n_group": 4, "topk_group": 2,
                                                                 "topk_method": "group_limited_greedy",
                                                                 "routed_scaling_factor": 1.5}),
    "deepseek_v3": ("deepseek2", "deepseek_v3", LATENT | {"q_lora_rank": 28, "n_group": 4, "topk_group": 2,
                                                          "first_k_dense_replace": 1}),
    "glm4_moe_lite": ("deepseek2", "glm4_moe_lite", LATENT | {"q_lora_rank": 28}),
    "mistral4": ("mistral4", "mistral4", LATENT | {"q_lora_rank": 28}
                 | rope("yarn", 500.0, factor=4.0, original_max_position_embeddings=16, mscale=1.0, mscale_all_dim=1.0,
                        llama_4_scaling_beta=0.4)),
    "glm4_moe": ("glm4moe", "glm4_moe", {"n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
                                         "attention_bias": True, "use_qk_norm": True}),
    "ministral3": ("mistral3", "ministral3", {"head_dim": 24} | rope("yarn", 500.0, factor=4.0, mscale=1.0,
                                                                     mscale_all_dim=1.0, llama_4_scaling_beta=0.4,
                                                                     original_max_position_embeddings=16)),
    "olmo3": ("olmo2", "olmo3", {"num_hidden_layers": 5, "sliding_window": 8, "rope_parameters": {
        "full_attention": {"rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0,
                           "original_max_position_embeddings": 16},
        "sliding_attention": {"rope_type": "default", "rope_theta": 5e5}}}),
    "ernie4_5": ("ernie4_5", "ernie4_5", {"head_dim": 24, "use_bias": True}),
    "ernie4_5_moe": ("ernie4_5-moe", "ernie4_5_moe", {"moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 24,
                                                      "moe_num_shared_experts": 2, "moe_layer_start_index": 1}),
    "apertus": ("apertus", "apertus", {"head_dim": 24} | rope("llama3", **LLAMA3)),
    "exaone4": ("exaone4", "exaone4", {"num_hidden_layers": 5, "sliding_window": 8}),
    "exaone4-whole": ("exaone4", "exaone4", {"sliding_window": None, "layer_types": [SLIDING[1]] * 3}),
    "hunyuan_dense": ("hunyuan-dense", "hunyuan_v1_dense", {"head_dim": 24}),
    "hunyuan_moe": ("hunyuan-moe", "hunyuan_v1_moe", {"head_dim": 24, "num_experts": 6, "moe_topk": 2}),
    "seed_oss": ("seed_oss", "seed_oss", {"head_dim": 24, "attention_out_bias": True}),
    "minimax_m2": ("minimax-m2", "minimax_m2", {"num_local_experts": 6, "num_experts_per_tok": 2}
                   | rope("default", 500.0, partial_rotary_factor=0.5)),
}  # fmt: skip
"""Name -> architecture in GGUF, model_type of transformers, keys of its configuration."""

PATTERNS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "cohere2-pattern": ("cohere2", "cohere2", {"sliding_window": 8, "layer_types": [SLIDING[1], *SLIDING]}),
    "gemma3-pattern": ("gemma3", "gemma3_text", GEMMA | {"layer_types": [*SLIDING, SLIDING[0]]}),
    "gpt_oss-pattern": ("gpt-oss", "gpt_oss", GPT_OSS | {"layer_types": [SLIDING[0]] * 3}),
}
"""Models whose layers slide in another order than is usual."""

SLIDES = {"gemma2", "gemma3", "cohere2", "gpt-oss", "olmo2", "exaone4"}
TURNED = {"llama", "smollm3", "granite", "mistral3"}
LATENTS = {"deepseek2", "mistral4"}
SIGMOIDS = {"deepseek_v3", "glm4_moe", "minimax_m2"}
"""Types whose files say that experts are chosen by sigmoids; those of GLM-4.7-Flash do not."""

PARTS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}
SANDWICH = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
GLM4 = {"post_self_attn_layernorm": "post_attention_norm", "post_mlp_layernorm": "post_ffw_norm"}
HUNYUAN = {"self_attn.query_layernorm": "attn_q_norm", "self_attn.key_layernorm": "attn_k_norm"}
HUNYUAN |= {"mlp.gate.wg": "ffn_gate_inp"} | {
    f"mlp.shared_mlp.{x}_proj": f"ffn_{x}_shexp" for x in ("gate", "up", "down")
}
OWN = {
    "apertus": {"attention_layernorm": "attn_norm", "feedforward_layernorm": "ffn_norm"},
    "seed_oss": {"post_attention_layernorm": "post_attention_norm"},
    "hunyuan-dense": HUNYUAN,
    "hunyuan-moe": HUNYUAN,
    "glm4": GLM4,
    "glm4moe": {"post_attention_layernorm": "post_attention_norm"},
    "gpt-oss": {"mlp.router": "ffn_gate_inp", "post_attention_layernorm": "post_attention_norm"},
}


@cache
def oracle(name: str) -> Any:
    """The transformers model of a case, in float32."""
    from transformers import AutoConfig, AutoModelForCausalLM, Mistral4ForCausalLM

    _, kind, more = (MODELS | PATTERNS)[name]
    config = AutoConfig.for_model(kind, **{**SIZES, **more}, attn_implementation="eager")
    known = kind != "mistral4"  # which has no automatic class
    return perturb((AutoModelForCausalLM.from_config(config) if known else Mistral4ForCausalLM(config)).float().eval())


def logits_of(model: Any, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0]


def stored(name: str, model: Any) -> dict[str, torch.Tensor]:
    """The tensors of a model under GGUF's names, changed as its converters change them."""
    architecture = (MODELS | PATTERNS)[name][0]
    config, found = model.config, dict[str, torch.Tensor]()
    parts = PARTS | (
        SANDWICH if architecture in {"gemma2", "gemma3", "olmo2", "exaone4"} else OWN.get(architecture, {})
    )
    for key, tensor in without_numbers(model).items():
        short = key.removeprefix("model.")
        value = tensor + 1.0 if architecture.startswith("gemma") and "norm" in short else tensor
        if not short.startswith("layers."):
            ends = {"embed_tokens.weight": "token_embd.weight"}
            ends |= {f"norm.{kind}": f"output_norm.{kind}" for kind in ("weight", "bias")}
            if short != "lm_head.weight" or not config.tie_word_embeddings:
                found[ends.get(short, "output.weight")] = value
            continue
        _, layer, part = short.split(".", 2)
        stem, _, ending = part.rpartition(".")
        at = f"blk.{layer}."
        if architecture == "gpt-oss" and (part == "self_attn.sinks" or ".experts." in part):
            found |= {f"{at}{theirs}": own for theirs, own in gpt_oss_tensors(part, value).items()}
        elif stem == "self_attn.kv_b_proj" and config.q_lora_rank is None:  # of older files it is one
            keys, values = value.view(4, 36, 24).split((16, 20), 1)
            found |= {f"{at}attn_k_b.weight": keys.transpose(1, 2), f"{at}attn_v_b.weight": values}
        elif ending == "e_score_correction_bias":
            found[f"{at}exp_probs_b.bias"] = value.flatten()
        elif part == "mlp.experts.gate_up_proj":
            kinds = ("gate_up",) if architecture == "mistral4" else ("gate", "up")
            found |= {f"{at}ffn_{x}_exps.weight": y for x, y in zip(kinds, value.chunk(len(kinds), 1), strict=True)}
        elif part == "mlp.experts.down_proj":
            found[f"{at}ffn_down_exps.weight"] = value
        else:
            heads = {"self_attn.q_proj": config.num_attention_heads, "self_attn.k_proj": config.num_key_value_heads}
            if architecture in TURNED and stem in heads:
                value = neighbours(value, heads[stem])
            found[f"{at}{parts[stem]}.{ending}"] = value.squeeze()
    return found


def without_numbers(model: Any) -> dict[str, torch.Tensor]:
    """A model's tensors, but for those that the metadata says."""
    return {key: tensor for key, tensor in model.state_dict().items() if ".act_fn." not in key}


def gpt_oss_tensors(part: str, value: torch.Tensor) -> dict[str, torch.Tensor]:
    """Sinks, and experts whose rows of gate and up take turns, with inputs before outputs."""
    if part == "self_attn.sinks":
        return {"attn_sinks.weight": value}
    kind = "bias" if part.endswith("_bias") else "weight"
    value = value if kind == "bias" else value.transpose(1, 2)
    if ".down_proj" in part:
        return {f"ffn_down_exps.{kind}": value}
    return {f"ffn_gate_exps.{kind}": value[:, ::2], f"ffn_up_exps.{kind}": value[:, 1::2]}


def neighbours(value: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of heads in the order of a rotary embedding that turns neighbours."""
    return value.view(heads, 2, -1, *value.shape[1:]).transpose(1, 2).reshape(value.shape)


def tables(model: Any) -> dict[str, list[float]]:
    """What a file stores of rotary scaling as tensors."""
    parameters = model.config.rope_parameters
    if parameters.get("rope_type") == "llama3":
        plain = 10000.0 ** (-torch.arange(0, 24, 2).float() / 24)
        return {"rope_freqs.weight": (plain / model.model.rotary_emb.inv_freq).tolist()}
    if parameters.get("rope_type") == "longrope":
        return {f"rope_factors_{kind}.weight": LONGROPE[f"{kind}_factor"] for kind in ("long", "short")}
    return {}


def write(
    path: Path,
    name: str,
    model: Any,
    kind: Kind | Callable[[str], Kind] = Kind.F32,
    tokenizer: Callable[..., None] | None = None,
    pattern: int | list[bool] | None = None,
    window: int | None = None,
) -> Path:
    """Write a model; matrices in `kind`, which may depend on the name, of MXFP4 only experts, the rest in float32.

    Args:
        pattern: which layers slide, as the file says it.
        window: a sliding window that the model does not have.
    """
    architecture = (MODELS | PATTERNS)[name][0]
    writer = gguf.GGUFWriter(path, architecture)
    describe(writer, architecture, model.config)
    describe_xielu(writer, model)
    if window is not None:
        writer.add_uint32(f"{architecture}.attention.sliding_window", window)
    if isinstance(pattern, int):
        writer.add_uint32(f"{architecture}.attention.sliding_window_pattern", pattern)
    elif pattern is not None:
        writer.add_array(f"{architecture}.attention.sliding_window_pattern", pattern)
    (tokenizer or byte_level)(writer)
    for key, values in tables(model).items():
        writer.add_tensor(key, np.array(values, np.float32))
    for key, tensor in stored(name, model).items():
        array = tensor.contiguous().numpy()
        own = kind if isinstance(kind, Kind) else kind(key)
        rounded = "exps.weight" in key if own is Kind.MXFP4 else array.ndim > 1 and "gate_inp" not in key
        if rounded and own is not Kind.F32:
            writer.add_tensor(key, gguf.quants.quantize(array, own), raw_dtype=own)
        else:
            writer.add_tensor(key, array)
    finish(writer)
    return path


def finish(writer: Any) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def describe(writer: Any, architecture: str, config: Any) -> None:
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    for key, value in {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": head,
        "expert_count": getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None),
        "expert_used_count": getattr(config, "num_experts_per_tok", None),
        "expert_feed_forward_length": getattr(config, "moe_intermediate_size", None),
        "expert_shared_count": getattr(config, "moe_num_shared_experts", None),
        "leading_dense_block_count": getattr(config, "moe_layer_start_index", None),
        "interleave_moe_layer_step": getattr(config, "moe_layer_interval", None),
        "expert_shared_feed_forward_length": getattr(config, "shared_expert_intermediate_size", None),
        "attention.sliding_window": getattr(config, "sliding_window", None) if architecture in SLIDES else None,
        **(latent_sizes(config) if architecture in LATENTS else {}),
        **(routed_experts(config) if hasattr(config, "n_routed_experts") else {}),
    }.items():
        if value is not None:
            writer.add_uint32(f"{architecture}.{key}", value)
    describe_router(writer, architecture, config)
    describe_rotary(writer, architecture, config, head)
    for key, ours in {"rms_epsilon": "rms_norm_eps", "epsilon": "norm_epsilon"}.items():
        if (epsilon := getattr(config, ours, getattr(config, "layer_norm_eps", None))) is not None:
            writer.add_float32(f"{architecture}.attention.layer_norm_{key}", epsilon)
    scales = {"embedding_scale": "embedding_multiplier", "residual_scale": "residual_multiplier"}
    scales |= {"attention.scale": "attention_multiplier", "logit_scale": "logits_scaling"}
    scales |= {"attn_logit_softcapping": "attn_logit_softcapping", "final_logit_softcapping": "final_logit_softcapping"}
    for theirs, ours in scales.items():
        if getattr(config, ours, None) is not None:
            writer.add_float32(f"{architecture}.{theirs}", getattr(config, ours))
    for theirs, ours in {"logit_scale": "logit_scale", "expert_weights_scale": "routed_scaling_factor"}.items():
        if getattr(config, ours, None) is not None:
            writer.add_float32(f"{architecture}.{theirs}", getattr(config, ours))


def describe_router(writer: Any, architecture: str, config: Any) -> None:
    if config.model_type in SIGMOIDS:
        writer.add_uint32(f"{architecture}.expert_gating_func", 2)
    if config.model_type in {*SIGMOIDS, "glm4_moe_lite", "mistral4"}:
        writer.add_bool(f"{architecture}.expert_weights_norm", getattr(config, "norm_topk_prob", True))


def describe_xielu(writer: Any, model: Any) -> None:
    for key in ("alpha_n", "alpha_p", "beta", "eps"):
        if values := [one.item() for name, one in model.state_dict().items() if name.endswith(f".act_fn.{key}")]:
            writer.add_array(f"apertus.xielu.{key}", values)


def latent_sizes(config: Any) -> dict[str, int | None]:
    return {
        "attention.head_count_kv": 1,
        "attention.key_length": config.kv_lora_rank + config.qk_rope_head_dim,
        "attention.value_length": config.kv_lora_rank,
        "attention.key_length_mla": config.qk_nope_head_dim + config.qk_rope_head_dim,
        "attention.value_length_mla": config.v_head_dim,
        "attention.kv_lora_rank": config.kv_lora_rank,
        "attention.q_lora_rank": config.q_lora_rank,
    }


def routed_experts(config: Any) -> dict[str, int]:
    return {
        "expert_count": config.n_routed_experts,
        "expert_shared_count": config.n_shared_experts,
        "expert_group_count": config.n_group,
        "expert_group_used_count": config.topk_group,
        "leading_dense_block_count": getattr(config, "first_k_dense_replace", None) or dense_layers(config),
    }


def dense_layers(config: Any) -> int:
    """How many layers come before those with experts."""
    return (getattr(config, "mlp_layer_types", None) or []).count("dense")


def describe_rotary(writer: Any, architecture: str, config: Any, head: int) -> None:
    parameters = config.rope_parameters.get("full_attention", config.rope_parameters)
    writer.add_float32(f"{architecture}.rope.freq_base", parameters["rope_theta"])
    writer.add_uint32(f"{architecture}.rope.dimension_count", int(head * parameters.get("partial_rotary_factor", 1.0)))
    if parameters["rope_type"] in {"linear", "yarn"}:
        writer.add_string(f"{architecture}.rope.scaling.type", parameters["rope_type"])
        writer.add_float32(f"{architecture}.rope.scaling.factor", parameters["factor"])
    if parameters["rope_type"] == "yarn":
        writer.add_uint32(f"{architecture}.rope.scaling.original_context_length", 16)
        for key in ("beta_fast", "beta_slow"):
            if key in parameters:
                writer.add_float32(f"{architecture}.rope.scaling.yarn_{key}", parameters[key])
        if "mscale" in parameters:
            growth = parameters["mscale"] / (10 if architecture in LATENTS else 1)
            writer.add_float32(f"{architecture}.rope.scaling.yarn_log_multiplier", growth)
        if "llama_4_scaling_beta" in parameters:
            writer.add_float32(f"{architecture}.attention.temperature_scale", parameters["llama_4_scaling_beta"])
    if parameters["rope_type"] == "longrope":
        writer.add_uint32(f"{architecture}.rope.scaling.original_context_length", 48)


def byte_level(writer: Any, pre: str = "gpt-2", tokens: list[str] = TOKENS, kinds: list[int] = KINDS) -> None:
    writer.add_string("tokenizer.ggml.model", "gpt2")
    writer.add_string("tokenizer.ggml.pre", pre)
    writer.add_array("tokenizer.ggml.tokens", tokens)
    writer.add_array("tokenizer.ggml.token_type", kinds)
    writer.add_array("tokenizer.ggml.merges", MERGES)
    writer.add_uint32("tokenizer.ggml.bos_token_id", 1)
    writer.add_uint32("tokenizer.ggml.eos_token_id", 2)
    writer.add_string("tokenizer.chat_template", "{% for m in messages %}{{ m.content }}{% endfor %}:")


def values_of(path: Path) -> torch.Tensor:
    """Logits for TEXT with the weights as they are in the file."""
    runner = load_runner(path, dtype="float32", quantization="none")
    return runner.extend([runner.open()], [TEXT], all_logits=True).logits


@pytest.mark.parametrize("name", MODELS)
def test_every_architecture_gives_the_logits_of_transformers(tmp_path: Path, name: str) -> None:
    found = values_of(write(tmp_path / "model.gguf", name, oracle(name)))
    wanted = logits_of(oracle(name), TEXT)
    assert (found - wanted).abs().max() < 1e-4
    assert (found - wanted.roll(1, 0)).abs().max() > 0.1


def test_numbers_of_layers_that_are_too_few_are_one_clear_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.describe_xielu", lambda writer, _: writer.add_array("apertus.xielu.beta", [0.5]))
    path = write(tmp_path / "model.gguf", "apertus", oracle("apertus"))
    with pytest.raises(
        CheckpointError, match=r"apertus\.xielu\.alpha_p must be a number for each of 3 layers, got None"
    ):
        read_config(path)


@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        ("cohere2-pattern", [False, True, False]),
        ("gemma3-pattern", [True, False, True]),
        ("gemma3-pattern", 2),
        ("gpt_oss-pattern", 0),
    ],
)
def test_layers_slide_as_the_file_says(tmp_path: Path, name: str, pattern: int | list[bool]) -> None:
    wanted = logits_of(oracle(name), TEXT)
    found = values_of(write(tmp_path / "model.gguf", name, oracle(name), pattern=pattern))
    assert (found - wanted).abs().max() < 1e-4
    unsaid = values_of(write(tmp_path / "unsaid.gguf", name, oracle(name)))
    assert (unsaid - wanted).abs().max() > 0.01


def test_routers_with_neither_softmax_nor_sigmoids_are_rejected(tmp_path: Path) -> None:
    def tokenizer(writer: Any, gating: int) -> None:
        byte_level(writer)
        writer.add_uint32("deepseek2.expert_gating_func", gating)

    one, two = (
        write(
            tmp_path / f"{gating}.gguf",
            "deepseek_v2",
            oracle("deepseek_v2"),
            tokenizer=partial(tokenizer, gating=gating),
        )
        for gating in (1, 3)
    )
    assert (values_of(one) - logits_of(oracle("deepseek_v2"), TEXT)).abs().max() < 1e-4
    with pytest.raises(UnsupportedModelError, match="deepseek_v2: scoring_func='number 3' is not implemented"):
        values_of(two)


def test_a_window_of_nothing_is_none(tmp_path: Path) -> None:
    whole = values_of(write(tmp_path / "none.gguf", "phi3", oracle("phi3")))
    assert torch.equal(values_of(write(tmp_path / "zero.gguf", "phi3", oracle("phi3"), window=0)), whole)


def with_keys(path: Path, name: str, keys: dict[str, Any]) -> Path:
    """A model's file with further keys of its architecture (".name"), or whole ones."""
    architecture = MODELS[name][0]

    def tokenizer(writer: Any) -> None:
        byte_level(writer)
        for key, value in keys.items():
            whole = f"{architecture}{key}" if key[0] == "." else key
            kind = {bool: "bool", int: "uint32", float: "float32", str: "string", list: "array"}[type(value)]
            getattr(writer, f"add_{kind}")(whole, value)

    return write(path, name, oracle(name), tokenizer=tokenizer)


def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = values_of(with_keys(tmp_path / "model.gguf", "glm4_moe", {".nextn_predict_layers": 1}))
    whole = logits_of(oracle("glm4_moe"), TEXT)
    monkeypatch.setattr(oracle("glm4_moe").config, "num_hidden_layers", 2)
    assert (found - logits_of(oracle("glm4_moe"), TEXT)).abs().max() < 1e-4
    assert (found - whole).abs().max() > 0.1


FACTOR, OLDER, TYPE = ".rope.scaling.factor", ".rope.scale_linear", ".rope.scaling.type"


@pytest.mark.parametrize("name", ["llama", "llama3"])
@pytest.mark.parametrize(
    ("keys", "factor"),
    [
        ({FACTOR: 3.0}, 3.0),
        ({OLDER: 3.0}, 3.0),
        ({FACTOR: 3.0, OLDER: 5.0}, 3.0),
        ({FACTOR: 3.0, TYPE: "linear"}, 3.0),
        ({FACTOR: 3.0, TYPE: "none"}, 1.0),
        ({FACTOR: 0.0, OLDER: 5.0}, 1.0),
    ],
)
def test_a_factor_without_a_kind_divides_positions(
    tmp_path: Path, name: str, keys: dict[str, Any], factor: float
) -> None:
    """transformers' model at positions 0, 1 / factor, 2 / factor, ... has the right value."""
    found = values_of(with_keys(tmp_path / "model.gguf", name, keys))
    places = torch.arange(len(TEXT)) / factor
    with torch.no_grad():
        wanted = oracle(name)(torch.tensor([TEXT]), position_ids=places[None]).logits[0]
    assert (found - wanted).abs().max() < 1e-4
    if factor != 1.0:
        assert (found - logits_of(oracle(name), TEXT)).abs().max() > 0.1


@pytest.mark.parametrize(
    ("name", "keys", "named"),
    [
        ("llama", {".attention.scale": 0.2}, "llama.attention.scale=0.2"),
        ("llama", {".attention.causal": False}, "llama.attention.causal=False"),
        ("llama", {".attention.clamp_kqv": 8.0}, "llama.attention.clamp_kqv=8.0"),
        ("llama", {".logit_scale": 2.0}, "llama.logit_scale=2.0"),
        ("llama", {".final_logit_softcapping": 30.0}, "llama.final_logit_softcapping=30.0"),
        ("llama", {".rope.scaling.attn_factor": 1.5}, "llama.rope.scaling.attn_factor=1.5"),
        ("llama", {".rope.scaling.alpha": 2.0}, "llama.rope.scaling.alpha=2.0"),
        ("llama", {TYPE: "dynamic", FACTOR: 2.0}, "rope.scaling.type='dynamic' with a factor of 2.0"),
        ("llama3", {TYPE: "yarn", FACTOR: 2.0}, "rope.scaling.type='yarn' with a factor of 2.0"),
        ("llama", {".a_key_of_tomorrow": 1}, "llama.a_key_of_tomorrow=1"),
        ("qwen2", {".rope.dimension_sections": [1, 2, 1, 0]}, "qwen2.rope.dimension_sections="),
        ("qwen3_moe", {".expert_weights_scale": 2.5}, "qwen3moe.expert_weights_scale=2.5"),
        ("mixtral", {".expert_gating_func": 2}, "llama.expert_gating_func=2"),
        ("phi3-longrope", {FACTOR: 4.0}, "rope.scaling"),
        ("granite", {".rope.scaling.finetuned": False}, "a Granite without rotary embedding"),
        ("gemma2", {".attention.key_length_swa": 12}, "gemma2.attention.key_length_swa=12"),
    ],
)
def test_keys_that_nobody_reads_are_refused_by_name(
    tmp_path: Path, name: str, keys: dict[str, Any], named: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=re.escape(named)) as caught:
        read_config(with_keys(tmp_path / "model.gguf", name, keys))
    assert "\n" not in str(caught.value)


def test_keys_that_change_nothing_are_no_obstacle(tmp_path: Path) -> None:
    keys = {
        ".vocab_size": 128,
        ".attention.causal": True,
        ".attention.value_length": 16,
        ".rope.scaling.attn_factor": 1.0,
        ".rope.scaling.finetuned": False,
        ".rope.freq_base_swa": 500.0,
        ".tensor_data_layout": "Meta AI original pth",
        ".expert_weights_scale": 0.0,
        ".logit_scale": 0.0,
        "general.file_type": 1,
        "quantize.imatrix.file": "x",
        "tokenizer.ggml.fim_pre_token_id": 5,
    }
    plain = read_config(write(tmp_path / "plain.gguf", "llama", oracle("llama")))
    path = with_keys(tmp_path / "model.gguf", "llama", keys)
    assert read_config(path) == plain
    assert Tokenizer.load(path).encode("hello")


def test_shares_of_experts_are_normed_as_the_file_says(tmp_path: Path) -> None:
    for name, usual in {"qwen3_moe": True, "qwen2_moe": False}.items():
        for says in ({}, {".expert_weights_norm": not usual}):
            path = with_keys(tmp_path / f"{name}-{len(says)}.gguf", name, says)
            assert read_config(path)["norm_topk_prob"] is (says.get(".expert_weights_norm", usual))


def test_recommended_sampling(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    keys = {"temp": 0.5, "top_k": 30, "min_p": 0.25, "mirostat": 0, "penalty_repeat": 1.0}
    keys = {f"general.sampling.{key}": value for key, value in keys.items()}
    path = with_keys(tmp_path / "model.gguf", "llama", keys)
    assert GenerationDefaults.load(path).sampling == {"temperature": 0.5, "top_k": 30, "min_p": 0.25}
    assert GenerationDefaults.load(write(tmp_path / "plain.gguf", "llama", oracle("llama"))).sampling == {}
    assert not caplog.messages
    GenerationDefaults.load(with_keys(path, "llama", {"general.sampling.mirostat": 2}))
    assert "model.gguf recommends mirostat, which is not honoured" in caplog.text


def test_a_tokenizer_with_a_rule_that_is_not_known_is_refused(tmp_path: Path) -> None:
    for key, value in {"normalizer.lowercase": True, "suppress_tokens": [5], "precompiled_charsmap": [1]}.items():
        path = with_keys(tmp_path / "model.gguf", "llama", {f"tokenizer.ggml.{key}": value})
        with pytest.raises(UnsupportedModelError, match=rf"tokenizer.ggml.{key}=.*; give tokenizer=FOLDER"):
            Tokenizer.load(path)
        read_config(path)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize("kind", [Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1])
def test_quantised_files_mean_what_their_blocks_say(tmp_path: Path, name: str, kind: Kind) -> None:
    """transformers' own model with the values that the blocks stand for."""
    import copy

    model = copy.deepcopy(oracle(name))
    with torch.no_grad():
        for value in model.parameters():
            if value.dim() > 1:
                value.copy_(torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(value.numpy(), kind), kind)))
    path = write(tmp_path / "model.gguf", name, oracle(name), kind)
    assert (values_of(path) - logits_of(model, TEXT)).abs().max() < 1e-4
    if kind is not Kind.F16 and kind is not Kind.BF16:
        assert (values_of(path) - logits_of(oracle(name), TEXT)).abs().max() > 1e-3


def test_experts_in_mxfp4(tmp_path: Path) -> None:
    """As files of gpt-oss hold them: a power of two for 32 inputs of an output."""
    import copy

    model = copy.deepcopy(oracle("gpt_oss"))
    with torch.no_grad():
        for name, value in model.named_parameters():
            if ".experts." in name and value.dim() == 3:
                blocks = gguf.quants.quantize(value.transpose(1, 2).contiguous().numpy(), Kind.MXFP4)
                value.copy_(torch.from_numpy(gguf.quants.dequantize(blocks, Kind.MXFP4)).transpose(1, 2))
    path = write(tmp_path / "model.gguf", "gpt_oss", oracle("gpt_oss"), Kind.MXFP4)
    assert (values_of(path) - logits_of(model, TEXT)).abs().max() < 1e-4
    assert (values_of(path) - logits_of(oracle("gpt_oss"), TEXT)).abs().max() > 1e-3


FOUR_BITS = [Kind.Q4_0, Kind.Q4_1, Kind.Q2_K, Kind.Q3_K, Kind.Q4_K, Kind.IQ4_NL, Kind.MXFP4]
TYPES = [Kind.F32, Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q5_0, Kind.Q5_1, Kind.Q5_K, Kind.Q6_K, *FOUR_BITS]


@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q5_1, Kind.Q4_0, Kind.Q4_1])
def test_weights_are_rounded_by_default(tmp_path: Path, kind: Kind, caplog: pytest.LogCaptureFixture) -> None:
    """Files of four bits to int4, all others to int8, said in one line; "none" keeps the values, in bfloat16."""
    path = write(tmp_path / "model.gguf", "llama", oracle("llama"), kind)
    form = "int4" if kind in {Kind.Q4_0, Kind.Q4_1} else "int8"
    assert load_runner(path).info.quantization == form
    (line,) = [one for one in caplog.messages if "rounded" in one]
    assert f"(mostly {kind.name}) are rounded to {form}" in line
    assert line.endswith("; quantization='none' keeps them as they are, in bfloat16")
    caplog.clear()
    kept = load_runner(path, quantization="none").info
    assert (kept.quantization, kept.dtype) == (None, torch.bfloat16)
    assert load_runner(path, quantization="none", dtype="float32").info.dtype == torch.float32
    assert load_runner(path, quantization="int8").info.quantization == "int8"
    assert not [one for one in caplog.messages if "rounded" in one]


def test_int4_keeps_the_steps_of_types_with_a_scale_and_a_minimum() -> None:
    """Rounding the file's values again errs by a small part of what its own did, with finer types by more."""
    weights, errors = torch.randn(64, 512, generator=torch.Generator().manual_seed(0)), {}
    for kind in (Kind.Q4_0, Kind.Q4_1, Kind.Q5_1):
        kept = torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(weights.numpy(), kind), kind))
        pairs, scale = quantize_groups(kept.bfloat16())
        again = dequantized({"a.weight": pairs, "a.scale": scale})["a.weight"]
        errors[kind] = float((again - kept).norm() / (kept - weights).norm())
    assert errors[Kind.Q4_0] < 0.05
    assert errors[Kind.Q4_1] < 0.2
    assert errors[Kind.Q5_1] > 1.0


def test_each_matrix_is_rounded_as_its_types_ask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """int4 where all parts have four bits, as files of type Q4_K_M mean it; a form that is asked for is for all."""
    wide = {"blk.0.attn_v.weight": Kind.Q8_0, "blk.1.ffn_down.weight": Kind.Q5_1, "output.weight": Kind.Q4_0}
    path = write(tmp_path / "model.gguf", "llama", oracle("llama"), lambda name: wide.get(name, Kind.Q4_1))
    found: dict[str, torch.Tensor] = {}
    make = NativeRunner.__init__

    def keep(self: Any, spec: Any, weights: dict[str, torch.Tensor], **options: Any) -> None:
        found.update(weights)
        make(self, spec, weights, **options)

    monkeypatch.setattr(NativeRunner, "__init__", keep)
    runner = load_runner(path, dtype="float32")
    bytes_of = {name for name, weight in found.items() if weight.dtype is torch.int8}
    assert bytes_of == {"layers.0.qkv.weight", "layers.1.down.weight", "head.weight"}
    assert "rounded to int4, and to int8 where that would lose much (an error of " in caplog.text
    near = {name: weight.float() for name, weight in dequantized(found).items()}
    small, exact = runner.extend([runner.open()], [TEXT], all_logits=True).logits, values_of(path)
    assert (small - exact).abs().mean() < 0.05 * exact.std()
    plain = make_plain(runner, near)
    assert (small - plain).abs().max() < 1e-3 * exact.std()
    assert runner.info.quantization == "int4"
    assert runner.info.fingerprint != load_runner(path, dtype="float32", quantization="int4").info.fingerprint
    assert {weight.dtype for name, weight in found.items() if name == "layers.0.qkv.weight"} == {torch.uint8}


def make_plain(runner: Any, weights: dict[str, torch.Tensor]) -> torch.Tensor:
    """Logits for TEXT of the model with other weights."""
    cpu = torch.device("cpu")
    plain = NativeRunner(
        replace(runner.spec, tied=False), weights, name="t", device=cpu, dtype=torch.float32, compiled=False
    )
    return plain.extend([plain.open()], [TEXT], all_logits=True).logits


@pytest.mark.parametrize("kind", [Kind.Q4_K, Kind.Q2_K, Kind.Q3_K, Kind.Q5_K, Kind.Q6_K, Kind.IQ4_NL, Kind.MXFP4])
def test_the_bits_of_types(tmp_path: Path, kind: Kind) -> None:
    rng, (block, _) = np.random.default_rng(0), gguf.GGML_QUANT_SIZES[kind]
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    raw = random_blocks(rng, kind, 64)
    writer.add_tensor("blk.0.ffn_up.weight", raw, raw_dtype=kind)
    writer.add_tensor("blk.0.ffn_down.weight", np.zeros((2, block), np.float32))
    finish(writer)
    file = read_gguf(tmp_path / "model.gguf")
    assert file.kind == kind.name
    assert file.is_narrow("blk.0.ffn_up.weight") == (kind in {Kind.Q4_K, Kind.Q2_K, Kind.Q3_K})
    assert not file.is_narrow("blk.0.ffn_down.weight")
    found = file.read("blk.0.ffn_up.weight").flatten()
    assert torch.equal(found, block_values(torch.from_numpy(raw).flatten(), kind.name))


HALVES = {Kind.Q8_0: [0], Kind.Q4_0: [0], Kind.Q4_1: [0, 2], Kind.Q5_0: [0], Kind.Q5_1: [0, 2], Kind.IQ4_NL: [0]}
HALVES |= {Kind.Q2_K: [80, 82], Kind.Q3_K: [108], Kind.Q4_K: [0, 2], Kind.Q5_K: [0, 2], Kind.Q6_K: [208]}
"""Bytes of blocks where a float16 begins."""


def random_blocks(rng: np.random.Generator, kind: Kind, count: int) -> np.ndarray:
    """(count, bytes) of blocks whose numbers are finite."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    if kind in (Kind.F32, Kind.F16, Kind.BF16):
        return gguf.quants.quantize(rng.standard_normal((count, block), np.float32), kind).view(np.uint8)
    raw = rng.integers(0, 256, (count, size), np.uint8)
    for at in HALVES.get(kind, []):
        raw[:, at : at + 2] = (rng.standard_normal((count, 1)) / 100).astype(np.float16).view(np.uint8)
    if kind is Kind.MXFP4:
        raw[:, 0] = rng.integers(0, 250, count)
    return raw


@pytest.mark.parametrize("kind", TYPES)
def test_blocks_mean_what_gguf_makes_of_them(kind: Kind) -> None:
    """Bit for bit, for random blocks of every type; another byte is another number."""
    raw = random_blocks(np.random.default_rng(1), kind, 512)
    stored = raw.view({Kind.F32: np.float32, Kind.F16: np.float16}.get(kind, np.uint8))
    wanted = np.asarray(gguf.quants.dequantize(stored, kind), np.float32).flatten()
    found = block_values(torch.from_numpy(raw).flatten(), kind.name).numpy()
    assert np.isfinite(found).all()
    assert np.array_equal(found.view(np.uint32), wanted.view(np.uint32))
    raw = raw.copy()  # F32 is read in place
    raw[100] ^= 3
    changed = block_values(torch.from_numpy(raw).flatten(), kind.name).numpy().view(np.uint32)
    assert set(np.flatnonzero(changed != found.view(np.uint32)) * 512 // len(found)) == {100}


PEAK = """
import functools, sys
from pathlib import Path
import torch
from paceline.checkpoints import GgufCheckpoint, load_weights, quantized, read_config, spec_from_config

def status(key):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(key))

def load(path):
    spec = spec_from_config(read_config(path))
    instead = functools.partial(quantized, spec=spec, form="int8")
    cpu, checkpoint = torch.device("cpu"), GgufCheckpoint(path)
    weights = load_weights(checkpoint, spec, device=cpu, dtype=torch.bfloat16, instead=instead)
    return sum(weight.nbytes for weight in weights.values()), weights

load(Path(sys.argv[1]))
before = status("VmRSS")
Path("/proc/self/clear_refs").write_text("5")
size, _weights = load(Path(sys.argv[2]))
print((status("VmHWM") - before) / size)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read from /proc")
def test_loading_needs_little_more_memory_than_its_result(tmp_path: Path) -> None:
    """The peak of a process of its own, whose result is 80 MB. A second copy of the whole would be 2 times it; threads,
    allocator and one matrix make it 1.2 to 1.35.
    """
    from transformers import LlamaConfig

    small = write(tmp_path / "small.gguf", "llama", oracle("llama"), Kind.Q8_0)
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 5, "vocab_size": 4096}
    config = LlamaConfig(**SIZES | sizes)
    writer = gguf.GGUFWriter(tmp_path / "large.gguf", "llama")
    describe(writer, "llama", config)
    for name, shape in shapes(config):
        if len(shape) == 1:
            writer.add_tensor(name, np.ones(shape, np.float32))
        else:
            raw = random_blocks(np.random.default_rng(0), Kind.Q8_0, shape[0] * shape[1] // 32)
            writer.add_tensor(name, raw.reshape(shape[0], -1), raw_dtype=Kind.Q8_0)
    finish(writer)
    command = [sys.executable, "-c", PEAK, small, tmp_path / "large.gguf"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert 0.9 < float(done.stdout) < 1.6


def shapes(config: Any) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of a Llama's tensors, untied."""
    hidden, inner, vocab = config.hidden_size, config.intermediate_size, config.vocab_size
    heads = config.num_key_value_heads * config.head_dim
    yield from {"token_embd.weight": (vocab, hidden), "output.weight": (vocab, hidden)}.items()
    yield "output_norm.weight", (hidden,)
    for layer in range(config.num_hidden_layers):
        parts = {"attn_norm": (hidden,), "ffn_norm": (hidden,), "attn_q": (hidden, hidden), "attn_k": (heads, hidden)}
        parts |= {"attn_v": (heads, hidden), "attn_output": (hidden, hidden), "ffn_gate": (inner, hidden)}
        parts |= {"ffn_up": (inner, hidden), "ffn_down": (hidden, inner)}
        yield from ((f"blk.{layer}.{part}.weight", shape) for part, shape in parts.items())


def test_a_model_answers_from_the_file_alone(tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", "llama", oracle("llama"))
    (tmp_path / "other").mkdir()
    write(tmp_path / "other" / "second.gguf", "llama", oracle("llama"))
    greedy = SamplingParams(temperature=0, max_tokens=8)
    llm = LLM(path)
    (out,) = llm.generate("hello world", greedy)
    assert out.prompt_token_ids == llm.tokenizer.encode("hello world")
    assert llm.defaults.eos_ids == (2,)
    (again,) = LLM(tmp_path / "other").generate("hello world", greedy)
    (named,) = LLM(tmp_path / "other", gguf_file="second.gguf").generate("hello world", greedy)
    assert out.outputs[0].token_ids == again.outputs[0].token_ids == named.outputs[0].token_ids
    (chat,) = llm.chat([{"role": "user", "content": "hello"}], greedy)
    assert llm.tokenizer.decode(chat.prompt_token_ids) == "hello:"
    write(tmp_path / "other" / "third.gguf", "llama", oracle("llama"))
    with pytest.raises(
        CheckpointError, match=r"2 GGUF files; name one with gguf_file \(--gguf-file\): second\.gguf, third\.gguf"
    ):
        LLM(tmp_path / "other")


def test_tokens_that_fill_up_the_rows_of_a_file_are_none(tmp_path: Path) -> None:
    """Converters name them so; any other unused token is one."""
    last = len(TOKENS) - 5
    filled = [*TOKENS[:last], *(f"[PAD{i}]" for i in range(last, len(TOKENS)))]
    kinds = [*KINDS[: last - 1], *[gguf.TokenType.UNUSED] * 6]

    def tokenizer(writer: Any) -> None:
        byte_level(writer, tokens=filled, kinds=kinds)

    llm = LLM(write(tmp_path / "model.gguf", "llama", oracle("llama"), tokenizer=tokenizer))
    assert sorted(llm.tokenizer.tokens()) == list(range(last))
    assert (llm.runner.info.vocab_size, llm.runner.info.stored_rows) == (last, len(TOKENS))
    (out,) = llm.generate("hello world", SamplingParams(temperature=2.0, seed=1, max_tokens=40, ignore_eos=True))
    assert max(out.outputs[0].token_ids) < last
    whole = LLM(write(tmp_path / "whole.gguf", "llama", oracle("llama")))
    assert whole.runner.info.vocab_size == len(TOKENS)


@pytest.mark.parametrize(
    ("rule", "other", "text", "words"),
    [
        ("deepseek-v3", "deepseek-llm", "1234 /ab_c 中文x", ["123", "4", " /", "ab", "_c", " ", "中文", "x"]),
        ("seed-coder", "qwen2", "a.\n12", ["a", ".", "\n", "1", "2"]),
        ("minimax-m2", "llama-bpe", "HelloWorld's", ["Hello", "World's"]),
    ],
)
def test_rules_of_models_cut_as_their_tokenizers_do(rule: str, other: str, text: str, words: list[str]) -> None:
    assert cut(rule, text) == words
    assert cut(other, text) != words


def cut(rule: str, text: str) -> list[str]:
    cuts = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in PRE[rule].patterns]
    return [word for word, _ in pre_tokenizers.Sequence(cuts).pre_tokenize_str(text)]


def test_text_is_cut_by_the_rule_that_the_file_names(tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", "llama", oracle("llama"))
    tokenizer = Tokenizer.load(path)
    spelt = [TOKENS[i] for i in tokenizer.encode("hello world", add_special_tokens=False)]
    assert spelt == ["hello", "Ġw", "or", "l", "d"]
    assert tokenizer.decode(tokenizer.encode("hello world\n")) == "hello world\n"

    def digits(writer: Any) -> None:
        byte_level(writer, "an-unknown-rule")

    path = write(tmp_path / "unknown.gguf", "llama", oracle("llama"), tokenizer=digits)
    with pytest.raises(
        UnsupportedModelError, match=r"rule 'an-unknown-rule' \(tokenizer.ggml.pre\), which is not known"
    ):
        Tokenizer.load(path)


def test_words_that_users_define_write_their_letters(tmp_path: Path) -> None:
    """Their signs stand for bytes elsewhere: "ü" alone for one that no text has, "Ċ" for a line break."""
    words = ["für", "ü", "Ċ"]
    named = [*(f"<spare{i}>" if token == "Ċ" else token for i, token in enumerate(TOKENS[:-3])), *words]

    def tokenizer(writer: Any) -> None:
        byte_level(writer, tokens=named, kinds=[*KINDS[:-3], *[gguf.TokenType.USER_DEFINED] * 3])

    read = Tokenizer.load(write(tmp_path / "model.gguf", "llama", oracle("llama"), tokenizer=tokenizer))
    ids = read.encode("hello für ü\n")
    assert set(range(len(TOKENS) - 3, len(TOKENS))) <= set(ids)
    assert read.decode(ids) == "hello für ü\n"


@pytest.mark.parametrize(("spare", "ends"), [(("<|return|>", "<|call|>"), [2, -1, -2]), (("<|x|>", "<|y|>"), [2, -3])])
def test_a_message_of_gpt_oss_ends_no_answer(tmp_path: Path, spare: tuple[str, str], ends: list[int]) -> None:
    """Beside its own end tokens, "<|end|>" is none; elsewhere, as in Phi, it is."""

    def tokenizer(writer: Any) -> None:
        byte_level(writer, "gpt-4o", [*TOKENS[:-3], "<|end|>", spare[1], spare[0]], [*KINDS[:-3], 3, 3, 3])

    path = write(tmp_path / "model.gguf", "llama", oracle("llama"), tokenizer=tokenizer)
    assert list(LLM(path).defaults.eos_ids) == [end % 128 for end in ends]


def by_scores(writer: Any) -> None:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(64)), "▁", "a", "b", "ab", "▁ab", "ba", "▁a"]
    tokens += [f"<spare{i}>" for i in range(128 - len(tokens))]
    scores = [0.0] * 67 + [-9.0, -7.0, -8.0, -1.0, -3.0, -2.0, -4.0] + [-1e4] * (len(tokens) - 74)
    writer.add_string("tokenizer.ggml.model", "llama")
    writer.add_array("tokenizer.ggml.tokens", tokens)
    writer.add_array("tokenizer.ggml.scores", scores)
    writer.add_array("tokenizer.ggml.token_type", [2, 3, 3] + [6] * 64 + [1] * (len(tokens) - 67))
    writer.add_uint32("tokenizer.ggml.bos_token_id", 1)


def test_sentencepiece_merges_by_score(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write(tmp_path / "model.gguf", "llama", oracle("llama"), tokenizer=by_scores))
    spelt = tokenizer.tokens()
    assert [spelt[i] for i in tokenizer.encode("ab aba\n")] == ["<s>", "▁ab", "▁ab", "a", "<0x0A>"]
    assert tokenizer.decode(tokenizer.encode("ab aba\n")) == "ab aba\n"


def test_parts_of_a_split_file_are_read_together(tmp_path: Path) -> None:
    whole = write(tmp_path / "model.gguf", "llama", oracle("llama"))
    reader = gguf.GGUFReader(whole)
    for number, tensors in enumerate((reader.tensors[:5], reader.tensors[5:]), 1):
        writer = gguf.GGUFWriter(tmp_path / f"split-{number:05d}-of-00002.gguf", "llama")
        if number == 1:
            describe(writer, "llama", oracle("llama").config)
            byte_level(writer)
        for tensor in tensors:
            writer.add_tensor(tensor.name, np.array(tensor.data))
        finish(writer)
    assert torch.equal(values_of(tmp_path / "split-00001-of-00002.gguf"), values_of(whole))
    (tmp_path / "split-00002-of-00002.gguf").unlink()
    with pytest.raises(CheckpointError, match=r"lacks split-00002-of-00002.gguf of 2 parts"):
        values_of(tmp_path / "split-00001-of-00002.gguf")


def said(path: Path) -> str:
    """The error of loading a file, or nothing."""
    try:
        values_of(path)
        Tokenizer.load(path)
    except PacelineError as error:
        return str(error)
    return ""


def test_damaged_files_are_one_line(tmp_path: Path) -> None:
    good = write(tmp_path / "good.gguf", "llama", oracle("llama")).read_bytes()
    bad = tmp_path / "bad.gguf"
    for size in (0, 3, 4, 11, 24, 60, 500, 2000, len(good) // 2, len(good) - 1):
        bad.write_bytes(good[:size])
        with pytest.raises(CheckpointError, match=r"(is cut off or no GGUF file|cannot be read).*download it again"):
            values_of(bad)
    bad.write_bytes(good[:4] + struct.pack("<I", 9) + good[8:])
    with pytest.raises(UnsupportedModelError, match="is GGUF version 9"):
        values_of(bad)
    rng = np.random.default_rng(0)
    for _ in range(200):
        data = bytearray(good)
        for at in rng.integers(0, 6000, 4):
            data[at] = rng.integers(256)
        bad.write_bytes(data)
        assert "\n" not in said(bad)
    bad.write_bytes(good.replace(b"llama", b"lamma"))
    with pytest.raises(
        UnsupportedModelError, match="of architecture 'lamma', which is not supported; supported are llama"
    ):
        values_of(bad)


def test_an_unknown_type_of_tensor(tmp_path: Path) -> None:
    data = bytearray(write(tmp_path / "model.gguf", "llama", oracle("llama")).read_bytes())
    at = data.index(b"blk.0.ffn_up.weight") + len(b"blk.0.ffn_up.weight") + 4 + 2 * 8
    data[at : at + 4] = struct.pack("<I", 4321)
    (tmp_path / "model.gguf").write_bytes(data)
    with pytest.raises(UnsupportedModelError, match=r"blk.0.ffn_up.weight is stored as type 4321, which is not known"):
        values_of(tmp_path / "model.gguf")


def test_a_model_that_only_transformers_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The line speaks of the GGUF file; transformers is not tried."""
    path = write(tmp_path / "model.gguf", "llama", oracle("llama"))
    with pytest.raises(ConfigError, match="transformers is not used for GGUF files"):
        load_runner(path, native=False)
    other = {"llama": gguf_architectures.Architecture(model_type="nameless")}
    monkeypatch.setattr(gguf_architectures, "ARCHITECTURES", other)
    with pytest.raises(UnsupportedModelError, match=r"GGUF file of a model that is not supported.*use the safetensors"):
        load_runner(path)


def test_a_file_without_a_tokenizer(tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", "llama", oracle("llama"), tokenizer=lambda writer: None)
    with pytest.raises(CheckpointError, match=r"holds no tokenizer \(tokens is missing\); give tokenizer=FOLDER"):
        LLM(path)
    other = write(tmp_path / "other.gguf", "llama", oracle("llama"))
    llm = LLM(path, tokenizer=other)
    assert llm.defaults.eos_ids == (2,)
    assert llm.generate("hello", SamplingParams(temperature=0, max_tokens=4))[0].outputs[0].token_ids


def test_metadata_that_contradicts_itself(tmp_path: Path) -> None:
    good = write(tmp_path / "model.gguf", "llama", oracle("llama")).read_bytes()
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(good.replace(b"llama.block_count", b"other.block_count"))
    with pytest.raises(CheckpointError, match=r"bad.gguf: its metadata lacks 'num_hidden_layers'"):
        values_of(bad)
    bad.write_bytes(good.replace(b"llama.attention.head_count\x04", b"llama.attention.head_xxxxx\x04"))
    with pytest.raises(CheckpointError, match=r"llama.attention.head_count must be a whole number, got None"):
        values_of(bad)
