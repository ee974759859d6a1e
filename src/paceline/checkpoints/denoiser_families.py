"""Families of diffusion language models: what each makes of its `config.json`, and how it names its tensors.

    LLaDA         GSAI-ML/LLaDA-8B and 1.5 (arXiv:2502.09992): keys and tensor names of OLMo, full attention
    LLaDA-MoE     inclusionAI/LLaDA-MoE-7B-A1B: softmax routing, norms on queries and keys, full attention
    Dream         Dream-org/Dream-v0, DiffuCoder (arXiv:2508.15487): Qwen2, full attention, shifted logits
    SDAR          JetLM/SDAR, TraDo (arXiv:2510.06303): Qwen3 or Qwen3-MoE, block-causal
    LLaDA2.x      inclusionAI/LLaDA2.0 and 2.1 (arXiv:2512.15745): grouped sigmoid routing, block-causal

A family becomes the configuration of the decoder family that it was built from, which `checkpoints.families` reads.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from paceline.checkpoints.config_keys import ConfigKeys
from paceline.checkpoints.families import declared_dtype, spec_from_config
from paceline.checkpoints.model_family import Rename
from paceline.errors import CheckpointError, UnsupportedModelError
from paceline.models import DenoiserSpec, ModelSpec

Config = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class DenoiserFamily:
    """One family.

    Attributes:
        spec: the DenoiserSpec of a configuration, its mask and end tokens still missing.
        names: patterns of stored names and what takes their place, so that `checkpoints.weights` knows them.
        block_length: of families that are block-causal, where the file does not say; None for full attention.
    """

    spec: Callable[[ConfigKeys], DenoiserSpec]
    names: Rename = ()
    block_length: int | None = None


LLADA_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "block_type": ("llama", None),
    "block_group_size": (1, None),
    "alibi": (False, None),
    "rope": (True, None),
    "layer_norm_type": ("rms", None),
    "attention_layer_norm": (False, None),
    "include_bias": (False, None),
    "bias_for_layer_norm": (False, None),
    "clip_qkv": (None,),
}
"""Keys of LLaDA's configuration that change the model, with the values that are implemented."""

LLADA2_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "use_bias": (False, None),
    "use_qkv_bias": (False, None),
    "use_qk_norm": (True, None),
    "score_function": ("sigmoid", None),
    "norm_head": (False, None),
    "use_linear_attention": (False, None),
}
LLADA_MOE_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "qk_layernorm": (True,),
    "moe_router_score_function": ("softmax", None),
    "moe_router_enable_expert_bias": (False, None),
    "shared_expert_intermediate_size": (None, 0, -1),
    "router_num_group": (None, 1),
    "routed_scaling_factor": (None, 1, 1.0),
}


def _only(keys: ConfigKeys, neutral: Mapping[str, tuple[object, ...]]) -> None:
    for name, values in neutral.items():
        if keys.get(name) not in values:
            raise UnsupportedModelError(f"{keys.family}: {name}={keys.get(name)!r} is not implemented")


def _family(keys: ConfigKeys, model_type: str, translated: Config, *shared: str) -> ModelSpec:
    """The spec of a decoder family, from keys called alike (`shared`) and those translated (`translated`)."""
    config = {name: keys.get(name) for name in shared if keys.given(name)}
    model = spec_from_config({**config, **translated, "model_type": model_type})
    return replace(model, family=keys.family)


_COMMON = (
    *("hidden_size", "num_attention_heads", "num_key_value_heads", "num_hidden_layers", "head_dim", "vocab_size"),
    "max_position_embeddings",
    "rms_norm_eps",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "hidden_act",
    "tie_word_embeddings",
    "partial_rotary_factor",
)
_QWEN = ("intermediate_size", "use_sliding_window", "sliding_window", "max_window_layers", "attention_bias")
_MOE = (
    "num_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "norm_topk_prob",
    "decoder_sparse_step",
    "mlp_only_layers",
)


def _llada(keys: ConfigKeys) -> DenoiserSpec:
    _only(keys, LLADA_NEUTRAL)
    width, heads = keys.size("d_model"), keys.size("n_heads")
    multi_query = 1 if keys.flag("multi_query_attention") else heads
    translated = {
        "hidden_size": width,
        "num_attention_heads": heads,
        "num_key_value_heads": keys.optional_size("n_kv_heads") or multi_query,
        "num_hidden_layers": keys.size("n_layers"),
        "intermediate_size": keys.optional_size("mlp_hidden_size") or int(width * keys.positive("mlp_ratio")),
        "vocab_size": keys.optional_size("embedding_size") or keys.size("vocab_size"),
        "max_position_embeddings": keys.size("max_sequence_length"),
        "tie_word_embeddings": keys.flag("weight_tying"),
        "hidden_act": keys.get("activation_type"),
    }
    model = replace(
        _family(keys, "llama", translated, "rms_norm_eps", "rope_theta"),
        qkv_bias=keys.flag("include_qkv_bias"),
        embedding_multiplier=float(width) ** 0.5 if keys.flag("input_emb_norm") else 1.0,
        logit_multiplier=float(width) ** -0.5 if keys.flag("scale_logits") else 1.0,
    )
    return DenoiserSpec(model=model, mask_token_id=-1)


def _llada_moe(keys: ConfigKeys) -> DenoiserSpec:
    _only(keys, LLADA_MOE_NEUTRAL)
    count = keys.size("num_hidden_layers")
    sparse = keys.items("moe_layer_freq", count)
    inner = keys.size("expert_intermediate_size")
    translated = {
        "intermediate_size": keys.optional_size("dense_intermediate_size") or inner,
        "moe_intermediate_size": inner,
        "norm_topk_prob": keys.flag("norm_topk_prob"),
        "mlp_only_layers": [i for i, on in enumerate(sparse or []) if not on],
        "head_dim": keys.optional_size("head_dim") or keys.size("hidden_size") // keys.size("num_attention_heads"),
        "num_key_value_heads": keys.optional_size("num_key_value_heads") or keys.size("num_attention_heads"),
    }
    model = _family(keys, "qwen3_moe", translated, *_COMMON, "num_experts", "num_experts_per_tok", "attention_bias")
    return DenoiserSpec(model=model, mask_token_id=-1)


def _dream(keys: ConfigKeys) -> DenoiserSpec:
    _only(keys, {"use_mrope": (False, None), "block_size": (None,)})
    return DenoiserSpec(model=_family(keys, "qwen2", {}, *_COMMON, *_QWEN), mask_token_id=-1, shifted=True)


def _sdar(keys: ConfigKeys) -> DenoiserSpec:
    mixture = keys.family == "sdar_moe"
    model = _family(keys, "qwen3_moe" if mixture else "qwen3", {}, *_COMMON, *_QWEN, *(_MOE if mixture else ()))
    return DenoiserSpec(model=model, mask_token_id=-1, block_length=_block_length(keys))


def _llada2(keys: ConfigKeys) -> DenoiserSpec:
    _only(keys, LLADA2_NEUTRAL)
    dense = keys.count("first_k_dense_replace")
    model = _family(
        keys, "qwen3_moe", {"mlp_only_layers": list(range(dense))}, *_COMMON, "intermediate_size", *_MOE[:4]
    )
    experts, groups, open_ = keys.size("num_experts"), keys.size("n_group"), keys.size("topk_group")
    if experts % groups or open_ > groups or open_ * (experts // groups) < keys.size("num_experts_per_tok"):
        raise CheckpointError(
            f"config.json: {experts} experts in {groups} groups, {open_} of them open, cannot serve "
            f"{keys.size('num_experts_per_tok')} experts a token; repair it"
        )
    shared = keys.count("num_shared_experts") * keys.size("moe_intermediate_size")
    assert model.moe is not None
    scaling = keys.positive("routed_scaling_factor")
    norm = model.moe.norm_top_k and model.moe.top_k > 1  # a single score is never normed
    moe = replace(model.moe, sigmoid=True, groups=(groups, open_), scaling=scaling, shared=shared, norm_top_k=norm)
    return DenoiserSpec(model=replace(model, moe=moe), mask_token_id=-1, block_length=_block_length(keys))


def _block_length(keys: ConfigKeys) -> int:
    key = next((name for name in ("block_length", "block_size") if keys.given(name)), None)
    if key is not None:
        return keys.size(key)
    length = DENOISER_FAMILIES[keys.family].block_length
    assert length is not None
    return length


_LLADA_BLOCK = {
    "attn_out": "self_attn.o_proj",
    "ff_proj": "mlp.gate_proj",
    "up_proj": "mlp.up_proj",
    "ff_out": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ff_norm": "post_attention_layernorm",
} | {f"{x}_proj": f"self_attn.{x}_proj" for x in "qkv"}
_LLADA_NAMES: Rename = (
    *(
        (re.compile(rf"^model\.transformer\.blocks\.(\d+)\.{old}\."), rf"layers.\1.{new}.")
        for old, new in _LLADA_BLOCK.items()
    ),
    (re.compile(r"^model\.transformer\.wte\."), "embed_tokens."),
    (re.compile(r"^model\.transformer\.ln_f\."), "norm."),
    (re.compile(r"^model\.transformer\.ff_out\."), "lm_head."),
)
_LLADA2_NAMES: Rename = (
    (re.compile(r"^model\.word_embeddings\."), "model.embed_tokens."),
    (re.compile(r"\.attention\.query_key_value\."), ".self_attn.qkv_proj."),
    (re.compile(r"\.attention\.dense\."), ".self_attn.o_proj."),
    (re.compile(r"\.attention\.query_layernorm\."), ".self_attn.q_norm."),
    (re.compile(r"\.attention\.key_layernorm\."), ".self_attn.k_norm."),
)

DENOISER_FAMILIES: Mapping[str, DenoiserFamily] = {
    "llada": DenoiserFamily(spec=_llada, names=_LLADA_NAMES),
    "llada_moe": DenoiserFamily(spec=_llada_moe),
    "dream": DenoiserFamily(spec=_dream),
    "sdar": DenoiserFamily(spec=_sdar, block_length=4),
    "sdar_moe": DenoiserFamily(spec=_sdar, block_length=4),
    "llada2_moe": DenoiserFamily(spec=_llada2, names=_LLADA2_NAMES, block_length=32),
}
REFUSED: Mapping[str, str] = {
    "bd3lm": "BD3-LM's own checkpoints condition on time (adaptive layer norm)",
    "mdlm": "MDLM's own checkpoints condition on time (adaptive layer norm)",
}
DEFAULTS: Config = {
    "mlp_ratio": 4,
    "activation_type": "silu",
    "rms_norm_eps": 1e-5,
    "max_sequence_length": 4096,
    "first_k_dense_replace": 0,
    "num_shared_experts": 0,
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
}


def family_name(config: Config) -> str | None:
    """The family of a `config.json`, an unsupported one included; None where it is no diffusion language model."""
    kind = str(config.get("model_type")).lower()
    if kind in {"llada", "lladamoe"} and "d_model" not in config and "num_experts" in config:
        return "llada_moe"
    return kind if kind in DENOISER_FAMILIES or kind in REFUSED else None


def is_denoiser(config: Config) -> bool:
    """Whether a `config.json` describes a masked diffusion language model (also one that is not supported)."""
    return family_name(config) is not None


def denoiser_spec(config: Config, *, mask_token_id: int | None, eos_token_ids: tuple[int, ...] = ()) -> DenoiserSpec:
    """The shape that a `config.json` describes.

    Args:
        mask_token_id: as the checkpoint's files say; None where they do not.
    Raises:
        UnsupportedModelError: no diffusion model, a family or feature that is not implemented, or no mask token.
        CheckpointError: a key that is missing, of the wrong kind, or contradicts another.
    """
    name = family_name(config)
    if name is None or name in REFUSED:
        reason = "it is no masked diffusion language model" if name is None else REFUSED[name]
        raise UnsupportedModelError(
            f"model_type {config.get('model_type')!r} is not native: {reason}; native are "
            f"{', '.join(DENOISER_FAMILIES)}"
        )
    spec = DENOISER_FAMILIES[name].spec(ConfigKeys(config, _defaults(name), name))
    if mask_token_id is None:
        raise UnsupportedModelError(
            f"a {name} checkpoint without a mask token cannot be decoded by diffusion; set mask_token_id in its "
            f"config.json"
        )
    vocab = spec.model.vocab_size
    if not 0 <= mask_token_id < vocab:
        raise CheckpointError(
            f"config.json: the mask token is {mask_token_id}, but there are {vocab} tokens; repair it"
        )
    model = replace(spec.model, dtype=declared_dtype(config) or "float32")
    return replace(spec, model=model, mask_token_id=mask_token_id, eos_token_ids=eos_token_ids)


def _defaults(name: str) -> Config:
    """Of the family; those that `checkpoints.families` knows are left to it."""
    return DEFAULTS if name == "llada" else {key: value for key, value in DEFAULTS.items() if key != "rms_norm_eps"}
