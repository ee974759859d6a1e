"""The binary files of Marian, such as the students of Bergamot and Firefox: a translation model in one file, most of
its matrices in int8.

Version 1, little endian: u64 version, u64 count of items; of each item u64 length of its name, type, rank and bytes;
all names, which end with 0; all shapes, of i32; u64 count of bytes to be skipped, and these; all values. Types are
float32; int8, of a text in YAML with the model's settings; and intgemm8: int8 values, behind the last of which stands
the float32 number that the weights were multiplied by. Matrices of int8 lie transposed, embeddings do not.
Source: https://github.com/browsermt/marian-dev, src/common/binary.cpp and src/tensors/cpu/expression_graph_packable.h.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import yaml

from paceline.checkpoints.checkpoint import some
from paceline.errors import CheckpointError, UnsupportedModelError

VERSION: Final = 1
FLOAT32: Final = 0x404
INTGEMM8: Final = (0x4101, 0x10001)
"""As Bergamot's Marian writes it, and as later ones do."""

SETTINGS: Final = "special:model.yml"
EMBEDDINGS: Final = "Wemb"
MARIAN_TOKENS: Final = {"eos_token": "</s>", "unk_token": "<unk>"}
"""As a tokenizer_config.json names them; no file of Marian's does."""

MOST_ITEMS, MOST_RANK = 2**16, 8


@dataclass(frozen=True, slots=True)
class MarianItem:
    """One item of a file.

    Attributes:
        kind: number of its type.
        shape: as the file says: (inputs, outputs) of a matrix, (1, n) of a vector.
        start, nbytes: where its values lie, with what stands behind them.
    """

    kind: int
    shape: tuple[int, ...]
    start: int
    nbytes: int

    @property
    def count(self) -> int:
        """Number of its values."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class MarianFile:
    """One file.

    Attributes:
        start: bytes before the first values.
    """

    path: Path
    items: Mapping[str, MarianItem]
    start: int

    def settings(self) -> dict[str, Any]:
        """What the file says of the model's shape.

        Raises:
            CheckpointError: nothing that can be read.
        """
        if SETTINGS not in self.items:
            raise CheckpointError(f"{self.path} lacks {SETTINGS}, its model's settings; download it again")
        text = self._bytes(SETTINGS).tobytes().split(b"\0")[0]
        try:
            found = yaml.safe_load(text)
        except (yaml.YAMLError, ValueError) as error:
            raise CheckpointError(f"{self.path}: its settings cannot be read ({error}); download it again") from error
        if not isinstance(found, dict):
            raise CheckpointError(f"{self.path}: its settings must be an object of YAML; download it again")
        return found

    def tensor(self, name: str) -> torch.Tensor:
        """An item in float32 and in the shape that the file says.

        Raises:
            UnsupportedModelError: a type that has no weights here.
        """
        item = self.items[name]
        if item.kind in INTGEMM8:
            return self.integers(name).float() / self.multiplier(name)
        if item.kind != FLOAT32:
            raise UnsupportedModelError(
                f"{self.path}: {name} has the type {item.kind:#x}, which is none of float32 and intgemm8"
            )
        return torch.from_numpy(self._bytes(name)[: 4 * item.count].view("<f4")).view(item.shape)

    def integers(self, name: str) -> torch.Tensor:
        """The int8 values of an item in the shape that the file says."""
        item = self.items[name]
        flat = torch.from_numpy(self._bytes(name)[: item.count].view(np.int8))
        if name.endswith(EMBEDDINGS) or len(item.shape) != 2:
            return flat.view(item.shape)
        return flat.view(item.shape[::-1]).t()

    def multiplier(self, name: str) -> float:
        """The number that the weights of an int8 item were multiplied by."""
        count = self.items[name].count
        return float(self._bytes(name)[count : count + 4].view("<f4")[0])

    def _bytes(self, name: str) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        item = self.items[name]
        found = np.fromfile(self.path, np.uint8, item.nbytes, offset=item.start)
        if len(found) < item.nbytes:
            raise CheckpointError(f"{self.path} has become shorter while it is read; download it again")
        return found


def marian_path(folder: Path) -> Path | None:
    """Marian's binary in a folder without config.json; None where there is none.

    Raises:
        CheckpointError: there are several.
    """
    if not folder.is_dir() or (folder / "config.json").exists():
        return None
    found = [path for path in sorted(folder.glob("*.bin")) if _begins(path)]
    if len(found) > 1:
        names = some([path.name for path in found])
        raise CheckpointError(f"{folder} holds several of Marian's files ({names}); give a folder with one of them")
    return found[0] if found else None


def _begins(path: Path) -> bool:
    with path.open("rb") as file:
        begin = file.read(16)
    return len(begin) == 16 and struct.unpack("<2Q", begin)[0] == VERSION


def read_marian(path: Path) -> MarianFile:
    """The items of a file; no values are read.

    Raises:
        CheckpointError: another version, or a file that is cut off or damaged.
    """
    size = path.stat().st_size
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            items, start = _items(data, size)
    except (struct.error, UnicodeDecodeError, ValueError) as error:
        raise CheckpointError(f"{path} is cut off or none of Marian's files ({error}); download it again") from error
    return MarianFile(path, items, start)


def _items(data: mmap.mmap, size: int) -> tuple[dict[str, MarianItem], int]:
    """Name -> item, and where the first values begin.

    Raises:
        ValueError, struct.error, UnicodeDecodeError: this is no such file.
    """
    version, count = struct.unpack_from("<2Q", data)
    if version != VERSION or count > MOST_ITEMS:
        raise ValueError(f"version {version}, {count} items")
    headers = [struct.unpack_from("<4Q", data, 16 + 32 * place) for place in range(count)]
    at, names, shapes = 16 + 32 * count, list[str](), list[tuple[int, ...]]()
    for length, *_ in headers:
        names.append(data[at : at + length].rstrip(b"\0").decode())
        at += length
    for _, _, rank, _ in headers:
        if rank > MOST_RANK:
            raise ValueError(f"a shape of {rank} sizes")
        shapes.append(struct.unpack_from(f"<{rank}i", data, at))
        at += 4 * rank
    start = at = at + 8 + struct.unpack_from("<Q", data, at)[0]
    items = {}
    for name, shape, (_, kind, _, nbytes) in zip(names, shapes, headers, strict=True):
        item = items[name] = MarianItem(kind, shape, at, nbytes)
        need = 4 * item.count if kind == FLOAT32 else item.count + 4 * (kind in INTGEMM8)
        if min(shape, default=0) < 0 or nbytes < need:
            raise ValueError(f"{name} of the shape {shape} in {nbytes} bytes")
        at += nbytes
        if at > size:
            raise ValueError(f"it ends before {name} does")
    return items, start
