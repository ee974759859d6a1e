"""`paceline demo`: the bundled prompts, decoded plainly and accelerated in turn; exit 1 if a text differs outside near ties."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.options import DEFAULT_SPEC, Model, Revision, Spec, Trust, open_llm, with_flags

if TYPE_CHECKING:
    from paceline.bench.demo import Total


@with_flags(sampling=False)
def command(
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, max=4096, help="Most new tokens per prompt.")] = 128,
    repeats: Annotated[int, typer.Option("--repeats", min=1, max=100, help="Timed runs of each prompt, both ways.")] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="Print one object instead of a table.")] = False,
    model: Model = None,
    speculative_config: Spec = DEFAULT_SPEC,
    revision: Revision = None,
    trust_remote_code: Trust = False,
    given: dict[str, Any] = {},  # noqa: B006 - filled by the decorator
) -> None:
    """Decode a set of prompts plainly and accelerated, in turn, and compare speed and text."""
    from rich.console import Console

    from paceline.bench import demo

    llm = open_llm(model, None, revision, trust_remote_code, speculative_config, given)
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
        info = llm.runner.info
        Console().print(table(lines, f"{info.family}, {info.dtype}, {info.device}, temperature 0".replace("torch.", "")))
    raise typer.Exit(1 if lines[-1].wrong else 0)


def progress_bar() -> Any:
    """A transient progress bar on standard error."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True)


def table(lines: list[Total], title: str) -> Any:
    """The totals as a table."""
    from rich.table import Table

    found = Table(title=title)
    for name in ("prompts", "plain tokens/s", "paceline tokens/s", "speed-up", "mean acceptance length", "identical"):
        found.add_column(name, justify="left" if name == "prompts" else "right")
    for line in lines:
        ties = f" ({line.near_ties} near ties)" if line.near_ties else ""
        same = "yes" if line.identical == line.prompts else f"no: {line.identical} of {line.prompts}{ties}"
        found.add_row(
            f"{line.name} ({line.prompts})",
            f"{line.plain_rate:.0f}",
            f"{line.fast_rate:.0f}",
            f"{line.speedup:.2f}x",
            f"{line.mean_acceptance_length:.2f}",
            same,
            style="bold" if line.name == "all" else None,
        )
    return found
