"""What DEL knows of early exits and how it chooses one: acceptance by exit, confidences, tokens per unit of time.

In: per round, at how many valid positions each exit would have been right, and how sure the drafted tokens were. Out:
an exit, a length, a threshold of confidence. Not here: shadow tokens and drafting (`dynamic_exit`).

Source: DEL: Context-aware dynamic exit layer for efficient self-speculative decoding (arXiv:2504.05598), sections 3 and
4: a length d from exit l brings (1 - a^(d+1)) / (1 - a) tokens where a is the chance that l agrees with the target.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]

PRIOR = 8.0
"""Positions that what is known of other texts counts for."""
ENOUGH = 2.0
"""Confidences of right and of wrong tokens from which on a threshold is drawn between them."""


def best_way(rates: Array, exits: Counts, layers: int, most: int) -> tuple[int, int]:
    """The exit and length with the most expected tokens per layer run: a drafted token costs its exit's, a verification
    all once.

    Args:
        rates: (n,) chance of each exit to agree with the target. exits: (n,) layers of each. layers: of the target.
        most: longest.
    Returns:
        Index of the exit, the earlier of equals; length, from 1.
    """
    lengths = np.arange(1, most + 1)
    gains = (1.0 + np.cumsum(rates[:, None] ** lengths, axis=1)) / (layers + exits[:, None] * lengths)
    exit_index, place = divmod(int((gains >= gains.max() * (1.0 - 1e-9)).argmax()), most)
    return exit_index, 1 + place


class ExitRecord:
    """Acceptance and confidence of each exit on one text, recent rounds counting more.

    Args:
        known: (n,) chances on other texts of the same tenant.
        weight: positions that these count for. decay: weight of a round against the one after it.

    Attributes:
        matched, valid: (n,) positions at which each exit was right, and all that count, recent ones more.
    """

    __slots__ = ("_decay", "_known", "_sure", "_weight", "matched", "valid")

    def __init__(self, known: Array, weight: float, decay: float) -> None:
        self._known, self._weight, self._decay = known, weight, decay
        self.matched, self.valid = np.zeros(len(known)), np.zeros(len(known))
        self._sure = [(0.0, 0.0, 0.0, 0.0)] * len(
            known
        )  # sum and number of confidences of right tokens, then of wrong ones

    @property
    def rates(self) -> Array:
        """(n,) chance that each exit agrees with the target."""
        found: Array = (self.matched + self._weight * self._known) / (self.valid + self._weight)
        return found

    def add_all(self, matches: Array, positions: int) -> None:
        """A round in which every exit was looked at: (n,) expected matches at so many positions."""
        self.matched = self.matched * self._decay + matches
        self.valid = self.valid * self._decay + positions

    def add(self, exit_index: int, rounds: Sequence[tuple[int, int]]) -> None:
        """Rounds that tell of one exit alone: of each, the matches and the positions."""
        matched, valid, decay = float(self.matched[exit_index]), float(self.valid[exit_index]), self._decay
        for matches, positions in rounds:
            matched, valid = matched * decay + matches, valid * decay + positions
        self.matched[exit_index], self.valid[exit_index] = matched, valid

    def hear(self, exit_index: int, right: Sequence[float], wrong: Sequence[float]) -> None:
        """Confidences of drafted tokens that stood, and of one that did not."""
        a, b, c, d = self._sure[exit_index]
        kept = self._decay
        self._sure[exit_index] = (
            a * kept + sum(right),
            b * kept + len(right),
            c * kept + sum(wrong),
            d * kept + len(wrong),
        )

    def threshold(self, exit_index: int) -> float:
        """The confidence halfway between that of right and of wrong tokens, below which a draft ends; 0 while too few
        are known.
        """
        right, rights, wrong, wrongs = self._sure[exit_index]
        if rights < ENOUGH or wrongs < ENOUGH:
            return 0.0
        return min(0.5 * (right / rights + wrong / wrongs), 1.0)
