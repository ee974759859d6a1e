"""Where the passes of a decoding loop leave their logits: one buffer, taken out of the loop only where somebody looks.

In: how many rows a pass will write. Out: the address for them; `Scores` that hold the rows from the moment somebody asks for them.
Not here: passes (models.kernels.fused).

Plain greedy decoding reads the best tokens and never the logits. So it needs no new tensor in every step, which would cost as much
as ten rows' best tokens; where the scores of a pass outlive the step, the next pass moves their logits out first.
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import ref

import torch

from paceline.models.kernels.vectors import LANES
from paceline.tree.types import Scores


class LogitRows:
    """The buffer of one decoder.

    Args:
        vocab: logits of a row. dtype: of the logits.
    """

    def __init__(self, vocab: int, dtype: torch.dtype) -> None:
        self._vocab, self._dtype = vocab, dtype
        self._rows = self._address = 0
        self._buffer = torch.empty(0, dtype=dtype)
        self._last: ref[_LateScores] | None = None

    def aim(self, rows: int) -> int:
        """Address of room for `rows` rows of whole lanes; logits written before are safe with those who may still ask for them."""
        if self._last is not None:
            last, self._last = self._last(), None
            if last is not None:
                last.settle()
        if rows > self._rows:
            self._buffer, self._rows = torch.empty(rows, -(-self._vocab // LANES) * LANES, dtype=self._dtype), rows
            self._address = self._buffer.data_ptr()
        return self._address

    def scores(self, offsets: tuple[int, ...], best: Sequence[int]) -> Scores:
        """What the pass gave that has just written `offsets[-1]` rows without taps."""
        found = _LateScores.of_pass(self, offsets, best)
        self._last = ref(found)
        return found

    def take(self, rows: int) -> torch.Tensor:
        """(rows, v) logits of the last pass, to keep."""
        if rows == self._rows and self._buffer.shape[1] == self._vocab:
            self._rows = 0
            return self._buffer
        return self._buffer[:rows, : self._vocab].clone(memory_format=torch.contiguous_format)


_set = object.__setattr__
_NO_TAPS: dict[int, torch.Tensor] = {}


class _LateScores(Scores):
    """Scores whose logits are taken out of the buffer when they are first asked for."""

    __slots__ = ("__weakref__", "_found", "_source")
    _found: torch.Tensor | None
    _source: LogitRows

    @classmethod
    def of_pass(cls, source: LogitRows, offsets: tuple[int, ...], best: Sequence[int]) -> _LateScores:
        """The scores of the pass that wrote last."""
        made = object.__new__(cls)
        _set(made, "rows", offsets)
        _set(made, "taps", _NO_TAPS)
        _set(made, "best", best)
        _set(made, "_source", source)
        _set(made, "_found", None)
        return made

    @property
    def logits(self) -> torch.Tensor:
        """(r, v) raw logits in the model's dtype."""
        return self.settle()

    @logits.setter
    def logits(self, given: torch.Tensor) -> None:
        """Those of a copy with other ones (`dataclasses.replace`); the class is frozen to everybody else."""
        _set(self, "_found", given)

    def settle(self) -> torch.Tensor:
        """Take the logits, which the next pass may overwrite."""
        found = self._found
        if found is None:
            found = self._source.take(self.rows[-1])
            _set(self, "_found", found)
        return found
