"""Measured costs in words.

In: a CostModel. Out: lines of plain English. Not here: measuring, and decisions.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from paceline.controllers.curve import PRIOR_LEVEL, PRIOR_SLOPE

if TYPE_CHECKING:
    from paceline.controllers.cost_model import CostModel
    from paceline.controllers.curve import Curve, Line


def describe(cost: CostModel) -> str:
    """What is known: milliseconds of a pass by rows, and of a draft by drafter."""
    if not any(cost.curves.values()):
        return f"costs: nothing measured yet (guess: each further row {PRIOR_SLOPE:.0%}, each draft level {PRIOR_LEVEL:.0%})"
    return "\n".join(_lines(cost))


def _lines(cost: CostModel) -> Iterator[str]:
    for (b, c), curve in sorted(cost.curves.items()):
        context = f"context ~{4**c}" if c else "short context"
        yield f"score, batch <= {1 << b}, {context}, ms by rows: {_points(curve)}"
    for b, one in sorted(cost.overheads.items()):
        plain = f"{_points(one.plain)} by sequences" if one.plain else "unknown"
        drafted = f"{_line(one.drafted)} per row" if one.drafted.count else "unknown"
        yield f"rules, verification, commit, batch <= {1 << b}, ms: plain {plain}; with drafts {drafted}"
    for (name, b), line in sorted(cost.lines.items()):
        yield f"draft by {name}, batch <= {1 << b}: {_line(line)} per level"


def _line(line: Line) -> str:
    return f"{1e3 * line.fixed:.3g} ms + {1e3 * line.per_level:.3g} ms"


def _points(curve: Curve) -> str:
    return ", ".join(f"{x}: {1e3 * y:.3g}" for x, y in curve.values.items())
