"""The packed matrices of a model, in the order in which compiled passes ask for them: made, or found on disk."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from paceline.checkpoints import PackedFile
from paceline.models.cpu.pages import Pages


class PackedWeights:
    """Makes packed matrices, or takes those that an earlier process has made.

    Args:
        file: where they are looked for, and kept; None for nowhere.

    Attributes:
        found: they are there, so that what they are made of is needed for its shape alone.
    """

    def __init__(self, file: PackedFile | None = None) -> None:
        self._file, self._pages, self._made = file, Pages(), list[torch.Tensor]()
        there = None if file is None else file.read()
        self.found = there is not None
        self._next: Iterator[torch.Tensor] = iter(there or ())

    def matrix(self, make: Callable[[Pages], torch.Tensor]) -> torch.Tensor:
        """The next packed matrix.

        Args:
            make: packs it into memory that it takes.
        """
        if self.found:
            return next(self._next)
        matrix = make(self._pages)
        self._made.append(matrix)
        return matrix

    def store(self) -> None:
        """Write what was made, once that is all."""
        matrices, self._made = self._made, []
        if self._file is not None and not self.found:
            self._file.write(matrices)
