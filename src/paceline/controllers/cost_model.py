"""What one step costs on this machine: seconds of a scoring pass by rows, batch and context, and of a draft by levels.

In: a probe that times the target, and the times of real steps. Out: tables of seconds. Not here: what to do about them
(`controllers.auto`), timing itself, the model.

T_verify(batch, rows, context) is a curve over rows for each bucket of batch and context; the first is measured by the probe, at
only as many rows as somebody asks about, and the others start as a copy of their nearest neighbour. What a step spends outside
scoring (rules, verification, commit) is learned apart, with drafts and without. T_draft is a line over levels for each drafter
and batch bucket.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import inf
from pathlib import Path
from time import perf_counter
from typing import Any, Final

from paceline.controllers.base import StepTimes
from paceline.controllers.buckets import batch_bucket, context_bucket
from paceline.controllers.cost_document import as_document, from_document
from paceline.controllers.cost_store import CostKey, CostStore
from paceline.controllers.cost_words import describe
from paceline.controllers.curve import GRID, PRIOR_LEVEL, Curve, Line, Overhead, points
from paceline.controllers.doubts import Doubts

logger = logging.getLogger("paceline.controllers")

Probe = Callable[[Sequence[int], int], Iterable[float]]
Bucket = tuple[int, int]

_REBUILD = 0.03
_QUICK: Final = 2e-3
"""A model whose pass takes less than so many seconds is measured anew in every process: that takes a few hundredths of a second."""

_TURNS, _AT_ONCE = 3, 16
"""Such a model is measured so many times up to so many rows at least: whatever else runs may last longer than a pass, so the least
counts."""

_BENT: Final = 0.15
"""A measured point that is dearer than a convex curve by this share at most was measured while something else ran; real passes
that are off by more say that the curve was."""

_SCALE: Final = 0.85
"""Share of an error in scoring that is put down to the machine's speed at present, for all rows alike."""

_CHANGED: Final = 1.5
"""A cost on disk that is off by this factor today is measured again, with all others."""

BESIDE: Final = 4
"""Passes of one number of rows whose mean says something; it counts for as many."""

ALIKE: Final = 32
"""Steps that went as planned teach what they cost as one in so many would have that were observed one by one."""

_LEAST = 1e-9

_SETTLED, _EVERY = 64, 4
"""After so many steps, one step in so many is learned from: learning costs microseconds, and so do some models' steps."""


class CostModel:
    """Measured seconds, kept current and kept on disk.

    Attributes:
        stale: whether the next `prepare` looks again at what was measured.
        disturbed: whether a probe ran since the last step was observed, so that the next step's `other` time includes it.

    Args:
        key: what the measurements belong to; None keeps nothing on disk.
        probe: `probe(counts, context)` gives for each number of rows the seconds of one scoring pass of a single sequence, warmed
            up and repeated as needed to be trusted; None learns from real steps alone.
        directory: folder of the files on disk; None is the platform's cache folder.
    """

    def __init__(self, key: CostKey | None = None, *, probe: Probe | None = None, directory: Path | None = None) -> None:
        self.probe = probe
        self.store = CostStore(key, directory) if key is not None else None
        self.curves: dict[Bucket, Curve] = {}
        self.overheads: dict[int, Overhead] = {}
        self.lines: dict[tuple[str, int], Line] = {}
        self.steps = 0
        self.stale = self.disturbed = False
        self._tables: dict[tuple[int, int, int], list[float]] = {}
        self._drift, self._doubts = 0.0, Doubts()
        if self.store is not None and (costs := self.store.load()) is not None:
            self._restore(costs)
            self.stale = True

    # Reading

    def verify(self, rows: int, *, batch: int = 1, context: int = 0) -> float:
        """Seconds of one scoring pass over `rows` rows of the whole batch; 1.0 is the unit before anything was measured."""
        return self._curve(batch_bucket(batch), context_bucket(context)).at(rows)

    def table(self, batch: int, context: int, rows: int) -> list[float]:
        """Seconds of a whole step apart from drafting, for 0..rows rows; shared, not to be changed by the caller."""
        key = batch, context_bucket(context), rows
        found = self._tables.get(key)
        if found is None:
            bucket = batch_bucket(batch)
            found = self._curve(bucket, key[1]).table(rows)
            if (overhead := self.overheads.get(bucket)) is not None:
                found = [a + b for a, b in zip(found, overhead.table(batch, rows), strict=True)]
            self._tables[key] = found
        return found

    def drafted(self, size: int, context: int, table: Sequence[float]) -> list[float]:
        """`table` where drafts were asked for: what asking takes besides drafting is not saved by scoring nothing."""
        found, base, bucket = list(table), min(size, len(table) - 1), batch_bucket(size)
        if (overhead := self.overheads.get(bucket)) is not None:
            found[base] = max(found[base], self._curve(bucket, context_bucket(context)).at(base) + overhead.asking(base))
        return found

    def draft(self, drafter: str, levels: int, batch: int = 1) -> float:
        """Seconds that `drafter` takes for a draft of so many levels for the whole batch."""
        return self.line(drafter, batch).at(levels)

    def line(self, drafter: str, batch: int = 1) -> Line:
        """Fixed and per-level seconds of a drafter, those of the nearest batch size or the prior where it was never timed."""
        if (found := self.lines.get((drafter, bucket := batch_bucket(batch)))) is not None:
            return found
        if others := [(abs(b - bucket), line) for (name, b), line in self.lines.items() if name == drafter]:
            return min(others, key=lambda pair: pair[0])[1]
        level = PRIOR_LEVEL * self._curve(bucket, 0).at(1)
        return Line(level / 2, level)

    def knows(self, drafter: str, batch: int = 1) -> bool:
        """Whether the drafter was timed often enough for its first, slow calls to be over."""
        line = self.lines.get((drafter, batch_bucket(batch)))
        return line is not None and line.count >= 3

    def _curve(self, batch: int, context: int) -> Curve:
        """The bucket's curve, or the nearest one's, context before batch; the prior before anything is known."""
        found = self.curves.get((batch, context))
        if found:
            return found
        known = [(abs(b - batch) + 100 * abs(c - context), curve) for (b, c), curve in self.curves.items() if curve]
        return min(known, key=lambda pair: pair[0])[1] if known else _UNIT

    # Measuring

    def prepare(self, rows: int, context: int = 0) -> None:
        """Measure the grid points up to the first one at `rows` or beyond that nobody has measured yet.

        A probe that fails is not asked again; real steps teach the model alone then, and the log says so. What was measured before
        is timed beside the new points, for the machine may be faster or slower than it was.
        """
        if self.probe is None or not (self.stale or self._measured < min(rows, GRID[-1])):
            return
        self.disturbed, start = True, perf_counter()
        curve = self.curves.setdefault((0, context_bucket(context)), Curve())
        known, found = 0 if self._must_measure_again(curve, context) else self._measured, dict[int, float]()
        for turn in range(_TURNS):
            if turn and not 0.0 < found.get(1, curve.at(1)) < _QUICK:
                break
            new = points(known, max(rows, _AT_ONCE) if turn else rows)
            for point, seconds in self._probe([known, *new] if known and new else new, context):
                found[point] = min(seconds, found.get(point, inf))
        speed = curve.at(known) / found[known] if known in found else 1.0  # the machine's, then over now
        for point in sorted(found.keys() - {known}):
            curve.set(point, found[point] * speed)
        curve.level()
        curve.smooth(_BENT)
        self._tables.clear()
        self._doubts.spend(perf_counter() - start)
        self.save()

    def _must_measure_again(self, curve: Curve, context: int) -> bool:
        """Whether what is known is to be measured anew: it is implausible, or from the disk and no longer true."""
        stale, self.stale = self.stale, False
        if not stale or not curve:
            return False
        seconds = sum(seconds for _, seconds in self._probe([1], context))
        ratio = seconds / curve.at(1) if seconds else 1.0
        if seconds < _QUICK or self.implausible or not 1 / _CHANGED < ratio < _CHANGED:
            curve.forget()
            self.curves = {(0, context_bucket(context)): curve}
            return True
        return False

    def _probe(self, counts: Sequence[int], context: int) -> Iterator[tuple[int, float]]:
        """Numbers of rows with their seconds by the probe, up to the first where it fails: then there is no probe any more."""
        try:
            if self.probe is not None:
                yield from zip(counts, self.probe(counts, context), strict=True)
        except RuntimeError as error:
            logger.warning("measuring %s rows failed (%s); learning from real steps instead", counts, error)
            self.probe = None

    @property
    def implausible(self) -> bool:
        """Whether some measured number of rows is said to cost more than twice what half of it costs."""
        return any(curve.implausible for curve in self.curves.values())

    @property
    def _measured(self) -> int:
        return max((point for curve in self.curves.values() for point in curve.values), default=0)

    def observe(
        self,
        batch: int,
        context: int,
        times: StepTimes,
        drafters: Sequence[str] = (),
        levels: Sequence[int | None] = (),
        *,
        always: bool = False,
        cold: bool = False,
        steps: int = 1,
    ) -> None:
        """Learn from a real step.

        Args:
            batch, context: sequences of the step, and the length of the longest.
            times: what the step took; `times.draft` in the order of `drafters`.
            levels: levels that each drafter drafted (0: it found nothing); None where it was not asked, or nobody knows.
            always: learn even where most steps are passed over to save time.
            cold: after planning, scoring takes longer than it mostly does: learn of drafts alone. steps: it stands for so many.
        """
        before, self.steps = self.steps, self.steps + (like := 1 + steps // ALIKE)
        self._doubts.earn(steps * (times.score + times.verify + times.other + sum(times.draft)))
        disturbed, self.disturbed = self.disturbed, False
        if self.steps > _SETTLED and self.steps % _EVERY and not (always or cold):
            return
        b, asked = batch_bucket(batch), times.rows > batch or any(count is not None for count in levels)
        for name, seconds, count in zip(drafters, times.draft, levels, strict=False):
            if count is not None:
                self.lines.setdefault((name, b), Line()).observe(count, seconds, cold=cold, times=like)
        if not cold:
            self._drift += 0.1 * self._own_curve(b, context_bucket(context)).observe(times.rows, times.score, _SCALE, like)
        if not (disturbed or cold):
            self.overheads.setdefault(b, Overhead()).observe(times.rows, times.verify + times.other, asked=asked, times=like)
        if abs(self._drift) > _REBUILD or self.steps // _SETTLED > before // _SETTLED or self.steps < 8:
            self._drift = 0.0
            self._tables.clear()
        if self.steps >= _SETTLED and self.steps.bit_length() > before.bit_length():
            self.stale = self.stale or (self._doubts.affordable and self.implausible)
            self.save()

    def observe_beside(self, batch: int, context: int, passes: Mapping[int, tuple[int, float, float]], usual: int) -> None:
        """Learn what other numbers of rows cost beside the usual one, from passes of the same moment. What contradicts the curve of
        single sequences, the one that is probed, has it looked at again.

        Args:
            passes: by rows, how many there were and the sum of their seconds; see `Counts.scoring`.
        """
        others = {rows: seconds / times for rows, (times, seconds, _) in passes.items() if rows != usual and times >= BESIDE}
        if not others:
            return
        curve = self._own_curve(batch_bucket(batch), context_bucket(context))
        times, seconds, _ = passes[usual]
        speed = curve.at(usual) * times / max(seconds, _LEAST)  # the machine's then over what is known
        errors = {rows: curve.observe(rows, speed * mean, 0.0, BESIDE) for rows, mean in others.items()}
        self._tables.clear()
        if off := [abs(error) > _BENT for rows, error in errors.items() if batch == 1 < rows]:
            self.stale = self._doubts.hear(contradicted=any(off)) or self.stale

    def _own_curve(self, batch: int, context: int) -> Curve:
        """The bucket's curve, at first a copy of the nearest one's."""
        curve = self.curves.get((batch, context))
        if not curve:
            near = self._curve(batch, context)
            curve = self.curves[batch, context] = near.copy() if near is not _UNIT else Curve()
        return curve

    # Keeping and showing

    def save(self) -> None:
        """Write what is known to disk, in one piece; without a key nothing happens."""
        if self.store is not None:
            self.store.save(as_document(self.curves, self.overheads, self.lines))

    def _restore(self, costs: dict[str, Any]) -> None:
        try:
            curves, overheads, lines = from_document(costs)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            logger.warning("measured costs on disk make no sense (%s: %s); measuring again", type(error).__name__, error)
            return
        self.curves, self.overheads, self.lines = curves, overheads, lines

    def describe(self) -> str:
        """What is known, for people: milliseconds of a pass by rows, and of a draft by drafter."""
        return describe(self)


_UNIT: Final = Curve({1: 1.0})
