"""The figures of a report that go across cells: batch sizes, load, other engines.

In: parts of a document. Out: `Figure`s and `Bars`, or None where there is nothing to draw. Not here: the figures of one
place (`bench.report_figures`).
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from paceline.bench.report.figures import Bars, Figure, Palette, Record, Table, bars, figure
from paceline.bench.report.plots import Axis, Line
from paceline.bench.report.table import interval


def batches(cells: Sequence[Record], palette: Palette) -> Figure | None:
    """Tokens per second against the batch size, for the cells of one workload and temperature."""
    sizes = sorted({cell["batch"] for cell in cells})
    if len(sizes) < 2:
        return None
    lines, table = [], Table(("setting", "batch", "tokens/s [95 %]"))
    for name in dict.fromkeys(cell["setting"] for cell in cells):
        mine = [cell for cell in cells if cell["setting"] == name and cell["tokens_per_second"]]
        points = [(c["batch"], *(c["tokens_per_second"][k] for k in ("value", "low", "high"))) for c in mine]
        lines.append(Line(name=name, colour=palette.colour(name), points=points, dash=palette.dash(name)))
        table.rows += [(name, str(c["batch"]), interval(c["tokens_per_second"], 0)) for c in mine]
    axes = Axis(label="batch size", log=True, ticks=sizes), Axis(label="tokens/s", low=0, show=short)
    return figure("Tokens per second by batch size", lines, axes, table)


def load(runs: Sequence[Record], palette: Palette) -> list[Figure]:
    """Latency, time to first token and throughput against the rate of one trace; medians of the repeats."""
    found = [
        _load("Latency by arrival rate, median and 99th percentile", runs, palette, "latency", ("p50", "p99")),
        _load("Time to first token by arrival rate", runs, palette, "time_to_first_token", ("p50", "p99")),
        _load("Tokens per second by arrival rate", runs, palette, "tokens_per_second", ("",)),
    ]
    return [figure for figure in found if figure is not None]


def _load(title: str, runs: Sequence[Record], palette: Palette, key: str, quantiles: Sequence[str]) -> Figure | None:
    rates = sorted({run["rate"] for run in runs})
    lines, table = [], Table(("setting", "rate", "tokens/s" if key == "tokens_per_second" else "seconds"))
    for name in dict.fromkeys(run["setting"] for run in runs):
        for number, quantile in enumerate(quantiles):
            points = []
            for rate in rates:
                mine = [run[key] for run in runs if run["setting"] == name and run["rate"] == rate]
                values = [v for v in (one[quantile] if quantile else one for one in mine) if v is not None]
                points += [(rate, median(values))] if values else []
            full = f"{name}, {quantile}" if quantile else name
            lines.append(Line(name=full, colour=palette.colour(name), points=points, dash=number))
            table.rows += [(full, f"{rate:g}", f"{value:.3g}") for rate, value in points]
    y = Axis(label="tokens/s", low=0, show=short) if key == "tokens_per_second" else Axis(label="seconds", log=True)
    return figure(
        title, lines, (Axis(label="arrivals, times as fast as recorded", log=True, ticks=rates[:8]), y), table
    )


def short(value: float) -> str:
    """A number of at most four figures."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def against(cells: Sequence[Record], peers: Sequence[Record], palette: Palette) -> Bars | None:
    """Tokens per second of our settings and of every peer at one workload and batch size."""

    def row(name: str, colour: str, one: Record) -> tuple[str, str, Any, str]:
        text = (
            interval(one["tokens_per_second"], 0)
            if one["tokens_per_second"]
            else "failed"
            if one["comparable"]
            else "withheld"
        )
        return name, colour, one["tokens_per_second"], text

    ours = [row(cell["setting"], palette.colour(cell["setting"]), cell) for cell in cells]
    theirs = [row(f"{peer['name']} {peer['setting']}", "--t-verify", peer) for peer in peers]
    return bars("Tokens per second", [("Paceline", ours), ("Others", theirs)])
