"""`paceline demo`: the bundled prompts, decoded plainly and accelerated in turn; exit 1 if a text differs outside near ties."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.options import open_llm, with_flags

if TYPE_CHECKING:
    from paceline.bench.demo import Total
    from paceline.llm import LLM


@with_flags(sampling=False)
def command(
    *,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, max=4096, help="Most new tokens per prompt.")] = 128,
    repeats: Annotated[int, typer.Option("--repeats", min=1, max=100, help="Timed runs of each prompt, both ways.")] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="Print one object instead of a table.")] = False,
    given: dict[str, Any],
) -> None:
    """Decode a set of prompts plainly and accelerated, in turn, and compare speed and text."""
    llm = open_llm({"speculative_config": '{"method": "auto"}'} | given, timed=True)  # a profile may say "off", which shows nothing
    from paceline.bench import demo

    with progress_bar() as bar:
        task = bar.add_task("decoding", total=None)
        rows = demo.run(
            llm,
            demo.bundled_prompts(),
            max_tokens=max_tokens,
            repeats=repeats,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    lines = demo.totals(rows)
    if as_json:
        print(json.dumps(demo.to_dict(rows)))
    else:
        print_table(lines, llm)
    raise typer.Exit(1 if lines[-1].wrong else 0)


def progress_bar() -> Any:
    """A transient progress bar on standard error; nothing where that is no terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def print_table(lines: list[Total], llm: LLM) -> None:
    """The totals as a table that fits 80 columns, and what it means."""
    from rich.console import Console

    console, info, last = Console(highlight=False), llm.runner.info, lines[-1]
    what = f"{info.family} in {info.dtype} on {info.device}, temperature 0, guesses by {', '.join(llm.drafter_methods) or 'nobody'}"
    console.print(what.replace("torch.", ""))
    console.print(table(lines))
    console.print(
        "Tokens/s are of plain and of accelerated decoding; accepted is the mean acceptance length, tokens per pass of the model."
    )
    if last.near_ties:
        places = "1 near tie" if last.near_ties == 1 else f"{last.near_ties} near ties"
        console.print(f"The texts differ at {places} of the two best tokens, which rounding decides.")
    if last.wrong:
        console.print(f"{last.wrong} of {last.prompts} texts differ elsewhere than at a near tie: this is a defect.")


def table(lines: list[Total]) -> Any:
    """The totals as a table."""
    from rich import box
    from rich.table import Table

    found = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("prompts", "plain", "paceline", "speed-up", "accepted", "identical"):
        found.add_column(name, justify="left" if name == "prompts" else "right", no_wrap=True)
    for line in lines:
        same = "yes" if line.identical == line.prompts else f"no ({line.identical} of {line.prompts})"
        found.add_row(
            f"{line.name} ({line.prompts})",
            f"{line.plain_rate:.0f}/s",
            f"{line.fast_rate:.0f}/s",
            f"{line.speedup:.2f}x",
            f"{line.mean_acceptance_length:.2f}",
            same,
            style="bold" if line.name == "all" else None,
        )
    return found
