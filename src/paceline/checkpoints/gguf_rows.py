"""A GGUF file's quantised matrices under the decoder's names, as places of their rows: nothing is read.

models.cpu.blocks packs them from there, with the numbers and scales that they have.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from paceline.checkpoints.canonical_tensors import StoredTensor
from paceline.checkpoints.gguf_blocks import block_values
from paceline.checkpoints.gguf_checkpoint import GgufCheckpoint
from paceline.checkpoints.quantization import MATRICES
from paceline.checkpoints.weights import StoredNames, chosen_pieces, targets
from paceline.models import ModelSpec

Ints = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]

TYPES: Final = {"Q4_0": 32, "Q4_1": 32, "Q5_0": 32, "Q5_1": 32, "Q8_0": 32, "Q4_K": 256, "Q5_K": 256, "Q6_K": 256}
"""Types whose blocks are kept, and the inputs of a block."""

NAMES: Final = tuple(TYPES)


@dataclass(frozen=True, slots=True)
class BlockRows:
    """Rows of a quantised matrix where they lie.

    Attributes:
        sources: mapped files. places: (outputs, 3) int64: of each row its source, the bytes before it, its type (an
            index of NAMES); -1 for a row of zeros.
        inputs: of every row.
    """

    sources: tuple[Bytes, ...]
    places: Ints
    inputs: int

    def __len__(self) -> int:
        return len(self.places)

    @property
    def nbytes(self) -> int:
        """Of all rows in their files."""
        sizes = np.array([row_bytes(kind, self.inputs) for kind in NAMES])
        return int(sizes[self.places[:, 2]].sum())

    def values(self, rows: Sequence[int]) -> torch.Tensor:
        """(n, inputs) float32 weights of the rows of these numbers."""
        values = torch.empty(len(rows), self.inputs)
        places = self.places[np.asarray(rows, np.int64)]
        for source, kind in {(int(source), int(kind)) for source, _, kind in places}:
            here = (places[:, 0] == source) & (places[:, 2] == kind)
            size = row_bytes(NAMES[kind], self.inputs)
            raw = self.sources[source][places[here, 1][:, None] + np.arange(size)]
            values[torch.from_numpy(here)] = block_values(torch.from_numpy(raw.ravel()), NAMES[kind]).view(
                -1, self.inputs
            )
        return values

    def rest(self) -> None:
        """Give back the memory of mapped files; what is read again comes from them."""
        for source in self.sources:
            if isinstance(source.base, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
                source.base.madvise(mmap.MADV_DONTNEED)

    def take(self, rows: npt.NDArray[np.int64]) -> BlockRows:
        """The rows of these numbers, -1 for one of zeros."""
        places = self.places[rows]
        places[rows < 0] = -1
        return BlockRows(self.sources, places, self.inputs)

    def and_then(self, more: BlockRows) -> BlockRows:
        """These, and others of the same files behind them."""
        return BlockRows(self.sources, np.concatenate((self.places, more.places)), self.inputs)


Blocks = Mapping[str, BlockRows]
"""Matrices by canonical name."""


def kinds_of(blocks: Blocks) -> list[str]:
    """The types of all matrices, sorted."""
    return sorted({NAMES[kind] for rows in blocks.values() for kind in np.unique(rows.places[:, 2])})


def row_bytes(kind: str, inputs: int) -> int:
    """Of a row in its file."""
    import gguf

    width, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    return int(inputs // width * size)


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
    if piece.expert is not None or len(piece.shape) != 2 or kind not in TYPES or piece.shape[1] % TYPES[kind]:
        return None
    rows = torch.from_numpy(order)[:, None]
    at = (rows if piece.arrange is None else piece.arrange(rows))[:, 0].numpy() * row_bytes(kind, piece.shape[1])
    return np.stack((np.full_like(at, paths.index(path)), start + at, np.full_like(at, NAMES.index(kind))), 1)
