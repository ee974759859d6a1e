"""What a family of models is, in so far as its `config.json` leaves it open."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from paceline.checkpoints.config_keys import FULL, ConfigKeys, Windows
from paceline.errors import CheckpointError, UnsupportedModelError
from paceline.models import LatentSpec, LayerSpec, MixerSpec, MoeSpec

Extra = Callable[[ConfigKeys], dict[str, Any]]
LINEAR = "linear_attention"
"""The type of layers that have a mixer with a recurrence."""

Rename = tuple[tuple[re.Pattern[str], str], ...]
"""Patterns of tensors' names, and what takes their place, one after another."""


@dataclass(frozen=True, kw_only=True)
class ModelFamily:
    """What is fixed for a family; the rest is in its `config.json`.

    Attributes:
        keys: keys of its files by other names than Llama's: own name -> Llama's, by which all code asks for them.
        names: patterns of tensors' names of its own, and what takes their place, so that `checkpoints.weights` knows
            them.
        defaults: of keys that its files may leave out, by Llama's names.
        windows: see `config_keys.layer_specs`.
        layers: makes all layers, where they are of kinds of the family's own.
        attention: there is some in its layers; else its files say nothing of heads and positions.
        rope_by_type: one rotary table for each layer type.
        rope_in_windows: layers without a sliding window have no rotary embedding.
        rope_interleaved: see `RopeSpec`.
        attention_bias: "no", "qkv" (always, but not on o), or "key": on all four if the key `attention_bias` says so.
        mlp_bias: the key `mlp_bias` counts.
        extra: further fields of ModelSpec, or other values of those that the others set.
    """

    keys: Mapping[str, str] = field(default_factory=dict)
    names: Rename = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    placement: Literal["pre", "post", "sandwich"] = "pre"
    norm_offset: bool = False
    qk_norm: Literal["head", "full"] | None = None
    qk_norm_rotated: bool = False
    windows: Windows = "none"
    layers: Callable[[ConfigKeys], tuple[LayerSpec, ...]] | None = None
    attention: bool = True
    rope_by_type: bool = False
    rope_in_windows: bool = False
    rope_interleaved: bool = False
    attention_bias: Literal["no", "qkv", "key"] = "key"
    mlp_bias: bool = False
    extra: Extra = lambda keys: {}


def moe_spec(keys: ConfigKeys, name: str, inner: int, *, norm_top_k: bool) -> MoeSpec:
    """The mixture that a file declares, its number of experts under one of two names."""
    other = {"num_experts": "num_local_experts", "num_local_experts": "num_experts"}.get(name, name)
    experts = keys.optional_size(other) or keys.size(name)
    top_k = keys.size("num_experts_per_tok")
    if top_k > experts:
        raise CheckpointError(
            f"config.json: num_experts_per_tok is {top_k}, but there are {experts} experts; repair it"
        )
    return MoeSpec(experts=experts, top_k=top_k, intermediate=inner, norm_top_k=norm_top_k)


def mixed_layers(keys: ConfigKeys, mixers: Mapping[str, MixerSpec], types: list[str]) -> tuple[LayerSpec, ...]:
    """Layers of attention or of a mixer, by their types."""
    layers = {kind: LayerSpec(attention=False, rope=None, mixer=mixer) for kind, mixer in mixers.items()}
    layers[FULL] = LayerSpec()
    if unknown := [kind for kind in types if kind not in layers]:
        raise UnsupportedModelError(f"{keys.family}: layers of type {unknown[0]!r} are not implemented")
    return tuple(layers[kind] for kind in types)


def expert_groups(keys: ConfigKeys, experts: int) -> tuple[int, int]:
    """See `MoeSpec.groups`."""
    groups, best = keys.size("n_group"), keys.size("topk_group")
    if experts % groups or best > groups or best * (experts // groups) < keys.size("num_experts_per_tok"):
        raise CheckpointError(
            f"config.json: {best} of {groups} groups of {experts} experts do not fit each other; repair it"
        )
    return groups, best


def latent_fields(keys: ConfigKeys) -> dict[str, Any]:
    """The fields of ModelSpec that latent attention sets, where no length is scaled."""
    latent = LatentSpec(
        rank=keys.size("kv_lora_rank"),
        nope=keys.size("qk_nope_head_dim"),
        rope=keys.size("qk_rope_head_dim"),
        value=keys.size("v_head_dim"),
        query_rank=keys.optional_size("q_lora_rank"),
    )
    return {
        "latent": latent,
        "num_kv_heads": 1,
        "head_dim": latent.rank + latent.rope,
        "attention_scale": (latent.nope + latent.rope) ** -0.5,
    }


def granite_multipliers(keys: ConfigKeys) -> dict[str, Any]:
    """Granite's factors, as fields of ModelSpec."""
    return {
        "embedding_multiplier": keys.positive("embedding_multiplier"),
        "residual_multiplier": keys.positive("residual_multiplier"),
        "attention_scale": keys.positive("attention_multiplier"),
        "logit_multiplier": 1.0 / keys.positive("logits_scaling"),
    }
