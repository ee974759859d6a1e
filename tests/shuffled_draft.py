"""The bundled draft model with all token ids shuffled: a draft with another tokenizer that shares every token of the
target.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from paceline.llm import BUNDLED

SOURCE = BUNDLED / "draft"


def write(folder: Path) -> Path:
    """A checkpoint folder."""
    weights = load_file(SOURCE / "model.safetensors")
    places = np.random.default_rng(0).permutation(6144)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        weights[name] = weights[name][torch.from_numpy(np.argsort(places))].contiguous()
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    for name in ("config.json", "tokenizer_config.json"):
        shutil.copy(SOURCE / name, folder)
    words = json.loads((SOURCE / "tokenizer.json").read_text())
    words["model"]["vocab"] = {token: int(places[index]) for token, index in words["model"]["vocab"].items()}
    for added in words["added_tokens"]:
        added["id"] = int(places[added["id"]])
    (folder / "tokenizer.json").write_text(json.dumps(words))
    return folder
