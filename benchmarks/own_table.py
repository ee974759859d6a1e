"""Writes what `own_computers.py` and `block_quality.py` found into the README and `docs/benchmarks.md`, and the plot.

usage: own_table.py [--folder FOLDER]     changes nothing if all is up to date already

The README's table and plot have the figures that most people ask for; the page has more.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from io import StringIO
from pathlib import Path
from typing import Any

from paceline.bench import pyplot

ROOT = Path(__file__).parent.parent
RESULTS, PLOT = ROOT / "benchmarks" / "results", ROOT / "docs" / "images" / "own_computers.svg"
PAGE = ROOT / "docs" / "benchmarks.md"
PAGES = {"files": ROOT / "README.md", "files-by-processor": PAGE, "block-losses": PAGE}
"""Marks, and the pages that hold them."""

NAMES = {
    "smollm2": "SmolLM2-135M, Q4_1",
    "qwen05": "Qwen2.5-Coder 0.5B, Q4_K_M",
    "qwen15": "Qwen2.5-Coder 1.5B, Q4_K_M",
}
PROCESSORS = ("AVX2 alone", "all instructions")
ENGINES = {"llama.cpp": "llama.cpp", "paceline": "Paceline"}
LOSSES = {
    "ours": "Paceline",
    "ours in float32": 'Paceline, `dtype="float32"`',
    "llama.cpp": "llama.cpp",
    "int4 and int8": "int4",
    "control": "control",
}
COLOURS, DRAFTED = ("#8a95a3", "#1b5fc4"), "#1f9d6b"
"""Of llama.cpp, and ours; ours with drafts."""

NONE = "-"


def marked(name: str, text: str) -> str:
    """Text between the marks by which it is found again."""
    return f"<!-- {name}:begin -->\n{text}\n<!-- {name}:end -->"


def within(name: str, page: str, text: str) -> str:
    """A page with the text between its marks."""
    before, rest = page.split(f"<!-- {name}:begin -->")
    return f"{before}{marked(name, text)}{rest.split(f'<!-- {name}:end -->')[1]}"


def number(value: float | None, scale: float = 1.0) -> str:
    """Three digits, without needless noughts behind a point."""
    if value is None:
        return NONE
    value *= scale
    return f"{value:,.0f}" if value >= 99.5 else f"{value:.{1 if value >= 9.95 else 2}f}"


def several(found: Mapping[str, float], keys: Iterable[str], scale: float = 1.0) -> str:
    return " / ".join(number(found.get(key), scale) for key in keys)


def of_processor(result: Mapping[str, Any], processor: str) -> dict[str, Any]:
    """File -> its figures, the smallest first."""
    return {file: result[part] for file in NAMES if (part := f"{processor}, {file}") in result}


def markdown(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def origin(made: Mapping[str, Any]) -> str:
    """A run in words."""
    return f"{made['cpu']}, {made['threads']} threads, {made['date'][:10]}; made by `{made['command']}`"


def both(found: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """Every file's rows: its name (once), the engine, its figures."""
    for file, engines in found.items():
        for place, (key, engine) in enumerate(ENGINES.items()):
            yield "" if place else NAMES[file], engine, engines[key]


def short(result: Mapping[str, Any]) -> str:
    """The README's table: what the plot shows, in figures, on every processor."""
    drafted = any(has_everyday(of_processor(result, processor)) for processor in PROCESSORS)
    heads = ("", "", *PANELS, *(["everyday tasks, plain / with drafts, tokens/s"] if drafted else []))
    tables = []
    for processor in PROCESSORS:
        if found := of_processor(result, processor):
            rows = [(name, engine, *_cells(one, drafted)) for name, engine, one in both(found)]
            made = result["parts"][f"{processor}, {next(reversed(found))}"]
            tables.append(f"{markdown(heads, rows)}\n\n{processor[0].upper()}{processor[1:]}: {origin(made)}.")
    return "\n\n".join([*tables, *everyday(result)])


def everyday(result: Mapping[str, Any]) -> Iterator[str]:
    """Paceline's everyday tasks, plain and with drafts, where they were timed by themselves."""
    timed = result.get("everyday", {})
    kinds = [kind for kind in PROCESSORS if any(part.startswith(f"{kind}, ") for part in timed)]
    if kinds:
        rows = []
        for file, name in NAMES.items():
            found = [timed.get(f"{kind}, {file}") for kind in kinds]
            if any(found):
                rows.append((name, *(NONE if one is None else _plain_and_drafts(one) for one in found)))
        made = next(reversed(timed.values()))["made"]
        heads = ("the tasks of `paceline demo`, prompts included", *(f"{kind}: plain / with drafts" for kind in kinds))
        yield f"{markdown(heads, rows)}\n\nTokens/s of Paceline: {origin(made)}."


def _plain_and_drafts(one: Mapping[str, Any]) -> str:
    return f"{number(one['plain'])} / {number(one['drafts'])}"


def has_everyday(found: Mapping[str, Any]) -> bool:
    """Whether the everyday tasks were timed on any of these files."""
    return any("everyday" in one["paceline"] for one in found.values())


def _cells(one: Mapping[str, Any], drafted: bool) -> Iterator[str]:
    for figure_of in PANELS.values():
        yield number(figure_of(one))
    if drafted:
        tasks = one.get("everyday")
        yield f"{number(tasks['plain'])} / {number(tasks['drafts'])}" if tasks else NONE


def long(result: Mapping[str, Any]) -> str:
    """The page's tables, one for each processor."""
    tables = []
    for processor in PROCESSORS:
        if found := of_processor(result, processor):
            made = result["parts"][f"{processor}, {next(iter(found))}"]
            last = f"{processor[0].upper()}{processor[1:]}: {origin(made)}.{shares(found)}"
            tables.append(f"{markdown(HEADS, map(_row, both(found)))}\n\n{last}")
    return "\n\n".join(tables)


def shares(found: Mapping[str, Any]) -> str:
    """How near decoding comes to reading its bytes once a step, where that was measured."""
    each = [f"{one['of the limit']:.2f} ({NAMES[file]})" for file, one in found.items() if "of the limit" in one]
    return f" Of the limit that reading sets, decoding reaches {', '.join(each)}." if each else ""


HEADS = (
    "file",
    "",
    "prompt of 512 / 2,048, tokens/s",
    "decoding, tokens/s",
    "a pass over 1 / 2 / 4 / 8 / 16 / 32 rows, ms",
    "to the first token, first / next start, s",
    "memory for it, GB",
)


def _row(one: tuple[str, str, Any]) -> tuple[str, ...]:
    name, engine, found = one
    return (
        name,
        engine,
        several(found["prefill"], ("512", "2048")),
        number(found["decode"]),
        several(found["rows"], ("1", "2", "4", "8", "16", "32")),
        several(found.get("ready", {}), ("first", "next")),
        several(found.get("peak", {}), ("first", "next"), 1e-9),
    )


def loss(result: Mapping[str, Any]) -> str:
    """What block arithmetic loses, file by file."""
    heads = ("file", "", "nats, mean", "nats, 99 %", "same likeliest token")
    rows = [
        (NAMES[file] if key == "ours" else "", name, f"{one['mean']:.2g}", f"{one['99 %']:.2g}", f"{one['same']:.1%}")
        for file in NAMES
        if file in result
        for key, name in LOSSES.items()
        if (one := result[file].get(key))
    ]
    return markdown(heads, [tuple(cell.replace("%", " %") for cell in row) for row in rows])


PANELS: dict[str, Callable[[Mapping[str, Any]], float | None]] = {
    "to the first token, s": lambda one: one.get("ready", {}).get("next"),
    "memory, GB": lambda one: one["peak"]["next"] / 1e9 if "peak" in one else None,
    "prompt of 512, tokens/s": lambda one: one["prefill"].get("512"),
    "decoding, tokens/s": lambda one: one["decode"],
}
"""Titles of the plot's panels, and their figure of an engine's."""

DRAFTS = "everyday tasks with drafts"


def plot(result: Mapping[str, Any]) -> str:
    """Bars of both engines on every processor and file, and of ours with drafts, in SVG with text as text."""
    rows = [
        (f"{NAMES[file].split(',')[0]}\n{processor}", found)
        for processor in PROCESSORS
        for file, found in of_processor(result, processor).items()
        if file != "smollm2"
    ]
    plt, places, drafted = pyplot(), range(len(rows)), has_everyday(dict(rows))
    style = {"svg.fonttype": "none", "svg.hashsalt": "own computers", "font.family": "sans-serif", "font.size": 10}
    with plt.rc_context(style):
        height = 0.7 * len(rows) + 1.0
        figure, axes = plt.subplots(
            1, len(PANELS) + drafted, figsize=(14 if drafted else 11.5, height), layout="constrained", sharey=True
        )
        for panel, (title, figure_of) in zip(axes, PANELS.items(), strict=False):
            for offset, (key, engine), colour in zip((-0.2, 0.2), ENGINES.items(), COLOURS, strict=True):
                _bars(panel, [place + offset for place in places], [figure_of(one[key]) for _, one in rows], colour)
                if panel is axes[0]:
                    panel.plot([], [], color=colour, linewidth=6, label=engine)
            panel.set_title(title, loc="left", weight="bold")
        for offset, key, colour in ((-0.2, "plain", COLOURS[1]), (0.2, "drafts", DRAFTED)) if drafted else ():
            tasks = [one["paceline"].get("everyday", {}).get(key) for _, one in rows]
            _bars(axes[-1], [place + offset for place in places], tasks, colour)
        if drafted:
            axes[0].plot([], [], color=DRAFTED, linewidth=6, label=f"Paceline, {DRAFTS}")
            axes[-1].set_title("everyday tasks, tokens/s", loc="left", weight="bold")
        axes[0].set_yticks(places, [name for name, _ in rows])
        axes[0].invert_yaxis()
        figure.legend(loc="outside lower center", ncols=3, frameon=False)
        text = StringIO()
        figure.savefig(text, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format")))
        plt.close(figure)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines()) + "\n"


def _bars(panel: Any, places: Sequence[float], values: Sequence[float | None], colour: str) -> None:
    """Horizontal bars with their figures; none where nothing was measured."""
    bars = panel.barh(places, [value or 0.0 for value in values], 0.36, color=colour)
    panel.bar_label(bars, [number(value) if value else "" for value in values], padding=3)
    panel.margins(x=0.3)
    panel.tick_params(left=False, bottom=False, labelbottom=False)
    panel.spines[:].set_visible(False)


def texts(folder: Path = RESULTS) -> dict[str, str]:
    """Of each mark what the result files say."""
    speeds, losses = (json.loads((folder / f"{name}.json").read_text()) for name in ("own_computers", "block_quality"))
    return {"files": short(speeds), "files-by-processor": long(speeds), "block-losses": loss(losses)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=RESULTS)
    given = parser.parse_args()
    for name, text in texts(given.folder).items():
        page = PAGES[name]
        page.write_text(within(name, page.read_text(encoding="utf-8"), text), encoding="utf-8")
    PLOT.write_text(plot(json.loads((given.folder / "own_computers.json").read_text())), encoding="utf-8")


if __name__ == "__main__":
    main()
