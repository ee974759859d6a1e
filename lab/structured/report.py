"""The record of a comparison of libraries of structured outputs: tables for a terminal, a page, and a plot."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from lab.structured.measure import FREE, LONGEST, SHOWN
from paceline.bench.report import COLOURS, NOTHING, Bars, bars, milliseconds, new_table
from paceline.explain import rendered
from paceline.utils import ENOUGH

if TYPE_CHECKING:
    from rich.table import Table

Found = Mapping[str, Any]
Cells = tuple[str, ...]
Rows = tuple[str, Cells, list[Cells]]
STRUCTURED_FORMAT: Final = "paceline-bench-structured"
STRUCTURED_MARK: Final = '<meta name="generator" content="python -m lab structured">'
"""Stands in every page, so that one may be told from a file that is something else."""

WIDE: Final = 96
"""Columns of a terminal from which on intervals are shown."""

SHARES: Final[Mapping[str, str]] = {
    "declared": "compiles",
    "empirical": "output valid",
    "true": "decides as the schema",
}


def structured_rows(document: Found) -> Iterator[Rows]:
    """(title, columns, rows) of every table: coverage and times of each set, then the questions.

    The columns' names hold line breaks for a terminal.
    """
    for name, found in document["sets"].items():
        if not found["cases"]:
            continue
        yield f"{name}: coverage, {found['cases']} schemas", *_coverage(found)
        yield f"{name}: CPU time, the {found['common']} schemas that all compile", *_times(found)
    if document["questions"]:
        n = next(iter(document["questions"].values()))["parsed"]["n"]
        columns = ("library", "of the form\n%", "right\n%", "cut\noff")
        rows: list[Cells] = [
            (name, share(one["parsed"]), share(one["right"]), str(one["unfinished"]))
            for name, one in document["questions"].items()
        ]
        yield f"{n} questions of GSM8K, answered as JSON", columns, rows


def _coverage(found: Found) -> tuple[Cells, list[Cells]]:
    columns = (
        "library", "declared\n%", "empirical\n%", "compliance\n%", "true\n%", "lets\nin", "re-\njects", "cut\noff"
    )  # fmt: skip
    rows: list[Cells] = []
    for name, one in found["libraries"].items():
        compliance = NOTHING if one["compliance"] is None else f"{100 * one['compliance']:.0f}"
        decided = (NOTHING, NOTHING) if one["true"] is None else (str(one["lenient"]), str(one["narrow"]))
        cut = NOTHING if one["empirical"] is None else str(one["unfinished"])
        shares = (share(one["declared"]), share(one["empirical"]), compliance, share(one["true"]))
        rows.append((name, *shares, *decided, cut))
    return columns, rows


def _times(found: Found) -> tuple[Cells, list[Cells]]:
    columns = (
        "library", "to first\nmask, ms", "95 %", "first\nmask, ms", "token,\nµs", "99 %", "of its own:\nfirst mask, ms"
    )  # fmt: skip
    rows: list[Cells] = []
    for name, one in found["libraries"].items():
        if name != FREE:
            compiled, first, token, own = (one[key] or {} for key in ("compile", "first", "token", "compile_own"))
            rows.append(
                (
                    name, milliseconds(compiled.get("p50")), milliseconds(compiled.get("p95")),
                    milliseconds(first.get("p50")), _micro(token.get("p50")), _micro(token.get("p99")),
                    milliseconds(own.get("p50")),
                )
            )  # fmt: skip
    return columns, rows


def share(found: Found | None) -> str:
    """In percent, with its interval."""
    return NOTHING if found is None else "{value:.0f} [{low:.0f}, {high:.0f}]".format(
        **{key: 100 * found[key] for key in ("value", "low", "high")}
    )  # fmt: skip


def _micro(seconds: float | None) -> str:
    return NOTHING if seconds is None else f"{1e6 * seconds:.0f}"


def structured_tables(document: Found, width: int) -> Iterator[Table]:
    """For a terminal of so many columns; intervals where they fit."""
    for title, columns, rows in structured_rows(document):
        made = new_table(title, columns)
        for row in rows:
            made.add_row(*(row if width >= WIDE else [cell.partition(" [")[0] for cell in row]))
        yield made


def structured_remarks(document: Found) -> list[str]:
    """What was measured for whom, and what was left out."""
    options, machine = document["options"], document["provenance"]["machine"]
    found = [
        "declared: the schema compiles. empirical: what the model writes under it ends and satisfies the schema. "
        "compliance: empirical over declared. true: all values known to be valid pass and no invalid one does, of the "
        "schemas that come with both; one that does not compile counts as wrong. `lets in` and `rejects` count the "
        "wrong among those that compile. In brackets: 95 % intervals. After JSONSchemaBench (arXiv:2501.10868).",
        f"Every library masks the same model ({document['model']['name']}, greedy, at most {options['max_tokens']} "
        f"tokens; a text that reaches them is cut off and not valid). It is shown the first {SHOWN} characters of the "
        "schema. Ours binds through the engine's own structured outputs, the others through a logits processor.",
        "A value passes if it does with its keys in any of several orders. Values of more than "
        f"{LONGEST} tokens were left out.",
        "Times are medians of processor seconds inside the library's own process, with one thread: `to first mask` is "
        "compiling and the first mask, `token` is a mask, its application to a row of logits, and taking the token, on "
        "values that come with the schema or were written under it; `of its own` is over all schemas that the library "
        "compiles. "
        f"A schema may take {options['seconds']:g} s; then it counts as not compiled. {machine['cores']} cores, "
        "which other programs may have shared.",
    ]
    for name, one in document["sets"].items():
        left = [(one["elsewhere"], "schemas refer to other files"), (one["unsound"], "schemas are not sound"),
                (one["doubtful"], "values are too long or judged otherwise by jsonschema")]  # fmt: skip
        found += [f"{name}: left out: " + ", ".join(f"{n} {why}" for n, why in left if n)] * any(n for n, _ in left)
        slow = {library: _slow(of["errors"]) for library, of in one["libraries"].items()}
        found += [
            f"{name}: {library} was ended on {n} schemas, as it took longer than {options['seconds']:g} s of a clock"
            for library, n in slow.items()
            if n
        ]
    return found + ["interrupted: the figures are of what was done until then."] * document["interrupted"]


def _slow(errors: Mapping[str, int]) -> int:
    """How many of the errors are of the clock."""
    return sum(n for error, n in errors.items() if "gave no answer" in error)


def structured_html(document: Found) -> str:
    """The page. It takes a theme from its address (`?theme=dark`, `?theme=light`), else from the system."""
    made = document["provenance"]
    return rendered(
        Path(__file__).with_name("structured.html"),
        STRUCTURED_MARK,
        title="Structured outputs compared",
        setup=f"{document['model']['name']}, {made['machine']['cpu']}; {made['date'][:10]}",
        places=list(_places(document)),
        remarks=structured_remarks(document),
        facts=_facts(document),
    )


def _places(document: Found) -> Iterator[dict[str, Any]]:
    tables = [(title, [_one_line(one) for one in head], rows) for title, head, rows in structured_rows(document)]
    for name, found in document["sets"].items():
        mine = [one for one in tables if one[0].startswith(f"{name}: ")]
        yield {"name": name, "bars": [one for one in (_bars(found),) if one], "tables": mine}
    if document["questions"]:
        yield {"name": "Answers with and without", "bars": [], "tables": tables[-1:]}


def _one_line(column: str) -> str:
    """Of a page, which breaks lines itself."""
    return column.replace("-\n", "").replace("\n", " ")


def _bars(found: Found) -> Bars | None:
    libraries = found["libraries"]
    colours = {name: "--plain" if name == FREE else f"--d{place % COLOURS}" for place, name in enumerate(libraries)}
    groups = [
        (f"{kind}: {word}", [_bar(name, ink, libraries[name][kind]) for name, ink in colours.items()])
        for kind, word in SHARES.items()
        if any(one[kind] for one in libraries.values())
    ]
    return bars("Coverage", groups, 1.0, "Whiskers: 95 % interval. The line marks all.")


def _bar(name: str, colour: str, found: Found | None) -> tuple[str, str, Found | None, str]:
    return name, colour, found, share(found)


def _facts(document: Found) -> list[tuple[str, str]]:
    made, machine = document["provenance"], document["provenance"]["machine"]
    packages = ", ".join(f"{name} {version}" for name, version in made["packages"].items())
    libraries = "; ".join(
        f"{name}: {one['version']} ({', '.join(f'{key} {value}' for key, value in one['settings'].items())})"
        for name, one in document["libraries"].items()
    )
    return [
        ("command", made["command"]),
        ("date", made["date"]),
        ("processor", f"{machine['cpu']}, {machine['cores']} cores"),
        ("system", machine["system"]),
        ("versions", f"paceline {made['paceline']}, Python {made['python']}, {packages}"),
        ("libraries", libraries),
        ("judge", document["judge"]),
    ]


INKS: Final = ("#1d5fc4", "#77acff", "#b8420f", "#177245", "#8331c9", "#0b6f85")
GREY: Final = "#888888"
MARKERS: Final = "os^"


def draw_structured(document: Found, path: Path, plt: Any) -> None:
    """Write the plot: coverage of each set by library, and what a token and compiling take."""
    sets = [(name, one) for name, one in document["sets"].items() if one["cases"]]
    names = list(document["libraries"])
    inks = {name: INKS[place % len(INKS)] for place, name in enumerate(names)} | {FREE: GREY}
    figure, every = plt.subplots(1, len(sets) + 1, figsize=(4 * len(sets) + 4, 4.2), layout="constrained")
    for axes, (name, found) in zip(every, sets, strict=False):
        _draw_coverage(axes, name, found, inks)
    _draw_times(every[-1], dict(sets), inks)
    handles = [plt.Rectangle((0, 0), 1, 1, color=ink) for ink in inks.values()]
    figure.legend(handles, list(inks), loc="outside lower center", ncols=len(inks), frameon=False, fontsize=9)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _draw_coverage(axes: Any, name: str, found: Found, inks: Mapping[str, str]) -> None:
    libraries = [one for one in inks if one in found["libraries"]]
    kinds = [kind for kind in SHARES if any(one[kind] for one in found["libraries"].values())]
    width = 0.8 / len(libraries)
    for place, library in enumerate(libraries):
        for group, kind in enumerate(kinds):
            one = found["libraries"][library][kind]
            if one is not None:
                at, value = group + (place - (len(libraries) - 1) / 2) * width, 100 * one["value"]
                errors = [[value - 100 * one["low"]], [100 * one["high"] - value]]
                sure = {"yerr": errors, "ecolor": "#555555"} if one["n"] >= ENOUGH else {}
                axes.bar(at, value, width * 0.92, color=inks[library], **sure)
    axes.set(title=f"{name}, {found['cases']} schemas", ylim=(0, 104), ylabel="schemas, %")
    axes.set_xticks(range(len(kinds)), kinds)
    axes.grid(axis="y", alpha=0.25)
    axes.set_axisbelow(True)


def _draw_times(axes: Any, sets: Mapping[str, Found], inks: Mapping[str, str]) -> None:
    """A point a set and library: how long compiling and a token take."""
    points = [
        (1e3 * one["compile"]["p50"], 1e6 * one["token"]["p50"], inks[library], marker)
        for found, marker in zip(sets.values(), MARKERS, strict=False)
        for library, one in found["libraries"].items()
        if one["compile"] and one["token"]
    ]
    for x, y, ink, marker in points:
        axes.scatter([x], [y], 55, color=ink, marker=marker, alpha=0.85)
    for name, marker in zip(sets, MARKERS, strict=False):
        axes.scatter([], [], 40, color=GREY, marker=marker, label=name)
    axes.set(title="CPU time, schemas that all compile" if points else "no schema compiles with all")
    axes.set(xlabel="compiling and first mask, ms (median)", ylabel="a token, µs (median)")
    if points:
        axes.set(xscale="log", yscale="log")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter("{x:g}")
            axis.set_minor_formatter("")
    axes.legend(fontsize=8, frameon=False)
    axes.grid(alpha=0.25)
