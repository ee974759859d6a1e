"""States of a target on disk: safetensors shards of many documents each, together within a cap.

A shard is written beside its place and moved there, so that a kill leaves whole shards, which the next run reads, and
at most one file that it removes. What waits for a shard to be full is read from memory.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Final

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

SHARD: Final = 64 << 20
"""Bytes of states after which a shard is written."""

ENTRY: Final = 512
"""Bytes of a shard's header that the two tensors of a document take, at most."""

States = tuple[Tensor, Tensor]
"""What is read of a document's tokens: (n, taps) states of layers, (n, d) those behind the final norm."""


class StateShards:
    """States by the tokens of their document.

    Args:
        folder: of the shards, for one model and one choice of layers; those that are there are read.
        limit: bytes of all shards. Documents beyond it are not kept.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self._limit = folder, limit
        self._files: dict[str, Path] = {}
        self._waiting: dict[str, Tensor] = {}
        self._waiting_bytes = 0
        for torn in folder.glob("*.new"):
            torn.unlink()
        for path in self._shards():
            self._index(path)
        self._used = sum(path.stat().st_size for path in self._shards())

    def get(self, tokens: Sequence[int]) -> States | None:
        """States of a document that was kept."""
        name = named(tokens)
        if f"{name}.final" in self._waiting:
            return self._waiting[f"{name}.taps"], self._waiting[f"{name}.final"]
        if f"{name}.final" not in self._files:
            return None
        with safe_open(self._files[f"{name}.final"], "pt") as file:
            return file.get_tensor(f"{name}.taps"), file.get_tensor(f"{name}.final")

    def put(self, tokens: Sequence[int], states: States) -> None:
        """Keep a document's states, where there is room for them."""
        size = ENTRY + sum(part.numel() * part.element_size() for part in states)
        if self._used + size > self._limit:
            self._write()
            return
        name = named(tokens)
        self._waiting |= {f"{name}.{part}": one.cpu() for part, one in zip(("taps", "final"), states, strict=True)}
        self._used, self._waiting_bytes = self._used + size, self._waiting_bytes + size
        if self._waiting_bytes >= SHARD:
            self._write()

    def remove(self) -> None:
        """Delete the shards."""
        shutil.rmtree(self.folder)

    def _write(self) -> None:
        if not self._waiting:
            return
        path = self.folder / f"states-{len(self._shards()):05}.safetensors"
        fresh = path.with_suffix(".new")
        save_file(self._waiting, fresh)
        fresh.replace(path)
        self._index(path)
        self._waiting, self._waiting_bytes = {}, 0

    def _shards(self) -> list[Path]:
        return sorted(self.folder.glob("states-*.safetensors"))

    def _index(self, path: Path) -> None:
        with safe_open(path, "pt") as file:
            self._files |= dict.fromkeys(file.keys(), path)


def named(tokens: Sequence[int]) -> str:
    """By which a document is known."""
    return sha256(json.dumps(list(tokens)).encode()).hexdigest()
