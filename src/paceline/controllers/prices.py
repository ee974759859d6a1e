"""What rows and tries cost at the present batch size, read off the tables of the cost model.

In: seconds of a step by rows, a drafter's line over levels. Out: seconds, or shares of a plain step. Not here: what is measured
(`controllers.cost_model`), and decisions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from paceline.controllers.curve import Line

TRY_DEPTHS: Final = (2, 4, 8)
DEPTHS: Final = (1, 2, 4, 8, 16)


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
