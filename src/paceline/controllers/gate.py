"""The guard of drafting as a whole at one batch size: planning, asking and judging drafters cost time too, for every sequence.

In: what each step brought and took, all of it. Out: whether the next step may draft. Not here: which drafter, and how much
(`controllers.auto`, `controllers.watch`).

The cost model charges a drafter for its own time and its rows; what the engine spends on having drafters at all shows only against
steps without any. So a few steps are made plain to be timed, and drafting stays on only while its steps bring more tokens per
second than plain ones. Off, it is tried again for some steps, the sooner the less the last try lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from typing import Final

from paceline.controllers.buckets import plain_ratio

FIRST_PLAIN: Final = 4
"""Plain steps that are timed when a batch size comes up."""

AGAIN, IN_A_ROW = 192, 6
"""Steps from some plain ones to the next while drafting is on, and how many; the engine takes all but the first without asking."""

AHEAD, SELDOM = 1.15, 3
"""While drafting brings so many times what plain steps bring, they are timed so many times less often."""

TRY: Final = 8
PATIENCE: Final = 24
"""Steps after which drafting is judged: while no drafter is used or it clearly loses, and while one is used that may yet pay."""

SETTLED: Final = 48
"""Steps after which an open gate counts as settled."""

PAID: Final = 4 * SETTLED
"""Drafting that went on for longer did pay for a while."""

CLEARLY: Final = 0.75
"""Drafting that brings less than this share of what plain steps bring loses clearly."""

ALMOST: Final = 0.85
"""Drafting that brings this share goes on until it counts as settled: a few dozen steps cannot tell it from drafting that pays, and
tries are planned step by step, which makes them dearer than shows."""

FRESH: Final = PATIENCE
"""Steps after which plain ones are timed again before drafting that seems to lose ends: the machine may have become slower."""

SHARE: Final = 0.02
"""About this share of all time goes into tries that lose; drafting that loses no more than that goes on."""

WAVER: Final = 0.15
"""Over n steps, drafting may seem to lose this much divided by the root of n before it ends: that is chance as often as not."""

LEAST, SOON, MOST = 48, 192, 1024

NEW: Final = 8
"""Steps that a new sequence waits after one try that lost; twice as many after each further one in a row."""

DISTURBED: Final = 3.0
"""A step that took more than so many times what was expected was interrupted; it counts as that long."""

CUT: Final = 2.0
"""An interrupted plain step counts as so many usual ones."""

_DECAY = 0.99
_MEMORY: Final = 1.0 / (1.0 - _DECAY)
_RATE = 0.2
_CLIP = 1.5
_SETTLING = 4
_MOST_LOST = 7


def mean_of(seconds: Sequence[float]) -> float:
    """Mean of what like steps took, interrupted ones cut short; a median would leave out what steps with drafts are charged for.
    (By hand: the module `statistics` takes as long as half a step of a small model here.)"""
    ranked = sorted(seconds)
    most = CUT * ranked[len(ranked) // 2]
    return sum([one if one < most else most for one in ranked]) / len(ranked)


class Gate:
    """Open, steps may draft. Kept per batch bucket.

    Attributes:
        wait: steps until it opens again; 0 while it is open.
        lost: tries in a row that lost.
    """

    __slots__ = ("_brought", "_doubted", "_plain", "_seen", "_spent", "_steps", "_thought", "lost", "wait")

    def __init__(self) -> None:
        self._plain: dict[int, float] = {}  # batch size -> seconds of a plain step
        self._seen = 0  # steps since a plain one
        self._doubted = False  # drafting seems to lose, by what plain steps took a while ago
        self.wait = 0
        self.lost = 0
        self._begin()

    def _begin(self) -> None:
        self._steps, self._brought, self._spent, self._thought = 0, 0.0, 0.0, 0.0  # brought: in plain steps of the size timed first
        self._seen, self._doubted = 0, False

    @property
    def starting(self) -> bool:
        """Whether the next step begins a try."""
        return not self.wait and not self._steps

    @property
    def on(self) -> bool:
        """Whether drafting goes on, be it after some plain steps that are timed."""
        return self._steps > 0

    @property
    def closed(self) -> bool:
        """Whether nothing is drafted since that did not pay."""
        return self.wait > 0 and not self.on

    @property
    def settled(self) -> bool:
        """Whether drafting has gone on long enough to be no try any more."""
        return self._steps >= SETTLED

    def admits(self, *, new: bool) -> bool:
        """Whether this step may draft.

        Args:
            new: a sequence that was not there before makes up the whole batch: what was learned may not hold for it, so that it
                need not wait as long.
        """
        if self.wait:
            self.wait = min(self.wait, NEW << self.lost) if new else self.wait
            self.wait -= 1
            return False
        self._seen += 1
        if self._steps >= _SETTLING and not self._plain:
            self.wait, self._seen = FIRST_PLAIN - 1, 0
            return False
        if self._doubted or (self._seen > AGAIN and self._seen > AGAIN * self._times):
            self.wait, self._seen, self._doubted = IN_A_ROW - 1, 0, False
            return False
        return True

    @property
    def _times(self) -> int:
        """How many times as long as usual plain steps need not be timed."""
        unit = next(iter(self._plain.values()), 0.0)
        return SELDOM if self.settled and self._brought * unit > AHEAD * self._spent else 1

    def passed(self, steps: int) -> None:
        """So many steps drafted without asking here."""
        self._seen += steps

    def rest(self, most: int) -> int:
        """Take up to `most` steps off the wait, for the engine to pass through without asking again; returns how many."""
        taken = min(self.wait, most)
        self.wait -= taken
        return taken

    def open(self) -> None:
        """Begin a try now, on a sign that it may pay."""
        self.wait = 0
        self._begin()

    def rested(self, size: int, seconds: Sequence[float]) -> None:
        """What plain steps took."""
        if seconds:
            usual = mean_of(seconds)
            known = self._plain.get(size, usual)
            self._plain[size] = known + (1.0 - (1.0 - _RATE) ** len(seconds)) * (min(usual, _CLIP * known) - known)

    def record(
        self,
        size: int,
        tokens: int,
        seconds: float,
        *,
        admitted: bool,
        asked: bool,
        table: Sequence[float],
        steps: int = 1,
        thinking: float = 0.0,
        gain: float = 1.0,
    ) -> None:
        """What steps brought.

        Args:
            tokens: committed by all their sequences together.
            seconds: of the whole steps; the caller has cut short what was interrupted.
            admitted: they could draft. asked: some drafter was used because the plan wants it.
            table: expected seconds of a step by rows.
            thinking: seconds of planning that most steps go without; tries cost them, whatever they show.
            gain: tokens that come while nothing is drafted for each that plain steps bring: what drafting must beat.
        """
        if not admitted:
            self.rested(size, [seconds])
            return
        if self.closed:  # steps from before
            return
        self._steps += steps
        if not self._plain:
            return
        unit, decay = next(iter(self._plain.values())), _DECAY**steps
        self._brought = self._brought * decay + tokens / size / gain * (self.plain_seconds(size, table) / unit)
        if self.settled or not asked:  # a try plans every step, which says nothing of later ones
            seconds, thinking = seconds + thinking, 0.0
        self._spent = self._spent * decay + seconds
        self._thought = self._thought * decay + thinking
        self._judge(self._brought * unit, unit, asked, MOST if size == 1 else 4 * MOST)

    def _judge(self, brought: float, plain: float, asked: bool, most: int) -> None:
        """Close where plain steps would have brought the same in less time than was spent."""
        patient = asked and brought > CLEARLY * self._spent
        enough = 1.0 - SHARE - WAVER / sqrt(min(self._steps, _MEMORY)) if asked else 1.0
        enough = ALMOST if asked and not self.settled else enough
        if self._steps >= (PATIENCE if patient else TRY) and brought < enough * self._spent:
            self._doubted = self._seen > FRESH
            if not self._doubted:
                self._close(((1.0 - SHARE) * self._spent + self._thought - brought) / plain, most)

    def _close(self, lost: float, most: int) -> None:
        """Wait the longer the more tokens were lost, up to `most` steps; but try again soon what did pay for long."""
        paid = self._steps > PAID
        self.lost = 0 if paid else min(self.lost + 1, _MOST_LOST)
        self.wait = int(min(max(lost / SHARE, LEAST), SOON if paid else most))
        self._begin()

    def plain_seconds(self, size: int, table: Sequence[float]) -> float:
        """Of a step without drafting, scaled from the nearest batch size that was timed; what `table` says before any was."""
        if not self._plain:
            return table[min(size, len(table) - 1)]
        near = min(self._plain, key=lambda known: abs(known - size))
        return self._plain[near] * (1.0 if near == size else plain_ratio(size, near, table))
