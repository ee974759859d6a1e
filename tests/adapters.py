"""Adapters of Kangaroo for tests: folders in the published layout.

In: a width, or weights. Out: paths.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file


def adapter_weights(width: int, *, scale: float = 0.3, seed: int = 0, mute: bool = False) -> dict[str, torch.Tensor]:
    """Random weights of one layer; `mute`: its attention adds nothing, so that the exit alone drafts."""
    generator = torch.Generator().manual_seed(seed)
    names = [f"layers.0.self_attn.{name}_proj.weight" for name in "qkvo"]
    found = {name: scale * torch.randn(width, width, generator=generator) for name in names}
    if mute:
        found["layers.0.self_attn.o_proj.weight"].zero_()
    return found | {"layers.0.input_layernorm.weight": torch.ones(width), "norm.weight": torch.ones(width)}


def written_adapter(weights: Mapping[str, torch.Tensor], width: int, heads: int = 2, **config: Any) -> str:
    """Path of an adapter in a folder of its own."""
    folder = Path(tempfile.mkdtemp(prefix="paceline-adapter-"))
    shape = {
        "hidden_size": width,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": width // heads,
    }
    rest = {"num_hidden_layers": 1, "intermediate_size": 4 * width, "vocab_size": 11, "rms_norm_eps": 1e-6}
    llama = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "float32"}
    (folder / "config.json").write_text(json.dumps({**llama, **shape, **rest, **config}))
    save_file({name: value.contiguous() for name, value in weights.items()}, folder / "model.safetensors")
    return str(folder)
