"""Writes a table and a plot of docs/benchmarks.md: tokens per second of SmolLM2 in Paceline and in other engines.

usage: table.py            changes nothing if both are up to date already

The figures are those of `results/peers.json` where it holds this model, all engines in one run (`peers.py --only
prompts`, after `python -m lab peers install all`); else those of `results/speed_cpu.json`, which knows transformers
alone (`speed.py --only demo`).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

from paceline.bench import pyplot

ROOT = Path(__file__).parent.parent
RESULTS, PLOT = ROOT / "benchmarks" / "results", ROOT / "docs" / "images" / "speed.svg"
BEGIN, END = "<!-- table:begin -->", "<!-- table:end -->"
OURS, MODEL, PART = "Paceline", "SmolLM2-135M-Instruct", "prompts smollm2"
ENGINES = {"transformers": "transformers", "llama.cpp": "llama.cpp", "openvino-genai": "OpenVINO GenAI"}
COLOURS = ("#8a95a3", "#1b5fc4")
"""Of other engines, and ours."""


@dataclass(frozen=True, slots=True)
class Row:
    """Tokens per second of one engine: plain, and with its best drafts, which are named."""

    engine: str
    plain: float
    best: float
    drafts: str


@dataclass(frozen=True, slots=True)
class Figures:
    """What the page shows, the slowest engine first.

    Attributes:
        over_plain: speed-up of `auto` over plain decoding of Paceline, with its 95 % interval, where it was measured.
    """

    rows: list[Row]
    made: dict[str, Any]
    over_plain: dict[str, float] | None = None


def figures(speed: dict[str, Any], peers: dict[str, Any]) -> Figures:
    """From all engines in one run where there is one, else from `speed.py`."""
    found = next((one for one in peers.get(PART, []) if one["batch"] == 1 and "tokens per second" in one), None)
    if found:
        made = peers.get("parts", {}).get(PART, peers["provenance"])
        return Figures(_ordered(peer_rows(found["tokens per second"])), made)
    demo = speed["demo"]["smollm2"]["all"]
    rates, over = demo["tokens_per_second"], demo["speedup of paceline auto over"]["paceline plain"]
    theirs = {name.removeprefix("transformers "): rate for name, rate in rates.items() if name.startswith("transf")}
    best = max(theirs, key=theirs.__getitem__)
    rows = [
        Row("transformers", theirs["plain"], theirs[best], best),
        Row(OURS, rates["paceline plain"], rates["paceline auto"], "auto"),
    ]
    made = speed.get("parts", {}).get("demo smollm2", speed["provenance"])
    return Figures(_ordered(rows), made, over)


def peer_rows(rates: dict[str, float]) -> list[Row]:
    """Rows from the speeds of `peers.py` by setting: those of Paceline bare, those of others behind their names."""
    rows = [Row(OURS, rates["plain"], rates["auto"], "auto")]
    for engine, name in ENGINES.items():
        settings = {key.removeprefix(f"{engine} "): rate for key, rate in rates.items() if key.startswith(f"{engine} ")}
        if "plain" in settings:
            best = max(settings, key=settings.__getitem__)
            rows.append(Row(name, settings["plain"], settings[best], best.split("(")[0]))
    return rows


def _ordered(rows: list[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: row.best)


def table(shown: Figures) -> str:
    """Markdown for the page."""
    head = ["| tokens/s | plain | with drafts |", "|---|---|---|"]
    lines = [
        f"| {row.engine} | {row.plain:.0f} | {f'**{row.best:.0f}**' if row.engine == OURS else f'{row.best:.0f}'} "
        f"({row.drafts}) |"
        for row in shown.rows
    ]
    over = shown.over_plain
    gain = (
        f"`auto` is {over['median']:.2f} times plain ({over['low']:.2f} to {over['high']:.2f}, 95 %). " if over else ""
    )
    return "\n".join([*head, *lines, "", f"{gain}{MODEL}, shipped prompts; {origin(shown.made)}."])


def origin(made: dict[str, Any]) -> str:
    """A run in words."""
    packages = made["packages"]
    return (
        f"{made['cpu']}, {made['threads']} threads, bfloat16, batch 1, temperature 0, {made['date'][:10]}; "
        f"PyTorch {packages['torch']}, transformers {packages['transformers']}; made by `{made['command']}`"
    )


def plot(shown: Figures) -> str:
    """The same as bars, in SVG with text as text."""
    plt, places = pyplot(), range(len(shown.rows))
    with plt.rc_context({"svg.fonttype": "none", "svg.hashsalt": MODEL, "font.family": "sans-serif", "font.size": 11}):
        figure, panel = plt.subplots(figsize=(8, 0.62 * len(shown.rows) + 0.7), layout="constrained")
        for offset, opacity in ((-0.2, 0.45), (0.2, 1.0)):
            rates = [row.plain if offset < 0 else row.best for row in shown.rows]
            words = ["plain" if offset < 0 else row.drafts for row in shown.rows]
            colours = [COLOURS[row.engine == OURS] for row in shown.rows]
            bars = panel.barh([place + offset for place in places], rates, 0.36, color=colours, alpha=opacity)
            panel.bar_label(bars, [f"{rate:.0f} {word}" for rate, word in zip(rates, words, strict=True)], padding=4)
        panel.set_title(f"{MODEL}: tokens per second, {shown.made['threads']} CPU threads", loc="left", weight="bold")
        panel.set_yticks(places, [row.engine for row in shown.rows], weight="bold")
        panel.invert_yaxis()
        panel.margins(x=0.12)
        panel.tick_params(left=False, bottom=False, labelbottom=False)
        panel.spines[:].set_visible(False)
        text = StringIO()
        figure.savefig(text, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format")))
        plt.close(figure)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines()) + "\n"


def committed() -> Figures:
    """Of the result files."""
    speed, peers = (json.loads((RESULTS / f"{name}.json").read_text()) for name in ("speed_cpu", "peers"))
    return figures(speed, peers)


def main() -> None:
    shown, page = committed(), ROOT / "docs" / "benchmarks.md"
    text = page.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    page.write_text(f"{before}{BEGIN}\n{table(shown)}\n{END}{after}", encoding="utf-8")
    PLOT.write_text(plot(shown), encoding="utf-8")


if __name__ == "__main__":
    main()
