"""`paceline methods`: what the registries hold."""

from __future__ import annotations

import json
from typing import Annotated

import typer


def command(as_json: Annotated[bool, typer.Option("--json", help="Print a list of objects.")] = False) -> None:
    """List drafters, verifiers and controllers: kind, exactness class, needs, paper."""
    from paceline import registry

    rows = [
        {
            "name": name,
            "family": family,
            "kind": entry.kind,
            "exactness_greedy": entry.exactness[0],
            "exactness_sampling": entry.exactness[1],
            "needs": list(entry.needs),
            "paper": entry.paper,
        }
        for family in registry.FAMILIES
        for name, entry in registry.table(family).items()
    ]
    if as_json:
        print(json.dumps(rows))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(show_lines=False)
    for name in ("name", "kind", "at temperature 0", "above", "needs", "paper"):
        table.add_column(name, overflow="fold")
    for row in rows:
        needs = ", ".join(row["needs"]) or "-"
        table.add_row(
            str(row["name"]),
            str(row["kind"]),
            str(row["exactness_greedy"]),
            str(row["exactness_sampling"]),
            needs,
            str(row["paper"]),
        )
    Console().print(table)
