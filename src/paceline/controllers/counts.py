"""What steps brought from which nothing was learned yet: outcomes counted, and what each was worth.

In: outcomes of single drafters for single sequences. Out: their net gains, a usual step. Not here: what is learned from them
(`controllers.acceptance`, `controllers.watch`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from paceline.controllers.base import StepTimes

if TYPE_CHECKING:
    from paceline.controllers.voice import Drafting
    from paceline.tree.token_tree import TokenTree
    from paceline.tree.types import Verdict


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


class Step(NamedTuple):
    """What a step brought to its sequences."""

    batch: Sequence[Drafting]
    trees: Sequence[TokenTree]
    verdicts: Sequence[Verdict]
    times: StepTimes


class Single(NamedTuple):
    """The same of a step of one sequence by itself whose tree is a chain by one drafter, or empty (-1): what summing it up needs,
    for by then the tree itself has left the caches."""

    batch: Sequence[Drafting]
    source: int
    scored: int
    accepted: int
    times: StepTimes


class Singles:
    """Steps of one sequence by itself that scored a chain by one drafter or nothing, as most are.

    Args:
        most: seconds that a step takes at most unless it was interrupted.
    Attributes:
        known: (drafter, nodes scored, nodes accepted) -> how often, seconds of scoring, seconds outside drafting and scoring,
            seconds of all; -1 is no drafter.
    """

    __slots__ = ("_half", "_most", "known")

    def __init__(self, most: float) -> None:
        self._most, self._half = most, most / 2
        self.known: dict[tuple[int, int, int], list[float]] = {}

    def add(self, step: Single, drafting: list[float]) -> None:
        """One more; seconds by drafter are added to `drafting`."""
        _, source, scored, accepted, times = step
        sums = self.known.setdefault((source, scored, accepted), [0, 0.0, 0.0, 0.0])
        score, rest, most, half = times.score, times.verify + times.other, self._most, self._half
        seconds = score + rest
        for drafter, spent in enumerate(times.draft):
            if spent:
                seconds += spent
                drafting[drafter] += spent if spent < most else most
        sums[0] += 1
        sums[1] += score if score < half else half
        sums[2] += rest if rest < half else half
        sums[3] += seconds if seconds < most else most


class Worth(NamedTuple):
    """Mean and variance of the net gains of so many steps."""

    times: int
    mean: float
    variance: float


@dataclass(slots=True)
class Counts:
    """What the steps since the last plan brought.

    Attributes:
        scoring: by rows, how often, seconds of scoring, seconds outside drafting and scoring.
        drafting: seconds by drafter. asked: times by (sequence, drafter). levels: that each drafter proposed, all in all.
        chains: how often, by (sequence, drafter, nodes scored, nodes accepted), of trees that are a chain by one drafter.
        mixed: the same of drafters in other trees.
    """

    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    scoring: dict[int, tuple[int, float, float]] = field(default_factory=dict)
    drafting: list[float] = field(default_factory=list)
    levels: dict[int, int] = field(default_factory=dict)
    asked: dict[tuple[int, int], int] = field(default_factory=dict)
    chains: dict[tuple[int, int, int, int], int] = field(default_factory=dict)
    mixed: dict[tuple[int, int, int, int], int] = field(default_factory=dict)

    def join(self, found: Singles) -> None:
        """Add steps of single sequences."""
        for (source, scored, stood), (times, score, rest, seconds) in found.known.items():
            if scored:
                key = (0, source, scored, stood)
                self.chains[key] = self.chains.get(key, 0) + int(times)
            self.tokens += (1 + stood) * int(times)
            self.seconds += seconds
            before = self.scoring.get(1 + scored, (0, 0.0, 0.0))
            self.scoring[1 + scored] = before[0] + int(times), before[1] + score, before[2] + rest

    def nets(self, rate: float, table: Sequence[float], size: int) -> Iterator[Net]:
        """Every outcome with its worth.

        Args:
            rate: tokens per second, the price of a second. table: seconds of a step by rows. size: sequences that run together.
        """
        last = len(table) - 1
        least = table[min(size, last)]
        times_asked: dict[int, int] = {}
        for (_, drafter), times in self.asked.items():
            times_asked[drafter] = times_asked.get(drafter, 0) + times
        nothing = dict(self.asked)
        for outcomes in (self.chains, self.mixed):
            for (index, drafter, scored, accepted), times in outcomes.items():
                rows = (table[min(size * (1 + scored), last)] - least) / size
                price = rate * (self.drafting[drafter] / times_asked[drafter] + rows)
                nothing[index, drafter] -= times
                yield Net(index, drafter, accepted - price, scored, accepted, times)
        for (index, drafter), times in nothing.items():
            if times:
                yield Net(index, drafter, -rate * self.drafting[drafter] / times_asked[drafter], 0, 0, times)

    def worths(self, rate: float, table: Sequence[float], size: int) -> dict[tuple[int, int], Worth]:
        """What asking each drafter for each sequence was worth; see `nets`."""
        sums: dict[tuple[int, int], tuple[int, float, float]] = {}
        for net in self.nets(rate, table, size):
            place, value, times = (net.sequence, net.drafter), net.net, net.times
            before = sums.get(place, (0, 0.0, 0.0))
            sums[place] = before[0] + times, before[1] + times * value, before[2] + times * value * value
        return {
            place: Worth(times, total / times, max(square / times - (total / times) ** 2, 0.0))
            for place, (times, total, square) in sums.items()
        }

    def usual(self) -> tuple[StepTimes, list[int | None]]:
        """A step with the number of rows that was seen most often, and the levels of each drafter in it; None where it was not
        asked, or by several sequences, which draft at once."""
        rows, (times, score, rest) = max(self.scoring.items(), key=lambda item: item[1])
        asked = {drafter: number for (index, drafter), number in self.asked.items() if index == 0}
        together = any(index for index, _ in self.asked)
        draft = tuple(seconds / asked.get(drafter, 1) for drafter, seconds in enumerate(self.drafting))
        mean = [round(self.levels.get(drafter, 0) / asked[drafter]) if drafter in asked else None for drafter in range(len(draft))]
        return StepTimes(draft, score / times, 0.0, rest / times, rows), [None] * len(mean) if together else mean

    def found(self, drafter: int) -> tuple[int, int]:
        """How often a drafter was asked, and how often it proposed."""
        asked = sum(times for (_, of), times in self.asked.items() if of == drafter)
        return asked, sum(times for table in (self.chains, self.mixed) for key, times in table.items() if key[1] == drafter)
