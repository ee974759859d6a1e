"""What the decoder of an encoder-decoder model attends to: keys and values that its layers made of the source, once.

Every token of a sequence sees all of it, drafts too, and nothing changes it: forks and outputs of a request share it,
and going back leaves it as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import torch

from paceline.errors import ConfigError
from paceline.models.base import PartAbilities
from paceline.models.inputs import Inputs


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class CrossMemory:
    """Keys and values of one source.

    Attributes:
        layers: of each layer (rows, 2 * kv heads, head dim): keys, then values.
    """

    layers: tuple[torch.Tensor, ...]

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self.layers)


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
