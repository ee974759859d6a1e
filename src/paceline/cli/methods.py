"""`paceline methods`: what the registries hold."""

from __future__ import annotations

import json
from collections.abc import Mapping
from textwrap import wrap
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.options import with_log_level

if TYPE_CHECKING:
    from paceline.diffusion import Method
    from paceline.registry import Entry

FAMILIES = {
    "drafters": 'Drafters guess: speculative_config key "method"',
    "verifiers": 'Verifiers decide which guesses stand: key "acceptance_method" (greedy at temperature 0)',
    "controllers": 'Controllers decide how much to guess: key "controller"',
}
DIFFUSION = 'Diffusion language models: diffusion_config key "method"'
WIDEST = 100


@with_log_level
def command(as_json: Annotated[bool, typer.Option("--json", help="Print a list of objects.")] = False) -> None:
    """List drafters, verifiers and controllers (kind, exactness class, needs, paper), and methods of diffusion
    decoding.
    """
    from paceline import registry
    from paceline.diffusion import METHODS

    tables = {family: registry.table(family) for family in registry.FAMILIES}
    if as_json:
        rows = [_row(family, name, entry) for family, table in tables.items() for name, entry in table.items()]
        print(json.dumps(rows + [_diffusion_row(name, method) for name, method in METHODS.items()]))
        return
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    width = min(console.width, WIDEST)
    for family, table in tables.items():
        console.print(Text(FAMILIES.get(family, family), style="bold"))
        for name, entry in table.items():
            console.print(Text(f"  {name}", style="green"), soft_wrap=True)
            for line in describe(family, entry, width):
                console.print(Text(line), soft_wrap=True)
        console.print()
    console.print(Text(DIFFUSION, style="bold"))
    for name, method in METHODS.items():
        console.print(Text(f"  {name}", style="green"), soft_wrap=True)
        for line in describe_diffusion(method, width):
            console.print(Text(line), soft_wrap=True)
    console.print()
    console.print(Text("\n".join(wrap(registry.STRICT_NOTE, width))), soft_wrap=True)


def _row(family: str, name: str, entry: Entry) -> dict[str, Any]:
    greedy, sampled = entry.exactness
    return {
        "name": name,
        "family": family,
        "kind": entry.kind,
        "exactness_greedy": greedy,
        "exactness_sampling": sampled,
        "needs": list(entry.needs),
        "paper": entry.paper,
    }


def describe(family: str, entry: Entry, width: int) -> list[str]:
    """What the registry says of one method, in lines of at most `width` columns (words are never cut)."""
    greedy, sampled = entry.exactness
    exactness = (
        f"{greedy}, at every temperature" if greedy == sampled else f"{greedy} at temperature 0; {sampled} above"
    )
    if family == "controllers":
        exactness = "that of the drafters and the verifier it steers"
    values = {
        "kind": entry.kind,
        "exactness": exactness,
        "needs": ", ".join(entry.needs) or "nothing",
        "paper": entry.paper or "none",
    }
    return _lines(values, width)


def _diffusion_row(name: str, method: Method) -> dict[str, Any]:
    needs = [method.needs] if method.needs else []
    return {"name": name, "family": "diffusion", "lossless": method.lossless, "needs": needs, "paper": method.paper}


def describe_diffusion(method: Method, width: int) -> list[str]:
    """The same of a method of diffusion decoding."""
    lossless = "the static baseline's text" if method.lossless else "a text of its own"
    return _lines({"writes": lossless, "needs": method.needs or "nothing", "paper": method.paper}, width)


def _lines(values: Mapping[str, str], width: int) -> list[str]:
    lines = []
    for key, value in values.items():
        indent = f"    {key:<11}"
        lines += wrap(value, width, initial_indent=indent, subsequent_indent=" " * len(indent), break_long_words=False)
    return lines
