"""Families of Mamba mixers, alone or beside attention; see `checkpoints.families`."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from paceline.checkpoints.config_keys import FULL, ConfigKeys
from paceline.checkpoints.model_family import (
    LINEAR,
    ModelFamily,
    Rename,
    expert_groups,
    granite_multipliers,
    mixed_layers,
    moe_spec,
)
from paceline.errors import CheckpointError, UnsupportedModelError
from paceline.models import GatedMemorySpec, LayerSpec, Mamba2Spec, MambaSpec, MixerSpec


def _mamba2(keys: ConfigKeys, inner: int, **more: Any) -> Mamba2Spec:
    """The mixer of an inner width, by the keys of Granite 4, Falcon-H1 and Bamba."""
    _check_activation(keys)
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


def _mamba(keys: ConfigKeys, inner: int, **more: Any) -> MambaSpec:
    """The mixer of an inner width, by Jamba's keys."""
    _check_activation(keys)
    rank = keys.get("mamba_dt_rank")
    return MambaSpec(
        channels=inner, state_dim=keys.size("mamba_d_state"), taps=keys.size("mamba_d_conv"),
        rank=-(-keys.size("hidden_size") // 16) if rank in (None, "auto") else keys.size("mamba_dt_rank"),
        conv_bias=keys.flag("mamba_conv_bias"), bias=keys.flag("mamba_proj_bias"), **more,
    )  # fmt: skip


def _check_activation(keys: ConfigKeys) -> None:
    if keys.get("hidden_act") not in ("silu", "swish"):
        raise UnsupportedModelError(f"{keys.family}: hidden_act={keys.get('hidden_act')!r} is not implemented")


def _inner(keys: ConfigKeys) -> int:
    return keys.size("mamba_expand") * keys.size("hidden_size")


def _steps(keys: ConfigKeys) -> tuple[float, float]:
    """Least and largest step; transformers writes an infinite one as an object."""
    limits = keys.items("time_step_limit", 2) or [0.0, math.inf]
    least, most = (math.inf if limit == {"__float__": "Infinity"} else limit for limit in limits)
    numbers = not any(isinstance(one, bool) or not isinstance(one, int | float) for one in (least, most))
    if not (numbers and 0 <= least <= most):
        raise keys.wrong("time_step_limit", "two numbers of 0 or more, the smaller one first")
    return float(least), float(most)


def _mixers_alone(keys: ConfigKeys, mixer: MixerSpec) -> tuple[LayerSpec, ...]:
    return (LayerSpec(rope=None, attention=False, mixer=mixer, mlp=False),) * keys.size("num_hidden_layers")


def _mamba2_layers(keys: ConfigKeys) -> tuple[LayerSpec, ...]:
    mixer = _mamba2(keys, _inner(keys), out_bias=keys.flag("mamba_proj_bias"))
    return _mixers_alone(keys, replace(mixer, norm_groups=mixer.groups))


def _mamba_inner(keys: ConfigKeys) -> int:
    return keys.optional_size("intermediate_size") or _inner(keys)


def _mamba_layers(keys: ConfigKeys) -> tuple[LayerSpec, ...]:
    if keys.known("mixer_rms_eps"):
        mixer = _mamba(keys, _mamba_inner(keys), norm="plain", norm_eps=keys.share("mixer_rms_eps"))
    else:
        mixer = _mamba(keys, _mamba_inner(keys))
    return _mixers_alone(keys, mixer)


def _granite_layers(keys: ConfigKeys) -> tuple[LayerSpec, ...]:
    count = keys.size("num_hidden_layers")
    types = keys.items("layers_block_type" if keys.given("layers_block_type") else "layer_types", count)
    types = [{"attention": FULL, "mamba": LINEAR}.get(kind, kind) for kind in types or [LINEAR] * count]
    bias = keys.flag("mamba_proj_bias")
    mixer = _mamba2(keys, _inner(keys), out_bias=bias)
    mixer = replace(mixer, norm_groups=mixer.groups)
    position, sparse = keys.get("position_embedding_type"), keys.count("num_local_experts") > 0
    if position not in (None, "nope", "rope"):
        raise UnsupportedModelError(f"{keys.family}: position_embedding_type={position!r} is not implemented")
    layers = mixed_layers(keys, {LINEAR: mixer}, types)
    turned = position == "rope"
    return tuple(replace(layer, moe=sparse, rope=layer.rope if turned else None) for layer in layers)


def _granite_hybrid(keys: ConfigKeys) -> dict[str, Any]:
    fields = granite_multipliers(keys)
    shared = keys.size("shared_intermediate_size")
    if not keys.count("num_local_experts"):
        return fields | {"intermediate_size": shared}
    moe = moe_spec(keys, "num_local_experts", keys.size("intermediate_size"), norm_top_k=True)
    return fields | {"moe": replace(moe, shared=shared)}


def _bamba_layers(keys: ConfigKeys) -> tuple[LayerSpec, ...]:
    attention = keys.integers("attn_layer_indices") or []
    types = [FULL if layer in attention else LINEAR for layer in range(keys.size("num_hidden_layers"))]
    mixer = _mamba2(keys, _inner(keys), out_bias=keys.flag("mamba_proj_bias"))
    return mixed_layers(keys, {LINEAR: replace(mixer, norm_groups=mixer.groups)}, types)


def _jamba_layers(keys: ConfigKeys) -> tuple[LayerSpec, ...]:
    count, sparse = keys.size("num_hidden_layers"), keys.size("num_experts") > 1
    attention, experts = (_every(keys, kind, count) for kind in ("attn_layer", "expert_layer"))
    mixer = _mamba(keys, _inner(keys), norm="weighed", norm_eps=keys.share("rms_norm_eps"))
    layers = mixed_layers(keys, {LINEAR: mixer}, [FULL if one else LINEAR for one in attention])
    return tuple(replace(layer, rope=None, moe=sparse and moe) for layer, moe in zip(layers, experts, strict=True))


def _every(keys: ConfigKeys, kind: str, count: int) -> list[bool]:
    """Which layers are of a kind whose period and offset the file names."""
    period, offset = keys.size(f"{kind}_period"), keys.count(f"{kind}_offset")
    return [layer % period == offset for layer in range(count)]


def _jamba(keys: ConfigKeys) -> dict[str, Any]:
    if keys.size("num_experts") == 1:
        return {"ropes": {}}
    return {"ropes": {}, "moe": moe_spec(keys, "num_experts", keys.size("intermediate_size"), norm_top_k=False)}


def _nemotron_types(keys: ConfigKeys) -> list[str]:
    pattern = keys.get("hybrid_override_pattern")
    if isinstance(pattern, str):
        types = [_NEMOTRON_LETTERS.get(letter, letter) for letter in pattern]
    else:
        types = keys.items("layers_block_type") or keys.items("layer_types") or list(_NEMOTRON_LETTERS.values())
    types = [{"attention": FULL, "mamba": LINEAR}.get(kind, kind) for kind in types]
    if unknown := [kind for kind in types if kind not in _NEMOTRON_LETTERS.values()]:
        raise UnsupportedModelError(f"{keys.family}: layers of type {unknown[0]!r} are not implemented")
    if LINEAR not in types:
        raise UnsupportedModelError(f"{keys.family}: models without Mamba layers are not implemented")
    return types


def _nemotron_layers(keys: ConfigKeys) -> tuple[LayerSpec, ...]:
    """Each is one of the four, alone."""
    inner, bias = keys.size("mamba_n_heads") * keys.size("mamba_d_head"), keys.flag("mamba_proj_bias")
    mixer = _mamba2(keys, inner, out_bias=bias)
    layers = {
        LINEAR: LayerSpec(rope=None, attention=False, mixer=replace(mixer, norm_groups=mixer.groups), mlp=False),
        FULL: LayerSpec(rope=None, mlp=False),
        "mlp": LayerSpec(rope=None, attention=False),
        "moe": LayerSpec(rope=None, attention=False, moe=True),
    }
    return tuple(layers[kind] for kind in _nemotron_types(keys))


def _nemotron_h(keys: ConfigKeys) -> dict[str, Any]:
    for key, fine in {"mlp_hidden_act": "relu2", "moe_latent_size": None}.items():
        if keys.get(key) != fine:
            raise UnsupportedModelError(f"{keys.family}: {key}={keys.get(key)!r} is not implemented")
    fields: dict[str, Any] = {"ropes": {}, "gated": False, "activation": "relu2"}
    if "moe" not in _nemotron_types(keys):
        return fields
    norm = keys.flag("norm_topk_prob")
    moe = moe_spec(keys, "n_routed_experts", keys.size("moe_intermediate_size"), norm_top_k=norm)
    moe = replace(
        moe,
        shared=keys.size("moe_shared_expert_intermediate_size"),
        scaling=keys.positive("routed_scaling_factor"),
        groups=expert_groups(keys, moe.experts),
        sigmoid=True,
    )
    return fields | {"moe": moe}


def _falcon_layers(keys: ConfigKeys) -> tuple[LayerSpec, ...]:
    norm = "gated_after" if keys.flag("mamba_norm_before_gate") else "gated_before"
    mixer = _mamba2(
        keys, _falcon_inner(keys), norm=norm if keys.flag("mamba_rms_norm") else None,
        norm_groups=keys.size("mamba_n_groups"), out_bias=keys.flag("projectors_bias"),
    )  # fmt: skip
    return (LayerSpec(mixer=mixer),) * keys.size("num_hidden_layers")


def _falcon_inner(keys: ConfigKeys) -> int:
    return keys.optional_size("mamba_d_ssm") or _inner(keys)


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


def _phi4flash_layers(keys: ConfigKeys) -> tuple[LayerSpec, ...]:
    """SambaY: Mamba and windows in turn; in the middle a Mamba layer that publishes, and the one layer that attends to
    all of the text with keys of its own; then gated memory units and attention to these keys in turn.
    """
    count, inner = keys.size("num_hidden_layers"), _inner(keys)
    if keys.size("mb_per_layer") != 2:  # the names of its tensors, too, say what an even layer is
        raise UnsupportedModelError(f"{keys.family}: mb_per_layer={keys.get('mb_per_layer')} is not implemented")
    if count % 4:
        raise CheckpointError(f"config.json: 'num_hidden_layers' must be a multiple of 4, got {count}; repair it")
    mamba = _mamba(keys, inner)
    mixer, attention = LayerSpec(rope=None, attention=False, mixer=mamba), LayerSpec(rope=None)
    middle, memory = replace(mamba, publishes=True), GatedMemorySpec(channels=inner, bias=mamba.bias)
    return (
        *(mixer, replace(attention, window=keys.optional_size("sliding_window"))) * (count // 4),
        replace(mixer, mixer=middle),
        attention,
        *(replace(mixer, mixer=memory), replace(attention, kv_of=count // 2 + 1)) * (count // 4 - 1),
    )


def _phi4flash(keys: ConfigKeys) -> dict[str, Any]:
    heads, kv_heads = keys.size("num_attention_heads"), keys.size("num_key_value_heads")
    size = keys.size("hidden_size") // heads
    if heads % 2 or kv_heads % 2:
        raise CheckpointError(f"config.json: {heads} heads and {kv_heads} key-value heads are no pairs; repair it")
    return {
        "ropes": {},
        "norm": "layer",
        "norm_bias": True,
        "qkv_bias": True,
        "o_bias": True,
        "differential": True,
        "num_kv_heads": kv_heads // 2,
        "head_dim": 2 * size,
        "attention_scale": size**-0.5,
        "wide_sums": True,
    }


_MAMBA_KEYS = {
    "state_size": "mamba_d_state",
    "conv_kernel": "mamba_d_conv",
    "expand": "mamba_expand",
    "use_conv_bias": "mamba_conv_bias",
    "use_bias": "mamba_proj_bias",
    "layer_norm_epsilon": "rms_norm_eps",
}
_MAMBA_NAMES: Rename = (
    (re.compile(r"^(backbone|model)\."), ""),
    (re.compile(r"^embeddings?\."), "embed_tokens."),
    (re.compile(r"^norm_f\."), "norm."),
    (re.compile(r"(layers\.\d+)\.norm\."), r"\1.input_layernorm."),
)
_ANY_LENGTH = 2**20
"""Longest text of models whose files name none, since a state has room for any."""

_MAMBA = {
    "vocab_size": 50280,
    "hidden_size": 768,
    "num_hidden_layers": 32,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": _ANY_LENGTH,
    "tie_word_embeddings": True,
}
_PURE_MAMBA2 = _MAMBA | {
    "vocab_size": 32768,
    "hidden_size": 4096,
    "num_hidden_layers": 64,
    "mamba_n_heads": 128,
    "mamba_d_head": 64,
    "mamba_n_groups": 8,
    "mamba_d_state": 128,
    "tie_word_embeddings": False,
}
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
_BAMBA = _MAMBA2 | {
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 262144,
    "partial_rotary_factor": 0.5,
}
_JAMBA = {
    "num_key_value_heads": 8,
    "max_position_embeddings": 262144,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "expert_layer_period": 2,
    "expert_layer_offset": 1,
    "attn_layer_period": 8,
    "attn_layer_offset": 4,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
}
_NEMOTRON_LETTERS: Mapping[str, str] = {"M": LINEAR, "E": "moe", "*": FULL, "-": "mlp"}
_NEMOTRON_KEYS = {
    "mamba_num_heads": "mamba_n_heads",
    "mamba_head_dim": "mamba_d_head",
    "n_groups": "mamba_n_groups",
    "ssm_state_size": "mamba_d_state",
    "conv_kernel": "mamba_d_conv",
    "use_conv_bias": "mamba_conv_bias",
    "use_bias": "mamba_proj_bias",
    "mamba_hidden_act": "hidden_act",
    "layer_norm_epsilon": "rms_norm_eps",
}
_NEMOTRON_H = {
    "vocab_size": 131072,
    "hidden_size": 4096,
    "intermediate_size": 21504,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "mlp_hidden_act": "relu2",
    "rms_norm_eps": 1e-5,
    "mamba_n_heads": 128,
    "mamba_d_head": 64,
    "mamba_n_groups": 8,
    "mamba_d_state": 128,
    "mamba_d_conv": 4,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 7688,
    "moe_shared_expert_intermediate_size": 7688,
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
}
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
_NEMOTRON_NAMES: Rename = (
    *_MAMBA_NAMES,
    (re.compile(r"\.mixer\.([qkvo]_proj)\."), r".self_attn.\1."),
    (re.compile(r"\.mixer\.(up_proj|down_proj|experts|gate|shared_experts)\."), r".mlp.\1."),
)
_JAMBA_NAMES = (*_FALCON_NAMES, (re.compile(r"\.mlp\.router\."), ".mlp.gate."))
_PHI4FLASH = {
    "vocab_size": 51200,
    "hidden_size": 2560,
    "intermediate_size": 9216,
    "num_hidden_layers": 32,
    "num_attention_heads": 40,
    "num_key_value_heads": 4,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "sliding_window": 2047,
    "mb_per_layer": 2,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
}
_PHI4FLASH_NAMES: Rename = (
    (re.compile(r"\bfinal_layernorm\."), "norm."),
    (re.compile(r"(layers\.\d*[02468])\.attn\."), r"\1.mixer."),
    (re.compile(r"\.attn\.Wqkv\."), ".self_attn.qkv_proj."),
    (re.compile(r"\.attn\.out_proj\."), ".self_attn.o_proj."),
    (re.compile(r"\.attn\.inner_cross_attn\."), ".self_attn."),
    (re.compile(r"\.mlp\.fc1\."), ".mlp.gate_up_proj."),
    (re.compile(r"\.mlp\.fc2\."), ".mlp.down_proj."),
)

MAMBA_FAMILIES: Mapping[str, ModelFamily] = {
    "mamba": ModelFamily(
        keys=_MAMBA_KEYS | {"time_step_rank": "mamba_dt_rank"},
        names=_MAMBA_NAMES,
        defaults=_MAMBA,
        attention=False,
        layers=_mamba_layers,
        extra=lambda keys: {"intermediate_size": _mamba_inner(keys)},
    ),
    "falcon_mamba": ModelFamily(
        keys=_MAMBA_KEYS | {"time_step_rank": "mamba_dt_rank"},
        names=_MAMBA_NAMES,
        defaults=_MAMBA | {"mixer_rms_eps": 1e-6},
        attention=False,
        layers=_mamba_layers,
        extra=lambda keys: {"intermediate_size": _mamba_inner(keys)},
    ),
    "mamba2": ModelFamily(
        keys=_MAMBA_KEYS | {"num_heads": "mamba_n_heads", "head_dim": "mamba_d_head", "n_groups": "mamba_n_groups"},
        names=_MAMBA_NAMES,
        defaults=_PURE_MAMBA2,
        attention=False,
        layers=_mamba2_layers,
        extra=lambda keys: {"intermediate_size": _inner(keys)},
    ),
    "granitemoehybrid": ModelFamily(
        names=_GRANITE_NAMES, defaults=_GRANITE_HYBRID, layers=_granite_layers, extra=_granite_hybrid
    ),
    "bamba": ModelFamily(names=_FALCON_NAMES, defaults=_BAMBA, mlp_bias=True, layers=_bamba_layers),
    "jamba": ModelFamily(names=_JAMBA_NAMES, defaults=_JAMBA, attention_bias="no", layers=_jamba_layers, extra=_jamba),
    "nemotron_h": ModelFamily(
        keys=_NEMOTRON_KEYS,
        names=_NEMOTRON_NAMES,
        defaults=_NEMOTRON_H,
        attention_bias="no",
        mlp_bias=True,
        layers=_nemotron_layers,
        extra=_nemotron_h,
    ),
    "falcon_h1": ModelFamily(
        names=_FALCON_NAMES, defaults=_FALCON_H1, mlp_bias=True, layers=_falcon_layers, extra=_falcon_h1
    ),
    "phi4flash": ModelFamily(
        keys={"layer_norm_eps": "rms_norm_eps"},
        names=_PHI4FLASH_NAMES,
        defaults=_PHI4FLASH,
        attention_bias="no",
        layers=_phi4flash_layers,
        extra=_phi4flash,
    ),
}
