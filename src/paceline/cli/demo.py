"""`paceline demo`: the bundled prompts, decoded plainly and accelerated in turn; exit 1 if a text differs outside near
ties.

Without `--model` it runs the bundled model, and, with the default methods, a real one where `benchmarks/real_models.py`
has made its folder: what drafting brings does not show on a model whose passes are so short.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.options import open_llm, with_flags
from paceline.cli.terminal import listed, progress_bar, say

if TYPE_CHECKING:
    from paceline.bench import DemoRow, DemoTotal
    from paceline.llm import LLM

TOO_SMALL = (
    "The bundled model is there to show that the texts are equal; its passes are so short that they say little "
    "about other models. `paceline bench --model MODEL` measures what drafting gains on a model of yours."
)

BUSY, WATCHED = 0.5, 0.3
"""CPUs that other processes use, from which on the demo says so; seconds for which they are watched."""


@with_flags(sampling=False)
def command(
    *,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", min=1, max=4096, help="Maximum number of new tokens per prompt.")
    ] = 128,
    repeats: Annotated[
        int, typer.Option("--repeats", min=1, max=100, help="Timed runs of each prompt, both ways.")
    ] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
    flag_values: dict[str, Any],
) -> None:
    """Decode a set of prompts plainly and accelerated, in turn, and compare speed and text.

    By default on the bundled model, and on SmolLM2 too where benchmarks/real_models.py has made its folder.
    """
    from paceline.bench import MAKE_SMOLLM2, REAL_PROMPTS, REAL_TOKENS, SMOLLM2, demo_dict, demo_totals, smollm2_folder

    options = {"speculative_config": '{"method": "auto"}'} | flag_values  # a profile may say "off", which shows nothing
    llm, folder = open_llm(options, timed=True), smollm2_folder()
    load = 0.0 if as_json else others_load()
    rows = decoded(llm, max_tokens, repeats)
    document, wrong = demo_dict(rows), demo_totals(rows)[-1].wrong
    if not as_json:
        print_table(demo_totals(rows), llm)
        print_busy(load)
    if not {"model", "speculative_config", "tokenizer"} & flag_values.keys():
        if not as_json:
            print_note(None if (folder / "config.json").exists() else MAKE_SMOLLM2)
        if (folder / "config.json").exists():
            del llm
            real = open_llm({**options, "model": str(folder)}, timed=True)
            rows = decoded(real, min(max_tokens, REAL_TOKENS), 1, REAL_PROMPTS)
            document, wrong = document | {SMOLLM2: demo_dict(rows)}, wrong + demo_totals(rows)[-1].wrong
            if not as_json:
                print()
                print_table(demo_totals(rows), real, SMOLLM2)
    if as_json:
        print(json.dumps(document))
    raise typer.Exit(1 if wrong else 0)


def decoded(llm: LLM, max_tokens: int, repeats: int, prompts: int | None = None) -> list[DemoRow]:
    """The demo on one model, with a progress bar; `prompts` of the set, spread over it, or all."""
    from paceline.bench import bundled_prompts, run_demo

    every = bundled_prompts()
    picked = every if prompts is None else every[:: max(1, len(every) // prompts)][:prompts]
    with progress_bar() as bar:
        task = bar.add_task("decoding", total=repeats * len(picked))
        return run_demo(
            llm,
            picked,
            max_tokens=max_tokens,
            repeats=repeats,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )


def print_note(command: str | None) -> None:
    """What the bundled model is too small to show, and the command that makes a real one where there is none yet."""
    say(TOO_SMALL)
    if command is not None:
        say(f"For a table on a real model beside this one, run `{command}` in a checkout, then this again.")


def others_load() -> float:
    """How many CPUs other processes keep busy, watched for a while in which this one sleeps."""
    import psutil

    return float(psutil.cpu_percent(interval=WATCHED)) / 100 * (psutil.cpu_count() or 1)


def print_busy(load: float) -> None:
    """That the machine was busy before the demo began, where it was: figures then say little."""
    import psutil

    if load >= BUSY:
        say(f"Other processes kept {load:.1f} of {psutil.cpu_count() or 1} CPUs busy, so these speeds scatter.")


def print_table(lines: list[DemoTotal], llm: LLM, name: str | None = None) -> None:
    """The totals as a table that fits 80 columns, and what it means."""
    from rich.console import Console

    console, info, last = Console(highlight=False), llm.runner.info, lines[-1]
    methods = listed(llm.drafter_methods) or "nothing"
    dtype = str(info.dtype).removeprefix("torch.")
    say(f"{name or info.name} in {dtype} on {info.device}, temperature 0, drafts by {methods}")
    console.print(table(lines))
    say(
        "Tokens/s are given for plain and for accelerated decoding; accepted is the mean acceptance length, tokens "
        "per pass of the model."
    )
    if last.near_ties:
        ties = "1 near tie" if last.near_ties == 1 else f"{last.near_ties} near ties"
        say(f"The texts differ at {ties} of the two best tokens, which rounding decides.")
    if last.wrong:
        say(f"{last.wrong} of {last.prompts} texts differ elsewhere than at a near tie: this is a defect.")


def table(lines: list[DemoTotal]) -> Any:
    """Make a table of the totals."""
    from rich import box
    from rich.table import Table

    rich_table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("prompts", "plain", "paceline", "speed-up", "accepted", "identical"):
        rich_table.add_column(name, justify="left" if name == "prompts" else "right", no_wrap=True)
    for line in lines:
        same = "yes" if line.identical == line.prompts else f"no ({line.identical} of {line.prompts})"
        rich_table.add_row(
            f"{line.name} ({line.prompts})",
            f"{line.plain_rate:.0f}/s",
            f"{line.fast_rate:.0f}/s",
            f"{line.speedup:.2f}x",
            f"{line.mean_acceptance_length:.2f}",
            same,
            style="bold" if line.name == "all" else None,
        )
    return rich_table
