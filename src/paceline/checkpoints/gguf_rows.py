"""A GGUF file's quantised matrices under the decoder's names, as places of their rows: nothing is read.

models.cpu.block_packing packs them from there, with the numbers and scales that they have.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from paceline.checkpoints.block_types import NAMES, TYPES, BlockRows, Ints, row_bytes
from paceline.checkpoints.canonical_tensors import StoredTensor
from paceline.checkpoints.gguf_blocks import OWN_SIZES
from paceline.checkpoints.gguf_checkpoint import GgufCheckpoint
from paceline.checkpoints.quantization import MATRICES
from paceline.checkpoints.weights import StoredNames, chosen_pieces, targets
from paceline.models import ModelSpec


def block_rows(checkpoint: GgufCheckpoint, spec: ModelSpec) -> dict[str, BlockRows] | None:
    """The matrices by canonical name; None where one is of another type, or of a mixture of experts."""
    names = StoredNames(checkpoint, spec)
    paths = sorted({tensor.path for tensor in checkpoint.file.tensors.values()})
    sources, rows_by_name = tuple(np.memmap(path, np.uint8, "r") for path in paths), {}
    for target in targets(spec):
        if target.name != "embed.weight" and not MATRICES.match(target.name):
            continue
        parts = [_part(checkpoint, names, piece, name, paths) for piece, name in chosen_pieces(names, target)]
        places = [part for part in parts if part is not None]
        if len(places) < len(parts):
            return None
        rows_by_name[target.name] = BlockRows(sources, np.concatenate(places), target.shape[-1])
    return rows_by_name


def _part(
    checkpoint: GgufCheckpoint, names: StoredNames, piece: StoredTensor, name: str, paths: Sequence[Path]
) -> Ints | None:
    """(rows, 3) places of a stored matrix, in the order that the model wants."""
    kind, path, start, order = checkpoint.place(names.stored[name])
    if piece.expert is not None or len(piece.shape) != 2 or kind not in TYPES or kind in OWN_SIZES:
        return None
    if piece.shape[1] % TYPES[kind]:
        return None
    rows = torch.from_numpy(order)[:, None]
    at = (rows if piece.arrange is None else piece.arrange(rows))[:, 0].numpy() * row_bytes(kind, piece.shape[1])
    return np.stack((np.full_like(at, paths.index(path)), start + at, np.full_like(at, NAMES.index(kind))), 1)
