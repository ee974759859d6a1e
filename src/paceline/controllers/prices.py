"""What rows and tries cost at the present batch size, read off the tables of the cost model.

In: seconds of a step by rows, a drafter's line over levels. Out: seconds, or shares of a plain step. Not here: what is measured
(`controllers.cost_model`), and decisions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from paceline.controllers.acceptance import DEPTH_BUCKET, RIVAL
from paceline.controllers.buckets import batch_bucket, plain_ratio

if TYPE_CHECKING:
    from paceline.controllers.acceptance import Acceptance, Own
    from paceline.controllers.curve import Line
    from paceline.tree.token_tree import TokenTree

_DECAY = 0.98
_LEAST_REACH = 0.05
TRY_DEPTHS: Final = (2, 4, 8)
DEPTHS: Final = (1, 2, 4, 8, 16)


class Rates:
    """Tokens per second lately, by batch bucket; of another size of the bucket than was seen last, scaled as plain steps are."""

    def __init__(self) -> None:
        self._sums: dict[int, tuple[int, float, float]] = {}  # size, tokens, seconds

    def of(self, size: int, table: Sequence[float]) -> float:
        """The rate at this batch size; 0 before the first step.

        Args:
            table: seconds of a step by rows.
        """
        seen, tokens, seconds = self._sums.get(batch_bucket(size), (size, 0.0, 1.0))
        return tokens / seconds * _more(seen, size, table)

    def count(self, size: int, tokens: int, seconds: float, table: Sequence[float], steps: int = 1) -> None:
        """What further steps brought."""
        seen, before, spent = self._sums.get(batch_bucket(size), (size, 0.0, 0.0))
        decay = _DECAY**steps
        self._sums[batch_bucket(size)] = size, before * decay * _more(seen, size, table) + tokens, spent * decay + seconds


def _more(seen: int, size: int, table: Sequence[float]) -> float:
    """Tokens a second of plain steps of `size` sequences for each of `seen`."""
    return 1.0 if seen == size else size / seen / plain_ratio(size, seen, table)


@dataclass(frozen=True, slots=True)
class Prices:
    """What time costs in one step.

    Attributes:
        table: seconds of a step by rows. size: sequences. rate: tokens per second. taken: nodes that are there already.
        per_level: seconds of a draft's level for the whole batch.
    """

    table: Sequence[float]
    size: int
    rate: float
    taken: int
    per_level: float


def best_depth(chance: float, levels: Sequence[float], depth: int, prices: Prices, width: float) -> tuple[float, int]:
    """Expected gain of a draft's best depth minus the price of its levels and rows, for one sequence of the batch; that depth.

    Args:
        chance: of the first level. levels: of the further ones, by depth bucket.
        width: nodes on a level.
    """
    table, size = prices.table, prices.size
    base, last = size + prices.taken if size == 1 else size, len(table) - 1
    price, start, per_row = prices.rate / size, table[min(base, last)], width * size
    best, deepest, reach, gain = -1e30, 1, 1.0, 0.0
    for level in range(1, depth + 1):
        if level > 1:
            chance = levels[DEPTH_BUCKET[level]]
        reach *= chance
        gain += reach
        rows = base + int(level * per_row)
        worth = gain - price * (prices.per_level * level + table[rows if rows < last else last] - start)
        if worth > best:
            best, deepest = worth, level
        elif reach < _LEAST_REACH:
            break
    return best, deepest


def best_gain(
    acceptance: Acceptance, own: Own, drafter: int, so_far: TokenTree, *, depth: int, prices: Prices
) -> tuple[float, int]:
    """`best_depth` of a drafter that is asked beside what `so_far` holds: there it matters only where that fails."""
    levels = acceptance.levels(own, drafter)
    chance = levels[1]
    if len(so_far):
        rival = acceptance.node(own, int(so_far.sources[0]), 1, float(so_far.confidence[0]))
        chance = min(levels[RIVAL], 1.0 - rival)
    return best_depth(chance, levels, depth, prices, acceptance.sources[drafter].width)


def row_seconds(taken: int, size: int, table: Sequence[float]) -> float:
    """Seconds of a second level's row, the mean over four levels, where `taken` nodes are there already and `size` sequences run;
    the step from no nodes to the first was decided before."""
    low = min(2 * size + taken, len(table) - 2)
    high = min(low + 4 * size, len(table) - 1)
    return (table[high] - table[low]) / (high - low)


def try_depth(line: Line, size: int, table: Sequence[float]) -> int:
    """Levels of a try: more than the fewest where they cost little more."""
    limit = 1.5 * try_cost(line, TRY_DEPTHS[0], size, table)
    return max(depth for depth in TRY_DEPTHS if depth == TRY_DEPTHS[0] or try_cost(line, depth, size, table) <= limit)


def try_cost(line: Line, depth: int, size: int, table: Sequence[float]) -> float:
    """What a try of so many levels costs beyond a plain step, as a share of that."""
    return (line.at(depth) + table[min(size * (1 + depth), len(table) - 1)] - table[size]) / table[size]


def hopeless(line: Line, size: int, table: Sequence[float], rate: float) -> bool:
    """Whether a drafter would lose even if the target took every token that it drafts for everyone, at any depth.

    Args:
        rate: tokens per second, the price of a second.
    """
    last = len(table) - 1
    return all(
        size * depth <= rate * (line.at(depth) + table[min(size * (1 + depth), last)] - table[min(size, last)]) for depth in DEPTHS
    )
