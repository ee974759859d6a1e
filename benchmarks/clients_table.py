"""Writes what `clients.py` found into `docs/serving.md`.

usage: clients_table.py     changes nothing if it is up to date already
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
PAGE = FOLDER.parent / "docs" / "serving.md"
BEGIN, END = "<!-- clients:begin -->", "<!-- clients:end -->"
NONE = "-"
GROUPS: Mapping[str, tuple[str, ...]] = {
    "errors": ("error",),
    "tools and structured output": ("tools with structured", "structured output and tools"),
    "structured output": ("structured", "JSON mode"),
    "tool loops": ("loop", "agent", "handoff"),
    "strict tools": ("strict", "zodFunction", "pydantic_function"),
    "tools": ("tools",),
    "text": ("",),
}
"""Kind of calls -> words of their names; the first that fits."""

COLUMNS = ("text", "tools", "strict tools", "tool loops", "structured output", "tools and structured output", "errors")
Json = dict[str, Any]


def group_of(call: str) -> str:
    """The kind of a call."""
    return next(group for group, words in GROUPS.items() if any(word in call for word in words))


def cell(calls: Sequence[Json]) -> str:
    """How many hold."""
    return f"{sum(one['ok'] for one in calls)} of {len(calls)}" if calls else NONE


def table(result: Mapping[str, Any]) -> str:
    """How many calls of each kind hold, by client, and which do not."""
    rows = [["client", *COLUMNS], ["---"] * (len(COLUMNS) + 1)]
    failed = []
    for name, found in result["clients"].items():
        known = ", ".join(f"{package} {version}" for package, version in found["versions"].items())
        of = {column: [one for one in found["calls"] if group_of(one["call"]) == column] for column in COLUMNS}
        rows.append([known, *(cell(of[column]) for column in COLUMNS)])
        failed += [f"{name}: {one['call']}" for one in found["calls"] if not one["ok"]]
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    made = result["provenance"]
    note = f"{result['model']}, {made['date'][:10]}; made by `{made['command']}`."
    return "\n".join([*lines, "", *([f"Not held: {'; '.join(failed)}.", ""] if failed else []), note])


def committed() -> str:
    """The table of the result file."""
    return table(json.loads((FOLDER / "results" / "clients.json").read_text()))


def main() -> None:
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n\n{committed()}\n\n{END}{rest.split(END)[1]}", encoding="utf-8")


if __name__ == "__main__":
    main()
