"""The tensors of a checkpoint folder: names, shapes and bytes from the headers, data by memory mapping, one tensor at a
time.

Only safetensors files are opened; nothing of a checkpoint is ever executed.

The format: 8 bytes with the header's size, a JSON header, then the data; a file shorter than its header says is
half-written.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from paceline.errors import CheckpointError, UnsupportedModelError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
MAX_HEADER = 100_000_000


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One stored tensor: its file, dtype as safetensors names it, shape, and bytes."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


class Checkpoint:
    """The tensors of one folder, by name.

    Raises:
        CheckpointError: no weights, a missing shard, or a file that is not whole.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.entries: dict[str, TensorEntry] = {}
        for file in weight_files(folder):
            self.entries.update(read_header(file))
        self._check_index()
        self._open: dict[Path, Any] = {}

    def header_sizes(self) -> dict[Path, int]:
        """Of each file the bytes before its data."""
        starts = {}
        for file in weight_files(self.folder):
            with file.open("rb") as stream:
                starts[file] = 8 + int.from_bytes(stream.read(8), "little")
        return starts

    def _check_index(self) -> None:
        if (self.folder / SINGLE).is_file():
            return
        absent = sorted(name for name in _index(self.folder) if name not in self.entries)
        if absent:
            raise CheckpointError(
                f"{self.folder}: {some(absent)} named in {INDEX} but in no file; download the checkpoint again"
            )

    def dtype(self) -> torch.dtype:
        """The floating dtype that most bytes have; float32 if there is none."""
        total: dict[str, int] = {}
        for entry in self.entries.values():
            if entry.dtype in DTYPES:
                total[entry.dtype] = total.get(entry.dtype, 0) + entry.nbytes
        return DTYPES[max(total, key=lambda name: total[name])] if total else torch.float32

    @property
    def kind(self) -> str | None:
        """What the weights are quantised in, in words; None for floats."""
        return None

    @property
    def is_rounded(self) -> bool:
        """Whether quantised weights that compiled passes do not keep are rounded, unless the user says otherwise."""
        return self.kind is not None

    def is_narrow(self, name: str) -> bool:
        """Whether a tensor is stored in four bits a weight or fewer, in even steps."""
        return False

    def is_readable(self, name: str) -> bool:
        """Whether `tensor` can give a tensor as floats."""
        return self.entries[name].dtype in DTYPES

    def tensor(self, name: str) -> torch.Tensor:
        """One tensor on the CPU as it is stored, mapped from the file where the platform allows.

        Raises:
            UnsupportedModelError: a dtype that is no plain float.
            CheckpointError: the file cannot be read.
        """
        entry = self.entries[name]
        if not self.is_readable(name):
            raise UnsupportedModelError(
                f"{self.folder}: {name} is stored as {entry.dtype}; quantised weights are not supported, use a float "
                f"checkpoint"
            )
        return self._mapped(name, entry.file)

    def _mapped(self, name: str, file: Path) -> torch.Tensor:
        from safetensors import SafetensorError, safe_open

        try:
            if file not in self._open:
                self._open[file] = safe_open(file, framework="pt", device="cpu")
            tensor: torch.Tensor = self._open[file].get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{file} cannot be read ({error}); download the checkpoint again") from error
        return tensor

    def fill(self, name: str, out: torch.Tensor) -> None:
        """Copy one tensor into `out`, which has its shape; see `tensor`."""
        out.copy_(self.tensor(name))


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint: the single one, or all shards of the index.

    Raises:
        CheckpointError: neither is there, or shards are missing.
    """
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    if not (folder / INDEX).is_file():
        there = sorted(path.name for path in folder.glob("*.safetensors"))
        holds = f"; it holds {some(there)}" if there else ""
        raise CheckpointError(
            f"no weights in {folder}: neither {SINGLE} nor {INDEX}{holds}; give the folder of a whole checkpoint"
        )
    names = sorted(set(_index(folder).values()))
    if unsafe := [name for name in names if Path(name).name != name]:
        raise CheckpointError(
            f"{folder / INDEX} names {unsafe[0]!r}, which is not a file of the same folder; download it again"
        )
    absent = [name for name in names if not (folder / name).is_file()]
    if absent:
        raise CheckpointError(f"{folder} lacks {some(absent)} of {len(names)} shards; download the checkpoint again")
    return [folder / name for name in names]


def _index(folder: Path) -> dict[str, str]:
    """Tensor name -> file name, as the index says."""
    path = folder / INDEX
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} cannot be read ({error!r}); download the checkpoint again") from error
    if (
        not isinstance(weight_map, dict)
        or not weight_map
        or not all(isinstance(name, str) for name in weight_map.values())
    ):
        raise CheckpointError(f"{path} has no weight_map of names to files; download the checkpoint again")
    return weight_map


def read_header(file: Path) -> dict[str, TensorEntry]:
    """What a safetensors file holds.

    Raises:
        CheckpointError: no safetensors file, or one that is cut off.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(start := stream.read(8), "little")
            if start == b"version ":
                raise CheckpointError(
                    f"{file} is a pointer of Git LFS, not the weights; run `git lfs pull` in its folder"
                )
            if size < 8 or length > min(size - 8, MAX_HEADER):
                raise CheckpointError(
                    f"{file} is cut off in its header or not a safetensors file ({size} bytes); download it again"
                )
            header = json.loads(stream.read(length))
        entries = {name: _entry(file, value) for name, value in header.items() if name != "__metadata__"}
        end = (
            8
            + length
            + max((value["data_offsets"][1] for name, value in header.items() if name != "__metadata__"), default=0)
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{file} is not a safetensors file ({error!r}); download it again") from error
    if end != size:
        raise CheckpointError(f"{file} is half-written: {size} bytes of {end}; download it again")
    return entries


def _entry(file: Path, value: Mapping[str, Any]) -> TensorEntry:
    start, stop = value["data_offsets"]
    return TensorEntry(file, str(value["dtype"]), tuple(value["shape"]), stop - start)


def some(names: list[str], most: int = 3) -> str:
    """The first names of a list, and how many more there are."""
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest
