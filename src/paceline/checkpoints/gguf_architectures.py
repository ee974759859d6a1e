"""The architectures of GGUF files: the family that each is, the names of its tensors, the keys that it alone has."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.checkpoints import gguf_hybrids as hybrids
from paceline.checkpoints.gguf_file import GgufFile, Metadata
from paceline.errors import CheckpointError, UnsupportedModelError
from paceline.utils import shortened

NAMES: Mapping[str, str] = {
    "token_embd": "embed_tokens",
    "output_norm": "norm",
    "token_embd_norm": "norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "attn_sinks": "self_attn.sinks",
}
EXPERTS: Mapping[str, Sequence[str]] = {
    "ffn_gate_exps": ("gate_proj",),
    "ffn_up_exps": ("up_proj",),
    "ffn_gate_up_exps": ("gate_proj", "up_proj"),
    "ffn_down_exps": ("down_proj",),
}
"""Stacks of experts, and what each expert has in them, one after the other."""

Extra = Callable[[GgufFile], Metadata]


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """What a GGUF architecture is here.

    Attributes:
        model_type: of `config.json`.
        turned: rows of queries and keys are stored for a rotary embedding that turns neighbours.
        norms_plus_one: norms are stored with the 1 that the model adds.
        names: of tensors, where they differ from NAMES.
        window_period: of a file with a sliding window that does not say which layers have it, one in so many attends to
            everything; None is the family's default.
        numbers: keys of metadata with a number for each layer -> the tensor that it is elsewhere, with its shape.
        yarn: parameters of YaRN that the model has and its files do not say. (llama.cpp rounds the ends of YaRN's ramp
            for gpt-oss too, which its makers do not.)
        extra: further keys of `config.json`.
    """

    model_type: str
    turned: bool = False
    norms_plus_one: bool = False
    names: Mapping[str, str] = field(default_factory=lambda: {"ffn_norm": "post_attention_layernorm"})
    window_period: int | None = None
    numbers: Mapping[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    yarn: Mapping[str, Any] = field(default_factory=dict)
    extra: Extra = lambda file: {}


def _gemma2(file: GgufFile) -> Metadata:
    return {
        "attn_logit_softcapping": file.get("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": file.get("final_logit_softcapping", 30.0),
        "query_pre_attn_scalar": _query_scalar(file, largest=46),
    }


def _gemma3(file: GgufFile) -> Metadata:
    metadata: Metadata = {
        "final_logit_softcapping": file.get("final_logit_softcapping"),
        "query_pre_attn_scalar": _query_scalar(file, largest=62),
    }
    if (local := file.get("rope.freq_base_swa")) is not None:
        metadata["rope_local_base_freq"] = local
    return metadata


def _query_scalar(file: GgufFile, *, largest: int) -> float:
    """What queries are divided by the root of: the file does not say; the largest Gemma has a value of its own."""
    if file.number("block_count") == largest:
        return file.number("embedding_length") / max(1, file.number("attention.head_count"))
    return float(file.number("attention.key_length", 256))


def _granite(file: GgufFile) -> Metadata:
    if file.get("rope.scaling.finetuned", True) is not True:
        raise UnsupportedModelError(f"{file.path.name}: a Granite without rotary embedding is not supported")
    return _multipliers(file)


def _multipliers(file: GgufFile) -> Metadata:
    keys = {
        "embedding_multiplier": "embedding_scale",
        "residual_multiplier": "residual_scale",
        "attention_multiplier": "attention.scale",
        "logits_scaling": "logit_scale",
    }
    return {ours: file.get(theirs) for ours, theirs in keys.items() if file.get(theirs) is not None}


def by_layer(file: GgufFile, key: str) -> list[float]:
    """The numbers of all layers that the metadata gives under a key, or one for all.

    Raises:
        CheckpointError: nothing of the kind.
    """
    found, count = file.get(key), file.number("block_count")
    numbers = found if isinstance(found, list) else [found] * count
    if len(numbers) != count or not all(isinstance(number, float) for number in numbers):
        raise CheckpointError(
            f"{file.path}: {file.architecture}.{key} must be a number for each of {count} layers, got "
            f"{shortened(found)}; download it again"
        )
    return numbers


def _apertus(file: GgufFile) -> Metadata:
    for key in (*XIELU, "xielu.eps"):
        by_layer(file, key)
    return {"hidden_act": "xielu"}


def _qwen2_moe(file: GgufFile) -> Metadata:
    return _qwen3_moe(file) | {
        "shared_expert_intermediate_size": file.get("expert_shared_feed_forward_length"),
        "norm_topk_prob": bool(file.get("expert_weights_norm", False)),
        "qkv_bias": "blk.0.attn_q.bias" in file.tensors,
    }


def _qwen3_moe(file: GgufFile) -> Metadata:
    return {
        "num_experts": file.get("expert_count"),
        "num_experts_per_tok": file.get("expert_used_count"),
        "moe_intermediate_size": file.get("expert_feed_forward_length"),
        "norm_topk_prob": bool(file.get("expert_weights_norm", True)),
    }


def _mixtral(file: GgufFile) -> Metadata:
    return {"num_local_experts": file.get("expert_count"), "num_experts_per_tok": file.get("expert_used_count")}


def _olmo2(file: GgufFile) -> Metadata:
    return {"model_type": "olmo3"} if file.get("attention.sliding_window") else {}  # both have one name


def _exaone4(file: GgufFile) -> Metadata:
    return {"sliding_window": file.get("attention.sliding_window")}  # where it is not said, there is none


def _starcoder2(file: GgufFile) -> Metadata:
    return {
        "norm_epsilon": file.get("attention.layer_norm_epsilon", 1e-5),
        "use_bias": "blk.0.attn_q.bias" in file.tensors,
    }


def _ernie4_5(file: GgufFile) -> Metadata:
    return {"use_bias": "blk.0.attn_q.bias" in file.tensors}


def _ernie4_5_moe(file: GgufFile) -> Metadata:
    return _ernie4_5(file) | {
        "moe_num_experts": file.get("expert_count"),
        "moe_k": file.get("expert_used_count"),
        "moe_intermediate_size": file.get("expert_feed_forward_length"),
        "moe_num_shared_experts": file.get("expert_shared_count", 0),
        "moe_layer_start_index": file.get("leading_dense_block_count", 0),
        "moe_layer_interval": file.get("interleave_moe_layer_step", 1),
    }


def _glm4(file: GgufFile) -> Metadata:
    return {"attention_bias": "blk.0.attn_q.bias" in file.tensors}


def _seed_oss(file: GgufFile) -> Metadata:
    return _glm4(file) | {"attention_out_bias": "blk.0.attn_output.bias" in file.tensors}


def _cohere2(file: GgufFile) -> Metadata:
    return {
        "layer_norm_eps": file.get("attention.layer_norm_epsilon", 1e-5),
        "logit_scale": file.get("logit_scale", 1.0),
    }


def _gpt_oss(file: GgufFile) -> Metadata:
    inner = file.get("expert_feed_forward_length", file.get("feed_forward_length"))
    return _mixtral(file) | {"intermediate_size": inner}


def _hunyuan_moe(file: GgufFile) -> Metadata:
    inner = file.get("expert_feed_forward_length", file.get("feed_forward_length"))
    return {
        "num_experts": file.get("expert_count"),
        "moe_topk": file.get("expert_used_count"),
        "intermediate_size": inner,
    }


def _deepseek2(file: GgufFile) -> Metadata:
    rope, groups = file.number("rope.dimension_count"), file.get("expert_group_count") or 1
    metadata = {
        "partial_rotary_factor": 1.0,
        "kv_lora_rank": file.get("attention.kv_lora_rank"),
        "q_lora_rank": file.get("attention.q_lora_rank"),
        "qk_rope_head_dim": rope,
        "qk_nope_head_dim": file.number("attention.key_length_mla", file.number("attention.key_length")) - rope,
        "v_head_dim": file.get("attention.value_length_mla", file.get("attention.value_length")),
        **_routed_experts(file),
    }
    if metadata["scoring_func"] == "sigmoid":
        return metadata | {"model_type": "deepseek_v3"}
    return metadata | {"topk_method": "greedy" if groups == 1 else "group_limited_greedy"}


def _mistral4(file: GgufFile) -> Metadata:
    found = _deepseek2(file)
    if found["scoring_func"] != "softmax":
        raise UnsupportedModelError(
            f"{file.path.name}: a Mistral 4 whose experts are not chosen by softmax is not known"
        )
    return {key: value for key, value in found.items() if key not in ("topk_method", "scoring_func")}


def _glm4_moe(file: GgufFile) -> Metadata:
    return _routed_experts(file) | _glm4(file) | {"use_qk_norm": "blk.0.attn_q_norm.weight" in file.tensors}


def _minimax_m2(file: GgufFile) -> Metadata:
    scores = {SOFTMAX: "softmax", SIGMOID: "sigmoid"}.get(file.get("expert_gating_func", SIGMOID), "unknown")
    norm = file.get("expert_weights_norm", True)
    return _gpt_oss(file) | {"scoring_func": scores, "norm_topk_prob": norm}


def _routed_experts(file: GgufFile) -> Metadata:
    """Experts chosen by groups, with an MLP beside them.

    Files of GLM-4.7-Flash do not say that their router's scores are sigmoids; only such are ranked by numbers besides.
    """
    ranked = any(name.endswith(".exp_probs_b.bias") for name in file.tensors)
    gating = file.get("expert_gating_func") or (SIGMOID if ranked else SOFTMAX)
    return {
        "n_routed_experts": file.get("expert_count"),
        "n_shared_experts": file.get("expert_shared_count", 0),
        "num_experts_per_tok": file.get("expert_used_count"),
        "moe_intermediate_size": file.get("expert_feed_forward_length"),
        "first_k_dense_replace": file.get("leading_dense_block_count", 0),
        "routed_scaling_factor": file.get("expert_weights_scale", 1.0),
        "norm_topk_prob": bool(file.get("expert_weights_norm", False)),
        "scoring_func": {SOFTMAX: "softmax", SIGMOID: "sigmoid"}.get(gating, f"number {gating}"),
        "n_group": file.get("expert_group_count") or 1,
        "topk_group": file.get("expert_group_used_count") or 1,
    }


SOFTMAX, SIGMOID = 1, hybrids.SIGMOID
"""Numbers of the functions that make shares of experts of what the router says."""

SANDWICH = {"ffn_norm": "pre_feedforward_layernorm"}
PHI3 = {"ffn_norm": "post_attention_layernorm", "ffn_up": "mlp.gate_up_proj"}
STARCODER2 = {"ffn_norm": "post_attention_layernorm", "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}
GLM4 = PHI3 | {"post_attention_norm": "post_self_attn_layernorm", "post_ffw_norm": "post_mlp_layernorm"}
QWEN2_MOE = {
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
XIELU: Mapping[str, tuple[str, tuple[int, ...]]] = {
    "xielu.alpha_p": ("mlp.act_fn.alpha_p", (1,)),
    "xielu.alpha_n": ("mlp.act_fn.alpha_n", (1,)),
    "xielu.beta": ("mlp.act_fn.beta", ()),
}
GPT_OSS = {"ffn_gate_inp": "mlp.router"}
SHARED_EXPERTS = {
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
HUNYUAN_MOE = SHARED_EXPERTS | {"ffn_norm": "post_attention_layernorm"}
DEEPSEEK2 = SHARED_EXPERTS | {
    "ffn_norm": "post_attention_layernorm",
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
}

ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture(model_type="llama", turned=True),
    "mistral3": Architecture(model_type="llama", turned=True),
    "qwen2": Architecture(model_type="qwen2"),
    "qwen3": Architecture(model_type="qwen3"),
    "qwen2moe": Architecture(model_type="qwen2_moe", names=QWEN2_MOE, extra=_qwen2_moe),
    "qwen3moe": Architecture(model_type="qwen3_moe", extra=_qwen3_moe),
    "gemma2": Architecture(model_type="gemma2", norms_plus_one=True, names=SANDWICH, extra=_gemma2),
    "gemma3": Architecture(model_type="gemma3_text", norms_plus_one=True, names=SANDWICH, extra=_gemma3),
    "phi3": Architecture(model_type="phi3", names=PHI3),
    "apertus": Architecture(model_type="apertus", numbers=XIELU, extra=_apertus),
    "smollm3": Architecture(model_type="smollm3", turned=True),
    "olmo2": Architecture(model_type="olmo2", window_period=4, extra=_olmo2),
    "exaone4": Architecture(model_type="exaone4", extra=_exaone4),
    "granite": Architecture(model_type="granite", turned=True, extra=_granite),
    "starcoder2": Architecture(model_type="starcoder2", names=STARCODER2, extra=_starcoder2),
    "glm4": Architecture(model_type="glm4", names=GLM4, extra=_glm4),
    "ernie4_5": Architecture(model_type="ernie4_5", extra=_ernie4_5),
    "ernie4_5-moe": Architecture(model_type="ernie4_5_moe", names=HUNYUAN_MOE, extra=_ernie4_5_moe),
    "hunyuan-dense": Architecture(model_type="hunyuan_v1_dense"),
    "hunyuan-moe": Architecture(model_type="hunyuan_v1_moe", names=HUNYUAN_MOE, extra=_hunyuan_moe),
    "seed_oss": Architecture(model_type="seed_oss", names={}, extra=_seed_oss),
    "cohere2": Architecture(model_type="cohere2", extra=_cohere2),
    "gpt-oss": Architecture(model_type="gpt_oss", names=GPT_OSS, yarn={"truncate": False}, extra=_gpt_oss),
    "deepseek2": Architecture(model_type="deepseek_v2", names=DEEPSEEK2, extra=_deepseek2),
    "mistral4": Architecture(model_type="mistral4", names=DEEPSEEK2, extra=_mistral4),
    "glm4moe": Architecture(model_type="glm4_moe", names=SHARED_EXPERTS, extra=_glm4_moe),
    "minimax-m2": Architecture(model_type="minimax_m2", extra=_minimax_m2),
    "lfm2": Architecture(model_type="lfm2", names=hybrids.LFM2, extra=hybrids.lfm2),
    "lfm2moe": Architecture(model_type="lfm2_moe", names=hybrids.LFM2, extra=hybrids.lfm2_moe),
    "falcon-h1": Architecture(model_type="falcon_h1", names=hybrids.FALCON_H1, extra=hybrids.falcon_h1),
    "granitehybrid": Architecture(
        model_type="granitemoehybrid",
        turned=True,
        names=hybrids.GRANITE_HYBRID,
        extra=lambda file: _multipliers(file) | hybrids.granite_hybrid(file),
    ),
    "qwen3next": Architecture(
        model_type="qwen3_next", norms_plus_one=True, names=hybrids.QWEN3_NEXT, extra=hybrids.qwen3_next_moe
    ),
    "qwen35": Architecture(
        model_type="qwen3_5_text", norms_plus_one=True, names=hybrids.QWEN3_NEXT, extra=hybrids.qwen3_next
    ),
    "qwen35moe": Architecture(
        model_type="qwen3_5_moe_text", norms_plus_one=True, names=hybrids.QWEN3_NEXT, extra=hybrids.qwen3_next_moe
    ),
}
MIXTRAL = Architecture(model_type="mixtral", turned=True, extra=_mixtral)


def architecture_of(file: GgufFile) -> Architecture:
    """What a file's architecture is here.

    Raises:
        UnsupportedModelError: it is none of ARCHITECTURES.
    """
    name = file.architecture
    if name not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"{file.path} is a GGUF file of architecture {name!r}, which is not supported; supported are "
            f"{', '.join(ARCHITECTURES)}; or use the safetensors checkpoint it was made from"
        )
    return MIXTRAL if name == "llama" and file.get("expert_count") else ARCHITECTURES[name]


def layers_before_others(file: GgufFile) -> int | None:
    """How many layers come before those that predict further tokens; None where there are none of these."""
    further = file.number("nextn_predict_layers", 0)
    return file.number("block_count") - further if further else None
