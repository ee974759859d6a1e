"""Plots as small inline SVG: lines over a linear or logarithmic axis, in colours that the page's theme gives.

In: lines of points. Out: Markup. Not here: what is plotted (`bench.report_figures`), bars (the page's own markup draws
them).

Every plot has the same size in units of the page's text, so that it is as legible on a narrow screen as on a wide one.
It carries its title as text for readers who do not see it; the figures stand in a table beside it. Points that are not
finite, or not positive on a logarithmic axis, are left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from markupsafe import Markup, escape

WIDTH, HEIGHT = 400, 232
LEFT, RIGHT, TOP, BOTTOM = 60, 12, 8, 42
DASHES = ("", "6 3", "2 3", "8 3 2 3")


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One series.

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


@dataclass(frozen=True, slots=True)
class _Scale:
    low: float
    high: float
    log: bool
    start: float
    end: float

    def __call__(self, value: float) -> float:
        at, low, high = (math.log(v) if self.log else v for v in (value, self.low, self.high))
        return round(self.start + (self.end - self.start) * (at - low) / (high - low), 1)


def plot(title: str, lines: Sequence[Line], x: Axis, y: Axis) -> Markup:
    """The plot; empty without a point that can be drawn."""
    kept = [(line, [(i, point) for i, point in enumerate(line.points) if _drawable(point, x, y)]) for line in lines]
    points = [point for _, found in kept for _, point in found]
    if not points:
        return Markup("")
    across = _scale(x, [point[0] for point in points], LEFT, WIDTH - RIGHT)
    up = _scale(y, [value for point in points for value in point[1:]], HEIGHT - BOTTOM, TOP)
    parts = [*_grid(x, y, across, up)]
    parts += [_series(line, found, across, up) for line, found in kept]
    head = Markup('<svg class="plot" viewBox="0 0 {} {}" role="img" aria-label="{}">').format(WIDTH, HEIGHT, title)
    return head + Markup("").join(parts) + Markup("</svg>")


def _drawable(point: Sequence[float], x: Axis, y: Axis) -> bool:
    if not all(math.isfinite(value) and abs(value) < 1e12 for value in point):
        return False
    return (point[0] > 0 or not x.log) and (min(point[1:]) > 0 or not y.log)


def _scale(axis: Axis, values: Sequence[float], start: float, end: float) -> _Scale:
    low = min(values) if axis.low is None else axis.low
    high = max(values) if axis.high is None else axis.high
    if axis.log:
        low, high = (low, high) if high > low else (low / 2, high * 2)
    elif high <= low:
        low, high = low - 0.5, low + 0.5
    elif axis.high is None:
        high += 0.05 * (high - low)
    return _Scale(low, high, axis.log, start, end)


def ticks(low: float, high: float, *, log: bool = False, most: int = 5) -> list[float]:
    """Round numbers between two: 1, 2 or 5 times a power of ten; on a logarithmic axis the powers, or those too.

    A short logarithmic axis is marked like a linear one.
    """
    if log and high / low >= 5:
        first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
        for steps in ((1, 2, 5), (1, 3), (1,)):
            found = [s * 10.0**p for p in range(first, last + 1) for s in steps if low <= s * 10.0**p <= high * 1.0001]
            if len(found) <= most + 1:
                return found
        return found[:: math.ceil(len(found) / most)]
    raw = (high - low) / most
    unit = 10.0 ** math.floor(math.log10(raw))
    step = next(s * unit for s in (1, 2, 5, 10) if s * unit >= raw)
    begin = math.ceil(low / step - 1e-9)
    return [(begin + i) * step for i in range(int((high - begin * step) / step + 1e-9) + 1)]


def _grid(x: Axis, y: Axis, across: _Scale, up: _Scale) -> list[Markup]:
    left, bottom, parts = LEFT, HEIGHT - BOTTOM, []
    for value in y.ticks if y.ticks is not None else ticks(up.low, up.high, log=y.log):
        at = up(value)
        parts.append(Markup('<line class="grid" x1="{}" x2="{}" y1="{}" y2="{}"/>').format(left, WIDTH - RIGHT, at, at))
        parts.append(Markup('<text x="{}" y="{}" text-anchor="end">{}</text>').format(left - 6, at + 4, y.show(value)))
    for value in x.ticks if x.ticks is not None else ticks(across.low, across.high, log=x.log):
        at = across(value)
        parts.append(Markup('<line class="tick" x1="{}" x2="{}" y1="{}" y2="{}"/>').format(at, at, bottom, bottom + 4))
        parts.append(
            Markup('<text x="{}" y="{}" text-anchor="middle">{}</text>').format(at, bottom + 17, x.show(value))
        )
    parts.append(
        Markup('<line class="axis" x1="{}" x2="{}" y1="{}" y2="{}"/>').format(left, WIDTH - RIGHT, bottom, bottom)
    )
    middle = (left + WIDTH - RIGHT) / 2
    parts.append(Markup('<text x="{}" y="{}" text-anchor="middle">{}</text>').format(middle, HEIGHT - 6, x.label))
    turned = Markup('<text transform="translate(12 {}) rotate(-90)" text-anchor="middle">{}</text>')
    parts.append(turned.format((TOP + bottom) / 2, y.label))
    return parts


def _series(line: Line, found: Sequence[tuple[int, Sequence[float]]], across: _Scale, up: _Scale) -> Markup:
    at = [(across(point[0]), up(point[1])) for _, point in found]
    path = _stairs(at) if line.steps else [*at]
    style = f"--c:var({line.colour})"
    dash = f' stroke-dasharray="{DASHES[line.dash % len(DASHES)]}"' if line.dash % len(DASHES) else ""
    text = " ".join(f"{x},{y}" for x, y in path)
    parts = [f'<g style="{style}"><title>{escape(line.name)}</title><polyline class="series" points="{text}"{dash}/>']
    for (index, point), (x, y) in zip(found, at, strict=True):
        if line.steps:
            break
        if len(point) == 4:
            parts.append(f'<line class="whisker" x1="{x}" x2="{x}" y1="{up(point[2])}" y2="{up(point[3])}"/>')
        parts.append(f'<circle class="dot{" few" if index in line.hollow else ""}" cx="{x}" cy="{y}" r="3.2"/>')
    return Markup("".join(parts) + "</g>")


def _stairs(at: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The outline of a histogram; the last point only ends the last bin."""
    found: list[tuple[float, float]] = []
    for (x, y), (right, _) in pairwise(at):
        found += [(x, y), (right, y)]
    return found
