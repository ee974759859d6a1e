"""Tiny random models whose layers have mixers, of each kind of mixer one: runners, and checkpoint folders with the
bundled tokenizer.
"""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from models.checkpoints import CASES, SIZES, perturb
from tiny_checkpoint import TARGET, TOKENIZER

from paceline.checkpoints import Checkpoint, load_weights, read_config, spec_from_config
from paceline.models import ModelSpec
from paceline.models.runners import RecurrentRunner

KINDS = {"convolution": "lfm2-wide", "mamba2": "granitemoehybrid-wide", "delta": "qwen3_5_text-wide"}
"""The checkpoint case of each kind of mixer, of sizes that compiled passes take."""


def write(folder: Path, kind: str = "mamba2", seed: int = 0, **changes: Any) -> Path:
    """A checkpoint with the bundled tokenizer; `changes` replaces keys of its config."""
    from transformers import AutoConfig, AutoModelForCausalLM

    size = json.loads((TARGET / "config.json").read_text())["vocab_size"]
    sizes = SIZES | {"vocab_size": size, "max_position_embeddings": 2048, "bos_token_id": 0, "eos_token_id": 3}
    case = CASES[KINDS[kind]]
    config = AutoConfig.for_model(case.model_type, **{**sizes, **case.new, **changes})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    perturb(model.float().eval(), seed).save_pretrained(folder)
    for name in TOKENIZER:
        shutil.copy(TARGET / name, folder)
    return folder


@cache
def _parts(kind: str, seed: int, vocab: int) -> tuple[ModelSpec, dict[str, torch.Tensor]]:
    with TemporaryDirectory() as folder:
        path = write(Path(folder), kind, seed, vocab_size=vocab, eos_token_id=2, bos_token_id=1)
        spec = spec_from_config(read_config(path))
        return spec, load_weights(Checkpoint(path), spec, device=torch.device("cpu"), dtype=torch.float32)


def hybrid(
    kind: str = "mamba2", seed: int = 0, vocab: int = 64, *, noise: float = 0.0, **options: Any
) -> RecurrentRunner:
    """A runner of a model with `vocab` tokens.

    Args:
        noise: makes a draft model that is often right: how far its matrices are from these, as a share of their spread.
        options: of `NativeRunner`.
    """
    spec, found = _parts(kind, seed, vocab)
    generator, weights = torch.Generator().manual_seed(1), dict(found)
    for name, weight in found.items():
        if noise and weight.dim() > 1:
            weights[name] = weight + noise * weight.std() * torch.randn(weight.shape, generator=generator)
    return RecurrentRunner(
        spec, weights, name=f"tiny {kind}", device=torch.device("cpu"), dtype=torch.float32, **options
    )
