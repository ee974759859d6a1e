"""`paceline bench`: measures every method against plain decoding.

Exit codes besides those of `cli.app`: 1 where a setting's outputs differ beyond its claim or all its prompts failed;
130 after Ctrl-C, with what was done shown and written. A program that calls the command may let others take turns with
the settings, through the object of its context.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli import bench_documents
from paceline.cli.bench_documents import Output
from paceline.cli.interrupts import INTERRUPTED, TerminatedToo, raise_from_now_on
from paceline.cli.options import engine_options, must_read_text, reject_diffusion, with_flags
from paceline.cli.terminal import console, progress_bar, say, stages
from paceline.errors import ConfigError

if TYPE_CHECKING:
    from paceline.bench.run import Options, Peers, Progress
    from paceline.llm import LLM
    from paceline.utils import Workload

    OpenPeers = Callable[[LLM, str | None, Progress], AbstractContextManager[Peers | None]]
    """Takes the model and the draft model that was named."""

RANDOM = "random:"

DEFAULT: dict[str, Any] = {"limit": None, "max_tokens": 128, "repeats": 3}
QUICK: dict[str, Any] = {"limit": 8, "max_tokens": 64, "repeats": 3}


WORKLOAD_HELP = (
    "PATH, FORMAT=PATH, synthetic:prompt=128,output=64,entropy=8 or bundled; may be repeated. Formats: spec-bench, "
    "mt-bench, mt-redundant, humaneval, gsm8k, jsonl, text, trace. Default: the prompts that ship with the package."
)
SHAPE_HELP = "A random-weights model: 291m, 1b, 8b or FAMILY:hidden=1024,layers=24,...; also --model random:SHAPE."
DIAL_TOKENS_HELP = "Speculative tokens of the dial; default: the controller's choice."
SETTING_HELP = (
    'A setting to measure, as ngram or {"method": "ngram"}; may be repeated. Default: auto and all that run here.'
)

Workloads = Annotated[
    list[str] | None,
    typer.Option("--workload", "-w", metavar="WORKLOAD", help=WORKLOAD_HELP, rich_help_panel="Workload"),
]
Limit = Annotated[
    int | None,
    typer.Option("--limit", metavar="N", min=1, help="Conversations per workload.", rich_help_panel="Workload"),
]
Raw = Annotated[bool, typer.Option("--raw", help="Do not apply the chat template.", rich_help_panel="Workload")]
MaxTokens = Annotated[
    int | None,
    typer.Option(
        "--max-tokens",
        metavar="N",
        min=1,
        max=65536,
        help="Maximum number of new tokens; default 128.",
        rich_help_panel="Workload",
    ),
]
IgnoreEos = Annotated[
    bool, typer.Option("--ignore-eos", help="Continue after an end token.", rich_help_panel="Workload")
]
DraftModel = Annotated[
    str | None,
    typer.Option(
        "--draft-model", metavar="MODEL", help="Draft model for methods that use one.", rich_help_panel="Settings"
    ),
]
Dial = Annotated[
    str,
    typer.Option(
        "--dial",
        metavar="P,P",
        help="Acceptance dial: measure at these acceptances, as 0.6,0.8.",
        rich_help_panel="Settings",
    ),
]
DialTokens = Annotated[
    int | None,
    typer.Option("--dial-tokens", metavar="N", min=1, max=64, help=DIAL_TOKENS_HELP, rich_help_panel="Settings"),
]
RandomShape = Annotated[
    str | None, typer.Option("--random-shape", metavar="SHAPE", help=SHAPE_HELP, rich_help_panel="Model")
]
Batch = Annotated[str, typer.Option("--batch", metavar="N,N", help="Batch sizes.", rich_help_panel="Sweep")]
Temperature = Annotated[
    str, typer.Option("--temperature", metavar="T,T", help="Temperatures.", rich_help_panel="Sweep")
]
Load = Annotated[
    str,
    typer.Option(
        "--load",
        metavar="R,R",
        help="Rates of a trace's replay: 2 is twice as fast as recorded.",
        rich_help_panel="Sweep",
    ),
]
Repeats = Annotated[
    int | None,
    typer.Option(
        "--repeats",
        metavar="N",
        min=1,
        max=1000,
        help="Timed runs of every prompt; default 3.",
        rich_help_panel="Sweep",
    ),
]
Quick = Annotated[
    bool,
    typer.Option(
        "--quick", help="8 conversations, 64 tokens: under a minute on the bundled model.", rich_help_panel="Sweep"
    ),
]
Seed = Annotated[
    int, typer.Option("--seed", metavar="INT", min=0, max=2**53, help="Seed of sampling and of synthetic prompts.")
]
Html = Annotated[
    Path | None, typer.Option("--html", metavar="FILE", help="Write the report there, one self-contained page.")
]


app = typer.Typer(
    name="bench",
    help="Measure speed against plain decoding, where outputs are equal.",
    invoke_without_command=True,
    add_completion=False,
)


def _repeated_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Make -s / --speculative-config of a command repeatable, none being allowed."""
    signature, parameters = inspect.signature(command), []
    repeatable = Annotated[
        list[str] | None,
        typer.Option("--speculative-config", "-s", metavar="JSON", help=SETTING_HELP, rich_help_panel="Settings"),
    ]
    for parameter in signature.parameters.values():
        unchanged = parameter.name != "speculative_config"
        parameters.append(parameter if unchanged else parameter.replace(default=None, annotation=repeatable))
    command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]  # read by typer
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


@app.callback()
@_repeated_settings
@with_flags(sampling=False)
def command(
    *,
    context: typer.Context,
    workload: Workloads = None,
    draft_model: DraftModel = None,
    dial: Dial = "",
    dial_tokens: DialTokens = None,
    random_shape: RandomShape = None,
    limit: Limit = None,
    max_tokens: MaxTokens = None,
    raw: Raw = False,
    ignore_eos: IgnoreEos = False,
    batch: Batch = "1",
    temperature: Temperature = "0",
    load: Load = "1",
    repeats: Repeats = None,
    quick: Quick = False,
    seed: Seed = 0,
    output: Output = None,
    html: Html = None,
    flag_values: dict[str, Any],
) -> None:
    """Decode prompts with every method and plainly, in turn, and say what each gains."""
    if context.invoked_subcommand is not None:
        return
    bench_documents.must_be_writable(output, html)
    sizes = {"limit": limit, "max_tokens": max_tokens, "repeats": repeats}
    options = _options(sizes, (batch, temperature, load), quick=quick, seed=seed, ignore_eos=ignore_eos, raw=raw)
    _name_random(flag_values, random_shape)
    dials = _numbers("--dial", dial, 0.0, 1.0), dial_tokens
    from paceline.bench.run import dial_registered

    with dial_registered():
        document = _measure(flag_values, workload or [], dials, options, draft=draft_model, context=context)
    _show(document)
    bench_documents.write(document, output, html)
    raise typer.Exit(_exit_code(document))


def _exit_code(document: Mapping[str, Any]) -> int:
    equal = all(cell["comparable"] for cell in document["cells"])
    return INTERRUPTED if document["interrupted"] else 0 if equal else 1


def _options(
    sizes: Mapping[str, int | None], sweep: tuple[str, str, str], *, quick: bool, seed: int, ignore_eos: bool, raw: bool
) -> Options:
    """How the benchmark runs; what was not typed takes its default, a smaller one with --quick.

    Args:
        sizes: limit, max_tokens, repeats.
        sweep: --batch, --temperature and --load as typed.
    Raises:
        ConfigError: a list with something else than numbers in their range.
    """
    from paceline.bench.run import Options

    batch, temperature, load = sweep
    chosen = (QUICK if quick else DEFAULT) | {name: value for name, value in sizes.items() if value is not None}
    return Options(
        **chosen,
        batches=tuple(int(n) for n in _numbers("--batch", batch, 1, 1024, whole=True)) or (1,),
        temperatures=_numbers("--temperature", temperature, 0.0, 10.0) or (0.0,),
        rates=_numbers("--load", load, 1e-6, 1e6) or (1.0,),
        seed=seed,
        ignore_eos=ignore_eos,
        chat=not raw,
        quick=quick,
    )


def _numbers(flag: str, text: str, low: float, high: float, *, whole: bool = False) -> tuple[float, ...]:
    """Numbers between commas, each once.

    Raises:
        ConfigError: no number, or one outside low..high.
    """
    numbers: list[float] = []
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        try:
            value = int(part) if whole else float(part)
        except ValueError:
            value = float("nan")
        if not low <= value <= high:
            kind = "integers" if whole else "numbers"
            raise ConfigError(f"{flag} must be {kind} in {low:g}..{high:g}, separated by commas, got {text[:100]!r}")
        if value not in numbers:
            numbers.append(value)
    return tuple(numbers)


def _name_random(flag_values: dict[str, Any], shape: str | None) -> None:
    """--random-shape is another way to say --model."""
    if shape is not None:
        if "model" in flag_values:
            raise ConfigError("give either --model or --random-shape, not both")
        flag_values["model"] = RANDOM + shape


def _measure(
    flag_values: dict[str, Any],
    texts: list[str],
    points: tuple[tuple[float, ...], int | None],
    options: Options,
    *,
    draft: str | None,
    context: typer.Context,
) -> dict[str, Any]:
    """Load the model and run everything; returns the document, also after Ctrl-C.

    Args:
        points: of the dial.
        context: its object opens others that take turns; see OpenPeers.
    """
    from paceline.bench.run import default_settings, dial_settings, parse_settings

    open_peers: OpenPeers = context.obj or _no_peers
    chosen, dials = parse_settings(flag_values.pop("speculative_config", None) or []), dial_settings(*points)
    random = str(flag_values.get("model", "")).startswith(RANDOM)
    llm = _open(flag_values, options)
    from paceline.bench import read_bandwidth
    from paceline.bench.run import Harness, build_document, load_sweep

    workloads = _workloads(texts, llm, options)
    skipped: list[dict[str, str]] = []
    if not chosen and not (dials and random):
        chosen, skipped = default_settings(llm, draft)
    for setting in [*chosen, *dials]:
        setting.open(llm, {} if setting.needs_record else None)  # for its errors, before anything is measured
    bandwidth = read_bandwidth(llm.runner.info.device)
    with TerminatedToo(), progress_bar() as bar, open_peers(llm, draft, show := stages(bar)) as peers:
        harness = Harness(llm, [*chosen, *dials], options, show, peers)
        harness.run(workloads)
        for workload in workloads:
            if workload.arrivals is not None and not harness.results.interrupted:
                load_sweep(harness, workload)
    return build_document(
        harness,
        workloads,
        skipped=skipped,
        bandwidth=bandwidth,
        random=random,
        peers=peers,
        program=context.find_root().info_name or "paceline",
    )


def _no_peers(llm: LLM, draft: str | None, progress: Progress) -> AbstractContextManager[None]:
    return nullcontext()


def _workloads(texts: list[str], llm: LLM, options: Options) -> list[Workload]:
    """What is decoded; rates where nothing is replayed at them are rejected."""
    from paceline.bench.run import load_workloads

    info = llm.runner.info
    sizes = {"vocab_size": info.vocab_size, "max_context": info.max_context}
    work = load_workloads(texts, **sizes, seed=options.seed, limit=options.limit)
    if options.rates != (1.0,) and all(workload.arrivals is None for workload in work):
        raise ConfigError(
            "--load is the rate of a request trace, and no workload is one; leave it out, or add -w trace=FILE"
        )
    return work


def _open(flag_values: dict[str, Any], options: Options) -> LLM:
    """The model, with room for the largest batch; from then on Ctrl-C raises KeyboardInterrupt."""
    from paceline.bench import model_folder
    from paceline.llm import LLM

    if str(flag_values.get("model", "")).startswith(RANDOM):
        flag_values["model"] = str(model_folder(flag_values["model"]))
    reject_diffusion(flag_values)
    chosen = engine_options(flag_values) | {"speculative_config": None, "seed": options.seed}
    llm = LLM(**chosen, max_num_seqs=max(16, *options.batches), enable_prefix_caching=False)
    must_read_text(llm, flag_values)
    raise_from_now_on()
    return llm


def _show(document: dict[str, Any]) -> None:
    from paceline.bench.report import document_remarks, document_tables

    screen = console()
    for table in document_tables(document, screen.width):
        screen.print(table)
        screen.print()
    say(*_by_reason(document_remarks(document)), indent="  ")


def _by_reason(remarks: Iterable[str]) -> list[str]:
    """The remarks, one for all settings that were left out for the same reason."""
    lines: list[str] = []
    names: dict[str, list[str]] = {}
    for line in remarks:
        kind, _, rest = line.partition(": ")
        if kind != "left out":
            lines.append(line)
            continue
        name, _, why = rest.partition(": ")
        names.setdefault(why, []).append(name)
    return lines + [f"left out: {', '.join(group)}: {why}" for why, group in names.items()]


app.command("compare")(bench_documents.compare)
app.command("report")(bench_documents.report)
