"""Measured time as a function of a count, kept current by observation: a monotone polyline, a line, and one of each.

In: (count, seconds) pairs, some of them spoilt by a descheduled process. Out: seconds for any count.
Not here: what the counts mean (rows of a scoring pass, levels of a draft), files, clocks.

Both learn from a clipped error, so that one step that took a hundred times too long moves them no more than one that took a
quarter too long, while a lasting change is followed within tens of steps.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate, pairwise
from math import exp, log
from typing import Final

import numpy as np

GRID = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
PRIOR_SLOPE = 0.02
"""Optimistic guess before the first measurement: each further row costs this share of the first."""

PRIOR_LEVEL = 0.02
"""Optimistic guess before a drafter was first timed: one level costs this share of plain decoding."""

_RATE = 0.1
SHARED = 0.2
"""Share of an error that moves the whole curve, not only the points beside it."""

_CLIP, _CLIP_NEW = 0.25, 1.0
_IMPLAUSIBLE: Final = 1.1
_MEASURED: Final = 3.0  # real steps that a deliberate measurement counts for: they find caches as it did not
_TINY = 1e-9
_DEARER = 0.2
_BASE: Final = 4.0  # levels that a drafter's fixed part is first taken to be worth: look-ups are nothing else
_FLAT: Final = 32.0  # rows that the fixed part of what a step takes outside scoring is worth: rows matter little there


class Curve:
    """Seconds over rows: values at GRID points, some still unknown, linear in between, never decreasing."""

    __slots__ = ("counts", "values")

    def __init__(self, values: dict[int, float] | None = None, count: float = 0.0) -> None:
        self.values: dict[int, float] = dict(sorted((values or {}).items()))
        self.counts: dict[int, float] = dict.fromkeys(self.values, count)

    def __bool__(self) -> bool:
        return bool(self.values)

    def copy(self) -> Curve:
        """The same shape, to be corrected by new observations."""
        return Curve(self.values)

    def knots(self) -> tuple[list[float], list[float]]:
        """Points of the polyline, the prior's slope before the first and a last slope at least as steep after the last."""
        xs, ys = [float(x) for x in self.values], list(accumulate(self.values.values(), max))
        base = ys[0] / (1 + PRIOR_SLOPE * (xs[0] - 1))
        slope = base * PRIOR_SLOPE
        if len(xs) > 1:
            slope = max(slope, (ys[-1] - ys[-2]) / (xs[-1] - xs[-2]))
        if xs[0] > 1:
            xs, ys = [1.0, *xs], [base, *ys]
        far = xs[-1] + 4096
        return [*xs, far], [*ys, ys[-1] + slope * 4096]

    def at(self, rows: float) -> float:
        """Seconds of `rows` rows; 0 of an empty curve. The same polyline as `table`, without building it."""
        if not self.values:
            return 0.0
        below, low, high = 0.0, 0.0, 0.0
        for x, y in self.values.items():
            high = max(low, y)
            if x >= rows:
                if x == rows or not below:
                    return high if x == rows else float(np.interp(rows, *self.knots()))
                return low + (high - low) * (rows - below) / (x - below)
            below, low = x, high
        return float(np.interp(rows, *self.knots()))

    def table(self, rows: int) -> list[float]:
        """Seconds of 0..rows rows (0 rows cost what 1 does)."""
        if not self.values:
            return [0.0] * (rows + 1)
        xs, ys = self.knots()
        found, at = [ys[0]], 1
        for (x, y), (right, high) in pairwise(zip(xs, ys, strict=True)):
            slope = (high - y) / (right - x)
            while at <= rows and at <= right:
                found.append(y + slope * (at - x))
                at += 1
        return found

    def set(self, rows: int, seconds: float) -> None:
        """A deliberate measurement at a grid point; replaces what was there."""
        self.values[rows], self.counts[rows] = max(seconds, _TINY), _MEASURED
        self._sort()

    def level(self) -> None:
        """Fewer rows cannot cost more than more rows: what says so was measured while something else ran."""
        for low, high in pairwise(reversed(self.values)):
            self.values[high] = min(self.values[high], self.values[low])

    def smooth(self, most: float) -> None:
        """Lie on the convex curve below what was measured, but for points that are further above it than a share of `most`.

        Whatever else runs makes a point dearer, never cheaper, and the next fewer rows would then always seem the best number to
        stop at. Where a pass waits for memory first and then for arithmetic, a few rows are nearly free and all others dear: such
        costs are a convex curve. Points that are dearer than `most` are steps that the machine has.
        """
        below: list[tuple[int, float]] = []
        for point in self.values.items():
            while len(below) > 1 and _above(below[-2], below[-1], point):
                below.pop()
            below.append(point)
        curve = Curve(dict(below))
        for x, seconds in self.values.items():
            if seconds <= (1.0 + most) * (low := curve.at(x)):
                self.values[x] = low

    @property
    def implausible(self) -> bool:
        """Whether some number of rows is said to cost more than twice what half of it costs: two passes never do. Something else
        ran while it was measured."""
        points = pairwise(self.values.items())
        return any(high > _IMPLAUSIBLE * b / a * low and b <= 2 * a for (a, low), (b, high) in points)

    def forget(self) -> None:
        """Be empty again."""
        self.values, self.counts = {}, {}

    def observe(self, rows: int, seconds: float, shared: float = SHARED, times: int = 1) -> float:
        """Learn from one pass, or from the mean of `times` passes; returns by how much (as a logarithm) the estimate at `rows` was
        off, cut to what one pass may say."""
        seconds = max(seconds, _TINY)
        if not self.values:
            self.values[1], self.counts[1] = seconds / (1 + PRIOR_SLOPE * (rows - 1)), 0.0
            if rows == 1:
                return 1.0
        weights = _neighbours(rows)
        if not weights.keys() <= self.values.keys():
            for point in weights:
                if point not in self.values:
                    self.values[point], self.counts[point] = self.at(point), 0.0
            self._sort()
        seen = min(self.counts[point] for point in weights)
        clip = _CLIP_NEW if seen < 3 else _CLIP
        error = min(max(log(seconds / self.at(rows)), -clip), clip)
        common = 1.0 - (1.0 - shared * _RATE) ** times
        factor = exp(common * error)
        for point, value in self.values.items():
            self.values[point] = value * factor
        for point, weight in weights.items():
            rate = 1.0 - (1.0 - max(_RATE, 1 / (self.counts[point] + 2))) ** times
            self.values[point] *= exp((rate - common) * weight * error)
            self.counts[point] = min(self.counts[point] + weight * times, 100.0)
        self.level()
        return error

    def _sort(self) -> None:
        self.values = dict(sorted(self.values.items()))


def points(known: int, rows: int) -> list[int]:
    """Grid points after `known`, up to the first one at `rows` or beyond."""
    return [point for i, point in enumerate(GRID) if point > known and (i == 0 or GRID[i - 1] < rows)]


def _above(left: tuple[int, float], point: tuple[int, float], right: tuple[int, float]) -> bool:
    """Whether a point lies on or above the chord of its neighbours."""
    return (point[1] - left[1]) * (right[0] - left[0]) >= (right[1] - left[1]) * (point[0] - left[0])


def _neighbours(rows: int) -> dict[int, float]:
    """Grid points on both sides of `rows` with their weights in linear interpolation."""
    if rows >= GRID[-1]:
        return {GRID[-1]: 1.0}
    right = bisect_left(GRID, rows)
    if GRID[right] == rows:
        return {rows: 1.0}
    low, high = GRID[right - 1], GRID[right]
    weight = (rows - low) / (high - low)
    return {low: 1 - weight, high: weight}


class Line:
    """Seconds over levels: a fixed part and a part per level, learned by normalised least mean squares.

    The first few observations may include warming up, so the smallest of them counts.

    Args:
        base: levels that the fixed part is first taken to be worth.
    """

    __slots__ = ("base", "count", "fixed", "per_level")

    def __init__(self, fixed: float = 0.0, per_level: float = 0.0, count: int = 0, *, base: float = _BASE) -> None:
        self.fixed, self.per_level, self.count, self.base = fixed, per_level, count, base

    def at(self, levels: float) -> float:
        """Seconds of a draft of so many levels."""
        return self.fixed + self.per_level * levels

    def observe(self, levels: int, seconds: float, *, cold: bool = False, times: int = 1) -> None:
        """Learn from one draft of `levels` levels (0: nothing was found to propose), or from the mean of `times`; `cold`: after a
        step of another kind, which makes it dearer than most, so that being dearer says little."""
        for _ in range(times):
            self._learn(levels, seconds, cold)

    def _learn(self, levels: int, seconds: float, cold: bool) -> None:
        self.count += 1
        if self.count <= 3:
            per = seconds / (levels + self.base)
            if self.count == 1 or seconds < self.at(levels):
                self.fixed, self.per_level = self.base * per, per
            return
        predicted = max(self.at(levels), _TINY)
        error = min(max(seconds - predicted, -predicted / 2), predicted / 2)
        error *= _DEARER if cold and error > 0.0 else 1.0
        x = levels / self.base
        step = 0.15 * error / (1 + x * x)
        self.fixed = max(self.fixed + step, 0.0)
        self.per_level = max(self.per_level + step * x / self.base, 0.0)


class Overhead:
    """Seconds of a step outside drafting and scoring: over its sequences where no drafts were asked for, and a line over its rows
    where they were. Points over rows instead would keep what interrupted the few steps of so many rows, and a table with a bend
    that is none has its best place there.

    Attributes:
        plain: over the sequences of a step without drafts. drafted: over the rows of a step for which drafts were asked.
    """

    __slots__ = ("drafted", "plain")

    def __init__(self, plain: Curve | None = None, fixed: float = 0.0, per_row: float = 0.0, count: int = 0) -> None:
        self.plain, self.drafted = plain or Curve(), Line(fixed, per_row, count, base=_FLAT)

    def observe(self, rows: int, seconds: float, *, asked: bool, times: int = 1) -> None:
        """Learn from one step, or from the mean of `times`; `asked`: whether drafts were asked for."""
        if asked:
            self.drafted.observe(rows, seconds, times=times)
        else:
            self.plain.observe(rows, seconds, times=times)

    def asking(self, rows: int) -> float:
        """Of a step for which drafts were asked."""
        return max(self.drafted.at(rows), self.plain.at(1)) if self.drafted.count else self.plain.at(rows)

    def table(self, size: int, rows: int) -> list[float]:
        """Of `size` sequences with 0..rows rows: nothing is drafted up to `size`."""
        plain = self.plain.at(size) if self.plain else self.asking(size)
        if not self.drafted.count:
            return [plain if count <= size else max(plain, self.plain.at(count)) for count in range(rows + 1)]
        fixed, per_row, least = self.drafted.fixed, self.drafted.per_level, max(plain, self.plain.at(1))
        return [plain if count <= size else max(least, fixed + per_row * count) for count in range(rows + 1)]
