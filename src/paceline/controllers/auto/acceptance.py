"""Online calibration: how often the target accepts a node, given that it accepted the node's parent.

By drafter, depth and the drafter's own confidence. Evidence comes only from parents that the target reached, the root
and the accepted path: there the accepted child is a success and every other child a failure; nodes below a rejected one
say nothing, nor do first-level nodes of a drafter where an earlier one is right. A proposed node that was not scored is
evidence too where the text that followed shows what would have become of it. Counts decay, so that the estimate follows
the text; a sequence that behaves unlike the others gets odds of its own.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from math import isfinite
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from paceline.tree import TokenTree

RIVAL: Final = 0
"""Depth bucket of a first-level node beside one of an earlier drafter: its chance where that one fails."""

DEPTH_BUCKET: Final = (RIVAL, 1, 2, 3, 3, 4, 4, 4, 4) + (5,) * 1016
"""Depth -> bucket: rival, 1, 2, 3-4, 5-8, more."""

BUCKETS: Final = 6
EDGES: Final = (0.1, 0.25, 0.4, 0.55, 0.7, 0.82, 0.92, 0.98)
BINS: Final = len(EDGES) + 1

_PRIOR_BIN: Final = (0.10, 0.25, 0.38, 0.5, 0.6, 0.7, 0.8, 0.88, 0.92)
_PRIOR_LEVEL: Final = 0.6
_PRIOR_RIVAL: Final = 0.8
"""Of a drafter's first level alone, what it is thought to be where an earlier one fails."""
_STRENGTH: Final = 4.0
_DECAY: Final = 0.995
_OWN_DECAY, _OWN_STRENGTH = 0.99, 24.0
_KEPT: Final = 40.0
"""Trials that an estimate from an earlier process weighs at most: today's text may be another."""


class Tally:
    """A decayed count of successes among trials."""

    __slots__ = ("hits", "tries")

    def __init__(self, hits: float = 0.0, tries: float = 0.0) -> None:
        self.hits, self.tries = hits, tries

    def mean(self, prior: float) -> float:
        """Posterior mean under a weak Beta prior with this mean."""
        return (self.hits + _STRENGTH * prior) / (self.tries + _STRENGTH)

    def add(self, success: bool) -> None:
        """One more trial, all earlier ones weighing less."""
        self.hits = self.hits * _DECAY + success
        self.tries = self.tries * _DECAY + 1.0


class Source:
    """What is known of one drafter.

    Attributes:
        bins: by confidence. cells: by depth bucket and confidence (depth bucket * BINS + bin), drawn to the bin's
            estimate.
        levels: by depth bucket, whether any child of an accepted parent was accepted, whatever the confidence.
        width: mean number of its children at a parent.
        finds: the share of sequences for which it proposes anything.
    """

    __slots__ = ("bins", "cells", "finds", "levels", "width")

    def __init__(self) -> None:
        self.bins = [Tally() for _ in range(BINS)]
        self.cells = [Tally() for _ in range(BINS * BUCKETS)]
        self.levels = [Tally() for _ in range(BUCKETS)]
        self.width = self.finds = 1.0

    def chance(self, bucket: int, confidence: float) -> float:
        """P(accepted | parent accepted) of a node."""
        index = bisect_right(EDGES, confidence)
        return self.cells[bucket * BINS + index].mean(self.bins[index].mean(_PRIOR_BIN[index]))

    def level(self, bucket: int) -> float:
        """P(one of its nodes accepted | parent accepted) before anything is drafted.

        Deeper levels are drawn to those before, and rivals to what the drafter is alone.
        """
        if bucket == RIVAL:
            return self.levels[RIVAL].mean(_PRIOR_RIVAL * self.level(1))
        if bucket == 1:
            return self.levels[1].mean(_PRIOR_LEVEL)
        return self.levels[bucket].mean(self.level(bucket - 1))

    def learn(self, bucket: int, confidence: float, success: bool) -> None:
        """The outcome of one node."""
        index = bisect_right(EDGES, confidence)
        self.cells[bucket * BINS + index].add(success)
        self.bins[index].add(success)

    def learn_level(self, bucket: int, children: int, success: bool) -> None:
        """The outcome of one accepted parent with so many children of this drafter."""
        self.levels[bucket].add(success)
        self.width += 0.05 * (children - self.width)

    def to_list(self) -> list[Any]:
        """JSON-ready."""
        tallies = [
            [[round(t.hits, 3), round(t.tries, 3)] for t in group] for group in (self.bins, self.cells, self.levels)
        ]
        return [*tallies, self.width, self.finds]

    @classmethod
    def restore(cls, kept: Any) -> Source:
        """From `to_list` of an earlier process, trusted less.

        Raises:
            ValueError: it is no such list.
        """
        acceptance = cls()
        bins, cells, levels, width, finds = kept
        acceptance.bins, acceptance.cells, acceptance.levels = (
            _tallies(bins, BINS),
            _tallies(cells, BINS * BUCKETS),
            _tallies(levels, BUCKETS),
        )
        acceptance.width, acceptance.finds = _number(width, 1e3), _number(finds, 1.0)
        return acceptance


class SequenceOdds:
    """How one sequence differs from the estimate over all, per drafter, as a factor on the odds."""

    __slots__ = ("counts", "odds")

    def __init__(self, sources: int) -> None:
        self.odds = [1.0] * sources
        self.counts = [(0.0, 0.0, 0.0)] * sources

    def add(self, source: int, hits: int, foreseen: float, tries: int) -> None:
        """Further outcomes: nodes accepted, the sum of their chances as thought, nodes tried."""
        decay, k, old = _OWN_DECAY**tries, _OWN_STRENGTH, self.counts[source]
        now = self.counts[source] = (old[0] * decay + hits, old[1] * decay + foreseen, old[2] * decay + tries)
        self.odds[source] = (now[0] + k) * (now[2] - now[1] + k) / ((now[1] + k) * (now[2] - now[0] + k))


class Acceptance:
    """The calibration of all drafters; `SequenceOdds` objects carry what is special to a sequence.

    Args:
        sources: number of drafters.
    """

    def __init__(self, sources: int) -> None:
        self.sources = [Source() for _ in range(sources)]

    def node(self, odds: SequenceOdds, source: int, bucket: int, confidence: float) -> float:
        """P(accepted | parent accepted) of a node with this confidence."""
        return _shifted(self.sources[source].chance(bucket, confidence), odds.odds[source])

    def level(self, odds: SequenceOdds, source: int, bucket: int) -> float:
        """P(one of the drafter's nodes accepted | parent accepted) before anything is drafted."""
        return _shifted(self.sources[source].level(bucket), odds.odds[source])

    def reach(self, odds: SequenceOdds, tree: TokenTree, off: AbstractSet[int] = frozenset()) -> list[float]:
        """Per node, the calibrated chance that it is accepted: the product along its path, and for one beside those of
        earlier drafters times the chance that they fail.

        Args:
            off: drafters of which nothing is scored; the chances of their nodes, and of what hangs off them, are 0.
        """
        reaches: list[float] = []
        last, earlier, covered = -1, 0.0, 0.0
        for node, (parent, source, bucket, confidence) in enumerate(nodes(tree)):
            out = bool(off) and off >= {source, *tree.also.get(node, ())}
            chance = 0.0 if out else self.node(odds, source, bucket, confidence)
            if parent < 0:
                if source != last:
                    last, earlier = source, min(covered, 1.0)
                chance *= 1.0 - earlier if bucket == RIVAL else 1.0
                covered += chance
            reaches.append(chance if parent < 0 else chance * reaches[parent])
        return reaches

    def covered(self, odds: SequenceOdds, tree: TokenTree, drafter: int, off: AbstractSet[int]) -> float | None:
        """The chance that one of the drafters before this one has the next token right; None where none of them has
        found any.
        """
        known = zip(tree.parents.tolist(), tree.sources.tolist(), self.reach(odds, tree, off), strict=True)
        first = [reach for parent, source, reach in known if parent < 0 and source < drafter]
        return min(sum(first), 1.0) if first else None

    def observe(
        self, odds: SequenceOdds, proposed: TokenTree, tokens: Sequence[int], accepted: Sequence[int], *, drawn: bool
    ) -> None:
        """Learn from what was proposed and what followed.

        Args:
            proposed: the merged tree, or the part that was scored.
            tokens: that the step committed. accepted: those of the tree's nodes that were accepted, for `drawn`.
            drawn: the tree has drawn trials, whose outcome the text does not tell: only accepted nodes and their
                siblings teach.
        """
        if not len(proposed):
            return
        path: set[int] = set(accepted) if drawn else _followed(proposed, tokens)
        kinds, families = proposed.kinds.tolist(), dict[tuple[int, int, int], list[int]]()
        known: dict[int, list[float]] = {}
        depths, sources = proposed.depths.tolist(), proposed.sources.tolist()
        right = min((sources[node] for node in path if depths[node] == 1), default=len(self.sources))
        for node, (parent, source, bucket, confidence) in enumerate(nodes(proposed)):
            if kinds[node] or (parent >= 0 and parent not in path) or depths[node] > len(tokens):
                continue
            if bucket == RIVAL and right < source:
                continue
            success, about = node in path, self.sources[source]
            counts = known.setdefault(source, [0, 0.0, 0])
            counts[0] += success
            counts[1] += about.chance(bucket, confidence)
            counts[2] += 1
            about.learn(bucket, confidence, success)
            family = families.setdefault((parent, source, bucket), [0, 0])
            family[0] += success
            family[1] += 1
        for (_, source, bucket), (successes, children) in families.items():
            self.sources[source].learn_level(bucket, children, successes > 0)
        self._learn_echoes(proposed, path)
        for source, (hits, foreseen, tries) in known.items():
            odds.add(source, int(hits), foreseen, int(tries))

    def _learn_echoes(self, tree: TokenTree, path: AbstractSet[int]) -> None:
        """Who begins as an earlier drafter did has nothing where that one fails."""
        parents, sources = tree.parents.tolist(), tree.sources.tolist()
        at_root = {source for parent, source in zip(parents, sources, strict=True) if parent < 0}
        failed = (others for node, others in tree.also.items() if parents[node] < 0 and node not in path)
        for source in {other for others in failed for other in others} - at_root:
            self.sources[source].levels[RIVAL].add(False)


class Gap:
    """Whether earlier drafters leave enough to a drafter that takes time (`Budget.needed`).

    Attributes:
        most: it is asked where one of them is right with no more than this chance.
    """

    __slots__ = ("_acceptance", "_drafter", "_off", "_own", "most")

    def __init__(
        self, acceptance: Acceptance, odds: SequenceOdds, drafter: int, most: float, off: AbstractSet[int]
    ) -> None:
        self._acceptance, self._own, self._drafter, self.most, self._off = acceptance, odds, drafter, most, off

    def covered(self, tree: TokenTree) -> float | None:
        """`Acceptance.covered` of a tree."""
        return self._acceptance.covered(self._own, tree, self._drafter, self._off) if len(tree) else None

    def __call__(self, tree: TokenTree) -> bool:
        return (self.covered(tree) or 0.0) <= self.most


class Stopper:
    """Ends a draft before the first level from which on nothing is worth its time (`Budget.go_on`).

    Further levels are looked at too: of a tile of rows the first costs more than it brings, the rest next to nothing.
    It reads only confidences of tokens already drawn, never of the level that it decides about.

    Args:
        prices: of each level from 1 on, the tokens that its time brings otherwise.
    """

    __slots__ = (
        "_acceptance", "_own", "_prices", "_source", "chance", "confidence", "levels", "price", "reach", "stopped",
    )  # fmt: skip

    def __init__(self, acceptance: Acceptance, odds: SequenceOdds, source: int, prices: Sequence[float]) -> None:
        self._acceptance, self._own, self._source, self._prices = acceptance, odds, source, prices
        self.confidence = self.reach = self.chance = 1.0
        self.levels, self.stopped, self.price = 1, 0, 0.0

    def __call__(self, depth: int, confidence: float, features: object) -> bool:
        if depth == 2:  # a new draft
            self.confidence = self.reach = 1.0
            self.stopped = 0
        last = min(confidence / self.confidence, 1.0) if self.confidence > 0 else 0.0
        self.confidence = confidence
        self.reach *= self._acceptance.node(self._own, self._source, DEPTH_BUCKET[depth - 1], last)
        if not self._pays(depth):
            self.stopped, self.levels = depth, depth - 1
            return False
        self.levels = depth
        return True

    def _pays(self, depth: int) -> bool:
        """Whether this level, or the next few with it, bring more than their time does otherwise."""
        reach, gain = self.reach, 0.0
        for level in range(depth, max(depth, len(self._prices)) + 1):
            reach *= self._acceptance.level(self._own, self._source, DEPTH_BUCKET[level])
            price = self._prices[min(level, len(self._prices)) - 1]
            if level == depth:
                self.chance, self.price = reach, price
            gain += reach - price
            if gain > 0.0:
                return True
        return False


def nodes(tree: TokenTree) -> Iterator[tuple[int, int, int, float]]:
    """Parent, drafter, depth bucket and confidence of every node."""
    parents, sources = tree.parents.tolist(), tree.sources.tolist()
    first = min((source for parent, source in zip(parents, sources, strict=True) if parent < 0), default=0)
    for parent, source, depth, confidence in zip(
        parents, sources, tree.depths.tolist(), tree.confidence.tolist(), strict=True
    ):
        yield parent, source, RIVAL if parent < 0 and source > first else DEPTH_BUCKET[depth], confidence


def _followed(tree: TokenTree, tokens: Sequence[int]) -> set[int]:
    """The nodes that the text went along, scored or not."""
    followed: set[int] = set()
    for node, (token, parent, depth) in enumerate(
        zip(tree.tokens.tolist(), tree.parents.tolist(), tree.depths.tolist(), strict=True)
    ):
        if depth <= len(tokens) and token == tokens[depth - 1] and (parent < 0 or parent in followed):
            followed.add(node)
    return followed


def _shifted(chance: float, odds: float) -> float:
    """A probability after its odds were multiplied."""
    return chance * odds / (1.0 + chance * (odds - 1.0))


def _tallies(pairs: Any, count: int) -> list[Tally]:
    tallies = []
    for hits, tries in pairs:
        if not 0.0 <= _number(hits, 1e9) <= _number(tries, 1e9) + 1e-3:
            raise ValueError(f"{hits!r} successes among {tries!r}")
        share = min(1.0, _KEPT / tries) if tries else 0.0
        tallies.append(Tally(float(hits) * share, float(tries) * share))
    if len(tallies) != count:
        raise ValueError(f"{len(tallies)} counts instead of {count}")
    return tallies


def _number(value: Any, most: float) -> float:
    if not isfinite(number := float(value)) or abs(number) > most:
        raise ValueError(f"{value!r} is not a valid number")
    return number
