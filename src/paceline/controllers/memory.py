"""What drafters were found to be worth, kept on disk for the next process.

In: an automatic controller's estimates, and where to keep them. Out: the same estimates in a later process, trusted less. Not here:
costs (`controllers.cost_model`), which a process measures by itself, and any text.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING, Any, Final

from paceline.controllers.acceptance import BINS, BUCKETS, Source, Tally
from paceline.controllers.watch import Watch

if TYPE_CHECKING:
    from paceline.controllers.cost_store import CostKey, CostStore

logger = logging.getLogger("paceline.controllers")

KEPT: Final = 40.0
"""Trials that what is remembered weighs at most: today's text may be another."""

FIRST: Final = 2
"""Sequences that have ended before anything is kept; then at every doubling."""

Latest = dict[tuple[int, bool], Watch]


@dataclass(frozen=True, slots=True)
class MemoryKey:
    """What estimates belong to; another value in any field is another file.

    Attributes:
        costs: machine, versions and shape of the target.
        model: name of the target.
        methods: drafters with their options, as text.
    """

    costs: CostKey
    model: str
    methods: str


class Memory:
    """The estimates of one controller.

    Args:
        store: a file; None keeps nothing.
        sources: what is known of each drafter. yields: how often each proposes. latest: its guards; all three are brought up to
            date here.
    """

    def __init__(self, store: CostStore | None, sources: Sequence[Source], yields: list[float], latest: Latest) -> None:
        self.store, self.sources, self.yields, self.latest = store, sources, yields, latest
        self._ended, self._next = 0, FIRST
        if store is not None and (kept := store.load()) is not None:
            try:
                self._recall(kept)
            except (KeyError, TypeError, ValueError, IndexError, OverflowError) as error:
                logger.warning("what %s holds makes no sense (%s); learning anew", store.path, error)

    @property
    def is_due(self) -> bool:
        """Whether the estimates are written when the next sequence ends."""
        return self.store is not None and self._ended + 1 >= self._next

    def keep(self) -> None:
        """One more sequence has ended; write the estimates if it is time."""
        due, self._ended = self.is_due, self._ended + 1
        if self.store is None or not due:
            return
        self._next = 2 * self._ended
        self.store.save(
            {
                "sources": [[_pairs(one.bins), _pairs(one.cells), _pairs(one.levels), one.width] for one in self.sources],
                "yields": self.yields,
                "watches": [[*place, *watch.to_list()] for place, watch in self.latest.items()],
            }
        )

    def _recall(self, kept: dict[str, Any]) -> None:
        """Take over what a file says, all of it or nothing."""
        sources = [
            (_tallies(bins, BINS), _tallies(cells, BINS * BUCKETS), _tallies(levels, BUCKETS + 1), _number(width, 1e3))
            for bins, cells, levels, width in kept["sources"]
        ]
        yields = [_number(value, 1.0) for value in kept["yields"]]
        watches = {(int(i), bool(greedy)): Watch.from_list([_number(x, 1e9) for x in rest]) for i, greedy, *rest in kept["watches"]}
        if not len(sources) == len(yields) == len(self.sources) or not all(0 <= i < len(yields) for i, _ in watches):
            raise ValueError("it is about other drafters")
        for source, (bins, cells, levels, width) in zip(self.sources, sources, strict=True):
            source.take(bins, cells, levels, width)
        self.yields[:] = yields
        self.latest.update(watches)


def _pairs(tallies: Sequence[Tally]) -> list[list[float]]:
    return [[round(tally.hits, 3), round(tally.tries, 3)] for tally in tallies]


def _tallies(pairs: Any, count: int) -> list[Tally]:
    """Counts that weigh `KEPT` trials at most."""
    found = []
    for hits, tries in pairs:
        if not 0.0 <= _number(hits, 1e9) <= _number(tries, 1e9) + 1e-3:
            raise ValueError(f"{hits!r} successes among {tries!r}")
        tally = Tally()
        tally.tries = min(float(tries), KEPT)
        tally.hits = min(float(hits) * (tally.tries / tries if tries else 0.0), tally.tries)
        found.append(tally)
    if len(found) != count:
        raise ValueError(f"{len(found)} counts instead of {count}")
    return found


def _number(value: Any, most: float) -> float:
    if not isfinite(number := float(value)) or abs(number) > most:
        raise ValueError(f"{value!r} is no sound number")
    return number
