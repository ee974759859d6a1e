"""What the parts of a step take.

The clock is read where one part ends and the next begins. A drafter's own seconds come with its trees."""

from __future__ import annotations

from time import perf_counter

from paceline.controllers import StepTimes
from paceline.engine.record import TimeSplit


class StepClock:
    """The readings of a step. One object serves all steps of an engine, so that a step allocates none.

    The methods that note the end of a part stand in the order in which they are called.

    Attributes:
        total: seconds of all steps so far, and of reading prompts.
        draft: seconds of each drafter in this step, with those for which the verdicts waited for it.
        reading: seconds in which each drafter read what it had not seen of the texts.
    """

    __slots__ = (
        "_committed", "_drafted", "_joined", "_learned", "_learning", "_planned", "_planning", "_proposing", "_scored",
        "_started", "_verified", "draft", "reading", "total",
    )  # fmt: skip

    def __init__(self) -> None:
        self.total = TimeSplit()
        self.draft: tuple[float, ...] = ()
        self.reading: tuple[float, ...] = ()
        self._learning = 0.0  # seconds that the controller took to learn since the last step
        self._planning = self._proposing = 0.0
        self._started = self._planned = self._drafted = self._scored = self._joined = 0.0
        self._verified = self._committed = self._learned = 0.0

    def prefilled(self, seconds: float) -> None:
        """Prompts were read, before a step or without one."""
        self.total.prefill += seconds

    def started(self) -> None:
        """A step begins."""
        self._started = perf_counter()

    def planned(self) -> None:
        """There is a plan."""
        self._planned = perf_counter()

    def drafted(self, draft: tuple[float, ...], reading: tuple[float, ...]) -> None:
        """There are trees; `draft` and `reading` as in the attributes, before the scoring pass."""
        self._drafted = perf_counter()
        self.draft, self.reading = draft, reading
        self._proposing = sum(draft) + sum(reading)

    def scored(self) -> None:
        """There are scores."""
        self._scored = perf_counter()

    def joined(self, waited_for: int | None) -> None:
        """What drafters did meanwhile has ended, too. Steering, which comes next, counts as verifying.

        Args:
            waited_for: index of the drafter that drafted since there are scores; None where nobody did.
        """
        self._joined = perf_counter()
        if waited_for is not None:
            waited = self._joined - self._scored
            self.draft = tuple([drafting + waited * (i == waited_for) for i, drafting in enumerate(self.draft)])

    def verified(self) -> None:
        """There are verdicts."""
        self._verified = perf_counter()

    def committed(self) -> None:
        """Texts and caches have grown, and drafters know of it."""
        self._committed = perf_counter()

    @property
    def _choosing(self) -> float:
        """Seconds of merging, selecting and fitting trees."""
        return self._drafted - self._planned - self._proposing

    def times(self, rows: int) -> StepTimes:
        """The step up to its commit, without planning.

        Args:
            rows: of the scoring pass.
        """
        score, verify = self._scored - self._drafted, self._verified - self._joined
        other = self._committed - self._verified + self._choosing
        return StepTimes(self.draft, score, verify, other, rows, self.reading)

    @property
    def seconds(self) -> float:
        """The step up to its commit, with planning and with what was learned from the last one."""
        return self._committed - self._started + self._learning

    def learned(self) -> None:
        """The controller knows what came of the step; the next one counts the time."""
        self._learned = perf_counter()
        self._planning = self._planned - self._started + self._learning
        self._learning = self._learned - self._committed

    def ended(self) -> TimeSplit:
        """Sequences that ended are gone; the seconds of the step, which are added to the total."""
        end = perf_counter()
        split = TimeSplit(
            draft=sum(self.draft) + sum(self.reading),
            score=self._scored - self._drafted,
            verify=self._verified - self._joined,
            commit=self._committed - self._verified + end - self._learned,
            other=self._choosing + self._planning,
        )
        self.total.add(split)
        return split

    @property
    def drafting(self) -> list[float]:
        """Seconds of each drafter, with those of reading."""
        return [draft + reading for draft, reading in zip(self.draft, self.reading, strict=True)]
