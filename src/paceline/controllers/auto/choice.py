"""Which drafters draft how much, and which proposed nodes are scored: pure functions of chances and seconds.

Both maximise expected tokens per second. For budgets the rate of every combination is compared; for the nodes of a
step, whose drafts are already paid for, a second is priced at the tokens that it brings otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from paceline.tree import EMPTY_TREE, PROBE, prune

if TYPE_CHECKING:
    from paceline.controllers.auto.trust import State
    from paceline.tree import TokenTree

BETTER: Final = 1.005
"""A further drafter is used only where it makes decoding faster by this factor."""

_UNLIKELY: Final = 0.02


@dataclass(frozen=True, slots=True)
class Forecast:
    """What is expected of one drafter, for the whole batch.

    Attributes:
        gains: by levels from 0 on, tokens that a draft of so many levels adds where it finds something and is alone.
        rival_gains: the same where an earlier drafter's draft fails.
        seconds: by levels, what drafting takes, with this step's part of `reading`. finds: how often it proposes
            anything.
        width: nodes on a level.
        beside: what became of it behind earlier drafters.
        reading: seconds until it has read what it has not seen of the texts.
    """

    drafter: int
    gains: Sequence[float]
    rival_gains: Sequence[float]
    seconds: Sequence[float]
    finds: float
    width: float
    beside: Beside
    reading: float = 0.0

    def price(self, levels: int, table: Sequence[float], size: int, rate: float) -> float:
        """Tokens that the time of such a draft, and of scoring it, brings otherwise.

        Args:
            table, size: as of `choose`. rate: tokens per second.
        """
        rows = min(size + int(self.finds * size * levels * self.width), len(table) - 1)
        return rate * (self.seconds[levels] + table[rows] - table[size])

    def most_covered(self, levels: int, price: float) -> float:
        """The chance that others are right up to which a draft pays that helps where they fail.

        It is thought to be right there as often as alone at least, for who is not asked does not learn.
        """
        gain = self.finds * max(self.gains[levels], self.rival_gains[levels])
        return min(max(1.0 - price / gain, 0.0), 1.0) if gain > 0.0 else 0.0


@dataclass(frozen=True, slots=True)
class Beside:
    """How much of its use earlier drafters leave to one that drafts only where they promise little.

    Attributes:
        asked: share of steps in which it drafts. alone: in which the others have found nothing.
        failing: mean chance that the others fail in those where they have found something and it drafts, times their
            share.
    """

    asked: float = 1.0
    alone: float = 1.0
    failing: float = 0.0

    def moved(self, covered: float | None, rate: float, *, asked: bool) -> Beside:
        """With one more step; `covered` is the chance that others are right, None where they have found nothing."""
        now = (float(asked), float(covered is None), (1.0 - covered) * asked if covered is not None else 0.0)
        before = (self.asked, self.alone, self.failing)
        return Beside(*(old + rate * (new - old) for old, new in zip(before, now, strict=True)))


@dataclass(frozen=True, slots=True)
class Pick:
    """A drafter that is used, and most levels of its draft."""

    drafter: int
    levels: int


@dataclass(frozen=True, slots=True)
class PlannedDraft:
    """A drafter in a plan.

    Attributes:
        state: its trust when the plan was made; OFF: it drafts, and nothing of it is scored.
        gain: tokens of a step expected of it beyond those that its time would bring otherwise.
        most: it drafts where earlier drafters are right with no more than this chance.
        cheap: its drafts cost next to nothing.
    """

    name: str
    drafter: int
    state: State
    pick: Pick
    gain: float
    most: float
    cheap: bool


@dataclass(frozen=True, slots=True)
class ChosenDrafters:
    """Drafters to use, in their order, and what is expected of a step.

    Attributes:
        tokens, seconds: of a step of the batch. rows: that it scores. drafting: seconds of it that drafting takes.
    """

    picks: tuple[Pick, ...]
    tokens: float
    seconds: float
    rows: float
    drafting: float = 0.0

    @property
    def rate(self) -> float:
        """Expected tokens per second."""
        return self.tokens / self.seconds


def gains(levels: Sequence[Sequence[float]], first: int, depth: int, bucket_of: Sequence[int]) -> list[float]:
    """Expected accepted tokens of drafts of 0 to `depth` levels, summed over the batch.

    Args:
        levels: per sequence, the chance by depth bucket. first: bucket of the first level.
        bucket_of: depth -> bucket.
    """
    totals = [0.0] * (depth + 1)
    for chances in levels:
        reach = gain = 0.0
        for level in range(1, depth + 1):
            reach = chances[first] if level == 1 else reach * chances[bucket_of[level]]
            gain += reach
            totals[level] += gain
    return totals


def choose(forecasts: Sequence[Forecast], table: Sequence[float], size: int) -> ChosenDrafters:
    """The drafters and lengths with the most expected tokens per second; none where plain decoding is faster.

    Args:
        forecasts: in the order of the drafters. table: seconds of a step without drafting, by rows. size: sequences.
    """
    plain = ChosenDrafters((), float(size), table[size], float(size))
    best = plain
    for start in range(len(forecasts)):
        chosen = _extended(plain, forecasts[start], table, size)
        for later in forecasts[start + 1 :]:
            longer = _extended(chosen, later, table, size)
            if longer.rate > BETTER * chosen.rate:
                chosen = longer
        if chosen.rate > best.rate:
            best = chosen
    return best


def _extended(before: ChosenDrafters, forecast: Forecast, table: Sequence[float], size: int) -> ChosenDrafters:
    """The best choice with one more drafter, at its best length."""
    best: ChosenDrafters | None = None
    for levels in range(1, len(forecast.gains)):
        longer = _with(before, forecast, Pick(forecast.drafter, levels), table, size)
        if best is None or longer.rate > best.rate:
            best = longer
        elif forecast.gains[levels] - forecast.gains[levels - 1] < _UNLIKELY * size:
            break
    return before if best is None else best


def _with(before: ChosenDrafters, forecast: Forecast, pick: Pick, table: Sequence[float], size: int) -> ChosenDrafters:
    levels, beside = pick.levels, forecast.beside if before.picks else Beside()
    gain = forecast.finds * (beside.alone * forecast.gains[levels] + beside.failing * forecast.rival_gains[levels])
    drafting = before.drafting + min(1.0, size * beside.asked) * forecast.seconds[levels]
    share, more = forecast.finds * beside.asked, size * levels * forecast.width
    rows = before.rows + share * more
    if size == 1:  # it drafts or does not: the mean of two prices, not the price of a mean number of rows
        scoring = (1.0 - share) * _at(table, before.rows) + share * _at(table, before.rows + more)
    else:
        scoring = _at(table, rows)
    return ChosenDrafters((*before.picks, pick), before.tokens + gain, drafting + scoring, rows, drafting)


def _at(table: Sequence[float], rows: float) -> float:
    """Seconds of a number of rows between two."""
    low = min(int(rows), len(table) - 2)
    return table[low] + (min(rows, len(table) - 1) - low) * (table[low + 1] - table[low])


def worth_scoring(
    reaches: Sequence[Sequence[float] | None], table: Sequence[float], rows: int, rate: float, most: int
) -> list[list[int]]:
    """The nodes of a batch's trees that are worth their rows, in node order.

    Args:
        reaches: per tree the chance of each node, never above its parent's; None for a tree that stays whole.
        table: seconds of a step by rows. rows: that are scored in any case.
        rate: tokens per second, the price of a second. most: nodes of a tree.
    """
    ranked = sorted(
        (
            (-reach, tree, node)
            for tree, by_node in enumerate(reaches)
            for node, reach in enumerate(by_node or ())
            if reach > 0.0
        )
    )
    last, base = len(table) - 1, table[min(rows, len(table) - 1)]
    kept: list[tuple[int, int]] = []
    counts, gain, best, count = [0] * len(reaches), 0.0, 0.0, 0
    for reach, tree, node in ranked:
        if counts[tree] == most:
            continue
        counts[tree] += 1
        kept.append((tree, node))
        gain -= reach
        worth = gain - rate * (table[min(rows + len(kept), last)] - base)
        if worth > best:
            best, count = worth, len(kept)
    nodes: list[list[int]] = [[] for _ in reaches]
    for tree, node in sorted(kept[:count]):
        nodes[tree].append(node)
    return nodes


def cut(tree: TokenTree, nodes: Sequence[int]) -> TokenTree:
    """The tree reduced to some of its nodes, in their order; every node's parent must be among them."""
    if len(nodes) == len(tree):
        return tree
    if not nodes:
        return EMPTY_TREE
    keep_n = np.zeros(len(tree), np.bool_)
    keep_n[list(nodes)] = True
    return prune(tree, keep_n)


def fixed_shape(tree: TokenTree) -> bool:
    """Whether a tree must stay as it is, for what came up must not decide: it has drawn trials, or probes."""
    return any(trial.drawn for trials in tree.trials.values() for trial in trials) or bool((tree.kinds == PROBE).any())


def levels_by_source(tree: TokenTree) -> dict[int, int]:
    """Drafter -> the deepest level that it proposed."""
    deepest: dict[int, int] = {}
    for node, (source, depth) in enumerate(zip(tree.sources.tolist(), tree.depths.tolist(), strict=True)):
        for drafter in (source, *tree.also.get(node, ())):
            deepest[drafter] = max(deepest.get(drafter, 0), depth)
    return deepest
