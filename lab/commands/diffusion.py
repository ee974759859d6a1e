"""`python -m lab diffusion`: methods of decoding diffusion language models on tasks with exact answers.

It says how long it will take before it starts, and each result as soon as it is there; Ctrl-C keeps what is there (exit
code 130). Exit code 1 where a line that claims to be lossless is not, a text of a constrained run does not parse, or a
line failed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from paceline.cli import (
    INTERRUPTED,
    Output,
    TerminatedToo,
    must_be_writable,
    progress_bar,
    raise_from_now_on,
    with_log_level,
    writing,
)
from paceline.errors import ConfigError

if TYPE_CHECKING:
    from lab.diffusion import DiffusionBench, DiffusionLine, DiffusionOptions

Part = Literal["methods", "caches", "constrained"]
BUNDLED_NAMES = ("diffusion", "block_diffusion")
STOPPED = "interrupted: the figures are of what was done until then."
KINDS = ("pdf", "png", "svg")
METHOD_HELP = (
    'A name or {"method": "threshold", "confidence_threshold": 0.8}; may be repeated. Default: all without training.'
)
MODEL_HELP = "Folder or hub id, diffusion or block_diffusion (bundled). Default: diffusion."
LENGTH_HELP = "Slots of every text; a block-causal model fills its last block."
BLOCK_HELP = "Of methods that name none; default: half the text, or the model's own blocks."


Tasks = Annotated[list[str] | None, typer.Option("--task", metavar="NAME", help="May be repeated. Default: all.")]
Timed = Annotated[int, typer.Option("--timed", metavar="N", help="How many of the prompts are timed; 0 for none.")]
DType = Annotated[str, typer.Option("--dtype", metavar="NAME", help="float32, bfloat16, float16 or float64.")]
Plot = Annotated[Path | None, typer.Option("--plot", metavar="FILE", help="Draw score against calls and time there.")]


@with_log_level
def command(
    *,
    model: Annotated[str, typer.Option("--model", "-m", metavar="MODEL", help=MODEL_HELP)] = "diffusion",
    method: Annotated[list[str] | None, typer.Option("--method", "-s", metavar="NAME|JSON", help=METHOD_HELP)] = None,
    task: Tasks = None,
    part: Annotated[Part, typer.Option("--part", help="What to compare.")] = "methods",
    count: Annotated[int, typer.Option("--count", metavar="N", help="Held-out prompts of each task.")] = 1,
    timed: Timed = 2,
    repeats: Annotated[int, typer.Option("--repeats", metavar="N", help="Timed runs of each.")] = 2,
    length: Annotated[int, typer.Option("--length", metavar="N", help=LENGTH_HELP)] = 32,
    block_length: Annotated[int | None, typer.Option("--block-length", metavar="N", help=BLOCK_HELP)] = None,
    dtype: DType = "float32",
    device: Annotated[str, typer.Option("--device", metavar="NAME", help="auto, cpu, cuda or cuda:N.")] = "auto",
    threads: Annotated[int | None, typer.Option("--threads", metavar="N", min=1, help="CPU threads.")] = None,
    seed: Annotated[int, typer.Option("--seed", metavar="INT", help="Seed of prompts and noise.")] = 0,
    output: Output = None,
    plot: Plot = None,
) -> None:
    """Measure how well and how fast methods decode a diffusion language model."""
    for flag, path in (("--json (or --output)", output), ("--plot", plot)):
        if path is not None:
            must_be_writable(flag, path)
    if plot is not None:
        _check_plot(plot, part)
    from lab.diffusion import TASKS, DiffusionOptions

    chosen = {"tasks": tuple(task)} if task else {}
    timed = min(timed, count * len(chosen.get("tasks", TASKS)))
    options = DiffusionOptions(
        **chosen, count=count, timed=timed, repeats=repeats, length=length, block_length=block_length, seed=seed
    )
    bench = _open(model, options, dtype=dtype, device=device, threads=threads)
    raise_from_now_on()
    with TerminatedToo(), progress_bar() as bar:
        document, wrong = _measure(bench, part, method or [], _Screen(bar))
    _show(document, part)
    _write(document, output, plot, model)
    raise typer.Exit(INTERRUPTED if document["interrupted"] else 1 if wrong else 0)


def _check_plot(path: Path, part: Part) -> None:
    from paceline.bench import pyplot

    if part != "methods":
        raise ConfigError(f"--plot draws --part methods, got --part {part}; leave one of them out")
    if path.suffix[1:].lower() not in KINDS:
        raise ConfigError(f"--plot must end with one of {', '.join(KINDS)}, got {path.name!r}; name it PLOT.png")
    pyplot()


def _open(model: str, options: DiffusionOptions, *, dtype: str, device: str, threads: int | None) -> DiffusionBench:
    """The model with its tokenizer and prompts; block lengths of a model with full attention default to half the
    text.
    """
    from dataclasses import replace

    import torch

    from lab.diffusion import DiffusionBench
    from paceline.checkpoints import Tokenizer, resolve
    from paceline.diffusion import TokenTexts
    from paceline.llm import BUNDLED
    from paceline.models import load_denoiser

    if threads is not None:
        torch.set_num_threads(threads)
    folder = BUNDLED / model if model in BUNDLED_NAMES else resolve(model)
    denoiser, tokenizer = load_denoiser(folder, dtype=dtype, device=device, name=model), Tokenizer.load(folder)
    if options.block_length is None and denoiser.attention == "full" and options.length % 2 == 0:
        options = replace(options, block_length=options.length // 2)
    made = str(denoiser.dtype).removeprefix("torch.")
    return DiffusionBench(denoiser, tokenizer, options, dtype=made, token_text=TokenTexts(tokenizer))


class _Screen:
    """Standard error: what to expect, one bar for the whole run (on a terminal), results as they come."""

    def __init__(self, bar: Any) -> None:
        self.bar, self.texts, self.before = bar, 0, 0
        self.task = bar.add_task("starting", total=None)

    def expect(self, what: str, texts: int, seconds: float) -> None:
        """Say how long so many texts of these seconds each will take."""
        self.texts = texts
        self.say(f"{what}: up to about {_duration(texts * seconds)}. Ctrl-C ends it and keeps what is there.")

    def say(self, line: str) -> None:
        self.bar.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def part(self, texts: int) -> Callable[[str, int, int], None]:
        """The progress of the next so many of the texts."""
        before = self.before
        self.before += texts

        def show(stage: str, done: int, total: int) -> None:
            share = before + texts * done / max(1, total)
            self.bar.update(self.task, description=stage[:46], completed=round(share), total=self.texts)

        return show


def _duration(seconds: float) -> str:
    return f"{max(1, round(seconds))} s" if seconds < 90 else f"{round(seconds / 60)} min"


def _measure(bench: DiffusionBench, part: Part, methods: list[str], screen: _Screen) -> tuple[dict[str, Any], bool]:
    """The document, and whether something is wrong with it."""
    from paceline.bench import provenance

    come = {"kind": f"diffusion {part}", "provenance": provenance(bench.options.seed, program="python -m lab")}
    measure = {"methods": _methods, "caches": _caches, "constrained": _constrained}[part]
    document, wrong = measure(bench, methods, screen)
    return come | document, wrong


def _methods(bench: DiffusionBench, methods: list[str], screen: _Screen) -> tuple[dict[str, Any], bool]:
    from lab.diffusion import (
        broken_methods,
        score_methods,
        text_seconds,
        texts_to_score,
        texts_to_time,
        time_methods,
        with_method_times,
    )

    lines, skipped = _lines(bench, methods)
    scored, timed = texts_to_score(bench, lines), texts_to_time(bench, lines)
    what = f"{len(lines)} methods on {len(bench.asked)} prompts, {len(bench.to_time)} of them timed"
    screen.expect(what, scored + timed, text_seconds(bench, lines[0]))

    def told(name: str, line: dict[str, Any]) -> None:
        screen.say(f"{name}: {line['score']['right']} of {line['score']['n']} right, {line['calls']:.1f} calls")

    document = score_methods(bench, lines, screen.part(scored), told) | {"skipped": skipped}
    times: dict[str, dict[str, Any]] = {}
    if not document["interrupted"]:
        kept = [line for line in lines if line.name in document["lines"]]
        times, document["interrupted"] = time_methods(bench, kept, screen.part(timed))
    return with_method_times(document, times), bool(broken_methods(document))


def _caches(bench: DiffusionBench, methods: list[str], screen: _Screen) -> tuple[dict[str, Any], bool]:
    from lab.diffusion import CACHE_ROWS, measure_caches, with_cache_times

    texts = 4 * CACHE_ROWS[bench.denoiser.attention] * len(bench.asked)  # with and without, and both once more
    _expect_static(bench, "cache policies", texts, screen)
    found, interrupted = _collected(measure_caches(bench, screen.part(texts)), screen)
    if not interrupted:
        try:
            found = with_cache_times(bench, found, screen.part(0))
        except KeyboardInterrupt:
            interrupted = True
    wrong = any(one["kept"] is False for one in found.values())
    return {"caches": found, "interrupted": interrupted}, wrong


def _constrained(bench: DiffusionBench, methods: list[str], screen: _Screen) -> tuple[dict[str, Any], bool]:
    from lab.diffusion import CASES, broken_constrained, measure_constrained

    texts = 2 * len(CASES) * bench.options.count
    _expect_static(bench, "constraints", texts, screen)
    rows = measure_constrained(bench, screen.part(texts), prompts=bench.options.count)
    found, interrupted = _collected(rows, screen)
    return {"constrained": found, "interrupted": interrupted}, bool(broken_constrained(found))


def _expect_static(bench: DiffusionBench, what: str, texts: int, screen: _Screen) -> None:
    from lab.diffusion import DiffusionLine, text_seconds

    static = DiffusionLine.of("static", bench.options.block_length)
    screen.expect(f"{what} on {len(bench.asked)} prompts", texts, text_seconds(bench, static))


def _collected(rows: Iterator[tuple[str, dict[str, Any]]], screen: _Screen) -> tuple[dict[str, Any], bool]:
    """The rows that were finished, and whether Ctrl-C ended them."""
    found: dict[str, Any] = {}
    try:
        for name, row in rows:
            found[name] = row
            screen.say(f"{name}: done")
    except KeyboardInterrupt:
        return found, True
    return found, False


def _lines(bench: DiffusionBench, methods: list[str]) -> tuple[list[DiffusionLine], list[dict[str, str]]]:
    from lab.diffusion import default_lines, must_fit, parse_lines

    size, canvas = bench.options.block_length, bench.canvas(bench.asked[0].prompt)
    if not methods:
        return default_lines(bench.denoiser, canvas, size)
    lines = parse_lines(methods, size)
    must_fit(lines, bench.denoiser, canvas, bench.token_text)
    return lines, []


def _show(document: dict[str, Any], part: Part) -> None:
    from rich.console import Console

    from lab.diffusion import caches_table, constrained_table, diffusion_remarks, methods_table

    console = Console(highlight=False)
    if part != "methods":
        for one in caches_table(document["caches"]) if part == "caches" else constrained_table(document["constrained"]):
            console.print(one)
            console.print()
        if document["interrupted"]:
            console.print(STOPPED)
        return
    for one in methods_table(document):
        console.print(one)
        console.print()
    for line in [*diffusion_remarks(document), *([STOPPED] if document["interrupted"] else [])]:
        console.print(line, markup=False, soft_wrap=not console.is_terminal)


def _write(document: dict[str, Any], output: Path | None, plot: Path | None, model: str) -> None:
    if output is not None:
        from paceline.bench.run import write_whole

        with writing("--json (or --output)", output):
            write_whole(output, json.dumps(document, indent=1, allow_nan=False) + "\n")
    if plot is not None:
        from lab.diffusion import draw_methods
        from paceline.bench import pyplot

        with writing("--plot", plot):
            draw_methods(document, plot, Path(model).name, pyplot())
