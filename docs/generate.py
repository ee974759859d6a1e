"""Writes docs/methods.md from the registry and the docstrings of what it names.

usage: python docs/generate.py
"""

from __future__ import annotations

import inspect
from pathlib import Path

from paceline import registry

HERE = Path(__file__).parent


def methods() -> str:
    """One section a method: what it is, options, exactness, needs, source."""
    note = "Written by `python docs/generate.py` from the registry; `paceline methods` prints the same facts."
    lines = ["# Methods", "", note, ""]
    for family in registry.FAMILIES:
        lines += [f"## {family.capitalize()}", ""]
        for name, entry in registry.FAMILIES[family].items():
            lines += _section(family, name, entry)
    return "\n".join(lines)


def _section(family: str, name: str, entry: registry.Entry) -> list[str]:
    found = registry.load(family, name)
    module = inspect.getdoc(inspect.getmodule(found)) or ""
    greedy, sampling = entry.exactness
    facts = [f"- Kind: {entry.kind}", f"- At temperature 0: {greedy}; above: {sampling}"]
    facts += [f"- Needs: {', '.join(entry.needs)}"] if entry.needs else []
    facts += [f"- Source: {entry.paper}"]
    options = inspect.getdoc(found) or ""
    return [f"### `{name}`", "", module.split("\n\n")[0].replace("\n", " "), "", *facts, "", "```text", options, "```", ""]


if __name__ == "__main__":
    (HERE / "methods.md").write_text(methods(), encoding="utf-8")
