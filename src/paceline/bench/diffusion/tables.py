"""The record of a diffusion benchmark as tables for a terminal.

In: documents of `bench.diffusion`, `bench.diffusion_caches`, `bench.diffusion_constrained`. Out: rich tables and lines.
Not here: printing (`cli.bench_diffusion`), plots (`bench.diffusion_plot`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

Found = Mapping[str, Any]
NOTHING = "-"


def methods_table(document: Found) -> Iterator[Table]:
    """What methods cost and reach, what they answer, and how their texts came about; each table fits 80 columns."""
    lines, options = document["lines"], document["options"]
    n = lines[document["baseline"]]["score"]["n"]
    title = f"{n} held-out prompts of {len(options['tasks'])} tasks, {options['length']} slots each"
    first = _new(title, ("method", "score %\n[95 %]", "calls", "fewer", "ms", "times static\n[95 %]", "same"))
    second = _new("answers", ("method", "one\nanswer %", "choice %", "less static, points\n[95 %]", "length"))
    third = _new("how texts came about", ("method", "tokens\n/call", "slots", "nats\n/round", "Local@1", "Global@1"))
    for name, line in lines.items():
        first.add_row(name, _score(line["score"]), *_cost(line))
        answers = (_share(line[key]) for key in ("determined", "choice"))
        second.add_row(name, *answers, _interval(line["difference"], 1, 100), f"{line['length']:.1f}")
        shown = (f"{line[key]:.2f}" for key in ("nats_per_round", "local_at_1", "global_at_1"))
        third.add_row(name, f"{line['tokens_per_call']:.2f}", f"{line['slots_computed']:.0f}", *shown)
    yield from (first, second, third)


def _cost(line: Found) -> Iterator[str]:
    times, same = line.get("times"), line["identical"]
    yield f"{line['calls']:.1f}"
    yield _number(line["fewer_calls"], 2)
    yield _number(times and 1e3 * times["seconds"], 1)
    yield _interval(times and times["over_static"], 2)
    yield "" if same is None else "all" if same["same"] == same["prompts"] else f"{same['same']}/{same['prompts']}"


def caches_table(found: Found) -> Iterator[Table]:
    """Cache policies against no cache: what differs, and what is saved."""
    title = "caches against no cache: what differs"
    first = _new(title, ("rule, cache", "other\ntokens %", "other\ntop %", "|logit| apart\nmean, most", "exact"))
    second = _new("and what is saved", ("rule, cache", "right\nwith, without", "slots\nless", "times none\n[95 %]"))
    for name, one in found.items():
        times, slots = one["times"], one["cost_without"]["slots_computed"] / max(1, one["cost"]["slots_computed"])
        apart, top = f"{one['mean']:.3g}, {one['largest']:.3g}", 100 * one["other_tokens"] / max(1, one["predictions"])
        kept = "" if not one["exact"] else "bit for bit" if one["kept"] else "NO"
        first.add_row(name, f"{100 * one['fraction']:.1f}", f"{top:.1f}", apart, kept)
        right = f"{one['right']}, {one['right_without']}"
        second.add_row(name, right, f"{slots:.2f}", _interval(times and times["over_static"], 2))
    yield from (first, second)


def constrained_table(found: Found) -> Iterator[Table]:
    """Constraints against none: what is written, and what a round takes."""
    columns = ("constraint", "parses %\nwith [95 %]", "without", "right %\nwith", "without")
    first = _new("constrained", columns)
    second = _new("what constraints cost", ("constraint", "ms/round\nwithout", "adds ms\n[95 %]", "tests\n/round"))
    for name, one in found.items():
        rest = (_share(one["parses_without"]), _share(one["right"]), _share(one["right_without"]))
        first.add_row(name, _score(one["parses"]), *rest)
        added, tests = _interval(one["added_ms_per_round"], 2), f"{one['tests_per_round']:.1f}"
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


def _new(title: str, columns: Sequence[str]) -> Table:
    from rich import box
    from rich.table import Table

    made = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for number, column in enumerate(columns):
        side: Any = "right" if number else "left"
        made.add_column(column, justify=side, overflow="fold", no_wrap=number > 0, min_width=None if number else 12)
    return made


def _number(value: float | None, digits: int) -> str:
    return NOTHING if value is None else f"{value:.{digits}f}"


def _share(share: Found | None) -> str:
    return NOTHING if share is None else f"{100 * share['value']:.1f}"


def _score(share: Found) -> str:
    return _interval(share, 0, 100)


def _interval(estimate: Found | None, digits: int, times: float = 1.0) -> str:
    if estimate is None:
        return NOTHING
    value, low, high = (f"{times * estimate[key]:.{digits}f}" for key in ("value", "low", "high"))
    return f"{value} [{low}, {high}]" if estimate["n"] > 1 else value
