"""What a step costs on this machine: seconds of a scoring pass by batch, rows and context, and of a draft by levels.

Passes: a curve over a grid of rows for each bucket of batch sizes and contexts; one that was never seen starts as a
copy of its nearest neighbour. Few rows have a grid point each, for kernels work in tiles: a pass over five rows may
cost as much as one over eight, and far more than one over four. Real steps add points and keep them current, a probe
measures where nobody has been. Beyond the last measured point the slope of its last doubling goes on. Drafts: a line
over levels for each drafter and bucket of batch sizes. What a step spends
outside scoring and drafting is kept apart, with drafts and without.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import isfinite
from typing import Any, Final

from paceline.controllers.auto.store import CostStore
from paceline.controllers.base import StepTimes

logger = logging.getLogger("paceline.controllers")

LADDER: Final = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
"""Rows at which a pass is probed."""

GRID: Final[tuple[int, ...]] = tuple(sorted({*LADDER, *range(1, 18), 20, 28, 33, 40, 65, 129}))
"""Rows at which a pass is measured; observations beyond the last are not used."""

PRIOR_ROW: Final = 0.02
"""Share of a pass that a further row is thought to cost while only one number of rows was measured."""

_TOGETHER, _APART = 0.14, 0.06
"""Of an error in seconds, what all points of a curve take over (the machine's speed, which changes by the minute), and
what the nearest ones do (the shape, which stays).
"""

_CLIP: Final = 1.25
"""An observation counts as off by this factor at most: one step that took a hundred times too long says little, and
numbers of rows that a plan then avoids are not seen again soon.
"""

_NEW: Final = 3
"""Real steps whose median makes a new grid point."""

_LEAST: Final = 1e-9

PROBED: Final = 8
"""Tokens of context at which numbers of rows are compared: filling a cache with more may take longer than the passes
that are timed.
"""

PASSES: Final = 4
"""Passes that a probe makes of each number of rows: one to warm up, and three of which the least counts."""

Probe = Callable[[Sequence[int], int], Iterable[float]]
Bucket = tuple[int, int]


def batch_bucket(batch: int) -> int:
    """0 for a batch of 1, then one bucket per doubling: 2, 3-4, 5-8, ..."""
    return max(batch - 1, 0).bit_length()


def context_bucket(context: int) -> int:
    """0 below 256 tokens, 4 below 512, then one bucket per factor of 4: 5 below 2,048, ..."""
    return max(context, 1).bit_length() // 2 if context >= 256 else 0


class Curve:
    """Seconds of a pass by rows, as a polyline through measured grid points that never falls."""

    def __init__(self, points: Mapping[int, float] | None = None) -> None:
        self.points = dict(sorted((points or {}).items()))
        self._new: dict[int, list[float]] = {}

    def copy(self) -> Curve:
        return Curve(self.points)

    @property
    def measured(self) -> int:
        """The largest number of rows with a point; 0 without any."""
        return next(reversed(self.points), 0)

    def table(self, rows: int, *, hopeful: bool = False) -> list[float]:
        """Seconds for 0 to `rows` rows; 0 rows take as long as 1. Without any point a pass of 1 row is the unit.

        Args:
            hopeful: grid points between measured ones that were not measured cost what the one before them does, so
                that whoever looks for the best number of rows tries them; three steps put that right.
        """
        points, measured = self.points or {1: 1.0}, self.measured
        at, high = next(iter(points.items()))
        prices = [high] * (at + 1)
        for point in sorted({*points, *GRID}) if hopeful else points:
            if at < point <= measured:
                seconds = max(points.get(point, high), high)
                prices += [high + (seconds - high) * i / (point - at) for i in range(1, point - at + 1)]
                at, high = point, seconds
        slope = (high - prices[at // 2]) / (at - at // 2) if len(points) > 1 else PRIOR_ROW * high
        prices += [high + slope * i for i in range(1, rows - at + 1)]
        return prices[: rows + 1]

    def at(self, rows: int) -> float:
        """Seconds for so many rows."""
        return self.table(rows)[rows]

    def set(self, rows: int, seconds: float) -> None:
        """Set a measured point; fewer rows take no longer, whatever was known (a first pass may fill caches)."""
        seconds = max(seconds, _LEAST)
        points = sorted({**self.points, rows: seconds}.items())
        self.points = {point: min(known, seconds) if point < rows else known for point, known in points}

    def observe(self, rows: int, seconds: float) -> None:
        """Learn from a pass; one beyond the grid says nothing of the points on it."""
        if not 1 <= rows <= GRID[-1] or not seconds > 0.0:
            return
        point = _nearest(rows)
        if self.points and seconds < self.at(rows) / 2.0:  # a pass may be held up, but not hurried
            self._correct(point, seconds / self.at(rows))
            return
        if point not in self.points:
            self._add(point, rows, seconds)
            return
        ratio = min(max(seconds / self.at(rows), 1.0 / _CLIP), _CLIP)
        together = ratio**_TOGETHER
        shares = self._shares(rows)
        self.points = {p: s * together * ratio ** (_APART * shares.get(p, 0.0)) for p, s in self.points.items()}

    def _correct(self, point: int, share: float) -> None:
        """Take back what passes that were held up have raised: a point, of which a share remains, and with it those
        beyond.
        """
        beyond = share ** (_TOGETHER / (_TOGETHER + _APART))
        right = self.at(point) * share
        self.points = {p: s * beyond if p > point else s for p, s in self.points.items()}
        self.set(point, right)

    def _add(self, point: int, rows: int, seconds: float) -> None:
        seen = self._new.setdefault(point, [])
        seen.append(seconds * (self.at(point) / self.at(rows) if self.points else 1.0))
        if len(seen) >= _NEW or not self.points:
            self.set(point, sorted(self._new.pop(point))[len(seen) // 2])

    def _shares(self, rows: int) -> dict[int, float]:
        """How much the points around `rows` have to do with it."""
        known = list(self.points)
        index = bisect_left(known, rows)
        if index == len(known) or known[index] == rows or index == 0:
            return {known[min(index, len(known) - 1)]: 1.0}
        low, high = known[index - 1], known[index]
        return {low: (high - rows) / (high - low), high: (rows - low) / (high - low)}


def _nearest(rows: int) -> int:
    return min(GRID, key=lambda point: abs(point - rows))


class DraftLine:
    """Seconds of a draft by levels, a fixed part and one for each level, by least squares over a fading past.

    Attributes:
        count: drafts that were timed; the first is left out, for it compiles or fills caches.
    """

    _DECAY: Final = 0.95

    def __init__(self, fixed: float = 0.0, per_level: float = 0.0, count: int = 0) -> None:
        self.fixed, self.per_level, self.count = fixed, per_level, count
        self._sums = [0.0] * 5

    def at(self, levels: int) -> float:
        """Seconds of a draft of so many levels."""
        return self.fixed + self.per_level * levels

    def observe(self, levels: int, seconds: float) -> None:
        """Learn from a draft; one that found nothing has 0 levels."""
        self.count += 1
        if self.count == 1:
            return
        if self.count == _NEW and levels and seconds < self.at(levels) / 2.0:  # the one before was held up
            self._sums = [0.0] * 5
        if self.count >= _NEW:
            seconds = min(seconds, 4.0 * self.at(levels) + _LEAST)
        new = (1.0, levels, levels * levels, seconds, levels * seconds)
        self._sums = [self._DECAY * old + more for old, more in zip(self._sums, new, strict=True)]
        n, x, xx, y, xy = self._sums
        spread = n * xx - x * x
        if spread > 1e-3 * n * n:
            self.per_level = max((n * xy - x * y) / spread, 0.0)
        elif n == 1.0:
            self.per_level = y / max(x, 1.0)
        self.per_level = min(self.per_level, y / x) if x else self.per_level
        self.fixed = max((y - self.per_level * x) / n, 0.0)


class Costs:
    """Measured seconds of passes, drafts and all else, kept current and kept on disk.

    Args:
        store: the file of this machine and model shape; None keeps nothing.
        probe: `probe(counts, context)` gives for each number of rows the seconds of one scoring pass of a single
            sequence, warmed up; None learns from real steps alone.
        beside: rows that a drafter adds to a pass beside so many roots and nodes of a sequence; None where none does.
    """

    def __init__(
        self, store: CostStore | None = None, *, probe: Probe | None = None, beside: Callable[[int], int] | None = None
    ) -> None:
        self.store, self.probe, self._beside = store, probe, beside
        self.curves: dict[Bucket, Curve] = {}
        self.lines: dict[tuple[str, int], DraftLine] = {}
        self.others: dict[tuple[int, bool], float] = {}
        self.steps = 0
        self._counts: dict[tuple[int, bool], int] = {}
        self._restore()

    # Reading

    def table(self, batch: int, context: int, rows: int, *, hopeful: bool = False) -> list[float]:
        """Seconds of a whole step apart from drafting, for 0 to `rows` rows.

        Up to `batch` of them are a step without drafts; more are roots and nodes, beside which there may be rows of a
        drafter's own. `hopeful`: see `Curve.table`.
        """
        table = self._curve(batch, context).table(self._with_beside(batch, rows), hopeful=hopeful)
        if self._beside is not None:
            table = [table[self._with_beside(batch, row)] for row in range(rows + 1)]
        bucket = batch_bucket(batch)
        plain = self.others.get((bucket, False), 0.0)
        drafted = max(self.others.get((bucket, True), plain), plain)
        return [seconds + (plain if row <= batch else drafted) for row, seconds in enumerate(table)]

    def _with_beside(self, batch: int, rows: int) -> int:
        """All rows of a pass of which so many are roots and nodes."""
        if self._beside is None or rows <= batch:
            return rows
        return rows + batch * self._beside(-(-rows // batch))

    def line(self, drafter: str, batch: int = 1) -> DraftLine:
        """A drafter's seconds by levels, or those of the nearest batch size; a count of 0 where it was never timed."""
        bucket = batch_bucket(batch)
        known = [(abs(b - bucket), line) for (name, b), line in self.lines.items() if name == drafter]
        return min(known, key=lambda pair: pair[0])[1] if known else DraftLine()

    def knows(self, batch: int, context: int) -> bool:
        """Whether any pass was measured."""
        return bool(self._curve(batch, context).points)

    def unmeasured(self, batch: int, context: int, rows: int) -> int | None:
        """The next number of rows to probe past so many, where nothing was measured there or beyond.

        None also where nothing can be.

        Args:
            rows: as of `table`; what is probed are all rows of a pass.
        """
        rows = self._with_beside(batch, rows)
        point = next((point for point in LADDER if point > rows), None)
        if self.probe is None or point is None or self._curve(batch, context).measured >= point:
            return None
        return point

    def _curve(self, batch: int, context: int) -> Curve:
        """The bucket's curve, or its nearest neighbour's: of its own context first, then of its own batch size."""
        b, c = batch_bucket(batch), context_bucket(context)
        if (b, c) in self.curves:
            return self.curves[b, c]
        known = sorted((100 * abs(c - key[1]) + abs(b - key[0]), key) for key in self.curves)
        return self.curves[known[0][1]] if known else Curve()

    def _own_curve(self, batch: int, context: int) -> Curve:
        curve = self._curve(batch, context)
        return self.curves.setdefault((batch_bucket(batch), context_bucket(context)), curve.copy())

    def probing(self, batch: int, context: int, rows: int) -> float:
        """Seconds that `measure` is expected to take: passes of both numbers of rows, and one that fills the cache.

        Rows cost what `table` says. While a single number of rows was measured, which tells nothing of further ones,
        they are taken to cost as much as passes of their own.
        """
        curve = self._curve(batch, context)
        known, filled = curve.measured or 1, min(context, PROBED)
        if len(curve.points) < 2:
            return curve.at(known) * (PASSES * (1.0 + rows / known) + filled / known)
        table = curve.table(max(rows, filled))
        return PASSES * (table[known] + table[rows]) + table[filled]

    # Learning

    def measure(self, batch: int, context: int, rows: int) -> None:
        """Time a pass of so many rows, and of the largest number known, to correct for the machine's present speed.

        A probe that fails is not called again; costs are then learned from real steps alone.
        """
        if self.probe is None:
            return
        curve = self._own_curve(batch, context)
        known = curve.measured
        counts = [known, rows] if known else [rows]
        try:
            seconds = dict(zip(counts, self.probe(counts, min(context, PROBED)), strict=True))
        except RuntimeError as error:
            logger.warning(
                "timing a pass of %s rows failed (%s); costs are learned from real steps instead", counts, error
            )
            self.probe = None
            return
        curve.set(rows, seconds[rows] * (curve.at(known) / max(seconds[known], _LEAST) if known else 1.0))
        self.save()

    def measure_up_to(self, batch: int, context: int, rows: int) -> None:
        """Time powers of two up to the first one past so many rows, unless that was measured.

        Args:
            rows: as of `table`.
        """
        rows = self._with_beside(batch, rows)
        if self._curve(batch, context).measured < min(rows, GRID[-1]):
            for point in LADDER:
                if point & (point - 1) == 0 and point < 2 * rows:
                    self.measure(batch, context, point)

    def observe(
        self, batch: int, context: int, times: StepTimes, drafters: Sequence[str], levels: Sequence[int | None]
    ) -> None:
        """Learn from a real step.

        Args:
            batch, context: sequences of the step, and the length of the longest.
            times: what it took; `times.draft` in the order of `drafters`.
            levels: levels that each drafter drafted, 0 where it found nothing; None where it was not used.
        """
        self.steps += 1
        bucket = batch_bucket(batch)
        for name, seconds, count in zip(drafters, times.draft, levels, strict=True):
            if count is not None:
                line = self.lines.get((name, bucket))
                if line is None:
                    near = self.line(name, batch)
                    line = self.lines[name, bucket] = DraftLine(near.fixed, near.per_level, near.count)
                line.observe(count, seconds)
        self._own_curve(batch, context).observe(times.rows, times.score)
        key, other = (bucket, times.rows > batch), times.verify + times.other
        known = self.others.setdefault(key, other)
        self._counts[key] = count = self._counts.get(key, 0) + 1
        if count <= _NEW:  # the first steps compile and fill caches
            self.others[key] = min(known, other)
        else:
            self.others[key] = known + 0.1 * (min(other, 4.0 * known + _LEAST) - known)
        if self.steps & (self.steps - 1) == 0 and self.steps >= 64:
            self.save()

    # Keeping

    def save(self) -> None:
        """Write what is known to disk, in one piece; without a store nothing happens."""
        if self.store is not None:
            self.store.save(
                {
                    "curves": [[*key, list(curve.points.items())] for key, curve in self.curves.items()],
                    "others": [[*key, seconds] for key, seconds in self.others.items()],
                }
            )

    def _restore(self) -> None:
        kept = self.store.load() if self.store is not None else None
        if kept is None:
            return
        try:
            curves = {(int(b), int(c)): _points(points) for b, c, points in kept["curves"]}
            others = {(int(b), bool(drafted)): _seconds(seconds) for b, drafted, seconds in kept["others"]}
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            logger.warning("the stored costs are not valid (%s: %s); measuring again", type(error).__name__, error)
            return
        self.curves, self.others = curves, others

    def drafts(self) -> list[Any]:
        """JSON-ready prices of drafts; they belong to the drafters, not to the model that verifies."""
        return [[*key, line.fixed, line.per_level] for key, line in self.lines.items() if line.count >= _NEW]

    def restore_drafts(self, kept: Any) -> None:
        """Take over what `drafts` gave in an earlier process.

        Raises:
            TypeError, ValueError: it is no such list.
        """
        self.lines = {(str(name), int(b)): DraftLine(_seconds(f), _seconds(p), _NEW) for name, b, f, p in kept}

    def describe(self) -> str:
        """What is known, for people: milliseconds of a pass by rows, and of a draft by drafter."""
        lines = []
        for (batch, context), curve in sorted(self.curves.items()):
            text = ", ".join(f"{rows}: {1e3 * seconds:.3g}" for rows, seconds in curve.points.items())
            lines.append(f"pass, batch bucket {batch}, context bucket {context}, ms by rows: {text}")
        for (name, batch), line in sorted(self.lines.items()):
            lines.append(
                f"{name}, batch bucket {batch}: {1e3 * line.fixed:.3g} ms + {1e3 * line.per_level:.3g} ms a level"
            )
        return "\n".join(lines) or "nothing was measured yet"


def _seconds(value: Any) -> float:
    if not isfinite(number := float(value)) or not 0.0 <= number < 1e6:
        raise ValueError(f"{value!r} is not a time")
    return number


def _points(pairs: Any) -> Curve:
    points = {int(rows): _seconds(seconds) for rows, seconds in pairs}
    if not all(rows in GRID and seconds > 0.0 for rows, seconds in points.items()):
        raise ValueError(f"{pairs!r} is not a curve")
    return Curve(points)
