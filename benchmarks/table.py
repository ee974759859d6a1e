"""Writes the table of the README from `results/speed_cpu.json`.

usage: table.py            prints nothing if the README is up to date already
"""

from __future__ import annotations

import json
from pathlib import Path

ROOT = Path(__file__).parent.parent
BEGIN, END = "<!-- table:begin -->", "<!-- table:end -->"
NAMES = {"smollm2": "SmolLM2-135M", "bundled": "bundled model (6M)", "large": "291M Llama, random weights"}


BEST = ("transformers plain", "transformers assisted", "transformers prompt lookup")


def table(result: dict) -> str:
    """Markdown rows from a result of `speed.py`."""
    rows = []
    for name, demo in sorted(result["demo"].items(), key=lambda item: item[0] != "smollm2"):
        for group in (one for one in ("all", "with repetition") if one in demo):
            rates, over = demo[group]["tokens_per_second"], demo[group]["speedup of paceline auto over"]
            best = max((one for one in BEST if one in rates), key=rates.__getitem__)
            own = over["paceline plain"]
            rows.append(
                f"| {NAMES.get(name, name)}, shipped prompts, {group} | {rates['transformers plain']:.0f} "
                f"| {rates[best]:.0f} ({best.removeprefix('transformers ')}) | {rates['paceline plain']:.0f} "
                f"| **{rates['paceline auto']:.0f}** | {own['median']:.2f} ({own['low']:.2f} to {own['high']:.2f}) |"
            )
    rates = result["large"]["tokens_per_second"]
    rows.append(f"| {NAMES['large']} | {rates['transformers']:.0f} | | {rates['paceline plain']:.0f} | | |")
    head = (
        "| tokens/s | transformers | transformers, best drafts | Paceline plain | Paceline | over its own plain (95 "
        "%) |\n|---|---|---|---|---|---|"
    )
    return "\n".join([head, *rows, "", f"{note(result)} Raw results in `benchmarks/results/`."])


def note(result: dict) -> str:
    """Which run made the rows; a sentence for each run where they come from several."""
    parts, runs = result.get("parts", {}), dict[str, list[str]]()
    for part, name in [*((f"demo {name}", name) for name in result.get("demo", {})), ("large", "large")]:
        made = parts.get(part) or parts.get("earlier") or result["provenance"]
        runs.setdefault(origin(made), []).append(NAMES.get(name, name))
    if len(runs) == 1:
        return f"{next(iter(runs))}."
    return " ".join(f"{' and '.join(rows)}: {run}." for run, rows in runs.items())


def origin(made: dict) -> str:
    """A run in words."""
    packages = made["packages"]
    return (
        f"{made['cpu']}, {made['threads']} threads, bfloat16, batch 1, temperature 0, {made['date'][:10]}; "
        f"PyTorch {packages['torch']}, transformers {packages['transformers']}; made by `{made['command']}`"
    )


def main() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    result = json.loads((ROOT / "benchmarks" / "results" / "speed_cpu.json").read_text())
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    (ROOT / "README.md").write_text(f"{before}{BEGIN}\n{table(result)}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
