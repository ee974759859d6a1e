"""When to ask a table for a guess while nothing else is drafted: at every step as long as guesses hold, rarely when they do not.

In: what each guess brought. Out: how many steps to wait for the next. Not here: who guesses, and how much of it is scored
(`controllers.auto`).

Text repeats itself in stretches. Averages over many steps see neither where one begins nor where it ends; a guess that held says at
once that the next one may, and one that failed that it may not. So a guess that paid is followed by another, and each that did not
doubles the steps to the next, or more after texts of which no guess held, up to a number at which guessing costs next to nothing.
Where that is not how the text goes, and what follows a guess that held loses on the whole, a guess that held says nothing.
"""

from __future__ import annotations

from typing import Final

LEAST, MOST = (4, 8), 192
"""Bounds of the longest wait, in steps: at least so many, where guesses pay on the whole and where they do not."""

NEW: Final = (2, 8)
"""Longest wait when a sequence begins, after guesses that paid and after others."""

SHARE: Final = 0.015
"""About this share of the time goes into guesses where they bring nothing."""

_RATE = 0.2
_PRIOR, _DECAY = 16.0, 0.99
_MOST_LOST = 3
_ONCE = 0.25  # share of the steps up to the next guess that a single one may lose
_AGAIN_RATE, _AGAIN_FADE, _AGAIN_LEAST = 0.1, 0.9, -0.05


class Burst:
    """The rhythm of guesses for one sequence at a time.

    Attributes:
        wait: plain steps before the next guess. key: of the sequence.
    """

    __slots__ = ("_again", "_follows", "_held", "_lost", "_mean", "_paused", "_stride", "_tokens", "_units", "key", "wait")

    def __init__(self) -> None:
        self.wait, self._stride, self._paused, self.key, self._mean = 0, 1, 0, -1, 0.0
        self._tokens = self._units = _PRIOR
        self._lost = 0  # sequences in a row of which no guess held; waits grow the faster
        self._held: bool | None = None  # whether one of this sequence's did, once there was one
        self._again, self._follows = [0.0, 0.0], -1  # what guesses bring right after one that paid, and one that only held

    @property
    def gain(self) -> float:
        """Tokens that plain steps and guesses brought lately for each that plain steps alone would have brought, 1 at least."""
        return max(self._tokens / self._units, 1.0)

    def count(self, tokens: int, units: float, steps: int = 1) -> None:
        """What steps brought, guesses or none.

        Args:
            units: plain steps that would have taken their time.
        """
        decay = _DECAY**steps
        self._tokens, self._units = self._tokens * decay + tokens, self._units * decay + units

    def of(self, key: int) -> Burst:
        """The rhythm for this sequence; a new one is soon guessed for."""
        if key != self.key:
            if self._held is not None:
                self._lost = 0 if self._held else min(self._lost + 1, _MOST_LOST)
            self.key, self._held = key, None
            self._stride = min(self._stride, NEW[self._mean <= 0.0])
            self.wait = min(self.wait, self._stride)
        return self

    def pause(self, most: int) -> int:
        """Take up to `most` steps off the wait; returns how many."""
        self._paused = taken = min(self.wait, most)
        self.wait -= taken
        return taken

    def give_back(self, steps: int) -> None:
        """So many steps of the last pause did not go by."""
        self.wait, self._paused = self.wait + min(steps, self._paused), 0

    def after(self, net: float, *, true: bool | None = None) -> None:
        """What a guess brought: tokens, less those that plain steps would have brought in its time.

        Args:
            true: its first token came, whether or not it was scored; by default where it brought more than it took.
        """
        self._mean += _RATE * (net - self._mean)
        if self._follows >= 0:
            self._again[self._follows] += _AGAIN_RATE * (net - self._again[self._follows])
        kind = 0 if net > 0.0 else 1 if true else -1
        self._held = bool(self._held) or kind >= 0
        most = int(min(max(-self._mean / SHARE, LEAST[self._mean <= 0.0]), MOST))
        if kind >= 0 and self._again[kind] >= _AGAIN_LEAST:
            self._stride, self._follows = 1, kind
        else:
            self._stride, self._follows = min(max((2 << self._lost) * self._stride, int(-net / _ONCE)), most), -1
            if kind >= 0:
                self._again[kind] *= _AGAIN_FADE
        self.wait = self._stride - 1
