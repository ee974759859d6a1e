"""What the decoder of an encoder-decoder model attends to: keys and values that its layers made of the source, once.

Every token of a sequence sees all of it, drafts too, and nothing changes it: forks and outputs of a request share it,
and going back leaves it as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Self

import torch

from paceline.errors import ConfigError
from paceline.models.base import PartAbilities
from paceline.models.inputs import Inputs
from paceline.models.state.arena import Arena
from paceline.models.state.cache import NativeCache


class CrossMemory:
    """Keys and values of one source, in slots of the arena like those of a text; they are given back with it.

    Args:
        rows: of the source.
    """

    __slots__ = ("__weakref__", "_cache")

    def __init__(self, arena: Arena, rows: int) -> None:
        self._cache = NativeCache(arena)
        self._cache.reserve(rows)
        self._cache.length = rows
        self._cache.trim(0)

    @property
    def cache(self) -> NativeCache:
        """Where they are: the slots of positions 0 .. rows - 1."""
        return self._cache

    def write(self, layer: int, keys_values: torch.Tensor) -> None:
        """Set what a layer has made of the source: (rows, 2 * kv heads, head dim), keys and then values."""
        cache, stored = self._cache, self._cache.arena.layers[layer]
        slots = torch.from_numpy(cache.slot_index(0, cache.length)).to(keys_values.device)
        stored.index_copy_(0, slots, keys_values.to(stored.dtype))

    def read(self, layer: int) -> torch.Tensor:
        """(rows, 2 * kv heads, head dim); a view where the slots are adjacent."""
        cache = self._cache
        stored = cache.arena.layers[layer]
        if cache.base >= 0:
            return stored.narrow(0, cache.base, cache.length)
        return stored[torch.from_numpy(cache.slot_index(0, cache.length)).to(stored.device)]


class SourcePart:
    """A sequence's share in the memory of its source (`models.state.parts.StatePart`).

    Args:
        inputs: what is to be read. memory: what came of it; None until the encoder has run.
    """

    abilities: ClassVar = PartAbilities()
    __slots__ = ("inputs", "memory")

    def __init__(self, inputs: Inputs, memory: CrossMemory | None = None) -> None:
        self.inputs, self.memory = inputs, memory

    def read(self) -> CrossMemory:
        """What the encoder made of it.

        Raises:
            ConfigError: it was not run.
        """
        if self.memory is None:
            raise ConfigError("this sequence's source was not read; call runner.encode() before its first tokens")
        return self.memory

    def commit(self, path: Sequence[int]) -> None:
        """See `StatePart.commit`."""

    def check_truncate(self, length: int) -> None:
        """See `StatePart.check_truncate`."""

    def truncate(self, length: int) -> None:
        """See `StatePart.truncate`."""

    def fork(self) -> Self:
        """See `StatePart.fork`."""
        return type(self)(self.inputs, self.memory)

    def release(self) -> None:
        """See `StatePart.release`."""
        self.memory = None
