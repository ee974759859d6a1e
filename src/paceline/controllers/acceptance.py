"""Online calibration: how often the target accepts a node, given that it accepted the node's parent.

In: scored trees and their verdicts. Out: probabilities by drafter, depth and the drafter's own confidence. Not here: costs and
decisions (`controllers.auto`).

Evidence comes only from parents that the target reached: the root and the accepted path. There the accepted child is a success and
every other child a failure; nodes further below a rejected one say nothing. Counts decay, so that the estimate follows the text, and
decay faster on an outcome that was thought nearly impossible. A sequence that behaves unlike the others gets odds of its own.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

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
_DECAY: Final = 0.99
_SURPRISE, _FORGET = 0.05, 0.6
_OWN_DECAY, _OWN_STRENGTH = 0.98, 8.0


class Tally:
    """A decayed count of successes among trials."""

    __slots__ = ("hits", "tries")

    def __init__(self) -> None:
        self.hits = self.tries = 0.0

    def mean(self, prior: float) -> float:
        """Posterior mean under a weak Beta prior with this mean."""
        return (self.hits + _STRENGTH * prior) / (self.tries + _STRENGTH)

    def add(self, success: bool, expected: float) -> None:
        """One more trial, whose success had the chance `expected`."""
        decay = _FORGET if success and expected < _SURPRISE else _DECAY
        self.hits = self.hits * decay + success
        self.tries = self.tries * decay + 1.0


class Source:
    """What is known of one drafter: by confidence bin, by bin and depth, and by depth alone (any of its children accepted)."""

    __slots__ = ("bins", "cells", "levels", "width")

    def __init__(self) -> None:
        self.bins = [Tally() for _ in range(BINS)]
        self.cells = [Tally() for _ in range(BINS * BUCKETS)]
        self.levels = [Tally() for _ in range(BUCKETS + 1)]  # the last: all depths together
        self.width = 1.0

    def node(self, bucket: int, bin_: int) -> float:
        """Chance that a node of this depth bucket and confidence bin is accepted at its accepted parent."""
        prior = self.bins[bin_].mean(_PRIOR_BIN[bin_])
        return self.cells[bucket * BINS + bin_].mean(prior)

    def level(self, bucket: int) -> float:
        """Chance that one of the drafter's children of an accepted parent is accepted."""
        if bucket == RIVAL:
            return self.levels[RIVAL].mean(_PRIOR_RIVAL)
        return self.levels[bucket].mean(self.levels[BUCKETS].mean(_PRIOR))


class Own:
    """How one sequence differs from the estimate over all, per drafter, as a factor on the odds."""

    __slots__ = ("counts", "odds")

    def __init__(self, sources: int) -> None:
        self.odds = [1.0] * sources
        self.counts = [[0.0, 0.0, 0.0] for _ in range(sources)]

    def add(self, source: int, success: bool, expected: float) -> None:
        """One more trial of a node of `source`, thought to succeed with the chance `expected`."""
        counts = self.counts[source]
        hits = counts[0] = counts[0] * _OWN_DECAY + success
        foreseen = counts[1] = counts[1] * _OWN_DECAY + expected
        tries = counts[2] = counts[2] * _OWN_DECAY + 1.0
        k = _OWN_STRENGTH
        self.odds[source] = (hits + k) * (tries - foreseen + k) / ((foreseen + k) * (tries - hits + k))


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
        return shifted(self.sources[source].node(bucket, bisect_right(EDGES, confidence)), own.odds[source])

    def level(self, own: Own, source: int, bucket: int) -> float:
        """P(one of the drafter's nodes accepted | parent accepted) before anything is drafted."""
        return shifted(self.sources[source].level(bucket), own.odds[source])

    def reach(self, own: Own, tree: TokenTree) -> list[float]:
        """Per node, the calibrated chance that it is accepted: the product along its path."""
        parents, sources = tree.parents.tolist(), tree.sources.tolist()
        depths, confidence = tree.depths.tolist(), tree.confidence.tolist()
        first = first_source(parents, sources)
        reach: list[float] = []
        for parent, source, depth, own_confidence in zip(parents, sources, depths, confidence, strict=True):
            bucket = RIVAL if parent < 0 and source > first else DEPTH_BUCKET[depth]
            chance = self.node(own, source, bucket, own_confidence)
            reach.append(chance if parent < 0 else chance * reach[parent])
        return reach

    def observe(self, own: Own, tree: TokenTree, path: Sequence[int]) -> list[int]:
        """Learn from one scored tree and the accepted path; returns the number of accepted nodes per drafter."""
        accepted = [0] * len(self.sources)
        parents, sources, depths = tree.parents.tolist(), tree.sources.tolist(), tree.depths.tolist()
        confidence, kinds = tree.confidence.tolist(), tree.kinds.tolist()
        first = first_source(parents, sources)
        stands = set(path)
        won: dict[tuple[int, int, int], list[int]] = {}
        for node, parent in enumerate(parents):
            if kinds[node] or (parent >= 0 and parent not in stands):
                continue
            source, success = sources[node], node in stands
            bucket = RIVAL if parent < 0 and source > first else DEPTH_BUCKET[depths[node]]
            self._add(own, source, bucket, confidence[node], success)
            family = won.setdefault((parent, source, bucket), [0, 0])
            family[0] += success
            family[1] += 1
            accepted[source] += success
        for (_, source, bucket), (success, width) in won.items():
            known = self.sources[source]
            expected = known.level(bucket)
            known.levels[bucket].add(success > 0, expected)
            if bucket != RIVAL:
                known.levels[BUCKETS].add(success > 0, expected)
            known.width += 0.05 * (width - known.width)
        return accepted

    def _add(self, own: Own, source: int, bucket: int, confidence: float, success: bool) -> None:
        known, bin_ = self.sources[source], bisect_right(EDGES, confidence)
        expected = known.node(bucket, bin_)
        own.add(source, success, expected)
        known.cells[bucket * BINS + bin_].add(success, expected)
        known.bins[bin_].add(success, expected)


def first_source(parents: Sequence[int], sources: Sequence[int]) -> int:
    """The earliest drafter with a first-level node; 0 of an empty tree."""
    return min((source for parent, source in zip(parents, sources, strict=True) if parent < 0), default=0)
