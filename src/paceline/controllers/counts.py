"""What steps brought from which nothing was learned yet: outcomes counted, and what each was worth.

In: outcomes of single drafters for single sequences. Out: their net gains, a usual step. Not here: what is learned from them
(`controllers.acceptance`, `controllers.watch`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from paceline.controllers.base import StepTimes


class Net(NamedTuple):
    """So many steps in which a drafter was asked for one sequence and so many of its nodes were accepted.

    Attributes:
        net: tokens gained by one of them, minus the tokens that its time and rows would have brought.
    """

    sequence: int
    drafter: int
    net: float
    scored: int
    accepted: int
    times: int


@dataclass(slots=True)
class Counts:
    """What the steps since the last plan brought.

    Attributes:
        scoring: by rows, how often, seconds of scoring, seconds outside drafting and scoring.
        drafting: seconds by drafter. asked: times by (sequence, drafter).
        chains: how often, by (sequence, drafter, nodes scored, nodes accepted), of trees that are a chain by one drafter.
        mixed: the same of drafters in other trees.
    """

    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    scoring: dict[int, tuple[int, float, float]] = field(default_factory=dict)
    drafting: list[float] = field(default_factory=list)
    asked: dict[tuple[int, int], int] = field(default_factory=dict)
    chains: dict[tuple[int, int, int, int], int] = field(default_factory=dict)
    mixed: dict[tuple[int, int, int, int], int] = field(default_factory=dict)

    def nets(self, rate: float, row: float) -> Iterator[Net]:
        """Every outcome with its worth.

        Args:
            rate: tokens per second, the price of a second. row: seconds of a node.
        """
        times_asked: dict[int, int] = {}
        for (_, drafter), times in self.asked.items():
            times_asked[drafter] = times_asked.get(drafter, 0) + times
        nothing = dict(self.asked)
        for table in (self.chains, self.mixed):
            for (index, drafter, scored, accepted), times in table.items():
                price = rate * (self.drafting[drafter] / times_asked[drafter] + scored * row)
                nothing[index, drafter] -= times
                yield Net(index, drafter, accepted - price, scored, accepted, times)
        for (index, drafter), times in nothing.items():
            if times:
                yield Net(index, drafter, -rate * self.drafting[drafter] / times_asked[drafter], 0, 0, times)

    def usual(self) -> StepTimes:
        """A step with the number of rows that was seen most often."""
        rows, (times, score, rest) = max(self.scoring.items(), key=lambda item: item[1])
        return StepTimes((), score / times, 0.0, rest / times, rows)

    def found(self, drafter: int) -> tuple[int, int]:
        """How often a drafter was asked, and how often it proposed."""
        asked = sum(times for (_, of), times in self.asked.items() if of == drafter)
        return asked, sum(times for table in (self.chains, self.mixed) for key, times in table.items() if key[1] == drafter)
