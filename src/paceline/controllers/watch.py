"""The guard of one drafter on one sequence: keeps it only while it measurably pays, and looks again at growing intervals.

In: what each step brought, in tokens, after its measured time was charged at the current rate. Out: what to do with the drafter in
the next step. Not here: where the numbers come from (`controllers.auto`).
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from math import sqrt
from typing import Final

FIRST_INTERVAL: Final = 4
NEW_SEQUENCE_INTERVAL: Final = 16
LONG: Final = 256
"""Longest interval between single steps that try a drafter; between trials of many it is longer."""

SLACK: Final = 0.1
"""Tokens a step that a drafter in use may seem to lose: estimates waver, and `Watch` tells what it really does."""

SHARE: Final = 0.015
"""At most about this share of all time goes into trying drafters that did not pay."""

_DECAY = 0.99
_FEW, _MANY = 6, 50
_HITS = 2
_LONGEST = 4096
_KEPT = 40.0  # steps that what earlier sequences brought weighs in a new one


class Mode(Enum):
    """What one step does with one drafter."""

    SKIP = "skip"
    ASK = "ask"
    LISTEN = "listen"
    """Asked although it sleeps, since asking costs next to nothing; its nodes are scored only where they look worth it."""
    EXPLORE = "explore"
    """Asked and scored although it does not look worth it, to learn whether that has changed."""


class Watch:
    """Awake, the drafter is used wherever the plan wants it. Asleep, it is tried every `interval` steps.

    It falls asleep when its mean net gain over some hundred steps is not above zero, after few steps already when it lies a
    standard error below, or when the plan has no use for it. It wakes after two tries in a row that paid, and where only the plan
    was against it, as soon as the plan has changed.
    """

    __slots__ = ("_before", "asleep", "count", "distrusted", "hits", "interval", "limit", "mean", "square", "wait")

    def __init__(self) -> None:
        self.asleep = self.distrusted = False
        self.interval = self.wait = FIRST_INTERVAL
        self.limit = 64
        self.hits = 0
        self.count = self.mean = self.square = 0.0
        self._before = 0.0  # steps of earlier sequences in which it was not put to sleep

    def for_new_sequence(self) -> Watch:
        """A watch that begins with what this one found, but looks again soon."""
        other = Watch()
        other.asleep, other.distrusted, other.limit = self.asleep, self.distrusted, self.limit
        if not self.asleep and self.count:
            other._before = self._before + self.count
            other.count, other.mean = min(self.count, _KEPT), self.mean
            other.square = self.square * other.count / self.count
        known_bad = self.asleep and self.limit > LONG  # a trial of some dozen steps said so: too dear to begin each sequence with
        other.interval = self.interval if known_bad else min(self.interval, NEW_SEQUENCE_INTERVAL)
        other.wait = self.wait if known_bad else other.interval
        return other

    def to_list(self) -> list[float]:
        """What `from_list` needs to begin in another process as if this had been an earlier sequence."""
        return [self.asleep, self.distrusted, self.limit, self.interval, self.count, self.mean, self.square]

    @classmethod
    def from_list(cls, values: Sequence[float]) -> Watch:
        """A watch as `to_list` has told of it.

        Raises:
            ValueError: not such a list.
        """
        asleep, distrusted, limit, interval, count, mean, square = values
        if min(count, square) < 0.0 or min(limit, interval) < 1.0:
            raise ValueError(f"no watch has {[*values]}")
        watch = cls()
        watch.asleep, watch.distrusted, watch.limit = bool(asleep), bool(distrusted), int(limit)
        watch.interval = watch.wait = int(interval)
        watch.count, watch.mean, watch.square = count, mean, square
        return watch

    def mode(self, pays: bool, cheap: bool, special: bool) -> Mode:
        """What to do now.

        Args:
            pays: the plan wants the drafter.
            cheap: asking it costs next to nothing.
            special: the step says little about others (an earlier drafter has proposed already, the end is near), so that a drafter
                without use in it need not sleep, and trying one would teach little.
        """
        if self.asleep and pays and not self.distrusted:
            self._wake()
        if not self.asleep:
            if pays:
                return Mode.ASK
            if special:
                return Mode.LISTEN if cheap else Mode.SKIP
            self.sleep()
        self.wait -= 1
        if self.wait <= (-self.interval if special else 0):
            return Mode.EXPLORE
        return Mode.LISTEN if cheap else Mode.SKIP

    def record(self, net: float, mode: Mode, scored: int, accepted: int) -> bool:
        """What a step brought.

        Args:
            net: tokens gained minus the price of their time.
            mode: how the drafter was used.
            scored, accepted: its nodes; a try whose nodes were all accepted promises more than it could show.
        Returns:
            whether the drafter fell asleep or woke.
        """
        if mode is Mode.ASK:
            return self.record_many(net, 0.0, 1)
        if mode is Mode.LISTEN and not scored:
            return False
        if net > 0 or 0 < scored == accepted:
            self.hits += 1
            self.wait = 0
            if self.hits >= _HITS:
                self._wake()
                return True
        else:
            self.hits = 0
            if mode is Mode.EXPLORE:
                self.wait = self.interval = min(2 * self.interval, self.limit)
        return False

    def after_trial(self, net: float, steps: int) -> None:
        """So many steps in a row tried the sleeping drafter and brought so much each."""
        if net > 0.0:
            self._wake()
            self.count, self.mean, self.square = float(steps), net, steps * max(net, 1.0)
        else:
            self.limit = int(min(max(-net * steps / SHARE, LONG + 1), _LONGEST))
            self.wait = self.interval = min(4 * self.interval, self.limit)

    def sleep(self) -> None:
        """Stop using the drafter for now; the longer, the less it did since it was last put to sleep."""
        long = self._before + self.count >= 2 * _MANY
        self.asleep, self._before, self.hits = True, 0.0, 0
        self.wait = self.interval = min(FIRST_INTERVAL if long else self.interval, self.limit)

    def look_now(self) -> None:
        """Asleep, be tried at the next step that allows it."""
        self.wait = min(self.wait, 1)

    def passed(self, steps: int) -> None:
        """So many steps went by without asking here."""
        if self.asleep:
            self.wait -= steps

    def limit_to(self, cost: float) -> None:
        """Set the longest interval from what one try costs, as a share of a plain step's time."""
        self.limit = int(min(max(cost / SHARE, FIRST_INTERVAL), LONG))

    def record_many(self, net: float, variance: float, times: int) -> bool:
        """What so many steps in use brought: their mean and variance, for nobody knows in what order they came.

        Returns:
            whether the drafter fell asleep.
        """
        fade = _DECAY**times
        kept, new = self.count * fade, (1.0 - fade) / (1.0 - _DECAY)
        delta, self.count = net - self.mean, kept + new
        self.mean += delta * new / self.count
        self.square = self.square * fade + new * variance + delta * delta * kept * new / self.count
        deviation = sqrt(self.square) / self.count
        bound = -deviation * (2.0 if self.count < _MANY else 1.0)
        if self.count >= _FEW and self.mean < bound:
            self.sleep()
            self.distrusted = True
            return True
        return False

    def _wake(self) -> None:
        self.asleep = self.distrusted = False
        self.hits = 0
        self.count = self.mean = self.square = 0.0
