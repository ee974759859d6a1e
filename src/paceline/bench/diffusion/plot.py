"""Score against calls and against wall time, a point for each method.

In: a document of `bench.diffusion`. Out: an image file. Not here: measuring, tables (`bench.diffusion_report`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import log
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError

FAMILIES: Mapping[str, tuple[str, str]] = {
    "fixed number a round": ("#555555", "o"),
    "adaptive number a round": ("#1f77b4", "s"),
    "early end": ("#9467bd", "^"),
    "cache": ("#2ca02c", "D"),
    "remasking": ("#8c564b", "v"),
    "verified drafts": ("#d62728", "*"),
}
Point = tuple[float, float, str]


def pyplot() -> Any:
    """matplotlib's pyplot, drawing into files.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import matplotlib as mpl
    except ImportError:
        raise ConfigError(
            "--plot draws with matplotlib, which is not installed; pip install 'paceline[bench]'"
        ) from None
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    return plt


def front(points: Sequence[Point]) -> list[Point]:
    """Points that no other beats in cost (first) and score (second), by cost."""
    best, found = -1.0, []
    for point in sorted(points, key=lambda p: (p[0], -p[1])):
        if point[1] > best:
            best = point[1]
            found.append(point)
    return found


def points(document: Mapping[str, Any], cost: str) -> list[Point]:
    """(cost, score in percent, name) of all lines that have both; `cost` is "calls" or "ms"."""
    found = []
    for name, line in document["lines"].items():
        times = line.get("times")
        value = line["calls"] if cost == "calls" else times and 1e3 * times["seconds"]
        if value:
            found.append((float(value), 100 * line["score"]["value"], name))
    return found


def draw_methods(document: Mapping[str, Any], path: Path, title: str, plt: Any) -> None:
    """Write the plot; numbers beside the points are explained at the right, points on the dashed line beaten by
    none.
    """
    lines = document["lines"]
    numbers = {name: number for number, name in enumerate(sorted(lines, key=lambda n: lines[n]["calls"]), 1)}
    timed = bool(points(document, "ms"))
    widths = (5, 5, 2.6) if timed else (5, 2.6)
    figure, every = plt.subplots(
        1, len(widths), figsize=(16 if timed else 10, 7), width_ratios=widths, layout="constrained"
    )
    panels = [("calls", "model calls per text")] + ([("ms", "milliseconds per text")] if timed else [])
    for axes, (cost, label) in zip(every, panels, strict=False):
        _panel(axes, document, numbers, points(document, cost))
        axes.set(xlabel=label, ylabel="right answers, %")
    options = document["options"]
    n = lines[document["baseline"]]["score"]["n"]
    figure.suptitle(f"{title}: {n} held-out prompts, {options['length']} slots each, {document['model']['dtype']}")
    _key(every[-1], document, numbers)
    shown = dict(zip(*reversed(every[0].get_legend_handles_labels()), strict=True))
    figure.legend(shown.values(), shown.keys(), loc="outside lower center", ncols=len(shown), frameon=False, fontsize=9)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _panel(axes: Any, document: Mapping[str, Any], numbers: Mapping[str, int], found: Sequence[Point]) -> None:
    from matplotlib.ticker import LogLocator

    lines = document["lines"]
    for family, (colour, marker) in FAMILIES.items():
        mine = [point for point in found if lines[point[2]]["family"] == family]
        if mine:
            size = 110 if marker == "*" else 45
            axes.scatter(
                [p[0] for p in mine], [p[1] for p in mine], size, color=colour, marker=marker, label=family, alpha=0.8
            )
    edge = front(found)
    axes.plot([p[0] for p in edge], [p[1] for p in edge], "--", color="#bbbbbb", zorder=0)
    groups: dict[tuple[float, float], list[int]] = {}
    across, up = _span([log(p[0]) for p in found]), _span([p[1] for p in found])
    for x, y, name in found:
        near = (at for at in groups if abs(log(at[0] / x)) < 0.09 * across and abs(at[1] - y) < 0.03 * up)
        groups.setdefault(next(near, (x, y)), []).append(numbers[name])
    for at, those in groups.items():
        axes.annotate(_wrapped(sorted(those)), at, xytext=(6, 5), textcoords="offset points", fontsize=8)
    low, high = min(p[0] for p in found), max(p[0] for p in found)
    axes.set_xscale("log")
    axes.set_xlim(low / 1.2, high * 1.5)
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter("")
    axes.grid(alpha=0.25)


def _span(values: Sequence[float]) -> float:
    return max(values) - min(values) or 1.0


def _wrapped(numbers: Sequence[int], most: int = 4) -> str:
    rows = [numbers[i : i + most] for i in range(0, len(numbers), most)]
    return "\n".join(",".join(map(str, row)) for row in rows)


def _key(axes: Any, document: Mapping[str, Any], numbers: Mapping[str, int]) -> None:
    axes.axis("off")
    for place, (name, number) in enumerate(numbers.items()):
        colour = FAMILIES[document["lines"][name]["family"]][0]
        at = (0.0, 1.0 - (place + 0.5) / max(30, len(numbers)))
        axes.text(*at, f"{number:2d}  {name}", color=colour, fontsize=8, transform=axes.transAxes, va="center")
