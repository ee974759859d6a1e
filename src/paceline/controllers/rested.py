"""Steps in which the engine was left to itself: what plain steps take that nothing interrupts.

In: seconds of such steps. Out: what a usual one takes, told to the gate every time, and now and then for the cost model. Not here:
who rests, and for how long (`controllers.planner`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from paceline.controllers.base import StepTimes
from paceline.controllers.cost_model import BESIDE
from paceline.controllers.gate import mean_of

if TYPE_CHECKING:
    from paceline.controllers.cost_model import CostModel
    from paceline.controllers.gate import Gate

ENOUGH: Final = 16
"""Quick steps that must have rested in a row to say what resting costs."""

RECENT: Final = 24
"""The last so many of them say it."""

EVERY: Final = 96
"""Quick steps at rest from one word to the cost model to the next, since it takes as long as half a step: what rows cost must be
known by the clock of the plain steps that they are held against."""


class Rested:
    """Steps since the last time that somebody asked.

    Attributes:
        beside: of the drafted steps before them: sequences, rows, seconds of scoring; None where nobody knows.
    """

    __slots__ = ("_seconds", "_untold", "beside")

    def __init__(self) -> None:
        self.beside: tuple[int, int, float] | None = None
        self._seconds: list[tuple[float, float]] = []
        self._untold = EVERY

    def add(self, score: float, rest: float) -> None:
        """One more, by seconds of scoring and of all else."""
        self._seconds.append((score, rest))

    def end(self, gate: Gate | None, size: int, *, quick: bool) -> tuple[float, float] | None:
        """Tell the gate; returns seconds of scoring and of all else of a usual step, where it is time to learn from them.

        Args:
            size: sequences. quick: steps are short beside what learning takes.
        """
        last, self._untold = self._seconds[-RECENT:], self._untold + len(self._seconds)
        last = last if len(last) >= ENOUGH else last[len(last) // 2 :]  # the first ones find caches as drafting left them
        self._seconds = []
        if gate is not None:
            gate.rested(size, [score + rest for score, rest in last])
        if len(last) < (ENOUGH if quick else 1) or (quick and self._untold < EVERY):
            return None
        self._untold = 0
        return mean_of([score for score, _ in last]), mean_of([rest for _, rest in last])

    def teach(self, gate: Gate | None, cost: CostModel, batch: tuple[int, int], *, quick: bool) -> None:
        """`end`, and have the cost model learn: what such steps take, or, of a few between drafts, what they take beside those.

        Args:
            batch: sequences, and tokens of the longest.
        """
        size, last, beside = batch[0], self._seconds[len(self._seconds) // 2 :], self.beside
        self.beside = None if last else beside
        if (usual := self.end(gate, size, quick=quick)) is not None:
            score, rest = usual
            cost.observe(*batch, StepTimes((), score, 0.0, rest, size), always=True, steps=EVERY if quick else 1)
        elif beside is not None and beside[0] == size != beside[1] and len(last) > 1:
            means = {size: mean_of([score for score, _ in last]), beside[1]: beside[2]}
            cost.observe_beside(*batch, {rows: (BESIDE, BESIDE * mean, 0.0) for rows, mean in means.items()}, beside[1])
