"""What rows, drafters and plain decoding are worth at present: looked up often enough, and not oftener.

In: measured costs, the size and context of a step's batch. Out: seconds by rows, each drafter's line, the rate to beat, who cannot
pay. Not here: measuring (`controllers.cost_model`), what is made of it (`controllers.planner`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from paceline.controllers.buckets import context_bucket
from paceline.controllers.cost_model import CostModel
from paceline.controllers.curve import Line
from paceline.controllers.gate import Gate
from paceline.controllers.prices import Rates, hopeless

RECHECK: Final = 4096
"""Steps after which a drafter that could not pay at all is timed again."""

LOOK_EVERY, SETTLED = 2, 64
"""After so many steps, costs are looked up once in so many."""

FIRST_ROWS: Final = 8
"""Rows of one sequence that are measured before anything is planned."""


class Outlook:
    """Costs of the step at hand.

    Args:
        cost_model: measured times.
        drafters: their names.
    Attributes:
        table: seconds of a step by rows; drafted: where drafts were asked for. lines: each drafter's seconds by levels.
        rate: tokens a second that a step must beat. hopeless: drafters that could not pay if every token stood.
        seen: changes with every look.
    """

    __slots__ = ("_cost", "_names", "_ready", "drafted", "hopeless", "lines", "rate", "seen", "table")

    def __init__(self, cost_model: CostModel, drafters: Sequence[str]) -> None:
        self._cost, self._names, self._ready = cost_model, drafters, 0
        self.table, self.rate = [0.0, 1.0], 1.0
        self.drafted = self.table
        self.lines, self.hopeless = list[Line](), list[bool]()
        self.seen = (0, 0, 0)

    @property
    def settled(self) -> bool:
        """Whether enough was measured to trust a look for a while."""
        return self._cost.steps >= SETTLED

    def prepare(self, rows: int, context: int) -> None:
        """See to it that steps of so many rows have been measured."""
        if rows > self._ready:
            self._ready = rows
            self._cost.prepare(rows, context)

    def begin(self, size: int, context: int) -> None:
        """See to it that a batch's first rows have been measured, anew where that is long ago."""
        first = size + FIRST_ROWS - 1
        if self._cost.stale:
            self._ready = first - 1
        self.prepare(first, context)

    def look(self, size: int, context: int, most_nodes: int, gate: Gate, rates: Rates) -> None:
        """Take the costs of a batch as they are now, unless they were looked up a moment ago.

        Args:
            size: sequences. context: tokens of the longest one. most_nodes: of each one's tree.
            gate: of such batches. rates: tokens a second lately.
        """
        before, every = self.seen, LOOK_EVERY if size == 1 else 1
        self.seen = (size, context_bucket(context), self._cost.steps // every)
        if self.seen == before and self.settled:
            return
        cost = self._cost
        self.table = cost.table(size, context, size * (most_nodes + 1))
        self.drafted = cost.drafted(size, context, self.table) if size == 1 else self.table
        self.lines = [cost.line(name, size) for name in self._names]
        plain = gate.plain_seconds(size, self.table)
        self.rate = max(size / min(plain, self.table[size]), rates.of(size, self.table))
        trusted = cost.steps % RECHECK >= LOOK_EVERY
        self.hopeless = [
            trusted and cost.knows(name, size) and hopeless(line, size, self.table, self.rate)
            for name, line in zip(self._names, self.lines, strict=True)
        ]
