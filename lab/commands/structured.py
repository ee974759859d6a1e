"""`python -m lab structured`: structured outputs beside other libraries, on sets of JSON schemas.

Exit codes besides those of `cli.app`: 130 after Ctrl-C, with what was done shown and written.
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli import (
    INTERRUPTED,
    OUTPUT,
    Output,
    TerminatedToo,
    must_be_own,
    must_be_writable,
    progress_bar,
    reject_diffusion,
    say,
    spinner,
    stages,
    with_log_level,
    writing,
)
from paceline.errors import ConfigError

if TYPE_CHECKING:
    from lab.structured import MeasuredSet, SchemaSet, StructuredBench

KINDS = ("pdf", "png", "svg")
DATA_HELP = (
    "Folder with iglu-central, schemastore, json-schema-test-suite and gsm8k, or some of them, each as published."
)
MODEL_HELP = "Folder or hub id. Default: bundled."
PEERS_HELP = (
    "Other libraries: all, or xgrammar, outlines, lm-format-enforcer separated by commas. "
    "`python -m lab peers install NAME` installs one."
)

Data = Annotated[Path, typer.Option("--data", metavar="FOLDER", help=DATA_HELP)]
Model = Annotated[
    str | None, typer.Option("--model", "-m", metavar="MODEL", help="Folder or hub id. Default: bundled.")
]
Count = Annotated[int, typer.Option("--schemas", metavar="N", min=1, max=100_000, help="Schemas of each set.")]
Cases = Annotated[int, typer.Option("--cases", metavar="N", min=1, max=100_000, help="Cases of the test suite.")]
Threads = Annotated[int | None, typer.Option("--threads", metavar="N", min=1, help="CPU threads of the model.")]
Asked = Annotated[int, typer.Option("--questions", metavar="N", min=0, max=100_000, help="Of GSM8K; 0 for none.")]
Tokens = Annotated[int, typer.Option("--max-tokens", metavar="N", min=1, max=65536, help="Of each output.")]
Seconds = Annotated[float, typer.Option("--seconds", metavar="S", min=0.1, max=3600, help="That a schema may take.")]
Peers = Annotated[str, typer.Option("--peers", metavar="all|NAME,NAME", help=PEERS_HELP)]
Html = Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write one self-contained page there.")]
Plot = Annotated[Path | None, typer.Option("--plot", metavar="FILE", help="Draw coverage and times there.")]


@with_log_level
def command(
    *,
    data: Data,
    model: Model = None,
    threads: Threads = None,
    schemas: Count = 30,
    cases: Cases = 100,
    questions: Asked = 20,
    max_tokens: Tokens = 256,
    seconds: Seconds = 10.0,
    peers: Peers = "",
    output: Output = None,
    html: Html = None,
    plot: Plot = None,
) -> None:
    """Compare structured outputs with other libraries: coverage of schemas, time, and the answers of a model."""
    _must_be_writable(output, html, plot)
    options = {"schemas": schemas, "cases": cases, "questions": questions, "max_tokens": max_tokens, "seconds": seconds}
    document = _measure(data, model, peers, options | {"threads": threads})
    _show(document)
    _write(document, output, html, plot)
    raise typer.Exit(INTERRUPTED if document["interrupted"] else 0)


def _must_be_writable(output: Path | None, html: Path | None, plot: Path | None) -> None:
    """Reject files that cannot be written, or hold something else, before the work is done for them."""
    from lab.structured import STRUCTURED_FORMAT, STRUCTURED_MARK
    from paceline.bench import pyplot

    what = "of `python -m lab structured`"
    if output is not None:
        must_be_own(OUTPUT, output, mark=f'"{STRUCTURED_FORMAT}"', what=f"a document {what}")
    if html is not None:
        must_be_own("--html", html, mark=STRUCTURED_MARK, what=f"a page {what}")
    if plot is not None:
        must_be_writable("--plot", plot)
        if plot.suffix[1:].lower() not in KINDS:
            raise ConfigError(f"--plot must end with one of {', '.join(KINDS)}, got {plot.name!r}; name it PLOT.png")
        pyplot()
    named = [path.resolve() for path in (output, html, plot) if path is not None]
    if len(set(named)) < len(named):
        raise ConfigError(f"{OUTPUT}, --html and --plot must be different files, got one twice")


def _measure(data: Path, model: str | None, peers: str, options: dict[str, Any]) -> dict[str, Any]:
    """The document, also after Ctrl-C."""
    from lab.structured import (
        STRUCTURED_FORMAT,
        StructuredBench,
        load_questions,
        load_sets,
        open_judge,
        open_libraries,
        parse_libraries,
        summarize_answers,
        summarize_set,
    )
    from paceline.bench import provenance
    from paceline.llm import LLM

    commands = parse_libraries(peers)
    sets = load_sets(data, options["schemas"], options["cases"])
    questions = load_questions(data, options["questions"])
    reject_diffusion({"model": model} if model else {})
    llm = LLM(model, speculative_config=None, profile=False, threads=options["threads"])
    with ExitStack() as stack, progress_bar() as bar:
        with spinner("starting the libraries"):
            libraries = [stack.enter_context(one) for one in open_libraries(llm, commands, options["seconds"])]
            judge = stack.enter_context(open_judge())
        bench = StructuredBench(llm, libraries, judge, max_tokens=options["max_tokens"], show=stages(bar))
        with TerminatedToo():
            measured, answers, interrupted = _run(bench, sets, questions)
    return {
        "format": STRUCTURED_FORMAT,
        "provenance": provenance(seed=0, program="python -m lab"),
        "model": {"name": Path(llm.runner.info.name).name, "dtype": str(llm.runner.info.dtype).removeprefix("torch.")},
        "options": options,
        "libraries": {one.name: {"version": one.version, "settings": one.settings} for one in libraries},
        "judge": judge.version,
        "sets": {one.of.name: summarize_set(one) for one in measured},
        "questions": summarize_answers(answers),
        "interrupted": interrupted,
    }


def _run(
    bench: StructuredBench, sets: list[SchemaSet], questions: list[Any]
) -> tuple[list[MeasuredSet], dict[str, Any], bool]:
    """Results by set and of the questions, and whether Ctrl-C ended them."""
    from lab.structured import MeasuredSet

    measured: list[MeasuredSet] = []
    answers: dict[str, Any] = {}
    try:
        for one in sets:
            measured.append(MeasuredSet(one))
            bench.measure(one, measured[-1])
        if questions:
            bench.answer(questions, answers)
    except KeyboardInterrupt:
        return measured, {name: found for name, found in answers.items() if found}, True
    return measured, answers, False


def _show(document: dict[str, Any]) -> None:
    from rich.console import Console

    from lab.structured import structured_remarks, structured_tables

    console = Console(highlight=False)
    for one in structured_tables(document, console.width):
        console.print(one)
        console.print()
    say(*structured_remarks(document), indent="  ")


def _write(document: dict[str, Any], output: Path | None, html: Path | None, plot: Path | None) -> None:
    from lab.structured import draw_structured, structured_html
    from paceline.bench.run import write_whole

    if output is not None:
        with writing(OUTPUT, output):
            write_whole(output, json.dumps(document, indent=1, allow_nan=False) + "\n")
    if html is not None:
        with writing("--html", html):
            write_whole(html, structured_html(document))
    if plot is not None:
        from paceline.bench import pyplot

        with writing("--plot", plot):
            draw_structured(document, plot, pyplot())
