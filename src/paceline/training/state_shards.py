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

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

SHARD: Final = 64 << 20
"""Bytes of states after which a shard is written."""

ENTRY: Final = 256
"""Bytes of a shard's header that a tensor takes, at most."""

FINAL: Final = "final"

States = tuple[Tensor, Tensor]
"""What is read of a document's tokens: (n, taps) states of layers, (n, d) those behind the final norm."""


class StateShards:
    """Keeps the target's states on disk, by the tokens of their document.

    Args:
        folder: of the shards, for one model; those that are there are read, of whichever layers they are.
        limit: bytes of all shards. Documents beyond it are not kept.
        layers: whose states are read, beside those behind the final norm.
    """

    def __init__(self, folder: Path, limit: int, layers: Sequence[int | str] = ()) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self._limit, self._parts = folder, limit, [*map(str, layers), FINAL]
        self._files: dict[str, Path] = {}
        self._waiting: dict[str, Tensor] = {}
        self._waiting_bytes = 0
        for torn in folder.glob("*.new"):
            torn.unlink()
        for path in self._shards():
            self._index(path)
        self._used = sum(path.stat().st_size for path in self._shards())

    def has(self, tokens: Sequence[int]) -> bool:
        """Whether the states of a document were kept."""
        name = named(tokens)
        return all(self._known(f"{name}.{part}") for part in self._parts)

    def get(self, tokens: Sequence[int]) -> States | None:
        """States of a document that was kept."""
        if not self.has(tokens):
            return None
        name = named(tokens)
        *layers, final = (self._read(f"{name}.{part}") for part in self._parts)
        return torch.cat((final[:, :0], *layers), -1), final

    def put(self, tokens: Sequence[int], states: States) -> None:
        """Keep a document's states, where there is room for them."""
        taps, final = states
        layers = taps.chunk(len(self._parts) - 1, -1) if len(self._parts) > 1 else ()
        name = named(tokens)
        named_parts = {f"{name}.{part}": tensor for part, tensor in zip(self._parts, (*layers, final), strict=True)}
        new = {key: tensor.cpu().contiguous() for key, tensor in named_parts.items() if not self._known(key)}
        size = sum(ENTRY + tensor.numel() * tensor.element_size() for tensor in new.values())
        if self._used + size > self._limit:
            self.write()
            return
        self._waiting |= new
        self._used, self._waiting_bytes = self._used + size, self._waiting_bytes + size
        if self._waiting_bytes >= SHARD:
            self.write()

    def _known(self, key: str) -> bool:
        return key in self._waiting or key in self._files

    def _read(self, key: str) -> Tensor:
        if key in self._waiting:
            return self._waiting[key]
        with safe_open(self._files[key], "pt") as file:
            tensor: Tensor = file.get_tensor(key)
        return tensor

    def remove(self) -> None:
        """Delete the shards."""
        shutil.rmtree(self.folder)

    def write(self) -> None:
        """A shard of what waits for one."""
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
    """Give the name under which a document's states are kept: a digest of its tokens."""
    return sha256(json.dumps(list(tokens)).encode()).hexdigest()
