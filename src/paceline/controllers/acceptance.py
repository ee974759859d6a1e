"""Online calibration: how often the target accepts a node, given that it accepted the node's parent.

In: scored trees and their verdicts. Out: probabilities by drafter, depth and the drafter's own confidence. Not here: costs and
decisions (`controllers.auto`).

Evidence comes only from parents that the target reached: the root and the accepted path. There the accepted child is a success
and every other child a failure; nodes further below a rejected one say nothing. Counts decay, so that the estimate follows the
text, and decay faster on an outcome that was thought nearly impossible. A sequence that behaves unlike the others gets odds of
its own.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from operator import mul
from typing import TYPE_CHECKING, Final

from paceline.tree.chain_columns import lone_source

if TYPE_CHECKING:
    from paceline.tree.token_tree import TokenTree

RIVAL: Final = 0
"""Depth bucket of a first-level node beside one of an earlier drafter: it only matters where that one fails."""

DEPTH_BUCKET: Final = (RIVAL, 1, 2, 3, 3, 4, 4, 4, 4) + (5,) * 1016
"""Depth -> bucket: rival, 1, 2, 3-4, 5-8, more."""

BUCKETS: Final = 6
EDGES: Final = (0.1, 0.25, 0.4, 0.55, 0.7, 0.82, 0.92, 0.98)
BINS: Final = len(EDGES) + 1

_PRIOR_BIN: Final = (0.10, 0.25, 0.38, 0.5, 0.6, 0.7, 0.8, 0.88, 0.92)
_PRIOR: Final = 0.6
_PRIOR_RIVAL: Final = 0.3
_STRENGTH: Final = 4.0
_DECAY: Final = 0.995
_REFRESH: Final = 64
_SURPRISE, _FORGET = 0.05, 0.6
_OWN_DECAY, _OWN_STRENGTH = 0.99, 24.0


class Tally:
    """A decayed count of successes among trials."""

    __slots__ = ("hits", "tries")

    def __init__(self) -> None:
        self.hits = self.tries = 0.0

    def mean(self, prior: float) -> float:
        """Posterior mean under a weak Beta prior with this mean."""
        return (self.hits + _STRENGTH * prior) / (self.tries + _STRENGTH)

    def add(self, success: bool, decay: float) -> None:
        """One more trial, all earlier ones weighing less."""
        self.hits = self.hits * decay + success
        self.tries = self.tries * decay + 1.0

    def add_many(self, hits: int, tries: int) -> None:
        """So many trials with so many successes, in an order that nobody knows."""
        decay = _DECAY**tries
        even = (1.0 - decay) / (1.0 - _DECAY)
        self.hits = self.hits * decay + even * hits / tries
        self.tries = self.tries * decay + even


class Source:
    """What is known of one drafter: by confidence bin, by bin and depth, and by depth alone (any of its children accepted).

    Attributes:
        chance: per cell (depth bucket * BINS + bin), P(accepted | parent accepted), kept ready for reading.
        level: per depth bucket, P(one of its children of an accepted parent is accepted), whatever their confidence.
        width: mean number of its children at a parent.
    """

    __slots__ = ("_news", "bins", "cells", "chance", "level", "levels", "width")

    def __init__(self) -> None:
        self.bins = [Tally() for _ in range(BINS)]
        self.cells = [Tally() for _ in range(BINS * BUCKETS)]
        self.levels = [Tally() for _ in range(BUCKETS + 1)]  # the last: all depths together
        self.width = 1.0
        self.chance: list[float] = []
        self.level: list[float] = []
        self._news = 0
        self._refresh()

    def learn(self, cell: int, success: bool) -> None:
        """The outcome of one node, written out for speed. Other cells of its bin hear of it at the next refresh."""
        tally, bin_ = self.cells[cell], self.bins[cell % BINS]
        decay = _FORGET if success and self.chance[cell] < _SURPRISE else _DECAY
        tally.hits = tally.hits * decay + success
        tally.tries = tally.tries * decay + 1.0
        bin_.hits = bin_.hits * decay + success
        bin_.tries = bin_.tries * decay + 1.0
        prior = (bin_.hits + _STRENGTH * _PRIOR_BIN[cell % BINS]) / (bin_.tries + _STRENGTH)
        self.chance[cell] = (tally.hits + _STRENGTH * prior) / (tally.tries + _STRENGTH)
        self._news += 1
        if self._news >= _REFRESH:
            self._refresh()

    def learn_level(self, bucket: int, children: int, success: bool) -> None:
        """The outcome of one accepted parent with so many children of this drafter."""
        decay = _FORGET if success and self.level[bucket] < _SURPRISE else _DECAY
        self.levels[bucket].add(success, decay)
        if bucket != RIVAL:
            self.levels[BUCKETS].add(success, decay)
        self.level[bucket] = self._level(bucket)
        self.width += 0.05 * (children - self.width)

    def learn_levels(self, hits: Sequence[int], tries: Sequence[int]) -> None:
        """`learn_level` of so many accepted parents with one child each, by depth bucket, all at once."""
        for bucket, (stood, tried) in enumerate(zip(hits, tries, strict=True)):
            if tried:
                self.levels[bucket].add_many(stood, tried)
        self.levels[BUCKETS].add_many(sum(hits), sum(tries))
        self.level = [self._level(bucket) for bucket in range(BUCKETS)]

    def take(self, bins: list[Tally], cells: list[Tally], levels: list[Tally], width: float) -> None:
        """Begin from these counts."""
        self.bins, self.cells, self.levels, self.width = bins, cells, levels, width
        self._refresh()

    def _level(self, bucket: int) -> float:
        return self.levels[bucket].mean(_PRIOR_RIVAL if bucket == RIVAL else self.levels[BUCKETS].mean(_PRIOR))

    def _refresh(self) -> None:
        priors = [tally.mean(prior) for tally, prior in zip(self.bins, _PRIOR_BIN, strict=True)] * BUCKETS
        self.chance = [tally.mean(prior) for tally, prior in zip(self.cells, priors, strict=True)]
        self.level = [self._level(bucket) for bucket in range(BUCKETS)]
        self._news = 0


class Own:
    """How one sequence differs from the estimate over all, per drafter, as a factor on the odds."""

    __slots__ = ("counts", "odds")

    def __init__(self, sources: int) -> None:
        self.odds = [1.0] * sources
        self.counts = [(0.0, 0.0, 0.0)] * sources

    def add(self, source: int, hits: int, foreseen: float, tries: int) -> None:
        """The outcome of one step: nodes accepted, the sum of their chances as thought, nodes tried."""
        decay, k, old = _OWN_DECAY**tries, _OWN_STRENGTH, self.counts[source]
        now = self.counts[source] = (old[0] * decay + hits, old[1] * decay + foreseen, old[2] * decay + tries)
        self.odds[source] = (now[0] + k) * (now[2] - now[1] + k) / ((now[1] + k) * (now[2] - now[0] + k))


def shifted(chance: float, odds: float) -> float:
    """A probability after its odds were multiplied."""
    return chance * odds / (1.0 + chance * (odds - 1.0))


class Acceptance:
    """The calibration of all drafters; `Own` objects carry what is special to a sequence.

    Args:
        sources: number of drafters.
    """

    def __init__(self, sources: int) -> None:
        self.sources = [Source() for _ in range(sources)]

    def node(self, own: Own, source: int, bucket: int, confidence: float) -> float:
        """P(accepted | parent accepted) of a node with this confidence, `bucket` from DEPTH_BUCKET (or RIVAL)."""
        return shifted(self.sources[source].chance[bucket * BINS + bisect_right(EDGES, confidence)], own.odds[source])

    def level(self, own: Own, source: int, bucket: int) -> float:
        """P(one of the drafter's nodes accepted | parent accepted) before anything is drafted."""
        return shifted(self.sources[source].level[bucket], own.odds[source])

    def levels(self, own: Own, source: int) -> list[float]:
        """`level` for all depth buckets."""
        odds = own.odds[source]
        return [chance * odds / (1.0 + chance * (odds - 1.0)) for chance in self.sources[source].level]

    def reach(self, own: Own, tree: TokenTree) -> list[float]:
        """Per node, the calibrated chance that it is accepted: the product along its path."""
        if (only := lone_source(tree)) >= 0:
            return self._chain_reach(own, only, tree.confidence.tolist())
        parents, sources = tree.parents.tolist(), tree.sources.tolist()
        first = first_source(parents, sources)
        chances, odds = [source.chance for source in self.sources], own.odds
        reach: list[float] = []
        for parent, source, depth, confidence in zip(parents, sources, tree.depths.tolist(), tree.confidence.tolist(), strict=True):
            bucket = RIVAL if parent < 0 and source > first else DEPTH_BUCKET[depth]
            chance = chances[source][bucket * BINS + bisect_right(EDGES, confidence)]
            chance = chance * odds[source] / (1.0 + chance * (odds[source] - 1.0))
            reach.append(chance if parent < 0 else chance * reach[parent])
        return reach

    def chances(self, own: Own, source: int) -> tuple[list[float], float]:
        """Of one drafter, for `pick.chain_count`: the chances of its cells, and the odds of this sequence."""
        return self.sources[source].chance, own.odds[source]

    def _chain_reach(self, own: Own, source: int, confidence: Sequence[float]) -> list[float]:
        """`reach` of a chain by one drafter."""
        chances, odds, reach, found = self.sources[source].chance, own.odds[source], 1.0, []
        for depth, sure in enumerate(confidence, start=1):
            chance = chances[DEPTH_BUCKET[depth] * BINS + bisect_right(EDGES, sure)]
            reach *= chance * odds / (1.0 + chance * (odds - 1.0))
            found.append(reach)
        return found

    def _observe_chain(self, own: Own, source: int, confidence: Sequence[float], taken: int) -> None:
        """`observe` for a chain by one drafter, `taken` nodes of which stand."""
        known, foreseen, tried = self.sources[source], 0.0, min(taken + 1, len(confidence))
        for depth in range(1, tried + 1):
            bucket = DEPTH_BUCKET[depth]
            cell = bucket * BINS + bisect_right(EDGES, confidence[depth - 1])
            foreseen += known.chance[cell]
            known.learn(cell, depth <= taken)
        for depth in range(1, tried + 1):
            known.learn_level(DEPTH_BUCKET[depth], 1, depth <= taken)
        own.add(source, taken, foreseen, tried)

    def observe_chains(self, own: Own, source: int, outcomes: Iterable[tuple[int, int, int]]) -> None:
        """Learn how deep chains by one drafter stood, whatever its confidence was.

        Args:
            outcomes: nodes scored, nodes accepted, and how often that was so.
        """
        known, hits, tries = self.sources[source], [0] * BUCKETS, [0] * BUCKETS
        for scored, stood, times in outcomes:
            for depth in range(1, min(stood + 1, scored) + 1):
                bucket = DEPTH_BUCKET[depth]
                tries[bucket] += times
                hits[bucket] += times * (depth <= stood)
        foreseen = sum(map(mul, known.level, tries))
        known.learn_levels(hits, tries)
        own.add(source, sum(hits), foreseen, sum(tries))

    def observe(self, own: Own, tree: TokenTree, path: Sequence[int]) -> list[int]:
        """Learn from one scored tree and the accepted path; returns the number of accepted nodes per drafter."""
        accepted = [0] * len(self.sources)
        if not len(tree.tokens):
            return accepted
        if (only := lone_source(tree)) >= 0:
            self._observe_chain(own, only, tree.confidence.tolist(), len(path))
            accepted[only] = len(path)
            return accepted
        parents, sources, depths = tree.parents.tolist(), tree.sources.tolist(), tree.depths.tolist()
        confidence, kinds = tree.confidence.tolist(), tree.kinds.tolist()
        first, stands = first_source(parents, sources), set(path)
        foreseen, tries = [0.0] * len(accepted), [0] * len(accepted)
        families: dict[tuple[int, int, int], list[int]] = {}
        for node, parent in enumerate(parents):
            if (parent >= 0 and parent not in stands) or kinds[node]:
                continue
            source, success = sources[node], node in stands
            bucket = RIVAL if parent < 0 and source > first else DEPTH_BUCKET[depths[node]]
            cell, known = bucket * BINS + bisect_right(EDGES, confidence[node]), self.sources[source]
            foreseen[source] += known.chance[cell]
            tries[source] += 1
            accepted[source] += success
            known.learn(cell, success)
            family = families.setdefault((parent, source, bucket), [0, 0])
            family[0] += success
            family[1] += 1
        for (_, source, bucket), (successes, children) in families.items():
            self.sources[source].learn_level(bucket, children, successes > 0)
        for source, count in enumerate(tries):
            if count:
                own.add(source, accepted[source], foreseen[source], count)
        return accepted


def first_source(parents: Sequence[int], sources: Sequence[int]) -> int:
    """The earliest drafter with a first-level node; 0 of an empty tree."""
    if not sources or len(set(sources)) == 1:
        return sources[0] if sources else 0
    return min(source for parent, source in zip(parents, sources, strict=True) if parent < 0)
