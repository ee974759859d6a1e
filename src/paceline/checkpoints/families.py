"""Which families run natively, and what each makes of its `config.json`.

A family is one line of `FAMILIES`. What a file asks for and the decoder cannot do raises UnsupportedModelError, which
`models.load` answers with the transformers fallback; a file that contradicts itself raises CheckpointError.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from paceline.checkpoints.config_keys import ConfigKeys, layer_specs, local_and_global, rope_spec
from paceline.checkpoints.encoder_decoder_families import encoder_decoder_spec, is_encoder_decoder
from paceline.checkpoints.hybrid_families import HYBRID_FAMILIES
from paceline.checkpoints.mamba_families import MAMBA_FAMILIES
from paceline.checkpoints.mixture_families import (
    HUNYUAN_NAMES,
    MINISTRAL_ROPE,
    MIXTURE_FAMILIES,
    QWEN,
)
from paceline.checkpoints.model_family import ModelFamily, Rename, granite_multipliers
from paceline.errors import CheckpointError, UnsupportedModelError
from paceline.models import LayerSpec, ModelSpec, RopeSpec
from paceline.utils import shortened

ACTIVATIONS: Mapping[str, Literal["silu", "gelu", "gelu_tanh", "xielu"]] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "xielu": "xielu",
}
DTYPES = ("float32", "bfloat16", "float16", "float64")
NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "use_bidirectional_attention": (False,),
    "is_causal": (True,),
    "add_cross_attention": (False,),
    "clip_qkv": (),
    "attention_chunk_size": (),
    "use_mrope": (False,),
    "rope_interleaved": (False,),
    "lm_head_bias": (False,),
}
"""Keys that change the model, with the values beside null under which they do not."""


def _gemma(keys: ConfigKeys) -> dict[str, Any]:
    return {
        "embedding_multiplier": float(keys.size("hidden_size")) ** 0.5,
        "attention_scale": keys.positive("query_pre_attn_scalar") ** -0.5,
        "attention_softcap": keys.optional_positive("attn_logit_softcapping"),
        "logit_softcap": keys.optional_positive("final_logit_softcapping"),
    }


def _gemma3(keys: ConfigKeys) -> dict[str, Any]:
    # The attention of Gemma 3 takes no soft-cap, whatever its configuration says.
    return _gemma(keys) | {"attention_softcap": None}


def _biases(keys: ConfigKeys) -> dict[str, Any]:
    """Biases that all maps have or none."""
    return dict.fromkeys(("qkv_bias", "o_bias", "mlp_bias"), keys.flag("use_bias"))


def _starcoder2(keys: ConfigKeys) -> dict[str, Any]:
    return _biases(keys) | {"norm": "layer", "norm_bias": True, "gated": False}


def _glm4(keys: ConfigKeys) -> dict[str, Any]:
    return {"qkv_bias": keys.flag("attention_bias")}


def _seed_oss(keys: ConfigKeys) -> dict[str, Any]:
    return {"qkv_bias": keys.flag("attention_bias"), "o_bias": keys.flag("attention_out_bias")}


def _cohere2(keys: ConfigKeys) -> dict[str, Any]:
    return {
        "norm": "layer",
        "parallel": True,
        "logit_multiplier": keys.positive("logit_scale"),
    }


def _exaone4_layers(keys: ConfigKeys) -> tuple[LayerSpec, ...]:
    layers = layer_specs(keys, "types", rope_by_type=False, mixture=False)
    return _rotated_in_windows(layers) if keys.given("sliding_window") else layers


def _rotated_in_windows(layers: tuple[LayerSpec, ...]) -> tuple[LayerSpec, ...]:
    """The same without a rotary embedding where there is no sliding window."""
    return tuple(layer if layer.window else replace(layer, rope=None) for layer in layers)


_COMMON: Mapping[str, Any] = {
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "decoder_sparse_step": 1,
    "first_k_dense_replace": 0,
    "max_position_embeddings": 2048,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
_GEMMA = {
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}
_GEMMA2 = (
    _GEMMA
    | {"num_key_value_heads": 4, "sliding_window_pattern": 2}
    | {"max_position_embeddings": 8192, "final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0}
)
# Nested text configurations leave out whatever equals the default, sizes included.
_GEMMA3_SIZES = {"vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26}
_GEMMA3_HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 131072}
_GEMMA3_ROPE = {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "sliding_window_pattern": 6}
_GEMMA3 = _GEMMA | _GEMMA3_SIZES | _GEMMA3_HEADS | _GEMMA3_ROPE
_PHI3 = {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "original_max_position_embeddings": 4096}
_SMOLLM3 = {
    "rope_theta": 2e6,
    "max_position_embeddings": 32768,
    "num_key_value_heads": 4,
    "tie_word_embeddings": True,
} | {"use_sliding_window": False, "no_rope_layer_interval": 4}
_OLMO3 = {"rms_norm_eps": 1e-5, "rope_theta": 500000.0, "sliding_window": 4096, "sliding_window_pattern": 4}
_EXAONE4 = {"rms_norm_eps": 1e-5, "num_key_value_heads": 32, "sliding_window": 4096, "sliding_window_pattern": 4}
_GRANITE = dict.fromkeys(("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"), 1.0)
_STARCODER2 = {
    "hidden_act": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-5,
    "use_bias": True,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}
_STARCODER2_NAMES: Rename = (
    (re.compile(r"\.mlp\.c_fc\."), ".mlp.up_proj."),
    (re.compile(r"\.mlp\.c_proj\."), ".mlp.down_proj."),
)
_GLM4 = {
    "head_dim": 128,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1.5625e-07,
    "max_position_embeddings": 131072,
    "partial_rotary_factor": 0.5,
    "attention_bias": True,
}
_ERNIE4_5 = {
    "head_dim": 128,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
    "use_bias": False,
}
_SEED_OSS = {
    "head_dim": 128,
    "num_key_value_heads": 8,
    "max_position_embeddings": 524288,
    "attention_bias": True,
    "attention_out_bias": False,
}
_COHERE2 = {
    "rms_norm_eps": 1e-5,
    "logit_scale": 0.0625,
    "max_position_embeddings": 8192,
    "sliding_window": 4096,
    "sliding_window_pattern": 4,
    "tie_word_embeddings": True,
}
_MISTRAL = {"sliding_window": 4096, "max_position_embeddings": 131072, "num_key_value_heads": 8}
_MINISTRAL3 = {
    "head_dim": 128,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "max_position_embeddings": 262144,
    "rope_parameters": MINISTRAL_ROPE | {"factor": 16.0, "original_max_position_embeddings": 16384},
}

_APERTUS = {
    "hidden_act": "xielu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 12e6,
    "max_position_embeddings": 65536,
    "rope_parameters": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}
_APERTUS_NAMES: Rename = (
    (re.compile(r"\.attention_layernorm\."), ".input_layernorm."),
    (re.compile(r"\.feedforward_layernorm\."), ".post_attention_layernorm."),
)

FAMILIES: Mapping[str, ModelFamily] = {
    "llama": ModelFamily(mlp_bias=True),
    "mistral": ModelFamily(defaults=_MISTRAL, windows="all", attention_bias="no"),
    "ministral3": ModelFamily(defaults=_MINISTRAL3, windows="all", attention_bias="no"),
    "qwen2": ModelFamily(defaults=QWEN | {"num_key_value_heads": 32}, windows="types", attention_bias="qkv"),
    "mimo": ModelFamily(defaults=QWEN | {"num_key_value_heads": 32}, windows="types", attention_bias="qkv"),
    "qwen3": ModelFamily(defaults=QWEN | {"head_dim": 128, "num_key_value_heads": 32}, qk_norm="head", windows="types"),
    "gemma2": ModelFamily(defaults=_GEMMA2, placement="sandwich", norm_offset=True, windows="types", extra=_gemma),
    "gemma3_text": ModelFamily(
        defaults=_GEMMA3,
        placement="sandwich",
        norm_offset=True,
        qk_norm="head",
        windows="types",
        rope_by_type=True,
        extra=_gemma3,
    ),
    "phi3": ModelFamily(defaults=_PHI3, windows="all", attention_bias="no"),
    "smollm3": ModelFamily(defaults=_SMOLLM3, windows="types", mlp_bias=True),
    "olmo2": ModelFamily(defaults={"rms_norm_eps": 1e-5}, placement="post", qk_norm="full"),
    "olmo3": ModelFamily(defaults=_OLMO3, placement="post", qk_norm="full", windows="types", rope_by_type=True),
    "exaone4": ModelFamily(
        defaults=_EXAONE4, placement="post", qk_norm="head", attention_bias="no", layers=_exaone4_layers
    ),
    "granite": ModelFamily(defaults=_GRANITE, mlp_bias=True, extra=granite_multipliers),
    "starcoder2": ModelFamily(
        keys={"norm_epsilon": "rms_norm_eps"},
        names=_STARCODER2_NAMES,
        defaults=_STARCODER2,
        windows="all",
        attention_bias="no",
        extra=_starcoder2,
    ),
    "apertus": ModelFamily(
        names=_APERTUS_NAMES, defaults=_APERTUS, qk_norm="head", extra=lambda keys: {"gated": False}
    ),
    "glm4": ModelFamily(defaults=_GLM4, placement="sandwich", rope_interleaved=True, attention_bias="no", extra=_glm4),
    "ernie4_5": ModelFamily(defaults=_ERNIE4_5, rope_interleaved=True, attention_bias="no", extra=_biases),
    "hunyuan_v1_dense": ModelFamily(
        names=HUNYUAN_NAMES, defaults={"rms_norm_eps": 1e-5}, qk_norm="head", qk_norm_rotated=True
    ),
    "seed_oss": ModelFamily(defaults=_SEED_OSS, attention_bias="no", mlp_bias=True, extra=_seed_oss),
    "cohere2": ModelFamily(
        keys={"layer_norm_eps": "rms_norm_eps"},
        defaults=_COHERE2,
        windows="types",
        rope_in_windows=True,
        rope_interleaved=True,
        extra=_cohere2,
    ),
    **MIXTURE_FAMILIES,
    **HYBRID_FAMILIES,
    **MAMBA_FAMILIES,
}
MULTIMODAL: Mapping[str, str] = {
    "gemma3": "gemma3_text",
    "kimi_k25": "deepseek_v3",
    "mistral3": "mistral",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
}
"""Families whose text part, `text_config`, runs natively, and what that is where it does not say."""

ALIASES: Mapping[str, str] = {"kimi_k2": "deepseek_v3"}
"""Other names of families in files."""


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's configuration: `config`, or its `text_config` completed by what only `config` has."""
    inner, name = config.get("text_config"), str(config.get("model_type"))
    if name in MULTIMODAL and isinstance(inner, Mapping):
        keys = ("tie_word_embeddings", "dtype", "torch_dtype")
        outer = {key: config[key] for key in keys if config.get(key) is not None}
        name = str(inner.get("model_type") or MULTIMODAL[name])
        config = {**inner, **outer, "model_type": name}
    return {**config, "model_type": ALIASES[name]} if name in ALIASES else config


def has_native_text(config: Mapping[str, Any]) -> bool:
    """Whether a model that reads more than text has a text part that runs natively, without the rest."""
    return config.get("model_type") in MULTIMODAL and text_config(config).get("model_type") in FAMILIES


def renamed(stored: str, names: Rename) -> str:
    """A tensor's name after all replacements."""
    for pattern, new in names:
        stored = pattern.sub(new, stored)
    return stored


def declared_dtype(config: Mapping[str, Any]) -> str | None:
    """The dtype that a `config.json` names ("bfloat16"), or None.

    Raises:
        CheckpointError: it names none that weights have.
    """
    text = text_config(config)
    for key in ("dtype", "torch_dtype"):
        value = text.get(key)
        if value is not None and value not in ("auto", *DTYPES, *(f"torch.{name}" for name in DTYPES)):
            known = ", ".join(DTYPES)
            raise CheckpointError(
                f"config.json: {key!r} must be one of {known}, got {shortened(value)}; repair or download it again"
            )
    value = text.get("dtype") or text.get("torch_dtype")
    return None if value in (None, "auto") else str(value).removeprefix("torch.")


def spec_from_config(config: Mapping[str, Any]) -> ModelSpec:
    """The shape of the model that a `config.json` describes.

    Raises:
        UnsupportedModelError: a family, or a feature of a known family, that the native decoder does not implement.
        CheckpointError: a key that is missing, of the wrong kind, or contradicts another.
    """
    config = text_config(config)
    if is_encoder_decoder(config):
        return replace(encoder_decoder_spec(config), dtype=declared_dtype(config) or "float32")
    family = _family(config)
    keys = ConfigKeys(config, {**_COMMON, **family.defaults}, str(config["model_type"]), family.keys)
    keys.check()
    keys.only(NEUTRAL)
    heads, kv_heads, head_dim = _heads(keys) if family.attention else (1, 1, keys.size("hidden_size"))
    ropes = _ropes(keys, family, head_dim) if family.attention else {}
    bias = family.attention_bias == "key" and keys.flag("attention_bias")
    extra = family.extra(keys)
    spec = ModelSpec(
        family=keys.family,
        vocab_size=keys.size("vocab_size"),
        hidden_size=keys.size("hidden_size"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=extra.pop("intermediate_size", None) or keys.size("intermediate_size"),
        layers=_layers(keys, family, mixture="moe" in extra),
        ropes=ropes,
        max_context=_max_context(keys, ropes),
        dtype=declared_dtype(config) or "float32",
        norm_eps=keys.share("rms_norm_eps"),
        norm_placement=family.placement,
        norm_offset=family.norm_offset,
        qk_norm=family.qk_norm,
        qk_norm_rotated=family.qk_norm_rotated,
        qkv_bias=bias or family.attention_bias == "qkv",
        o_bias=bias,
        mlp_bias=family.mlp_bias and keys.flag("mlp_bias"),
        activation=_activation(keys),
        tied=keys.flag("tie_word_embeddings"),
    )
    return replace(spec, **extra)


def _ropes(keys: ConfigKeys, family: ModelFamily, head_dim: int) -> Mapping[str, RopeSpec]:
    ropes = local_and_global(keys, head_dim) if family.rope_by_type else {"default": rope_spec(keys, head_dim)}
    return {key: replace(rope, interleaved=True) for key, rope in ropes.items()} if family.rope_interleaved else ropes


def _layers(keys: ConfigKeys, family: ModelFamily, *, mixture: bool) -> tuple[LayerSpec, ...]:
    if family.layers is not None:
        return family.layers(keys)
    layers = layer_specs(keys, family.windows, rope_by_type=family.rope_by_type, mixture=mixture)
    return _rotated_in_windows(layers) if family.rope_in_windows else layers


def _family(config: Mapping[str, Any]) -> ModelFamily:
    name = config.get("model_type")
    if str(name) not in FAMILIES:
        raise UnsupportedModelError(f"architecture {name!r} is not native; native are {', '.join(FAMILIES)}")
    return FAMILIES[str(name)]


def _heads(keys: ConfigKeys) -> tuple[int, int, int]:
    """Query heads, key-value heads, and the size of each."""
    heads = keys.size("num_attention_heads")
    kv_heads = keys.optional_size("num_key_value_heads") or heads
    if heads % kv_heads:
        raise CheckpointError(
            f"config.json: {heads} attention heads cannot share {kv_heads} key-value heads evenly; repair it"
        )
    return heads, kv_heads, keys.optional_size("head_dim") or keys.size("hidden_size") // heads


def _activation(keys: ConfigKeys) -> Literal["silu", "gelu", "gelu_tanh", "xielu"]:
    key = "hidden_activation" if keys.family.startswith("gemma") else "hidden_act"
    name = keys.get(key)
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise UnsupportedModelError(
            f"{keys.family}: {key}={name!r} is not implemented; known are {', '.join(ACTIVATIONS)}"
        )
    return ACTIVATIONS[name]


def _max_context(keys: ConfigKeys, ropes: Mapping[str, RopeSpec]) -> int:
    """`max_position_embeddings`, but for the kinds of scaling that begin where it ends."""
    longest = keys.size("max_position_embeddings")
    for rope in ropes.values():
        factor: Any = rope.scaling.get("factor", 1.0)
        original: Any = rope.scaling.get("original_max_position_embeddings", longest)
        if rope.kind in {"dynamic", "yarn"}:
            longest = max(longest, int(factor * (longest if rope.kind == "dynamic" else original)))
    return longest
