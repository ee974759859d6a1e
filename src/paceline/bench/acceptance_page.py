"""An analysis of acceptance as one HTML page of two plots that needs nothing else.

In: an Analysis. Out: HTML. Not here: the figures (`bench.acceptance_rules`), how lines are drawn (`bench.report_plots`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

from markupsafe import Markup

if TYPE_CHECKING:
    from paceline.bench.acceptance_rules import Analysis

MARK: Final = '<meta name="generator" content="paceline analyze">'
"""Stands in every page, so that one may be told from a file that is something else."""

COLOURS: Final = ("#1b6ca8", "#c8553d", "#2a7f62", "#8a5a9e", "#7a6a2f", "#888888", "#333333", "#d08c00", "#5aa9e6", "#b3446c")

_PAGE: Final = Markup("""<!doctype html>
<html lang="en"><head><meta charset="utf-8">{mark}<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; style-src 'unsafe-inline'"><title>Acceptance of drafts</title><style>
:root {{ {colours} }} body {{ font: 15px sans-serif; max-width: 60em; margin: 2em auto; padding: 0 1em; color: #222 }}
svg {{ width: 100%; max-width: 46em; font-size: 11px }} text {{ fill: #444 }}
.grid {{ stroke: #e4e4e4 }} .axis, .tick {{ stroke: #888 }}
.series {{ fill: none; stroke: var(--c); stroke-width: 1.6 }} .dot {{ fill: var(--c) }} li {{ list-style: none }}
li::before {{ content: "\\25CF  "; color: var(--c) }}
</style></head><body><h1>Acceptance of drafts</h1><p>{positions} places. {note}</p>{figures}</body></html>
""")


def page(found: Analysis, note: str) -> str:
    """The page.

    Args:
        note: what the figures mean.
    """
    colours = Markup(" ").join(Markup("--d{}: {};").format(i, colour) for i, colour in enumerate(COLOURS))
    figures = _figure("Acceptance by number of drafts", "drafts at one place", "acceptance", found.drafts, found.acceptance)
    figures += _figure("Tokens per pass by nodes of the tree", "nodes", "tokens per pass", found.budgets, found.tokens)
    return _PAGE.format(mark=Markup(MARK), colours=colours, positions=found.positions, note=note, figures=figures)


def _figure(title: str, across: str, up: str, places: Sequence[int], rows: Mapping[str, Sequence[float]]) -> Markup:
    from paceline.bench.report_plots import Axis, Line, plot

    lines = [
        Line(
            name=name,
            colour=f"--d{i % len(COLOURS)}",
            points=list(zip(places, values, strict=True)),
            dash=int(name.startswith("optimum")),
        )
        for i, (name, values) in enumerate(rows.items())
    ]
    legend = Markup("").join(Markup('<li style="--c:var({})">{}</li>').format(line.colour, line.name) for line in lines)
    drawn = plot(title, lines, Axis(label=across, ticks=places), Axis(label=up))
    return Markup("<h2>{}</h2>{}<ul>{}</ul>").format(title, drawn, legend)
