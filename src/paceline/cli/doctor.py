"""`paceline doctor`: checks a setup and says what is wrong, one line each; exit 0 when fine, 1 when something is
wrong.
"""

from __future__ import annotations

import json
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.demo import progress_bar
from paceline.cli.options import open_llm, with_flags
from paceline.cli.prompts import read_prompts
from paceline.cli.verify import stages
from paceline.config import SpeculativeConfig

if TYPE_CHECKING:
    from paceline.bench.doctor import Visit
    from paceline.llm import LLM

PROBED = 3
"""Prompts of the probes."""

WIDEST = 100


@with_flags(sampling=False)
def command(
    *,
    prompts: Annotated[
        Path | None,
        typer.Option("--prompts", metavar="FILE", help="Text, a prompt a line, or JSONL with a key prompt."),
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Name the checks that found nothing, too.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as one object.")] = False,
    given: dict[str, Any],
) -> None:
    """Check machine, checkpoints and drafters, and say what is wrong and what to do about it."""
    texts = None if prompts is None else read_prompts(prompts)
    config = SpeculativeConfig.parse(given.pop("speculative_config", None) or {"method": "auto"})
    llm = open_llm(given | {"speculative_config": "null"}, timed=True)
    from paceline.bench.doctor import visit

    items = _prompts(llm) if texts is None else texts[:PROBED]
    with progress_bar() as bar:
        found = visit(llm, config, items, stages(bar))
    print(json.dumps(found.to_dict()) if as_json else words(found, llm, verbose=verbose))
    raise typer.Exit(0 if found.diagnosis.healthy else 1)


def _prompts(llm: LLM) -> list[Any]:
    """A few bundled prompts, of different tasks."""
    from paceline.cli.verify import bundled

    found = bundled(llm)
    return found[:: max(1, len(found) // PROBED)][:PROBED]


def words(found: Visit, llm: LLM, *, verbose: bool) -> str:
    """The findings, no wider than the terminal, faults before hints."""
    from rich.console import Console

    width = min(Console().width, WIDEST)
    facts, diagnosis = found.facts, found.diagnosis
    target, threads = facts.target, facts.machine.threads
    lines = [
        f"{Path(llm.runner.info.name).name} ({target.dtype} on {target.device}, {threads} "
        f"thread{'s' if threads > 1 else ''})"
    ]
    for probe in facts.probes:
        lines.append(_probed(probe))
    complained = {name for name, _ in diagnosis.findings}
    if verbose:
        lines += [f"ok     {name}" for name in diagnosis.asked if name not in complained]
    for name, one in sorted(diagnosis.findings, key=lambda pair: pair[1].hint):
        lines.append(f"{'hint ' if one.hint else 'WRONG'}  {name}: {one.what}. To do: {one.do}.")
    wrong = sum(not one.hint for _, one in diagnosis.findings)
    hints = len(diagnosis.findings) - wrong
    verdict = "nothing is wrong" if not wrong else f"{wrong} thing{'s are' if wrong > 1 else ' is'} wrong"
    lines.append(
        f"{len(diagnosis.asked)} checks: {verdict}" + (f", {hints} hint{'s' if hints > 1 else ''}" if hints else "")
    )
    return "\n".join(
        "\n".join(wrap(line, width, subsequent_indent=_indent(line), break_on_hyphens=False)) for line in lines
    )


def _indent(line: str) -> str:
    return " " * 7 if line.startswith(("WRONG", "hint", "ok ")) else "  "


def _probed(probe: Any) -> str:
    """What a probe saw, in one line."""
    hits, number = sum(guess.hit for guess in probe.guesses), len(probe.guesses)
    if not number:
        return f"probe of {probe.drafter}: no guesses"
    return f"probe of {probe.drafter}: {hits} of {number} guesses stand, {1e3 * probe.draft_seconds:.2g} ms for a token"
