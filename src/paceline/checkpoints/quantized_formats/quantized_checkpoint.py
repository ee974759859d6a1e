"""A quantised checkpoint under the names and shapes of a float one: matrices are multiplied out as they are read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from paceline.checkpoints.checkpoint import Checkpoint, TensorEntry, some
from paceline.checkpoints.quantized_formats.formats import find_format
from paceline.checkpoints.quantized_formats.integer_matrix import StoredMatrix
from paceline.checkpoints.quantized_formats.stored_parts import Format, StoredParts
from paceline.errors import CheckpointError


class QuantizedCheckpoint(Checkpoint):
    """See the module and `Checkpoint`.

    Args:
        form: the format of the folder's weights.
    Attributes:
        matrices: quantised matrices by the name of their weights.
    Raises:
        CheckpointError: parts that are missing, or do not fit each other or the configuration; nothing quantised.
        UnsupportedModelError: a layout that is not read.
    """

    def __init__(self, folder: Path, form: Format) -> None:
        super().__init__(folder)
        self.form, self._stored = form, dict(self.entries)
        self.matrices: dict[str, StoredMatrix] = {}
        modules: dict[str, dict[str, TensorEntry]] = {}
        for name, entry in self._stored.items():
            stem, _, part = name.rpartition(form.separator)
            if part in form.others:
                del self.entries[name]
            elif part in form.parts:
                modules.setdefault(stem, {})[part] = entry
        for stem, parts in modules.items():
            if parts.keys() & form.marks:
                self._add(StoredParts(stem, parts, form.separator))
        if not self.matrices:
            marks = some([f"{form.separator}{mark}" for mark in sorted(form.marks)])
            raise CheckpointError(
                f"{folder} is said to be quantised ({form.label}), but holds no tensor that ends in {marks}; its "
                "configuration and weights do not belong together"
            )

    def _add(self, parts: StoredParts) -> None:
        matrix = self.form.matrix(parts, self.stored_tensor)
        for part in parts.entries:
            del self.entries[parts.name(part)]
        name, first = parts.name(self.form.weight), next(iter(parts.entries.values()))
        size = sum(entry.nbytes for entry in parts.entries.values())
        self.matrices[name] = matrix
        self.entries[name] = TensorEntry(first.file, self.form.label, matrix.shape, size)

    @property
    def kind(self) -> str:
        """The format, and the bits of its weights, in words."""
        bits = " and ".join(map(str, sorted({matrix.bits for matrix in self.matrices.values()})))
        return f"{self.form.label}, {bits} bits" + (f"; {self.form.ignores}" if self.form.ignores else "")

    @property
    def is_rounded(self) -> bool:
        """See `Checkpoint`."""
        return self.form.is_rounded

    def is_narrow(self, name: str) -> bool:
        """See `Checkpoint`."""
        matrix = self.matrices.get(name)
        return matrix is not None and matrix.uniform and matrix.bits <= 4

    def is_readable(self, name: str) -> bool:
        """See `Checkpoint`."""
        return name in self.matrices or super().is_readable(name)

    def header_sizes(self) -> dict[Path, int]:
        """See `Checkpoint`; with config.json, which says how tensors are read."""
        return super().header_sizes() | {self.folder / "config.json": 0}

    def stored_tensor(self, name: str) -> torch.Tensor:
        """A tensor as it is stored, by its name in the files."""
        return self._mapped(name, self._stored[name].file)

    def tensor(self, name: str) -> torch.Tensor:
        """See `Checkpoint`; quantised matrices in float32."""
        if name not in self.matrices:
            return super().tensor(name)
        out = torch.empty(self.entries[name].shape)
        self.fill(name, out)
        return out

    def fill(self, name: str, out: torch.Tensor) -> None:
        """See `Checkpoint`."""
        if name in self.matrices:
            self.matrices[name].fill(self.stored_tensor, out)
        else:
            super().fill(name, out)


def open_checkpoint(folder: Path, config: Mapping[str, Any]) -> Checkpoint:
    """The tensors of a folder with safetensors, quantised or not.

    Raises:
        CheckpointError, UnsupportedModelError: see `QuantizedCheckpoint`.
    """
    form = find_format(folder, config)
    return Checkpoint(folder) if form is None else QuantizedCheckpoint(folder, form)
