"""The figures of a report: what is plotted, its legend, and the table behind it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from markupsafe import Markup

from paceline.bench.drawing import DASHES, Axis, PlotSeries, inline
from paceline.bench.report.table import NOTHING, interval, milliseconds, percent
from paceline.bench.run.measures import histogram
from paceline.utils import ENOUGH

Record = Mapping[str, Any]
FEW = 20
"""Trials below which a point is drawn hollow."""
COLOURS = 8
PARTS = {
    "prefill": "--t-prefill",
    "draft": "--d0",
    "score": "--t-score",
    "verify": "--d1",
    "commit": "--d2",
    "other": "--t-other",
    "outside": "--line-strong",
}
"""Parts of the time, with their colours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """Holds a plot with its title, legend, table and note, as the template shows them.

    Attributes:
        legend: (name, colour, stroke-dasharray).
        head, rows: the table behind it.
        note: what the reader should know.
    """

    title: str
    svg: Markup
    legend: Sequence[tuple[str, str, str]]
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A bar: its end, whiskers and mark in percent of the track."""

    name: str
    colour: str
    text: str
    width: float | None = None
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Bars:
    """Bars in groups, with a mark in percent of the track."""

    title: str
    groups: Sequence[tuple[str, Sequence[Bar]]]
    mark: float | None = None
    note: str = ""


@dataclass(frozen=True, slots=True)
class Palette:
    """A colour for every setting of a document: a grey one for plain decoding."""

    baseline: str
    names: Sequence[str]

    def colour(self, name: str) -> str:
        """A custom property of the style sheet."""
        if name == self.baseline:
            return "--plain"
        others = [name for name in self.names if name != self.baseline]
        return f"--d{others.index(name) % COLOURS}" if name in others else "--t-verify"

    def dash(self, name: str) -> int:
        """Beyond the colours, lines differ by their dashes."""
        others = [name for name in self.names if name != self.baseline]
        return others.index(name) // COLOURS if name in others else 0


def figure(
    title: str, lines: Sequence[PlotSeries], axes: tuple[Axis, Axis], table: PlotTable, note: str = ""
) -> Figure | None:
    """A plot with its legend and table; None without a point that can be drawn."""
    svg = inline(title, lines, *axes)
    if not svg:
        return None
    legend = [
        (line.name, line.colour, " ".join(f"{length:g}" for length in DASHES[line.dash % len(DASHES)]))
        for line in lines
    ]
    return Figure(title=title, svg=svg, legend=legend, head=table.head, rows=table.rows, note=note)


@dataclass(slots=True)
class PlotTable:
    """Header and rows of the table behind a plot."""

    head: Sequence[str]
    rows: list[Sequence[str]] = field(default_factory=list)


def bars(
    title: str,
    groups: Iterable[tuple[str, Iterable[tuple[str, str, Any, str]]]],
    mark: float | None = None,
    note: str = "",
) -> Bars | None:
    """Bars of (name, colour, estimate or number or None, text), on one scale for all groups."""
    taken = [(name, list(rows)) for name, rows in groups]
    tops = [_ends(value)[2] for _, rows in taken for _, _, value, _ in rows if _ends(value) is not None]
    if not tops:
        return None
    top = max([*tops, mark or 0.0]) * 1.04 or 1.0

    def share(value: float) -> float:
        return round(100 * min(max(value / top, 0.0), 1.0), 2)

    def bar(name: str, colour: str, value: Any, text: str) -> Bar:
        ends = _ends(value)
        if ends is None:
            return Bar(name=name, colour=colour, text=text)
        sure = _sure(value)
        middle, low, high = map(share, ends)
        return Bar(
            name=name, colour=colour, text=text, width=middle, low=low if sure else None, high=high if sure else None
        )

    drawn = [(name, [bar(*row) for row in rows]) for name, rows in taken]
    return Bars(title=title, groups=drawn, mark=None if mark is None else share(mark), note=note)


def _ends(value: Any) -> tuple[float, float, float]:
    """(value, low, high) of an estimate or a number, low and high the value of too few prompts; None where there is
    nothing finite.
    """
    middle = value["value"] if isinstance(value, Mapping) else value
    numbers = tuple(float(value[k]) for k in ("value", "low", "high")) if _sure(value) else (middle,) * 3
    if any(n is None or not math.isfinite(n) or abs(n) > 1e12 for n in numbers):
        return None  # type: ignore[return-value]
    return numbers  # type: ignore[return-value]


def _sure(value: Any) -> bool:
    """Whether it is an estimate of enough prompts for an interval."""
    return isinstance(value, Mapping) and value["n"] >= ENOUGH


def _with_ends(estimate: Mapping[str, Any]) -> tuple[float, ...]:
    """The value and, of enough prompts, its interval's ends."""
    keys = ("value", "low", "high") if _sure(estimate) else ("value",)
    return tuple(estimate[key] for key in keys)


def by_task(cells: Sequence[Record], palette: Palette) -> Bars | None:
    """Speed-up of every setting, over all prompts and for each task."""
    others = [cell for cell in cells if cell["setting"] != palette.baseline]
    tasks = list(
        dict.fromkeys(task["task"] for cell in others for task in cell["tasks"] if task["speedup"] is not None)
    )

    def rows(find: Callable[[Record], Any]) -> list[tuple[str, str, Any, str]]:
        values = [(cell["setting"], find(cell)) for cell in others]
        return [
            (name, palette.colour(name), value, f"{interval(value)}" if value else NOTHING) for name, value in values
        ]

    def of(task: str) -> Callable[[Record], Any]:
        return lambda cell: next((t["speedup"] for t in cell["tasks"] if t["task"] == task), None)

    groups = [("all prompts", rows(lambda cell: cell["speedup"]))]
    groups += [(task, rows(of(task))) for task in tasks] if len(tasks) > 1 else []
    note = f"Whiskers: 95 % interval, of {ENOUGH} prompts or more. The line marks plain decoding."
    return bars("Speed-up over plain decoding, by task", groups, 1.0, note)


def acceptance(cells: Sequence[Record], palette: Palette) -> Figure | None:
    """Share of drafted tokens that were accepted, by depth, for each drafter of each setting."""
    lines, table = [], PlotTable(("setting, drafter", "position", "proposed", "accepted", "share"))
    for cell in cells:
        for number, drafter in enumerate(cell["drafters"]):
            kept = [p for p in drafter["positions"] if p["proposed"]]
            alone = len(cell["drafters"]) == 1
            name = (
                cell["setting"]
                if alone or drafter["name"] == cell["setting"]
                else f"{cell['setting']}: {drafter['name']}"
            )
            points = [(p["position"], p["accepted"] / p["proposed"]) for p in kept]
            few = frozenset(i for i, p in enumerate(kept) if p["proposed"] < FEW)
            dash = palette.dash(cell["setting"]) + number
            lines.append(
                PlotSeries(name=name, colour=palette.colour(cell["setting"]), points=points, dash=dash, hollow=few)
            )
            table.rows += [
                (
                    name,
                    str(p["position"]),
                    str(p["proposed"]),
                    str(p["accepted"]),
                    percent(p["accepted"] / p["proposed"]),
                )
                for p in kept
            ]
    axes = Axis(label="position in the draft", ticks=_whole(lines)), Axis(label="accepted", low=0, high=1, show=percent)
    return figure("Acceptance by position", lines, axes, table, f"Hollow: fewer than {FEW} drafted tokens.")


def _whole(lines: Sequence[PlotSeries]) -> list[float]:
    """Marks at whole numbers, eight at most."""
    places = sorted({point[0] for line in lines for point in line.points})
    if not places:
        return []
    step = max(1, math.ceil((places[-1] - places[0] + 1) / 8))
    return [float(v) for v in range(int(places[0]), int(places[-1]) + 1, step)]


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeBar:
    """Where a setting's time went: (part, colour, percent, milliseconds a token)."""

    name: str
    colour: str
    text: str
    parts: Sequence[tuple[str, str, float, str]]


def time_split(cells: Sequence[Record], palette: Palette) -> list[TimeBar]:
    """A stacked bar per setting; none where nothing was decoded."""
    bars = []
    for cell in cells:
        times = {part: cell["time_split"][part] for part in PARTS}
        total = sum(times.values())
        if not 0 < total < 1e12:
            continue
        tokens = cell["tokens"]
        parts = [
            (p, PARTS[p], round(100 * s / total, 2), milliseconds(s / tokens if tokens else None))
            for p, s in times.items()
        ]
        text = f"{milliseconds(total / tokens)} ms a token" if tokens else "no token"
        bars.append(TimeBar(name=cell["setting"], colour=palette.colour(cell["setting"]), text=text, parts=parts))
    return bars


def limits(cells: Sequence[Record], palette: Palette) -> Bars | None:
    """Share of the physical limit: of a whole step, and of scoring alone."""

    def rows(key: str) -> list[tuple[str, str, Any, str]]:
        return [(c["setting"], palette.colour(c["setting"]), c["limit"][key], percent(c["limit"][key])) for c in cells]

    note = (
        "The line marks the limit: weights and cache read once a step at the measured bandwidth. Weights that stay in "
        "a processor's cache are read faster."
    )
    return bars(
        "Share of the limit",
        [("of the whole step", rows("share_of_step")), ("of scoring alone", rows("share_of_score"))],
        1.0,
        note,
    )


def inter_token(cells: Sequence[Record], palette: Palette) -> Figure | None:
    """Histogram of the times between tokens."""
    histograms = [
        (cell, cell["latency_histogram"], cell["inter_token_latency"]) for cell in cells if cell["comparable"]
    ]
    return _histogram("Inter-token latency", histograms, palette)


def first_token(cells: Sequence[Record], palette: Palette) -> Figure | None:
    """Histogram of the times to the first token."""
    histograms = []
    for cell in cells:
        times = [row["time_to_first_token"] for row in cell["rows"] if row["time_to_first_token"] and not row["error"]]
        if cell["comparable"] and times:
            histograms.append((cell, histogram(times), cell["time_to_first_token"]))
    return _histogram("Time to first token", histograms, palette)


def _histogram(title: str, histograms: Sequence[tuple[Record, Record, Record]], palette: Palette) -> Figure | None:
    lines, table = [], PlotTable(("setting", "p50 ms", "p90 ms", "p99 ms", "mean ms", "count"))
    for cell, counts, quantiles in histograms:
        total = sum(counts["counts"])
        heights = [count / total for count in counts["counts"]] if total else []
        points = [(1000 * edge, height) for edge, height in zip(counts["edges"], [*heights, 0.0], strict=False)]
        name = cell["setting"]
        lines.append(
            PlotSeries(name=name, colour=palette.colour(name), points=points, dash=palette.dash(name), steps=True)
        )
        figures = [milliseconds(quantiles[key]) for key in ("p50", "p90", "p99", "mean")]
        table.rows.append((name, *figures, str(quantiles["count"])))
    axes = Axis(label="milliseconds", log=True), Axis(label="share", low=0, show=percent)
    return figure(title, lines, axes, table)


def batches(cells: Sequence[Record], palette: Palette) -> Figure | None:
    """Tokens per second against the batch size, for the cells of one workload and temperature."""
    sizes = sorted({cell["batch"] for cell in cells})
    if len(sizes) < 2:
        return None
    lines, table = [], PlotTable(("setting", "batch", "tokens/s [95 %]"))
    for name in dict.fromkeys(cell["setting"] for cell in cells):
        mine = [cell for cell in cells if cell["setting"] == name and cell["tokens_per_second"]]
        points = [(c["batch"], *_with_ends(c["tokens_per_second"])) for c in mine]
        lines.append(PlotSeries(name=name, colour=palette.colour(name), points=points, dash=palette.dash(name)))
        table.rows += [(name, str(c["batch"]), interval(c["tokens_per_second"], 0)) for c in mine]
    axes = Axis(label="batch size", log=True, ticks=sizes), Axis(label="tokens/s", low=0, show=short)
    return figure("Tokens per second by batch size", lines, axes, table)


def load(runs: Sequence[Record], palette: Palette) -> list[Figure]:
    """Latency, time to first token and throughput against the rate of one trace; medians of the repeats."""
    plots = [
        _load("Latency by arrival rate, median and 99th percentile", runs, palette, "latency", ("p50", "p99")),
        _load("Time to first token by arrival rate", runs, palette, "time_to_first_token", ("p50", "p99")),
        _load("Tokens per second by arrival rate", runs, palette, "tokens_per_second", ("",)),
    ]
    return [figure for figure in plots if figure is not None]


def _load(title: str, runs: Sequence[Record], palette: Palette, key: str, quantiles: Sequence[str]) -> Figure | None:
    rates = sorted({run["rate"] for run in runs})
    lines, table = [], PlotTable(("setting", "rate", "tokens/s" if key == "tokens_per_second" else "seconds"))
    for name in dict.fromkeys(run["setting"] for run in runs):
        for number, quantile in enumerate(quantiles):
            points = []
            for rate in rates:
                mine = [run[key] for run in runs if run["setting"] == name and run["rate"] == rate]
                values = [v for v in (record[quantile] if quantile else record for record in mine) if v is not None]
                points += [(rate, median(values))] if values else []
            full = f"{name}, {quantile}" if quantile else name
            lines.append(PlotSeries(name=full, colour=palette.colour(name), points=points, dash=number))
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

    def row(name: str, colour: str, record: Record) -> tuple[str, str, Any, str]:
        text = (
            interval(record["tokens_per_second"], 0)
            if record["tokens_per_second"]
            else "failed"
            if record["comparable"]
            else "withheld"
        )
        return name, colour, record["tokens_per_second"], text

    ours = [row(cell["setting"], palette.colour(cell["setting"]), cell) for cell in cells]
    theirs = [row(f"{peer['name']} {peer['setting']}", "--t-verify", peer) for peer in peers]
    return bars("Tokens per second", [("Paceline", ours), ("Others", theirs)])
