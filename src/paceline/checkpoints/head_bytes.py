"""How much of what a step reads is the language-modelling head, by a checkpoint's configuration and the header of its
file: no weight is read.
"""

from __future__ import annotations

from pathlib import Path

import torch

from paceline.checkpoints.families import spec_from_config
from paceline.checkpoints.gguf_checkpoint import GgufCheckpoint
from paceline.checkpoints.gguf_file import is_gguf
from paceline.checkpoints.gguf_rows import block_rows
from paceline.checkpoints.hub import read_config
from paceline.checkpoints.weights import untie_if_different, weight_bytes
from paceline.errors import UnsupportedModelError


def head_share(folder: Path) -> float:
    """The head's share of the bytes of all weights but the embedding; 0 for a model without a native runner.

    Of a GGUF file whose blocks are kept as they are, the bytes are the file's; elsewhere all numbers are of one size.

    Raises:
        CheckpointError: nothing to load there.
    """
    try:
        spec = spec_from_config(read_config(folder))
    except UnsupportedModelError:
        return 0.0
    sizes = weight_bytes(spec, torch.float32)
    if is_gguf(folder):
        checkpoint = GgufCheckpoint(folder)
        blocks = block_rows(checkpoint, untie_if_different(checkpoint, spec))
        sizes = sizes if blocks is None else {name: rows.nbytes for name, rows in blocks.items()}
    table = sizes.pop("embed.weight")
    head = sizes.setdefault("head.weight", table)
    return head / sum(sizes.values())
