"""Matrices of whole numbers with a scale and a zero for each group of inputs: what GPTQ, AWQ and the integer formats of
compressed-tensors have in common.

weight[o, i] = scale[o, g] * (number[o, i] - zero[o, g]), with g the group of input i. Numbers are unsigned; a format
with signed ones adds half of their range to numbers and zeros.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

import torch

Reader = Callable[[str], torch.Tensor]
"""A stored tensor by its name."""

AT_ONCE: Final = 2**20
"""Weights that are multiplied out at a time."""


@dataclass(frozen=True, slots=True)
class Grid:
    """What numbers are multiplied out by.

    Attributes:
        scales: (outputs, groups) floats as stored. zeros: (outputs, groups) int16. groups: (inputs,) int64, the group
            of each input.
    """

    scales: torch.Tensor
    zeros: torch.Tensor
    groups: torch.Tensor

    def values(self, numbers: torch.Tensor, out: torch.Tensor) -> None:
        """Write the weights of (outputs, inputs) numbers to `out`; they are computed in float32."""
        rows = max(1, AT_ONCE // max(1, numbers.shape[1]))
        for first in range(0, len(numbers), rows):
            part = slice(first, first + rows)
            zeros, scales = (grid[part].float()[:, self.groups] for grid in (self.zeros, self.scales))
            out[part] = numbers[part].float().sub_(zeros).mul_(scales)


class StoredMatrix(Protocol):
    """A quantised matrix (outputs, inputs) of a checkpoint, or those of all experts (experts, outputs, inputs).

    Attributes:
        bits: of a weight. uniform: its values are steps of the same size.
    """

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def bits(self) -> int: ...

    @property
    def uniform(self) -> bool: ...

    def fill(self, read: Reader, out: torch.Tensor) -> None:
        """Write the weights to `out` of their shape, computed in float32.

        Raises:
            CheckpointError: contents that contradict each other.
        """
        ...


class IntegerMatrix(ABC):
    """A matrix of whole numbers; see `StoredMatrix`."""

    shape: tuple[int, int]
    bits: int
    uniform: Final = True

    @abstractmethod
    def grid(self, read: Reader) -> Grid:
        """Scales, zeros and groups.

        Raises:
            CheckpointError: contents that contradict each other.
        """

    @abstractmethod
    def numbers(self, read: Reader) -> torch.Tensor:
        """(outputs, inputs) uint8.

        Raises:
            CheckpointError: contents that contradict each other.
        """

    def fill(self, read: Reader, out: torch.Tensor) -> None:
        """See `StoredMatrix`."""
        self.grid(read).values(self.numbers(read), out)


def even_groups(inputs: int, count: int, size: int) -> torch.Tensor:
    """(inputs,) int64 groups of `size` inputs each, the last one perhaps smaller; of one group if `count` is 1."""
    return torch.zeros(inputs, dtype=torch.int64) if count == 1 else torch.arange(inputs) // size
