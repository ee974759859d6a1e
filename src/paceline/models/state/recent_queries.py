"""A sequence that remembers what its last tokens asked: their queries, layer by layer, beside keys and values.

A selection of keys that is made anew every so many tokens looks back with them (models.attention.loopserve). What is
scored and not accepted is forgotten like its keys, so that the queries are those of the committed text alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.models.state.arena import Arena
from paceline.models.state.cache import NativeCache

CHOICES_KEPT = 4
"""Latest choices of each layer, for drafts and searches that take back some tokens."""


class QueriesCache(NativeCache):
    """See `NativeCache`.

    Args:
        most: latest queries of each layer that are kept.

    Attributes:
        first: position of the first row that was scored behind known tokens; None where none was.
        choices: by layer and border what was chosen among the positions before that, (kv heads, tokens) int64.
    """

    __slots__ = ("_rows", "_scored", "choices", "first", "most")

    def __init__(self, arena: Arena, prompt_length: int = 0, *, most: int) -> None:
        super().__init__(arena, prompt_length)
        self.most = most
        self.first: int | None = None
        self.choices: dict[int, dict[int, torch.Tensor]] = {}
        self._rows: dict[int, tuple[int, torch.Tensor]] = {}
        self._scored: dict[int, torch.Tensor] = {}

    def begin_known(self) -> None:
        """Known tokens are about to be read: choices begin anew behind them."""
        self.first = None
        self.choices.clear()

    def begin_scored(self) -> int:
        """Rows are about to be scored; `first`."""
        if self.first is None:
            self.first = self.length
        return self.first

    def note_known(self, layer: int, queries: torch.Tensor) -> None:
        """Remember the queries (n, ...) of the next n tokens, which will be committed."""
        self._append(layer, self.length, queries)

    def note_scored(self, layer: int, queries: torch.Tensor, done: int) -> None:
        """Remember the queries (n, ...) of scored inputs, `done` of which were noted before."""
        self._scored[layer] = torch.cat((self._scored[layer][:done], queries)) if done else queries

    def known(self, layer: int, start: int, stop: int) -> tuple[int, torch.Tensor | None]:
        """The queries of committed positions as far as they are kept, and the position of the first; None for none."""
        end, rows = self._rows.get(layer, (0, None))
        if rows is None:
            return start, None
        begin = end - len(rows)
        low, high = max(start, begin), min(stop, end)
        return (low, rows[low - begin : high - begin]) if low < high else (start, None)

    def scored(self, layer: int, inputs: Sequence[int]) -> torch.Tensor:
        """(inputs, ...) queries of some inputs last scored."""
        queries = self._scored[layer]
        return queries[torch.tensor(inputs, dtype=torch.int64, device=queries.device)]

    def keep_choice(self, layer: int, border: int, chosen: torch.Tensor) -> None:
        """Remember what was chosen before a border."""
        of_layer = self.choices.setdefault(layer, {})
        of_layer[border] = chosen
        if len(of_layer) > CHOICES_KEPT:
            del of_layer[min(of_layer)]

    def _append(self, layer: int, start: int, queries: torch.Tensor) -> None:
        """Queries of positions from `start` on; those before them are kept where they end there."""
        stop = start + len(queries)
        end, rows = self._rows.get(layer, (0, None))
        if rows is not None and end == start:
            queries = torch.cat((rows, queries))
        self._rows[layer] = stop, queries[-self.most :].clone()

    def commit(self, path: Sequence[int]) -> None:
        """See `NativeCache.commit`."""
        start = self.length
        super().commit(path)
        inputs = [0, *(1 + node for node in path)]
        for layer in self._scored:
            self._append(layer, start, self.scored(layer, inputs))
        self._scored = {}

    def truncate(self, length: int) -> None:
        """See `NativeCache.truncate`."""
        super().truncate(length)
        self._scored = {}
        self._rows = {
            layer: (min(end, length), rows[: len(rows) - max(0, end - length)])
            for layer, (end, rows) in self._rows.items()
            if end - len(rows) < length
        }
        if self.first is not None and length < self.first:
            self.begin_known()
        for of_layer in self.choices.values():
            for border in [border for border in of_layer if border > length]:
                del of_layer[border]

    def fork(self) -> QueriesCache:
        """See `NativeCache.fork`."""
        other = QueriesCache(self.arena, self.prompt_length, most=self.most)
        self.share_with(other)
        other.first, other._rows = self.first, dict(self._rows)
        other.choices = {layer: dict(of_layer) for layer, of_layer in self.choices.items()}
        return other

    def release(self) -> None:
        """See `NativeCache.release`."""
        super().release()
        self._rows, self._scored = {}, {}
        self.choices.clear()
