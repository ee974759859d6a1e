"""A benchmark document, and a comparison of two, as tables for a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from paceline.utils import ENOUGH, rates_differ, shown_faster

if TYPE_CHECKING:
    from rich.table import Table

    from paceline.bench.report.compare import ComparedLine, Comparison

Record = Mapping[str, Any]
NOTHING = "-"
NARROW = 76
"""Below so many columns no figure is kept in one line, for then the last columns would be cut off."""

TASKS = 6
"""Tasks in one table, so that it fits into 80 columns."""


def interval(estimate: Mapping[str, Any] | None, digits: int = 2) -> str:
    """A figure with its interval, or of how few prompts or batches it is, or a dash."""
    if estimate is None:
        return NOTHING
    if estimate["n"] < ENOUGH:
        return f"{estimate['value']:.{digits}f} (of {estimate['n']})"
    return f"{estimate['value']:.{digits}f} [{estimate['low']:.{digits}f}, {estimate['high']:.{digits}f}]"


def milliseconds(seconds: float | None, figures: int = 3) -> str:
    """Milliseconds with so many figures, never with an exponent; or a dash."""
    return NOTHING if seconds is None else f"{float(f'{seconds * 1000:.{figures}g}'):g}"


def percent(share: float | None) -> str:
    """A share in percent, or a dash."""
    return NOTHING if share is None else f"{share:.0%}"


def length(tokens: float | None) -> str:
    """A mean acceptance length, or a dash."""
    return NOTHING if tokens is None else f"{tokens:.2f}"


def place_name(cell: Record) -> str:
    """Workload, temperature, batch."""
    return f"{cell['workload']}, temperature {cell['temperature']:g}, batch {cell['batch']}"


def grouped(cells: Iterable[Record], name: Callable[[Record], str]) -> dict[str, list[Record]]:
    """Name -> those that have it, in their order."""
    groups: dict[str, list[Record]] = {}
    for cell in cells:
        groups.setdefault(name(cell), []).append(cell)
    return groups


def document_tables(document: Mapping[str, Any], width: int = 80) -> Iterator[Table]:
    """One table per workload, temperature and batch size; then by task, where there are several; then load and peers.

    Args:
        width: of the terminal, in columns.
    """
    for table in _tables(document):
        yield _fitted(table, width)


def _fitted(table: Table, width: int) -> Table:
    """The same table, whose cells may all break into lines where the terminal is narrow."""
    if width < NARROW:
        for column in table.columns:
            column.no_wrap, column.min_width = False, None
    return table


def _tables(document: Mapping[str, Any]) -> Iterator[Table]:
    for title, cells in grouped(document["cells"], place_name).items():
        yield _settings(title, cells)
        yield from _by_task("speed-up by task", [cell for cell in cells if cell["setting"] != document["baseline"]])
    by_rate = grouped(document["load"], lambda run: f"{run['workload']} under load, rate {run['rate']:g}")
    for title, runs in by_rate.items():
        yield _load(title, runs)
    for title, peers in grouped(document["peers"], place_name).items():
        yield _peers(f"{title}: other engines", peers)


def new_table(title: str, columns: Sequence[str], whole: Sequence[str] = ()) -> Table:
    """A table without rows; columns in `whole` are never broken into lines."""
    from rich import box
    from rich.table import Table

    table = Table(
        title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, collapse_padding=True
    )
    for number, column in enumerate(columns):
        least = None if number else 10
        side: Any = "right" if number else "left"
        table.add_column(column, justify=side, overflow="fold", min_width=least, no_wrap=column in whole)
    return table


def _settings(title: str, cells: Sequence[Record]) -> Table:
    speed, between = "speed-up\n[95 %]", "ITL ms\np50/p99"
    columns = ("setting", "tokens\n/s", speed, "mean\nlength", "TTFT\nms", between, "limit", "same")
    table = new_table(title, columns, (speed, between))
    for cell in cells:
        latency, rate = cell["inter_token_latency"], cell["tokens_per_second"]
        table.add_row(
            cell["setting"],
            NOTHING if rate is None else f"{rate['value']:.0f}",
            _speedup(cell),
            f"{cell['mean_acceptance_length']:.2f}",
            milliseconds(cell["time_to_first_token"]["p50"]),
            f"{milliseconds(latency['p50'], 2)}/{milliseconds(latency['p99'], 2)}",
            percent(cell["limit"]["share_of_step"]),
            _outcome(cell),
            style=None if cell["comparable"] else "red",
        )
    return table


def _speedup(cell: Record) -> str:
    if cell["comparable"]:
        return interval(cell["speedup"])
    return "outputs differ" if cell["failed"] < cell["prompts"] else "failed"


def _outcome(cell: Record) -> str:
    """Whether outputs are identical, and how many prompts failed."""
    equal = NOTHING if cell["equality"] is None else same(cell["equality"])
    return f"{equal}\n{cell['failed']} of {cell['prompts']} failed" if cell["failed"] else equal


def same(equality: Mapping[str, Any]) -> str:
    """Whether outputs are identical with plain decoding's, in a word or two."""
    if equality["mode"] == "baseline":
        return NOTHING
    if equality["mode"] == "distribution":
        return "in distribution"
    if equality["identical"] == equality["compared"]:
        return "yes"
    differ = f"{equality['identical']} of {equality['compared']}"
    return f"{differ} (near ties)" if equality["allowed"] and equality["mode"] == "tokens" else differ


def _by_task(title: str, cells: Sequence[Record]) -> Iterator[Table]:
    """Settings by task, a few tasks a table; a star marks a speed-up that differs from 1."""
    tasks = (
        [i for i, _ in enumerate(cells[0]["tasks"]) if any(cell["tasks"][i]["speedup"] for cell in cells)]
        if cells
        else []
    )
    for start in range(0, len(tasks), TASKS) if len(tasks) > 1 else ():
        part = tasks[start : start + TASKS]
        names = [f"{task['task']}\n({task['prompts']})" for task in (cells[0]["tasks"][index] for index in part)]
        table = new_table(title, ("setting", *names))
        for cell in cells:
            table.add_row(cell["setting"], *(starred(cell["tasks"][index]["speedup"]) for index in part))
        yield table


def starred(estimate: Mapping[str, Any] | None) -> str:
    if estimate is None:
        return NOTHING
    return f"{estimate['value']:.2f}{'*' if rates_differ(**estimate) else ' '}"


def _load(title: str, runs: Sequence[Mapping[str, Any]]) -> Table:
    """Medians over the repeats, a line a setting."""
    from statistics import median

    latency, first = "latency s\np50/p90/p99", "TTFT s\np50/p99"
    table = new_table(
        title, ("setting", "tokens\n/s", latency, first, "ITL ms\np50", "mean\nlength", "failed"), (latency, first)
    )
    groups = grouped(runs, lambda run: str(run["setting"]))

    def mid(group: list[Record], name: str, key: str) -> float | None:
        values = [run[name][key] for run in group if run[name][key] is not None]
        return median(values) if values else None

    def seconds(value: float | None) -> str:
        return NOTHING if value is None else f"{float(f'{value:.2g}'):g}"

    for setting, group in groups.items():
        table.add_row(
            setting,
            f"{median(run['tokens_per_second'] for run in group):.0f}",
            "/".join(seconds(mid(group, "latency", key)) for key in ("p50", "p90", "p99")),
            "/".join(seconds(mid(group, "time_to_first_token", key)) for key in ("p50", "p99")),
            milliseconds(mid(group, "inter_token_latency", "p50")),
            f"{median(run['mean_acceptance_length'] for run in group):.2f}",
            str(max(run["failed"] for run in group)),
        )
    return table


def _peers(title: str, peers: Sequence[Mapping[str, Any]]) -> Table:
    ratio = "over our plain\n[95 %]"
    table = new_table(
        title, ("engine, method", "dtype", "tokens\n/s", ratio, "mean\nlength", "same", "equal\ntokens"), (ratio,)
    )
    for peer in peers:
        rate = peer["tokens_per_second"]
        table.add_row(
            f"{peer['name']} {peer['setting']}",
            peer["precision"] or NOTHING,
            NOTHING if rate is None else f"{rate['value']:.0f}",
            _speedup(peer),
            length(peer["mean_acceptance_length"]),
            _outcome(peer),
            percent(peer["equal_share"]),
        )
    return table


def document_remarks(document: Mapping[str, Any]) -> Iterator[str]:
    """What the figures mean, and what went wrong, in lines."""
    model, bandwidth = document["model"], document["bandwidth"]
    what = f"{model['name']} ({model['family']}, {model['dtype']}, {model['device']}"
    yield f"{what}{', random weights' if model['random'] else ''}); {document['provenance']['machine']['cpu']}"
    if document["cells"]:
        yield (
            "tokens/s: delivered tokens over all time; speed-up: median over prompts of the paired ratio to plain "
            "decoding, with its 95 % bootstrap interval; mean length: mean acceptance length; same: outputs identical "
            "with plain decoding's; by "
            f"task: prompts in brackets, a star where the interval leaves out 1 (of {ENOUGH} prompts or more)."
        )
    if bandwidth is not None:
        rate = f"{bandwidth['bytes_per_second'] / 1e9:.1f} GB/s"
        yield (
            f"limit: share of the time that reading weights and cache once a step takes at {rate} "
            f"({bandwidth['method']}); it can "
            "pass 100 % where they fit into the processor's caches, which are faster."
        )
    scales = {run["workload"]: run["length_scale"] for run in document["load"] if run["length_scale"] < 1}
    for workload, scale in scales.items():
        yield (
            f"{workload}: all lengths are scaled by {scale:.3g}, so that the longest request fits the model's context."
        )
    for cell in document["cells"]:
        yield from _remarks_on(cell)
    for peer in document["peers"]:
        yield from _trouble(peer)
    for skipped in (*document["skipped"], *document["peers_skipped"]):
        yield f"left out: {skipped['name']}: {skipped['why']}"
    yield from _verdict(document)
    if document["interrupted"]:
        yield "interrupted: the figures are of what was done until then."


def _remarks_on(cell: Record) -> Iterator[str]:
    """Why a cell has no speed, what failed in it, and its notes."""
    place = f"{cell['setting']} on {place_name(cell)}"
    if cell["reason"] is not None:
        yield f"no speed for {place}: {'outputs differ: ' if cell['equality']['different'] else ''}{cell['reason']}"
    if cell["failed"]:
        first = next(row for row in cell["rows"] if row["error"])
        failed = f"{cell['failed']} of {cell['prompts']} prompts failed"
        yield f"{failed} for {place}, first {first['prompt']!r}: {first['error']}"
    yield from (f"{place}: {note}" for note in cell["notes"])


def _verdict(document: Mapping[str, Any]) -> Iterator[str]:
    """Said where nothing is shown to be faster than plain decoding, so that the largest figure is not taken for it."""
    others = [cell for cell in document["cells"] if cell["setting"] != document["baseline"]]
    if others and not any(shown_faster(cell["speedup"]) for cell in others):
        yield "no setting shown faster than plain decoding."


def _trouble(peer: Mapping[str, Any]) -> Iterator[str]:
    """What went wrong with a peer."""
    place = f"{peer['name']} {peer['setting']} on {peer['workload']}, batch {peer['batch']}"
    if peer["reason"] is not None:
        yield f"no speed for {place}: {peer['reason']}"
    if peer["failed"]:
        first = next((row["error"] for row in peer["rows"] if row["error"]), "the baseline could not decode them")
        yield f"{peer['failed']} of {peer['prompts']} prompts failed for {place}, first: {first}"


def comparison_table(comparison: Comparison, width: int = 80) -> Iterator[Table]:
    """B against A: a table per workload, temperature and batch size.

    A star marks what is significant after the correction.
    """
    places: dict[tuple[str, float, int], list[ComparedLine]] = {}
    for line in comparison.lines:
        _, workload, temperature, batch = line.key
        places.setdefault((workload, temperature, batch), []).append(line)
    speed, gain = "tokens/s\n[95 %]", "speed-up over plain\n[95 %]"
    for (workload, temperature, batch), lines in places.items():
        title = f"B over A: {workload}, temperature {temperature:g}, batch {batch}"
        table = new_table(title, ("setting", "prompts", speed, gain), (speed, gain))
        for line in lines:
            figures = []
            for estimate, significant in ((line.speed, line.speed_significant), (line.gain, line.gain_significant)):
                text = interval(None if estimate is None else estimate.to_dict(), 3)
                figures.append(f"{text}{' *' if significant else ''}")
            table.add_row(line.key[0], str(line.prompts), *figures)
        yield _fitted(table, width)
