"""Decoder layers by themselves: they are given states in place of tokens, and keep a cache for each sequence.

They run as a model of so many layers does (models.runners.native), so in compiled passes on CPUs.
"""

from __future__ import annotations

from typing import Any, Final

import torch

from paceline.checkpoints import spec_from_config
from paceline.models.base import ModelInfo
from paceline.models.heads.head_config import HeadConfig
from paceline.models.layers.own_weights import Weights
from paceline.models.runners.native import NativeRunner
from paceline.models.spec import ModelSpec

UNUSED: Final = 32
"""Rows of an embedding or a head that never runs."""


def state_layer(
    spec: ModelSpec, weights: Weights, target: ModelInfo, *, name: str, prefix: str, head: torch.Tensor | None
) -> NativeRunner:
    """A model of the layers of which the first one's tensors begin with `prefix`, for `run_states` over sequences of a
    target.

    Args:
        weights: by Hugging Face's names; `norm.weight`, where there is one, is the norm before `head`.
        head: (n, hidden) rows that make logits; None where there are none.
    """
    return layer_runner(spec, _canonical(weights, spec, prefix, head), target, name=name)


def layer_runner(spec: ModelSpec, weights: Weights, target: ModelInfo, *, name: str) -> NativeRunner:
    """The same of canonical weights, which hold an embedding and a head of any size."""
    return NativeRunner(
        spec, weights, name=name, device=target.device, dtype=target.dtype, max_context=target.max_context + 1,
        row_invariant=False,
    )  # fmt: skip


def layer_spec(config: HeadConfig, weights: Weights, prefix: str, rows: int = UNUSED, *, layers: int = 1) -> ModelSpec:
    """The shape of a head's decoder layers, with so many rows of a head behind it: a Llama's, or with norms of queries
    and keys a Qwen3's.

    Args:
        weights: of the head; those of the first layer begin with `prefix`.
    """
    declared: dict[str, Any] = {key: value for key, value in config.layer.items() if value is not None}
    kind = "qwen3" if f"{prefix}self_attn.q_norm.weight" in weights else "llama"
    defaults = {"model_type": kind, "num_hidden_layers": layers, "rms_norm_eps": 1e-6, "rope_theta": 10000.0}
    sizes = {"hidden_size": config.hidden_size, "vocab_size": rows, "tie_word_embeddings": False}
    sizes |= {"head_dim": config.head_dim, "num_key_value_heads": config.kv_heads}
    return spec_from_config({**defaults, **declared, **sizes})


RENAMED: Final = {
    "self_attn.o_proj": "o",
    "mlp.down_proj": "down",
    "self_attn.q_norm": "q_norm",
    "self_attn.k_norm": "k_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "mlp_norm",
}
FUSED: Final = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
}


def _canonical(weights: Weights, spec: ModelSpec, prefix: str, head: torch.Tensor | None) -> Weights:
    """The layers' weights by the decoder's names, out of Hugging Face's."""
    empty = weights[f"{prefix}self_attn.o_proj.weight"].new_zeros(UNUSED, spec.hidden_size)
    canonical = {"embed.weight": empty, "head.weight": empty if head is None else head}
    for layer in range(spec.num_layers):
        canonical |= of_layer(weights, prefix.replace("0", str(layer)), f"layers.{layer}.")
    if "norm.weight" in weights:
        canonical["final_norm.weight"] = weights["norm.weight"]
    return canonical


def of_layer(weights: Weights, prefix: str, own: str) -> Weights:
    """One layer's weights by the decoder's names, which begin with `own`, out of Hugging Face's, which begin with
    `prefix`.
    """
    layer = {name.removeprefix(prefix): weight for name, weight in weights.items() if name.startswith(prefix)}
    canonical = {}
    for name, parts in FUSED.items():
        canonical[f"{own}{name}.weight"] = torch.cat([layer[f"{part}.weight"] for part in parts])
        biases = [
            layer.get(f"{part}.bias", layer[f"{part}.weight"].new_zeros(len(layer[f"{part}.weight"]))) for part in parts
        ]
        if any(f"{part}.bias" in layer for part in parts):
            canonical[f"{own}{name}.bias"] = torch.cat(biases)
    for stored, name in RENAMED.items():
        for kind in ("weight", "bias"):
            if f"{stored}.{kind}" in layer:
                canonical[f"{own}{name}.{kind}"] = layer[f"{stored}.{kind}"]
    return canonical
