"""Hybrid models of random weights: shapes of published ones, and one of each native family at the size that
`families.py` compares.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

from paceline.checkpoints import spec_from_config, targets

Shape = tuple[str, Mapping[str, Any]]
"""transformers' `model_type`, and sizes of its configuration."""

PUBLISHED: Mapping[str, Shape] = {
    "LFM2-350M": (
        "lfm2",
        {
            "vocab_size": 65536, "hidden_size": 1024, "intermediate_size": 6656, "num_hidden_layers": 16,
            "num_attention_heads": 16, "num_key_value_heads": 8, "max_position_embeddings": 128_000,
            "full_attn_idxs": [2, 5, 8, 10, 12, 14],
        },
    ),
    "Qwen3.5-0.8B": (
        "qwen3_5_text",
        {
            "vocab_size": 248_320, "hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 24,
            "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256, "linear_num_key_heads": 16,
            "linear_num_value_heads": 16, "tie_word_embeddings": True, "max_position_embeddings": 262_144,
        },
    ),
    "Granite-4.0-H-350M": (
        "granitemoehybrid",
        {
            "vocab_size": 100_352, "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 32,
            "num_attention_heads": 12, "num_key_value_heads": 4, "shared_intermediate_size": 2048,
            "num_local_experts": 0, "num_experts_per_tok": 0, "mamba_n_heads": 48, "mamba_d_head": 32,
            "mamba_d_state": 128, "tie_word_embeddings": True, "max_position_embeddings": 32_768,
            "layer_types": ["attention" if layer in {10, 13, 17, 27} else "mamba" for layer in range(32)],
        },
    ),
    "Phi-4-mini-flash, halved": (
        "phi4flash",
        {
            "vocab_size": 200_064, "hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 16,
            "num_attention_heads": 20, "num_key_value_heads": 10, "sliding_window": 512, "mb_per_layer": 2,
            "max_position_embeddings": 262_144,
        },
    ),
}  # fmt: skip

SIZES = {
    "vocab_size": 32_000, "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8,
    "num_attention_heads": 16, "num_key_value_heads": 8, "max_position_embeddings": 4096, "tie_word_embeddings": True,
}  # fmt: skip
"""Of a small model of any family; the heads and mixers of each are in the proportions of its published models."""

DELTA = {
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256, "linear_num_key_heads": 8,
    "linear_num_value_heads": 16, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
}  # fmt: skip
EXPERTS = {"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 256}
MAMBA2 = {"mamba_n_heads": 32, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_n_groups": 1}
MAMBA = {"intermediate_size": 2048, "num_hidden_layers": 16, "state_size": 16, "time_step_rank": 64}
NEMOTRON = {
    "mamba_num_heads": 32, "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 8, "head_dim": 64,
    "intermediate_size": 4096, "time_step_min": 1e-30,
}  # fmt: skip
KIMI = {
    "num_key_value_heads": 16, "kv_lora_rank": 256, "q_lora_rank": None, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32,
    "v_head_dim": 64, "linear_head_dim": 64, "linear_num_heads": 16, "num_experts": 32, "num_experts_per_token": 4,
    "moe_intermediate_size": 256,
}  # fmt: skip
WHOLE_HEADS = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 1.0}
"""Of Bamba, which rotates halves of heads: where a part is rotated, llama.cpp's converter pairs other dimensions."""

THIRDS = ["conv", "conv", "full_attention", "conv", "full_attention", "conv", "full_attention", "conv"]
QUARTERS = ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 2
EIGHTH = ["mamba"] * 4 + ["attention"] + ["mamba"] * 3

SMALL: Mapping[str, Shape] = {
    "lfm2": ("lfm2", {"intermediate_size": 4096, "layer_types": THIRDS}),
    "lfm2_moe": ("lfm2_moe", EXPERTS | {"num_dense_layers": 1, "layer_types": THIRDS}),
    "qwen3_next": ("qwen3_next", DELTA | EXPERTS | {"shared_expert_intermediate_size": 256, "layer_types": QUARTERS}),
    "qwen3_5": ("qwen3_5_text", DELTA | {"layer_types": QUARTERS}),
    "qwen3_5_moe": (
        "qwen3_5_moe_text",
        DELTA | EXPERTS | {"shared_expert_intermediate_size": 256, "layer_types": QUARTERS},
    ),
    "granite_hybrid": (
        "granitemoehybrid",
        MAMBA2 | {"shared_intermediate_size": 2816, "num_local_experts": 0, "num_experts_per_tok": 0}
        | {"layer_types": EIGHTH},
    ),
    "falcon_h1": (
        "falcon_h1",
        MAMBA2 | {"mamba_n_heads": 24, "mamba_d_ssm": 1536, "num_attention_heads": 8, "num_key_value_heads": 2}
        | {"head_dim": 64},
    ),
    "bamba": ("bamba", MAMBA2 | {"attn_layer_indices": [4], "rope_parameters": WHOLE_HEADS}),
    "jamba": (
        "jamba",
        {"intermediate_size": 704, "num_experts": 16, "num_experts_per_tok": 2, "expert_layer_period": 2}
        | {"expert_layer_offset": 1, "attn_layer_period": 8, "attn_layer_offset": 4, "mamba_d_state": 16},
    ),
    "nemotron_h": (
        "nemotron_h",
        NEMOTRON | {"layers_block_type": ["linear_attention", "mlp"] * 3 + ["linear_attention", "full_attention", "mlp"]
        + ["linear_attention", "mlp"] * 3},
    ),
    "kimi_linear": ("kimi_linear", KIMI | {"layer_types": QUARTERS}),
    "mamba": ("mamba", MAMBA),
    "falcon_mamba": ("falcon_mamba", MAMBA),
    "mamba2": (
        "mamba2",
        {"num_hidden_layers": 16, "intermediate_size": 2048, "num_heads": 32, "head_dim": 64, "state_size": 128}
        | {"n_groups": 1},
    ),
}  # fmt: skip
"""Family -> its small model; of all native ones with states but LightNet, which transformers does not have."""

MIXTURES = ("lfm2_moe", "qwen3_next", "qwen3_5_moe", "jamba", "kimi_linear")


LAYERS = {"linear_attention": "mamba", "full_attention": "attention"}
"""How Granite's published configurations name layers, by the names that transformers writes."""


def written(shape: Shape, folder: Path) -> Path:
    """A checkpoint in bfloat16, with the weights that transformers begins a training with."""
    kind, sizes = shape
    torch.manual_seed(0)
    if kind not in CONFIG_MAPPING:
        return _written_by_name({"model_type": kind, "torch_dtype": "bfloat16", **sizes}, folder)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes, dtype="bfloat16"))
    model.generation_config.eos_token_id = None
    model.to(torch.bfloat16).save_pretrained(folder)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    if kind == "granitemoehybrid":  # as llama.cpp's converter knows it
        config["layer_types"] = [LAYERS[name] for name in config["layer_types"]]
        path.write_text(json.dumps(config))
    return folder


def _written_by_name(config: Mapping[str, Any], folder: Path) -> Path:
    """The same for a family that transformers lacks: all that is asked for, by the first names that it may have."""
    tensors = {}
    for target in targets(spec_from_config(config)):
        for piece in target.recipes[0]:
            weight = 0.02 * torch.randn(piece.shape)
            if piece.names[0].endswith(("norm.weight", "subln.weight")):
                weight += 1.0
            tensors[piece.names[0]] = weight.to(torch.bfloat16)
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def small(family: str, folder: Path) -> Path:
    """The checkpoint of a family's small model."""
    kind, sizes = SMALL[family]
    ends = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": None}
    return written((kind, {**SIZES, **ends, **sizes}), folder)
