"""What each drafter brought in a step: its tokens, minus the tokens that its time and its rows would have brought otherwise.

In: scored trees, accepted nodes, measured times and prices. Out: every asked drafter's guard (`controllers.watch`) is told.
Not here: prices, what follows from it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.controllers.watch import Mode

if TYPE_CHECKING:
    from paceline.controllers.base import StepTimes
    from paceline.controllers.curve import Line
    from paceline.controllers.voice import Drafting
    from paceline.tree.token_tree import TokenTree

logger = logging.getLogger("paceline.controllers")


@dataclass(frozen=True, slots=True)
class Charge:
    """What time costs.

    Attributes:
        table: seconds of a step by rows. rate: tokens per second. lines: per drafter, what its levels cost.
        levels: per drafter, levels that it drafted in this step; None where it was not asked.
    """

    table: Sequence[float]
    rate: float
    lines: Sequence[Line]
    levels: Sequence[int | None]

    def drafting(self, drafter: int, seconds: float) -> float:
        """Seconds to charge a drafter for; a step that was disturbed costs it no more than twice as much as usual."""
        levels = self.levels[drafter]
        return seconds if levels is None else min(seconds, 2 * self.lines[drafter].at(levels))


def judge(
    names: Sequence[str | None],
    batch: Sequence[Drafting],
    trees: Sequence[TokenTree],
    accepted: Sequence[Sequence[int]],
    *,
    times: StepTimes,
    charge: Charge,
) -> Iterator[tuple[int, Drafting]]:
    """Tell the guards of one step.

    Args:
        names: of the drafters, None where what it costs is not known yet.
        accepted: per sequence, accepted nodes by drafter.
    Yields:
        (drafter, sequence) of each guard that was told.
    """
    size, table = len(trees), charge.table
    nodes = times.rows - size
    row = (table[min(times.rows, len(table) - 1)] - table[size]) / nodes if nodes > 0 else 0.0
    for drafter, name in enumerate(names):
        asked = [i for i, one in enumerate(batch) if one.modes[drafter] is not Mode.SKIP]
        if not asked or name is None:
            continue
        seconds = charge.drafting(drafter, times.draft[drafter]) / len(asked)
        for i in asked:
            scored = trees[i].sources.tolist().count(drafter)
            net = accepted[i][drafter] - charge.rate * (seconds + scored * row)
            watch = batch[i].watches[drafter]
            if watch.record(net, batch[i].modes[drafter], scored, accepted[i][drafter]):
                logger.debug("%s %s", name, "sleeps" if watch.asleep else "wakes")
            yield drafter, batch[i]
