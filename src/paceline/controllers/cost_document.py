"""What a cost model knows as a document that JSON can hold, and back.

In: curves, overheads and lines by bucket; or the document of an earlier process. Out: the other of the two. Not here: where it is
kept (`controllers.cost_store`), what it means (`controllers.cost_model`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.controllers.curve import GRID, Curve, Line, Overhead

KNOWN = 8.0
"""Real steps that a point of an earlier process counts for."""

Known = tuple[dict[tuple[int, int], Curve], dict[int, Overhead], dict[tuple[str, int], Line]]


def as_document(
    curves: Mapping[tuple[int, int], Curve], overheads: Mapping[int, Overhead], lines: Mapping[tuple[str, int], Line]
) -> dict[str, Any]:
    """Everything as lists of numbers and names."""
    return {
        "curves": [[b, c, _pairs(curve)] for (b, c), curve in curves.items()],
        "overheads": [[b, _pairs(one.plain), *_numbers(one.drafted)] for b, one in overheads.items()],
        "lines": [[name, b, *_numbers(line)] for (name, b), line in lines.items()],
    }


def from_document(costs: Mapping[str, Any]) -> Known:
    """Curves by (batch, context), overheads by batch, lines by (drafter, batch).

    Raises:
        KeyError, TypeError, ValueError, OverflowError: something else.
    """
    curves = {(int(b), int(c)): Curve(_values(pairs), KNOWN) for b, c, pairs in costs["curves"]}
    lines = {(str(n), int(b)): Line(_seconds(f), _seconds(p), int(k)) for n, b, f, p, k in costs["lines"]}
    overheads = {
        int(b): Overhead(Curve(_values(pairs), KNOWN), _seconds(f), _seconds(p), int(k)) for b, pairs, f, p, k in costs["overheads"]
    }
    return curves, overheads, lines


def _pairs(curve: Curve) -> list[list[float]]:
    return [[x, y] for x, y in curve.values.items()]


def _numbers(line: Line) -> tuple[float, float, int]:
    return line.fixed, line.per_level, line.count


def _values(pairs: Any) -> dict[int, float]:
    """Points of a curve."""
    values = {int(x): _seconds(y) for x, y in pairs}
    if not set(values) <= set(GRID):
        raise ValueError(f"rows {sorted(values)} are not grid points")
    if 0.0 in values.values():
        raise ValueError("a pass takes no time")
    return values


def _seconds(value: Any) -> float:
    seconds = float(value)
    if not 0 <= seconds < 1e4:
        raise ValueError(f"{value!r} is not a time in seconds")
    return seconds
