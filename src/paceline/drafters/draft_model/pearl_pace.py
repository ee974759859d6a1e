"""Whether drafting beside the target pays here, and how far: both ways take turns until one was faster.

In: seconds and tokens of whole steps. Out: the way to go on. Not here: drafting, threads.

Two models at once share cores, caches and memory bandwidth, so that what each costs alone says little of what they cost
together. So nothing is modelled: whole steps of both ways are timed, one way after the other, tokens per second decide,
and what was decided is tried again after some thousand steps. Neither way changes what is written: points are verified
to the same tokens either way, drawn tokens have the same distribution.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter
from typing import Final

logger = logging.getLogger("paceline.drafters")

STEPS: Final = 24
"""Of one way at a time."""

TURNS: Final = 4
"""Before something is decided; the ways alternate."""

SKIP: Final = 3
"""First steps of a turn that do not count: caches are filled and threads woken."""

AGAIN: Final = 4096
"""Steps after which a decision is tried again."""

LONGEST: Final = 16


@dataclass(slots=True)
class Way:
    """What was seen of one way."""

    seconds: float = 0.0
    tokens: int = 0

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds if self.seconds > 0.0 else 0.0


@dataclass(slots=True)
class Pace:
    """The choice for one size of batch.

    Attributes:
        decided: whether steps draft beside the target; None while it is tried.
        draft, rest: seconds and tokens of drafting alone, seconds and steps of all else, as sequential steps show them.
    """

    decided: bool | None = None
    steps: int = 0
    ways: dict[bool, Way] = field(default_factory=lambda: {False: Way(), True: Way()})
    draft: Way = field(default_factory=Way)
    rest: Way = field(default_factory=Way)

    @property
    def beside(self) -> bool:
        """Whether the next step drafts beside the target; sequential steps come first."""
        return self.steps // STEPS % 2 == 1 if self.decided is None else self.decided

    @property
    def window(self) -> int:
        """As many tokens as are drafted while the target scores, by what both take alone."""
        if not (self.draft.seconds > 0.0 and self.rest.tokens):
            return LONGEST
        return min(max(round(self.draft.rate * self.rest.seconds / self.rest.tokens), 1), LONGEST)

    def step(self, seconds: float | None, tokens: int) -> bool | None:
        """A step took so long, None where that is not known; the decision, where there is a new one."""
        place, beside = self.steps % STEPS, self.beside
        self.steps += 1
        if self.decided is not None:
            if self.steps >= AGAIN:
                self.decided, self.steps, self.ways = None, 0, {False: Way(), True: Way()}
            return None
        if seconds is not None and place >= SKIP:
            way = self.ways[beside]
            way.seconds, way.tokens = way.seconds + seconds, way.tokens + tokens
        if self.steps < STEPS * TURNS:
            return None
        self.decided, self.steps = self.ways[True].rate > self.ways[False].rate, 0
        return self.decided


class Paces:
    """A `Pace` for every size of batch.

    Args:
        name: of the method, for the log.
        always: the user's own choice; None decides by the clock.
    """

    def __init__(self, name: str, always: bool | None, clock: Callable[[], float] = perf_counter) -> None:
        self.name, self.always, self.clock = name, always, clock
        self._known: dict[int, Pace] = {}
        self._asked = 0  # sequences of the step that is under way
        self._last = 0  # of the step before, where it was one that counts
        self._since = self._from = 0.0  # ends of that step and of drafting
        self._told: set[bool] = set()

    def of(self, batch: int) -> Pace:
        """That of a batch; sizes count by doublings."""
        return self._known.setdefault(max(batch - 1, 0).bit_length(), Pace())

    def beside(self, batch: int) -> bool:
        """A step begins; whether it drafts beside the target."""
        self._asked, self._from = batch, self.clock()
        return self.of(batch).beside if self.always is None else self.always

    def drafted(self, tokens: int) -> None:
        """A sequential step has drafted so many tokens for each sequence."""
        now, draft = self.clock(), self.of(self._asked).draft
        draft.seconds, draft.tokens = draft.seconds + now - self._from, draft.tokens + tokens
        self._from = now

    def stepped(self, batch: int, tokens: int, *, alone: bool) -> None:
        """The step is over.

        Args:
            batch: sequences that go on. tokens: that it brought. alone: whether it drafted before the target scored.
        """
        now, asked, last = self.clock(), self._asked, self._last
        self._asked, self._last = 0, batch if asked == batch else 0
        since, self._since = self._since, now
        if asked != batch:  # some have ended, or nobody was asked
            return
        pace = self.of(batch)
        if alone:
            pace.rest.seconds, pace.rest.tokens = pace.rest.seconds + now - self._from, pace.rest.tokens + 1
        if self.always is not None:
            return
        decision = pace.step(now - since if last == batch else None, tokens)
        if decision is not None and decision not in self._told:
            self._told.add(decision)
            self._say(decision, pace)

    def _say(self, beside: bool, pace: Pace) -> None:
        rates = f"{pace.ways[True].rate:.0f} tokens/s against {pace.ways[False].rate:.0f}"
        if beside:
            logger.info("%s drafts while the target scores: that gives %s of one after the other", self.name, rates)
        else:
            logger.warning(
                "%s: drafting while the target scores gives %s of one after the other here; going on sequentially",
                self.name,
                rates,
            )
