"""What drafters would have guessed while nothing is drafted: the cheap sign that drafting would pay again.

In: guesses that were never scored, and how much of each came true. Out: whether to try. Not here: who guesses (`engine.listening`),
trying (`controllers.gate`).

A look-up in a table costs a few microseconds, a try that loses several steps. So while a single sequence decodes plainly, a guess
is made every few steps and held against the text as it comes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from paceline.controllers.cost_model import CostModel
    from paceline.controllers.curve import Line

EVERY: Final = 24
"""Plain steps from one guess to the next."""

TOKENS: Final = 7
"""Tokens of a guess: all of them have been decided when the next one is made."""

CHEAP: Final = 0.5
"""A drafter is asked whose guess costs less than this share of a plain step."""

GAIN: Final = 1.15
"""A guess promises something if a step with it would have been worth so many plain ones of the same time."""

_LEAST = 2


def cheap_ones(cost: CostModel, names: Sequence[str], lines: Sequence[Line], table: Sequence[float]) -> list[int]:
    """Drafters, by index, whose guesses cost next to nothing beside a plain step of a single sequence."""
    return [i for i, line in enumerate(lines) if line.at(1) < CHEAP * table[1] and cost.knows(names[i])]


class Ear:
    """Counts guesses in a row that came true.

    Attributes:
        hits: so far.
    """

    __slots__ = ("hits",)

    def __init__(self) -> None:
        self.hits = 0

    def hear(self, matched: int, line: Line, table: Sequence[float], lost: int) -> bool:
        """Whether what was heard calls for a try.

        Args:
            matched: tokens of the guess that came true, from the first on.
            line: what its drafter costs. table: seconds of a step by rows.
            lost: tries in a row that lost; after any, one more good guess is asked for.
        """
        rows = min(2 + matched, len(table) - 1)
        pays = matched >= _LEAST and (matched + 1) * table[1] > GAIN * (table[rows] + line.at(matched + 1))
        self.hits = self.hits + 1 if pays else 0
        if self.hits < _LEAST + min(lost, 1):
            return False
        self.hits = 0
        return True
