"""Keys and values of a sequence whose later rows leave out layers, and what stands in for these there.

From the *border* on, rows may be reduced: they write no keys in the layers that they leave out. Anchors are what those
layers gave at the last rows that ran them; all of them are kept, so that a text can be taken back to any length.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.models.state.arena import Arena
from paceline.models.state.cache import NativeCache


class SkippingCache(NativeCache):
    """See `NativeCache`.

    Attributes:
        anchors: by position (layers left out, hidden), of committed tokens.
        scored: the same of inputs last scored.
    """

    __slots__ = ("_first", "anchors", "scored")

    def __init__(self, arena: Arena, prompt_length: int = 0) -> None:
        super().__init__(arena, prompt_length)
        self._first: int | None = None
        self.anchors: dict[int, torch.Tensor] = {}
        self.scored: dict[int, torch.Tensor] = {}

    @property
    def border(self) -> int | None:
        """The first position at which rows may be reduced: behind the prompt, whose length was announced, or else that
        of the first token that was scored; None before one was.
        """
        return self.prompt_length or self._first

    def begin_scored(self, done: int) -> None:
        """Rows are about to be scored, `done` of whose inputs have been already."""
        if not self.prompt_length and self._first is None:
            self._first = self.length
        if not done:
            self.scored = {}

    def commit(self, path: Sequence[int]) -> None:
        """See `NativeCache.commit`."""
        start = self.length
        super().commit(path)
        for place, one in enumerate((0, *(1 + node for node in path)), start):
            if (anchor := self.scored.get(one)) is not None:
                self.anchors[place] = anchor
        self.scored = {}

    def truncate(self, length: int) -> None:
        """See `NativeCache.truncate`."""
        super().truncate(length)
        if self._first is not None and length < self._first:
            self._first = None
        self.anchors = {place: anchor for place, anchor in self.anchors.items() if place < length}
        self.scored = {}

    def fork(self) -> SkippingCache:
        """See `NativeCache.fork`."""
        other = SkippingCache(self.arena, self.prompt_length)
        self.share_with(other)
        other._first, other.anchors = self._first, dict(self.anchors)
        return other

    def release(self) -> None:
        """See `NativeCache.release`."""
        super().release()
        self.anchors, self.scored = {}, {}
