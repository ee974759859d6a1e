"""`paceline demo`: tasks as people have them, decoded plainly and accelerated in turn; exit 1 if a text differs outside
near ties.

Where no model is named it runs on SmolLM2-135M-Instruct if that is at hand or the hub gives it, else on the bundled
one, of which it prints no speed: passes so short say nothing about models that people use.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.interrupts import GoesOn
from paceline.cli.options import open_llm, with_flags
from paceline.cli.terminal import console, listed, progress_bar, remark, say

if TYPE_CHECKING:
    from paceline.bench import DemoRow, DemoTotal
    from paceline.llm import LLM

ONLY_EQUAL = (
    "This is the bundled model, of 6 million parameters: it shows that the texts are equal, and its passes are too "
    "short to say how fast other models become. For speeds, run `paceline demo` where the Hugging Face hub can be "
    "reached, or `paceline demo --model MODEL` with a model of yours."
)

BUSY, WATCHED = 0.5, 0.3
"""CPUs that other processes use, from which on the demo says so; seconds for which they are watched."""


@with_flags(sampling=False)
def command(
    *,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", min=1, max=4096, help="Maximum number of new tokens per task.")
    ] = 96,
    repeats: Annotated[int, typer.Option("--repeats", min=1, max=100, help="Timed runs of each task, both ways.")] = 2,
    offline: Annotated[
        bool, typer.Option("--offline", help="Do not ask the hub for a model; take what is on this machine.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
    flag_values: dict[str, Any],
) -> None:
    """Decode everyday tasks plainly and accelerated, in turn, and compare speed and text.

    Runs on SmolLM2-135M-Instruct where it is at hand or the hub gives it, else on the bundled model.
    """
    from paceline.bench import demo_dict, demo_totals

    model = flag_values.get("model") or real_model(offline)
    chosen = {} if model is None else {"model": model}
    drafting = {"speculative_config": '{"method": "auto"}'}  # a profile may say "off", which shows nothing
    llm = open_llm(drafting | flag_values | chosen, timed=True)
    load = others_load() if model is not None and not as_json else 0.0
    rows = decoded(llm, max_tokens, repeats)
    totals = demo_totals(rows)
    if as_json:
        print(json.dumps({"model": llm.runner.info.name} | demo_dict(rows)))
    else:
        print_table(totals, llm, speeds=model is not None)
        print_busy(load)
    raise typer.Exit(1 if totals[-1].wrong else 0)


def real_model(offline: bool) -> str | None:
    """A model on which speeds mean something, fetched if the user lets it come; None takes the bundled one."""
    from paceline.bench import HUB_ID, download, model_at_hand, offer_of_hub

    if (folder := model_at_hand()) is not None:
        return folder
    offer = None if offline else offer_of_hub()
    if offer is None:
        return None
    remark(f"fetching {offer}; Ctrl-C takes the bundled model instead, --offline never asks")
    try:
        with GoesOn():
            done = download()
    except KeyboardInterrupt:
        remark("taking the bundled model; what has come is kept for the next time")
        return None
    if not done:
        remark("that did not work; taking the bundled model")
    return HUB_ID if done else None


def decoded(llm: LLM, max_tokens: int, repeats: int) -> list[DemoRow]:
    """The tasks on one model, with a progress bar."""
    from paceline.bench import demo_tasks, run_demo

    tasks = demo_tasks()
    with progress_bar() as bar:
        shown = bar.add_task("decoding", total=repeats * len(tasks))
        return run_demo(
            llm,
            tasks,
            max_tokens=max_tokens,
            repeats=repeats,
            progress=lambda done, total: bar.update(shown, completed=done, total=total),
        )


def others_load() -> float:
    """How many CPUs other processes keep busy, watched for a while in which this one sleeps."""
    import psutil

    return float(psutil.cpu_percent(interval=WATCHED)) / 100 * (psutil.cpu_count() or 1)


def print_busy(load: float) -> None:
    """That the machine was busy before the demo began, where it was: figures then say little."""
    import psutil

    if load >= BUSY:
        say(f"Other processes kept {load:.1f} of {psutil.cpu_count() or 1} CPUs busy, so these speeds scatter.")


def print_table(lines: list[DemoTotal], llm: LLM, *, speeds: bool) -> None:
    """The totals as a table that fits 80 columns, and what it means."""
    info, last = llm.runner.info, lines[-1]
    methods = listed(llm.drafter_methods) or "nothing"
    dtype = info.quantization or str(info.dtype).removeprefix("torch.")
    say(f"{info.name} in {dtype} on {info.device}, temperature 0, drafts by {methods}")
    console().print(table(lines, speeds=speeds))
    if last.identical == last.prompts:
        say(f"All {last.prompts} texts are equal to those of plain decoding.")
    if last.near_ties:
        ties = "1 near tie" if last.near_ties == 1 else f"{last.near_ties} near ties"
        say(f"The texts differ at {ties} of the two best tokens, which rounding decides.")
    if last.wrong:
        say(f"{last.wrong} of {last.prompts} texts differ elsewhere than at a near tie: this is a defect.")
    say(
        "Tokens a second count prompts in; tokens a pass are what a pass of the model yields with drafts."
        if speeds
        else ONLY_EQUAL
    )


def table(lines: list[DemoTotal], *, speeds: bool) -> Any:
    """The totals as a table; `speeds` gives it the columns of times."""
    from rich import box
    from rich.table import Table

    found = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    timed = ("plain", "paceline", "speed-up") if speeds else ()
    for name in ("tasks", *timed, "tokens a pass", "equal texts"):
        found.add_column(name, justify="left" if name == "tasks" else "right", no_wrap=True)
    for line in lines:
        times = (f"{line.plain_rate:.0f}/s", f"{line.fast_rate:.0f}/s", f"{line.speedup:.2f}x") if speeds else ()
        same = f"{line.identical} of {line.prompts}"
        style = "bold" if line.name == "all" else None
        found.add_row(line.name, *times, f"{line.mean_acceptance_length:.2f}", same, style=style)
    return found
