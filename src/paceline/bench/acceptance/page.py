"""An analysis of acceptance as one HTML page of two plots, with their figures as tables, that needs nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import log
from pathlib import Path
from typing import TYPE_CHECKING, Final

from paceline.bench.acceptance.rules import BLOCK, WITH, WITHOUT
from paceline.bench.drawing import Axis, PlotSeries
from paceline.bench.report.figures import COLOURS, Figure, PlotTable, figure
from paceline.explain import rendered

if TYPE_CHECKING:
    from paceline.bench.acceptance.rules import Analysis

ACCEPTANCE_MARK: Final = '<meta name="generator" content="paceline analyze">'
"""Stands in every page, so that one may be told from a file that is something else."""

DASHED, DOTTED = 1, 2
FIXED: Final[Mapping[str, tuple[str, int]]] = {
    WITH: ("--muted", DASHED),
    WITHOUT: ("--ink", DASHED),
    BLOCK: ("--d7", 0),
}
"""Lines that are no rule of single places -> colour and dashes; the rules have the other colours in their order."""

APPROXIMATE: Final = "(approximate)"
APART: Final = 0.045
"""Least distance of two marks of an axis, as a share of it."""


def acceptance_html(analysis: Analysis, note: str) -> str:
    """The page. It takes a theme from its address (`?theme=dark`, `?theme=light`), else from the system.

    Args:
        note: what the figures mean.
    """
    drawn = [
        _figure(
            "Acceptance by number of drafts",
            ("drafts at one place", "acceptance"),
            analysis.drafts,
            analysis.acceptance,
            ".4f",
        ),
        _figure(
            "Tokens per pass by nodes of the tree",
            ("nodes", "tokens per pass"),
            analysis.budgets,
            analysis.tokens,
            ".3f",
        ),
    ]
    setup = f"Mean of {analysis.positions} place{'s' if analysis.positions > 1 else ''}"
    return rendered(
        Path(__file__).with_name("acceptance.html"),
        ACCEPTANCE_MARK,
        title="Acceptance of drafts",
        setup=setup,
        figures=[figure for figure in drawn if figure],
        note=note,
    )


def _figure(
    title: str, labels: tuple[str, str], places: Sequence[int], rows: Mapping[str, Sequence[float]], form: str
) -> Figure | None:
    """Args: labels: across and up. form: of the table's figures."""
    styles = _styles(list(rows))
    lines = [
        PlotSeries(
            name=name, colour=styles[name][0], dash=styles[name][1], points=list(zip(places, values, strict=True))
        )
        for name, values in rows.items()
    ]
    table = PlotTable(
        ("rule", *map(str, places)),
        [(name, *(format(value, form) for value in values)) for name, values in rows.items()],
    )
    return figure(title, lines, (Axis(label=labels[0], ticks=marks(places), log=True), Axis(label=labels[1])), table)


def _styles(names: Sequence[str]) -> dict[str, tuple[str, int]]:
    """Name -> colour, dashes."""
    rules = [name for name in names if name not in FIXED]
    styles = {name: (f"--d{i % (COLOURS - 1)}", DOTTED if APPROXIMATE in name else 0) for i, name in enumerate(rules)}
    return styles | dict(FIXED)


def marks(places: Sequence[int]) -> list[float]:
    """The places, in rising order, whose marks do not run into each other on a logarithmic axis."""
    width = log(places[-1] / places[0]) or 1.0
    marked: list[float] = []
    for place in places:
        if not marked or log(place / marked[-1]) >= APART * width:
            marked.append(float(place))
    return marked
