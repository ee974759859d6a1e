"""Successive halving within a time budget, and what the winner gains on fresh measurements.

In: a function that measures one arm against the baseline on one item, and a clock. Out: a ranking, refusals, a bootstrap interval.
Not here: what an arm is (`bench.candidates`), timing (`bench.tune`).

All surviving arms are measured on the same items; after each share of the budget the worse half (by the median of the gains) goes.
The winner's own measurements flatter it, since it was chosen for them: its gain is to be measured again (`confirm`).

Source: Jamieson and Talwalkar 2016, Non-stochastic best arm identification and hyperparameter optimization (arXiv:1502.07943);
bootstrap in two stages: Davison and Hinkley 1997, Bootstrap methods and their application, section 3.8.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from statistics import median

import numpy as np

Pull = Callable[[int, int], float]
"""`pull(arm, item)`: speed of the arm over speed of the baseline, measured in turn. May raise Refused or KeyboardInterrupt."""

MIN_PAIRS = 8
"""Fewest fresh measurements of a winner, whatever the budget: an interval from fewer says little."""

MAX_PAIRS = 256
RESAMPLES = 2000


class RefusedError(Exception):
    """This arm is out of the race; the text says why."""


@dataclass(frozen=True, slots=True)
class Gain:
    """One measurement."""

    item: int
    ratio: float


@dataclass(frozen=True, slots=True)
class Interval:
    """Median gain with its 95 % bootstrap interval.

    Attributes:
        median, low, high: speed over the baseline's.
        confidence: share of the resamples whose median lies above 1.
        pairs, items: paired runs, and different items among them.
    """

    median: float
    low: float
    high: float
    confidence: float
    pairs: int
    items: int


@dataclass(slots=True)
class Race:
    """How a search went.

    Attributes:
        order: arms from best to worst, the refused ones left out; those that went later come before those that went earlier.
        gains: per arm, what was measured.
        refused: arm -> why.
        rounds: finished rounds.
        interrupted: by Ctrl-C.
    """

    order: list[int]
    gains: list[list[Gain]]
    refused: dict[int, str] = field(default_factory=dict)
    rounds: int = 0
    interrupted: bool = False


def race(
    arms: int,
    items: Sequence[int],
    pull: Pull,
    *,
    elapsed: Callable[[], float],
    budget: float,
    progress: Callable[[int], None] = lambda alive: None,
) -> Race:
    """Halve until one arm is left; every round takes an equal share of the budget, and measures every arm at least once.

    Args:
        arms: how many.
        items: what may be measured on, taken in turn.
        elapsed: seconds since the start; `budget` is in the same unit.
        progress: told the number of arms left, before each measurement.
    """
    found = Race(list(range(arms)), [[] for _ in range(arms)])
    rounds, turn, alive = max(1, math.ceil(math.log2(max(arms, 1)))), count(), list(range(arms))
    try:
        for number in range(rounds):
            while True:
                alive = _measure(found, alive, items[next(turn) % len(items)], pull, progress)
                if len(alive) < 2 or elapsed() >= budget * (number + 1) / rounds:
                    break
            alive = _ranked(found, alive)
            _put_first(found, alive)
            found.rounds = number + 1
            alive = alive[: math.ceil(len(alive) / 2)]
            if len(alive) < 2:
                break
    except KeyboardInterrupt:
        found.interrupted = True
        _put_first(found, _ranked(found, [arm for arm in alive if arm not in found.refused]))
    found.order = [arm for arm in found.order if arm not in found.refused]
    return found


def _measure(found: Race, alive: Sequence[int], item: int, pull: Pull, progress: Callable[[int], None]) -> list[int]:
    """Every arm once on one item; those that were not refused."""
    for arm in alive:
        progress(len(alive) - len([a for a in alive if a in found.refused]))
        try:
            found.gains[arm].append(Gain(item, pull(arm, item)))
        except RefusedError as error:
            found.refused[arm] = str(error)
    return [arm for arm in alive if arm not in found.refused]


def _ranked(found: Race, alive: Sequence[int]) -> list[int]:
    """Best first, by the median over the measurements that all of them have."""
    common = min((len(found.gains[arm]) for arm in alive), default=0)
    if common == 0:
        return sorted(alive, key=lambda arm: -len(found.gains[arm]))
    return sorted(alive, key=lambda arm: -median(gain.ratio for gain in found.gains[arm][:common]))


def _put_first(found: Race, ranked: Sequence[int]) -> None:
    found.order = [*ranked, *(arm for arm in found.order if arm not in ranked)]


def confirm(
    arm: int,
    items: Sequence[int],
    pull: Pull,
    *,
    elapsed: Callable[[], float],
    budget: float,
    progress: Callable[[int], None] = lambda pairs: None,
) -> tuple[list[Gain], bool]:
    """Fresh measurements of one arm until the budget is used up, at least MIN_PAIRS; and whether Ctrl-C ended them.

    Raises:
        RefusedError: the arm turned out to be wrong on an item.
    """
    gains: list[Gain] = []
    try:
        while len(gains) < MIN_PAIRS or (elapsed() < budget and len(gains) < MAX_PAIRS):
            progress(len(gains))
            item = items[len(gains) % len(items)]
            gains.append(Gain(item, pull(arm, item)))
    except KeyboardInterrupt:
        return gains, True
    return gains, False


def interval(gains: Sequence[Gain], *, seed: int = 0, level: float = 0.95) -> Interval:
    """Median of the ratios with a percentile interval of the two-stage bootstrap: items are drawn, then measurements of each.

    Raises:
        ValueError: no measurement.
    """
    if not gains:
        raise ValueError("no measurements to take an interval of")
    groups = [np.array([gain.ratio for gain in gains if gain.item == item]) for item in dict.fromkeys(g.item for g in gains)]
    medians = _resampled_medians(groups, np.random.default_rng(seed))
    low, high = np.quantile(medians, [(1 - level) / 2, (1 + level) / 2])
    middle = median(gain.ratio for gain in gains)
    return Interval(middle, float(low), float(high), float((medians > 1.0).mean()), len(gains), len(groups))


def _resampled_medians(groups: Sequence[np.ndarray], rng: np.random.Generator) -> np.ndarray:
    """(RESAMPLES,) medians: groups drawn with replacement, then as many values of each as it has."""
    sizes = np.array([len(group) for group in groups])
    padded = np.full((len(groups), sizes.max()), np.inf)
    for row, group in zip(padded, groups, strict=True):
        row[: len(group)] = group
    drawn = rng.integers(len(groups), size=(RESAMPLES, len(groups)))
    place = (rng.random((*drawn.shape, sizes.max())) * sizes[drawn][..., None]).astype(int)
    values = padded[drawn[..., None], place]
    values[np.arange(sizes.max()) >= sizes[drawn][..., None]] = np.inf
    values, number = np.sort(values.reshape(RESAMPLES, -1)), sizes[drawn].sum(1)
    every = np.arange(RESAMPLES)
    found: np.ndarray = (values[every, (number - 1) // 2] + values[every, number // 2]) / 2
    return found
