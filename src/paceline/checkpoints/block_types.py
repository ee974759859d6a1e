"""Rows of matrices in blocks, whose numbers and scales compiled passes multiply as they are (models.cpu.blocks).

Blocks are those of GGUF's types, and two that no such file has, of 32 numbers of 4 bits, the first sixteen in the low
halves of their bytes: INT4_ZEROS, with a float16 scale and a zero of one byte before them, and FP4_HALVES, 4-bit floats
with a float16 scale for each half, as NVFP4 groups them.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from paceline.checkpoints.gguf_blocks import block_bytes, block_values

Ints = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]
Source = Bytes | Callable[[], Bytes]
"""Bytes that are there, or mapped; or what makes them."""

TYPES: Final = {
    "Q4_0": 32, "Q4_1": 32, "Q5_0": 32, "Q5_1": 32, "Q8_0": 32, "Q4_K": 256, "Q5_K": 256, "Q6_K": 256,
    "INT4_ZEROS": 32, "MXFP4": 32, "FP4_HALVES": 32,
}  # fmt: skip
"""Types whose blocks are kept, and the inputs of a block."""

NAMES: Final = tuple(TYPES)


@dataclass(frozen=True, slots=True)
class BlockRows:
    """Rows of a quantised matrix where they lie.

    Attributes:
        sources: what they lie in. places: (outputs, 3) int64: of each row its source, the bytes before it, its type (an
            index of NAMES); -1 for a row of zeros.
        inputs: of every row. columns: (inputs,) the input that each number of a row belongs to; None: in order.
    """

    sources: tuple[Source, ...]
    places: Ints
    inputs: int
    columns: Ints | None = None

    def __len__(self) -> int:
        return len(self.places)

    @property
    def nbytes(self) -> int:
        """Of all rows."""
        sizes = np.array([row_bytes(kind, self.inputs) for kind in NAMES])
        return int(sizes[self.places[:, 2]].sum())

    def read(self) -> list[Bytes]:
        """The bytes of all sources; nothing of those in which no row lies."""
        used, nothing = set(self.places[:, 0].tolist()), np.zeros(0, np.uint8)
        return [
            nothing if number not in used else source() if callable(source) else source
            for number, source in enumerate(self.sources)
        ]

    def values(self, rows: Sequence[int]) -> torch.Tensor:
        """(n, inputs) float32 weights of the rows of these numbers, in the order of the blocks."""
        values = torch.empty(len(rows), self.inputs)
        places, sources = self.places[np.asarray(rows, np.int64)], self.read()
        for source, kind in {(int(source), int(kind)) for source, _, kind in places}:
            here = (places[:, 0] == source) & (places[:, 2] == kind)
            size = row_bytes(NAMES[kind], self.inputs)
            raw = sources[source][places[here, 1][:, None] + np.arange(size)]
            values[torch.from_numpy(here)] = block_values(torch.from_numpy(raw.ravel()), NAMES[kind]).view(
                -1, self.inputs
            )
        return values

    def rest(self) -> None:
        """Give back the memory of mapped files; what is read again comes from them."""
        for source in self.sources:
            base = None if callable(source) else source.base
            if isinstance(base, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
                base.madvise(mmap.MADV_DONTNEED)

    def take(self, rows: Ints) -> BlockRows:
        """The rows of these numbers, -1 for one of zeros."""
        places = self.places[rows]
        places[rows < 0] = -1
        return replace(self, places=places)


Blocks = Mapping[str, BlockRows]
"""Matrices by canonical name."""


def kinds_of(blocks: Blocks) -> list[str]:
    """The types of all matrices, sorted."""
    return sorted({NAMES[kind] for rows in blocks.values() for kind in np.unique(rows.places[:, 2])})


def row_bytes(kind: str, inputs: int) -> int:
    """Of a row."""
    return inputs // TYPES[kind] * block_bytes(kind)


def stacked(above: BlockRows, below: BlockRows) -> BlockRows:
    """The rows of two matrices that take the same inputs in the same order, as one."""
    moved = below.places.copy()
    moved[moved[:, 0] >= 0, 0] += len(above.sources)
    places = np.concatenate((above.places, moved))
    return replace(above, sources=(*above.sources, *below.sources), places=places)
