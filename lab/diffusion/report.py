"""The record of a diffusion benchmark as tables for a terminal, and as a plot of score against cost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import log
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.bench.report import NOTHING, interval, new_table

if TYPE_CHECKING:
    from rich.table import Table

Found = Mapping[str, Any]


def methods_table(document: Found) -> Iterator[Table]:
    """What methods cost and reach, what they answer, and how their texts came about; each table fits 80 columns."""
    lines, options = document["lines"], document["options"]
    if not lines:
        return
    n = lines[document["baseline"]]["score"]["n"]
    title = f"{n} held-out prompts of {len(options['tasks'])} tasks, {options['length']} slots each"
    times = "times static\n[95 %]"
    first = new_table(title, ("method", "score %\n[95 %]", "calls", "fewer", "ms", times, "same"), (times,))
    second = new_table("answers", ("method", "one\nanswer %", "choice %", "less static, points\n[95 %]", "length"))
    third = new_table(
        "how texts came about", ("method", "tokens\n/call", "slots", "nats\n/round", "Local@1", "Global@1")
    )
    for name, line in lines.items():
        first.add_row(name, _score(line["score"]), *_cost(line))
        answers = (_share(line[key]) for key in ("determined", "choice"))
        second.add_row(name, *answers, interval(_percent(line["difference"]), 1), f"{line['length']:.1f}")
        shown = (f"{line[key]:.2f}" for key in ("nats_per_round", "local_at_1", "global_at_1"))
        third.add_row(name, f"{line['tokens_per_call']:.2f}", f"{line['slots_computed']:.0f}", *shown)
    yield from (first, second, third)


def _cost(line: Found) -> Iterator[str]:
    times, same = line.get("times"), line["identical"]
    yield f"{line['calls']:.1f}"
    yield _number(line["fewer_calls"], 2)
    yield _number(times and 1e3 * times["seconds"], 1)
    yield interval(times and times["over_static"], 2)
    yield "" if same is None else "all" if same["same"] == same["prompts"] else f"{same['same']}/{same['prompts']}"


def caches_table(found: Found) -> Iterator[Table]:
    """Cache policies against no cache: what differs, and what is saved."""
    title = "caches against no cache: what differs"
    first = new_table(title, ("rule, cache", "other\ntokens %", "other\ntop %", "|logit| apart\nmean, most", "exact"))
    second = new_table(
        "and what is saved", ("rule, cache", "right\nwith, without", "slots\nless", "times none\n[95 %]")
    )
    for name, one in found.items():
        times, slots = one["times"], one["cost_without"]["slots_computed"] / max(1, one["cost"]["slots_computed"])
        apart, top = f"{one['mean']:.3g}, {one['largest']:.3g}", 100 * one["other_tokens"] / max(1, one["predictions"])
        kept = "" if not one["exact"] else "bit for bit" if one["kept"] else "NO"
        first.add_row(name, f"{100 * one['fraction']:.1f}", f"{top:.1f}", apart, kept)
        right = f"{one['right']}, {one['right_without']}"
        second.add_row(name, right, f"{slots:.2f}", interval(times and times["over_static"], 2))
    yield from (first, second)


def constrained_table(found: Found) -> Iterator[Table]:
    """Constraints against none: what is written, and what a round takes."""
    columns = ("constraint", "parses %\nwith [95 %]", "without", "right %\nwith", "without")
    first = new_table("constrained", columns)
    second = new_table("what constraints cost", ("constraint", "ms/round\nwithout", "adds ms\n[95 %]", "tests\n/round"))
    for name, one in found.items():
        rest = (_share(one["parses_without"]), _share(one["right"]), _share(one["right_without"]))
        first.add_row(name, _score(one["parses"]), *rest)
        added, tests = interval(one["added_ms_per_round"], 2), f"{one['tests_per_round']:.1f}"
        second.add_row(name, f"{one['ms_per_round_without']:.2f}", added, tests)
    yield from (first, second)


def diffusion_remarks(document: Found) -> Iterator[str]:
    """What the tables do not say: lines that failed, broke a claim or were left out."""
    for name, line in document["lines"].items():
        same = line["identical"]
        if same is None:
            continue
        if same["same"] < same["prompts"]:
            yield f"{name} is not lossless here ({same['same']} of {same['prompts']} canvases); its speed is withheld"
        if not same["exact"]:
            yield f"{name} is lossless in exact arithmetic; this run was in {same['dtype']}, use --dtype float32"
    yield from (f"{one['name']} failed: {one['reason']}" for one in document["failed"])
    yield from (f"left out: {one['name']}: {one['reason']}" for one in document.get("skipped", ()))


def _number(value: float | None, digits: int) -> str:
    return NOTHING if value is None else f"{value:.{digits}f}"


def _share(share: Found | None) -> str:
    return NOTHING if share is None else f"{100 * share['value']:.1f}"


def _score(share: Found) -> str:
    return interval(_percent(share), 0)


def _percent(estimate: Found | None) -> Found | None:
    return estimate and {**estimate, **{key: 100 * estimate[key] for key in ("value", "low", "high")}}


FAMILIES: Mapping[str, tuple[str, str]] = {
    "fixed number a round": ("#555555", "o"),
    "adaptive number a round": ("#1f77b4", "s"),
    "early end": ("#9467bd", "^"),
    "cache": ("#2ca02c", "D"),
    "remasking": ("#8c564b", "v"),
    "verified drafts": ("#d62728", "*"),
}
Point = tuple[float, float, str]


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
    """Write the plot, with numbers beside the points explained at the right, and the Pareto front as a dashed line."""
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


def _wrapped(numbers: Sequence[int]) -> str:
    rows = [numbers[i : i + 4] for i in range(0, len(numbers), 4)]
    return "\n".join(",".join(map(str, row)) for row in rows)


def _key(axes: Any, document: Mapping[str, Any], numbers: Mapping[str, int]) -> None:
    axes.axis("off")
    for place, (name, number) in enumerate(numbers.items()):
        colour = FAMILIES[document["lines"][name]["family"]][0]
        at = (0.0, 1.0 - (place + 0.5) / max(30, len(numbers)))
        axes.text(*at, f"{number:2d}  {name}", color=colour, fontsize=8, transform=axes.transAxes, va="center")
