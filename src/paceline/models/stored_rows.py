"""Rows of a model's files that are no tokens, which a loaded model does without: some heads were trained with one of
them as their mask token.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from paceline.checkpoints import (
    GgufCheckpoint,
    is_gguf,
    load_weights,
    open_checkpoint,
    read_config,
    spec_from_config,
    targets,
)
from paceline.errors import CheckpointError
from paceline.models.base import ModelInfo

EMBEDDING = "embed.weight"


@torch.inference_mode()
def stored_embedding(folder: Path, token: int, model: ModelInfo) -> torch.Tensor:
    """(hidden,) a row of the embedding in a checkpoint's files, with the family's multiplier, on the model's device.

    Args:
        folder: of the checkpoint. token: an id below the rows in the files, a token or not. model: loaded from them.
    Raises:
        CheckpointError: no such row. UnsupportedModelError: a family without a native runner.
    """
    config = read_config(folder)
    checkpoint = GgufCheckpoint(folder) if is_gguf(folder) else open_checkpoint(folder, config)
    spec = replace(spec_from_config(config), stored_rows=None)
    elsewhere = [tensor.name for tensor in targets(spec) if tensor.name != EMBEDDING]
    device = torch.device("cpu")
    rows = load_weights(checkpoint, spec, device=device, dtype=model.dtype, elsewhere=elsewhere)[EMBEDDING]
    if not 0 <= token < len(rows):
        raise CheckpointError(
            f"{model.name} has {len(rows)} embeddings, and its head asks for that of token {token}; use one that was "
            "trained for this model"
        )
    return rows[token].mul(spec.embedding_multiplier).to(model.device)
