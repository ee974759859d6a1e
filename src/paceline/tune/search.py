"""Successive halving within a time budget, and what the winner gains on fresh measurements.

Every arm is looked at once, the first ones first, until a share of the budget is gone; those after that are left out.
All surviving arms are measured on the same items; after each further share of the budget the worse half (by the median
of the gains) goes. The winner's own measurements flatter it, since it was chosen for them: its gain is to be measured
again (`confirm`).

Source: Jamieson and Talwalkar 2016, Non-stochastic best arm identification and hyperparameter optimization
(arXiv:1502.07943);
bootstrap in two stages: Davison and Hinkley 1997, Bootstrap methods and their application, section 3.8.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from statistics import median

import numpy as np

from paceline.utils import stats

Pull = Callable[[int, int], float]
"""`pull(arm, item)`: speed of the arm over speed of the baseline, measured in turn. May raise RejectedError or
KeyboardInterrupt.
"""

MIN_PAIRS = 8
"""Fewest fresh measurements of a winner, whatever the budget: an interval from fewer says little."""

FIRST_LOOKS = 0.5
"""Share of the budget after which no arm is looked at for the first time."""

LEAST_ARMS = 3
"""Arms that are looked at whatever the budget."""

MAX_PAIRS = 256


class RejectedError(Exception):
    """This arm is out of the race; the text says why."""


@dataclass(frozen=True, slots=True)
class Gain:
    """Holds one measurement: on which item, and how many times faster than plain decoding an arm was."""

    item: int
    ratio: float


@dataclass(frozen=True, slots=True)
class Interval:
    """Gives a median gain with its 95 % bootstrap interval.

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
    """Records how a search went: gains by arm, and which arms were left out.

    Attributes:
        order: arms from best to worst, the rejected ones left out; those that went later come before those that went
            earlier.
        gains: per arm, what was measured.
        rejected: arm -> why.
        unseen: arms for which there was no time; not in `order`.
        rounds: finished rounds.
        interrupted: by Ctrl-C.
    """

    order: list[int]
    gains: list[list[Gain]]
    rejected: dict[int, str] = field(default_factory=dict)
    unseen: list[int] = field(default_factory=list)
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
    """Look at the arms once each, then halve until one is left; every round may take an equal share of the budget.

    Args:
        arms: how many, the most promising first.
        items: what may be measured on, taken in turn.
        elapsed: seconds since the start, as `budget`, after which none but the first look at LEAST_ARMS arms begins.
        progress: told the number of arms left, before each measurement.
    """
    raced, turn = Race(list(range(arms)), [[] for _ in range(arms)]), count()

    def look(alive: Sequence[int], until: float, least: int = 0) -> list[int]:
        item = items[next(turn) % len(items)]
        return _look(raced, alive, least, item=item, pull=pull, progress=progress, late=lambda: elapsed() >= until)

    alive = list(raced.order)
    try:
        alive = look(alive, FIRST_LOOKS * budget, LEAST_ARMS)
        alive, raced.unseen = ([arm for arm in alive if bool(raced.gains[arm]) is seen] for seen in (True, False))
        rounds = max(1, math.ceil(math.log2(max(len(alive), 1))))
        for number in range(rounds):
            while len(alive) > 1 and elapsed() < budget * (number + 1) / rounds:
                alive = look(alive, budget)
            alive = _ranked(raced, alive)
            _put_first(raced, alive)
            raced.rounds = number + 1
            alive = alive[: math.ceil(len(alive) / 2)]
    except KeyboardInterrupt:
        raced.interrupted = True
        _put_first(raced, _ranked(raced, [arm for arm in alive if arm not in raced.rejected]))
    raced.order = [arm for arm in raced.order if arm not in raced.rejected and arm not in raced.unseen]
    return raced


def _look(
    raced: Race,
    alive: Sequence[int],
    least: int,
    *,
    item: int,
    pull: Pull,
    progress: Callable[[int], None],
    late: Callable[[], bool],
) -> list[int]:
    """Arms once each on one item, until it is late and `least` were measured; all but the rejected ones."""
    for arm in alive:
        if late() and sum(bool(raced.gains[arm]) for arm in alive) >= least:
            break
        progress(sum(arm not in raced.rejected for arm in alive))
        try:
            raced.gains[arm].append(Gain(item, pull(arm, item)))
        except RejectedError as error:
            raced.rejected[arm] = str(error)
    return [arm for arm in alive if arm not in raced.rejected]


def _ranked(raced: Race, alive: Sequence[int]) -> list[int]:
    """Best first, by the median over the measurements that all of them have."""
    common = min((len(raced.gains[arm]) for arm in alive), default=0)
    if common == 0:
        return sorted(alive, key=lambda arm: -len(raced.gains[arm]))
    return sorted(alive, key=lambda arm: -median(gain.ratio for gain in raced.gains[arm][:common]))


def _put_first(raced: Race, ranked: Sequence[int]) -> None:
    raced.order = [*ranked, *(arm for arm in raced.order if arm not in ranked)]


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
        RejectedError: the arm turned out to be wrong on an item.
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


def interval(gains: Sequence[Gain], *, seed: int = 0) -> Interval:
    """Median of the ratios with a percentile interval of the two-stage bootstrap.

    Items are drawn, then measurements of each.

    Raises:
        ValueError: no measurement.
    """
    if not gains:
        raise ValueError("no measurements to take an interval of")
    groups = [[gain.ratio for gain in gains if gain.item == item] for item in dict.fromkeys(g.item for g in gains)]
    padded = np.full((len(groups), max(map(len, groups))), np.nan)
    for row, group in zip(padded, groups, strict=True):
        row[: len(group)] = group
    medians = stats.resampled([padded], lambda values: np.asarray(np.nanmedian(values, axis=(-2, -1))), seed=seed)
    low, high = stats.quantiles_of(medians)
    middle = median(gain.ratio for gain in gains)
    return Interval(middle, low, high, float((medians > 1.0).mean()), len(gains), len(groups))
