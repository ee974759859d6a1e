"""A tiny random Llama with the bundled tokenizer, written as a checkpoint folder, and ways to break it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from paceline.llm import BUNDLED

TARGET = BUNDLED / "target"
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")


def write(folder: Path, seed: int = 0, **changes: Any) -> Path:
    """A checkpoint of 2 layers and 128 positions; `changes` replaces keys of its config."""
    torch.manual_seed(seed)
    config = {
        "vocab_size": json.loads((TARGET / "config.json").read_text())["vocab_size"],
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "max_position_embeddings": 128,
        "tie_word_embeddings": False,
        "initializer_range": 0.2,
        "bos_token_id": 0,
        "eos_token_id": 3,
    }
    LlamaForCausalLM(LlamaConfig(**(config | changes))).save_pretrained(folder)
    for name in TOKENIZER:
        shutil.copy(TARGET / name, folder)
    return folder


def edit_json(path: Path, **changes: Any) -> None:
    """Replace keys of a JSON file; None removes one."""
    found = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in found.items() if value is not None}))


def edit_weights(folder: Path, change: Any) -> None:
    """Rewrite the weights after `change(name -> tensor)`."""
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
