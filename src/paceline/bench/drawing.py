"""Plots: matplotlib into files, and line plots as inline SVG in the colours of a page's theme.

An inline plot has the size of the page's text, so that it is as legible on a narrow screen as on a wide one. It carries
its title for readers who do not see it; the figures are in a table beside it. Points that are not finite, or not
positive on a logarithmic axis, are left out.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import StringIO
from typing import Any

from markupsafe import Markup

from paceline.errors import ConfigError

WIDTH, HEIGHT = 400, 232
DASHES: tuple[tuple[float, ...], ...] = ((), (6, 3), (2, 3), (8, 3, 2, 3))
TEXT, GRID, AXIS, SURFACE = "--muted", "--line", "--line-strong", "--surface"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlotSeries:
    """Describes one series of a plot.

    Attributes:
        colour: a custom property of the style sheet, as "--d0".
        dash: an index into DASHES.
        points: (x, y), or (x, y, low, high) with an interval.
        hollow: indices of points that rest on little.
        steps: draw the points' y as a histogram whose bins begin at the x.
    """

    name: str
    colour: str
    points: Sequence[tuple[float, ...]]
    dash: int = 0
    hollow: frozenset[int] = frozenset()
    steps: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """An axis; `low` and `high` None take what the points need.

    Attributes:
        ticks: where the marks are; None chooses.
        log: logarithmic.
    """

    label: str
    show: Callable[[float], str] = lambda value: f"{value:g}"
    low: float | None = None
    high: float | None = None
    log: bool = False
    ticks: Sequence[float] | None = None


def pyplot() -> Any:
    """matplotlib's pyplot, drawing into files; ask for it before anything is measured.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import matplotlib as mpl
    except ImportError:
        raise ConfigError(
            "plots are drawn with matplotlib, which is not installed; pip install '.[bench]' in a checkout"
        ) from None
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    return plt


def inline(title: str, lines: Sequence[PlotSeries], x: Axis, y: Axis) -> Markup:
    """The plot as SVG; empty without a point that can be drawn."""
    kept = [(line, [(i, p) for i, p in enumerate(line.points) if _drawable(p, x, y)]) for line in lines]
    if not any(points for _, points in kept):
        return Markup("")
    plt, theme = pyplot(), _Theme()
    style = {"svg.fonttype": "none", "svg.hashsalt": title, "font.size": 11, "font.family": "sans-serif"}
    with plt.rc_context(style):
        figure, panel = plt.subplots(figsize=(WIDTH / 72, HEIGHT / 72), layout="constrained")
        for number, (line, points) in enumerate(kept):
            if points:
                _draw(panel, number, line, points, theme)
        _dress(panel, x, y, theme)
        text = StringIO()
        figure.savefig(text, format="svg", transparent=True, metadata=dict.fromkeys(("Creator", "Date", "Format")))
        plt.close(figure)
    page_has = r"<metadata>.*?</metadata>|<style.*?</style>|font-size: [^;]*; |font-family: [^;]*; "
    body = re.sub(page_has, "", theme.page(text.getvalue()), flags=re.DOTALL)
    head = Markup('<svg class="plot" viewBox="0 0 {} {}" role="img" aria-label="{}">').format(WIDTH, HEIGHT, title)
    return head + Markup(body[body.index(">", body.index("<svg")) + 1 :])


class _Theme:
    """Colours of the page: matplotlib is given a number for each, which the SVG then names by its property."""

    def __init__(self) -> None:
        self.names: dict[str, str] = {}

    def __call__(self, name: str) -> str:
        return self.names.setdefault(name, f"#0a0b{len(self.names):02x}")

    def page(self, svg: str) -> str:
        for name, number in self.names.items():
            svg = svg.replace(number, f"var({name})")
        return svg


def _drawable(point: Sequence[float], x: Axis, y: Axis) -> bool:
    if not all(math.isfinite(value) and abs(value) < 1e12 for value in point):
        return False
    return (point[0] > 0 or not x.log) and (min(point[1:]) > 0 or not y.log)


def _draw(
    panel: Any, number: int, line: PlotSeries, points: Sequence[tuple[int, tuple[float, ...]]], theme: _Theme
) -> None:
    colour, dash = theme(line.colour), DASHES[line.dash % len(DASHES)]
    look = {"color": colour, "linewidth": 1.8, "dashes": dash or (None, None), "gid": f"series-{number}"}
    across, up = [p[0] for _, p in points], [p[1] for _, p in points]
    if line.steps:
        panel.step(across, up, where="post", **look)
        return
    panel.plot(across, up, **look)
    for index, point in points:
        if len(point) == 4:
            panel.vlines(point[0], point[2], point[3], color=colour, linewidth=1.4)
        face = theme(SURFACE) if index in line.hollow else colour
        panel.plot(*point[:2], "o", color=colour, markersize=5, markerfacecolor=face, gid=f"point-{number}-{index}")


def _dress(panel: Any, x: Axis, y: Axis, theme: _Theme) -> None:
    """Axes, marks and labels."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator

    for name, axis in (("x", x), ("y", y)):
        ticks = getattr(panel, f"{name}axis")
        if axis.log:
            getattr(panel, f"set_{name}scale")("log")
        getattr(panel, f"set_{name}lim")(axis.low, axis.high)
        getattr(panel, f"set_{name}label")(axis.label, color=theme(TEXT))
        low, high = getattr(panel, f"get_{name}lim")()
        few = (
            LogLocator(subs=(1, 2, 5), numticks=5)
            if axis.log and high / low >= 5
            else MaxNLocator(5, steps=[1, 2, 5, 10])
        )
        ticks.set_major_locator(few if axis.ticks is None else FixedLocator(list(axis.ticks)))
        ticks.set_minor_locator(FixedLocator([]))
        ticks.set_major_formatter(FuncFormatter(lambda value, _, show=axis.show: show(value)))
        panel.tick_params(axis=name, color=theme(AXIS), labelcolor=theme(TEXT), length=4 if name == "x" else 0)
    panel.grid(axis="y", color=theme(GRID))
    panel.set_axisbelow(True)
    for side, spine in panel.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(theme(AXIS))
