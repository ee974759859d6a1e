"""`paceline bench`: measures every method against plain decoding.

Exit codes besides those of `cli.app`: 1 where a setting's outputs differ beyond its claim or all its prompts failed;
130 after Ctrl-C, with what was done shown and written. In: arguments. Out: tables, a JSON document, an HTML report. Not
here: measuring (`paceline.bench`), what is done with documents (`cli.bench_documents`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer

from paceline.cli import bench_diffusion, bench_documents
from paceline.cli import bench_flags as flags
from paceline.cli.interrupts import AtOnce
from paceline.cli.options import engine_options, refuse_diffusion, with_flags
from paceline.cli.peers import peers_app
from paceline.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paceline.bench.run import Options
    from paceline.llm import LLM
    from paceline.utils import Workload

INTERRUPTED = 130
RANDOM = "random:"

app = typer.Typer(
    name="bench",
    help="Measure speed against plain decoding; refuse to where outputs differ.",
    invoke_without_command=True,
    add_completion=False,
)


@app.callback()
@flags.repeated_settings
@with_flags(sampling=False)
def command(
    *,
    context: typer.Context,
    workload: flags.Workloads = None,
    draft_model: flags.DraftModel = None,
    dial: flags.Dial = "",
    dial_tokens: flags.DialTokens = None,
    random_shape: flags.RandomShape = None,
    limit: flags.Limit = None,
    max_tokens: flags.MaxTokens = None,
    raw: flags.Raw = False,
    ignore_eos: flags.IgnoreEos = False,
    batch: flags.Batch = "1",
    temperature: flags.Temperature = "0",
    load: flags.Load = "1",
    repeats: flags.Repeats = None,
    peers: flags.Peers = None,
    peer_url: flags.PeerUrl = None,
    peer_model: flags.PeerModel = None,
    quick: flags.Quick = False,
    seed: flags.Seed = 0,
    output: flags.Output = None,
    html: flags.Html = None,
    given: dict[str, Any],
) -> None:
    """Decode prompts with every method and plainly, in turn, and say what each gains."""
    if context.invoked_subcommand is not None:
        return
    switches = {"quick": quick, "ignore_eos": ignore_eos, "raw": raw, "seed": seed}
    sweep = {"batch": batch, "temperature": temperature, "load": load}
    sizes = {"limit": limit, "max_tokens": max_tokens, "repeats": repeats}
    bench_documents.must_be_writable(output, html)
    options = flags.options(**switches, **sweep, **sizes)
    _name_random(given, random_shape)
    dials, others = (flags.numbers("--dial", dial, 0.0, 1.0), dial_tokens), (peers or [], peer_url, peer_model)
    from paceline.bench.run import dial_registered

    with dial_registered():
        document = _measure(given, workload or [], dials, options, draft=draft_model, others=others)
    _show(document)
    bench_documents.write(document, output, html)
    raise typer.Exit(
        INTERRUPTED if document["interrupted"] else 0 if all(c["comparable"] for c in document["cells"]) else 1
    )


def _name_random(given: dict[str, Any], shape: str | None) -> None:
    """--random-shape is another way to say --model."""
    if shape is not None:
        if "model" in given:
            raise ConfigError("give either --model or --random-shape, not both")
        given["model"] = RANDOM + shape


def _measure(
    given: dict[str, Any],
    texts: list[str],
    points: tuple[tuple[float, ...], int | None],
    options: Options,
    *,
    draft: str | None,
    others: tuple[list[str], str | None, str | None],
) -> dict[str, Any]:
    """Load the model and run everything; returns the document, also after Ctrl-C.

    `points` are those of the dial; `others` are --peers, --peer-url and --peer-model.
    """
    from paceline.bench.peers import parse_peers
    from paceline.bench.run import default_settings, dial_settings, parse_settings

    wanted = parse_peers(*others)
    chosen, dials = parse_settings(given.pop("speculative_config", None) or []), dial_settings(*points)
    random = str(given.get("model", "")).startswith(RANDOM)
    llm = _open(given, options)
    from paceline.bench import read_bandwidth
    from paceline.bench.peers import PeersInTurn
    from paceline.bench.run import Harness, build_document, load_sweep

    work = _workloads(texts, llm, options)
    skipped: list[dict[str, str]] = []
    if not chosen and not (dials and random):
        chosen, skipped = default_settings(llm, draft)
    for setting in [*chosen, *dials]:
        setting.open(llm, {} if setting.needs_record else None)  # for its errors, before anything is measured
    bandwidth = read_bandwidth(llm.runner.info.device)
    with _progress() as progress, PeersInTurn(llm, wanted, draft=draft, progress=progress) as peers:
        harness = Harness(llm, [*chosen, *dials], options, progress, peers)
        harness.run(work)
        for one in work:
            if one.arrivals is not None and not harness.results.interrupted:
                load_sweep(harness, one)
    return build_document(harness, work, skipped=skipped, bandwidth=bandwidth, random=random, peers=peers)


def _workloads(texts: list[str], llm: LLM, options: Options) -> list[Workload]:
    """What is decoded; rates where nothing is replayed at them are refused."""
    from paceline.bench.run import load_workloads

    info = llm.runner.info
    sizes = {"vocab_size": info.vocab_size, "max_context": info.max_context}
    work = load_workloads(texts, **sizes, seed=options.seed, limit=options.limit)
    if options.rates != (1.0,) and all(one.arrivals is None for one in work):
        raise ConfigError(
            "--load is the rate of a request trace, and no workload is one; leave it out, or add -w trace=FILE"
        )
    return work


def _open(given: dict[str, Any], options: Options) -> LLM:
    """The model, with room for the largest batch; Ctrl-C meanwhile ends the process, since nothing is measured yet."""
    with AtOnce():
        from paceline.bench import model_folder
        from paceline.llm import LLM

        if str(given.get("model", "")).startswith(RANDOM):
            given["model"] = str(model_folder(given["model"]))
        refuse_diffusion(given)
        chosen = engine_options(given) | {"speculative_config": None, "seed": options.seed}
        return LLM(**chosen, max_num_seqs=max(16, *options.batches), enable_prefix_caching=False)


@contextmanager
def _progress() -> Iterator[Callable[[str, int, int], None]]:
    """A bar per stage on standard error, where that is a terminal."""
    from paceline.cli.demo import progress_bar

    with progress_bar() as bar:
        tasks: dict[str, Any] = {}

        def show(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                for task in tasks.values():
                    bar.update(task, visible=False)
                tasks[stage] = bar.add_task(stage[:60], total=total)
            bar.update(tasks[stage], completed=done)

        yield show


def _show(document: dict[str, Any]) -> None:
    from rich.console import Console

    from paceline.bench.report import document_remarks, document_tables

    console = Console(highlight=False)
    for one in document_tables(document, console.width):
        console.print(one)
        console.print()
    for line in document_remarks(document):
        console.print(line, markup=False, soft_wrap=not console.is_terminal)


app.command("compare")(bench_documents.compare)
app.command("diffusion")(bench_diffusion.command)
app.command("report")(bench_documents.report)
app.add_typer(peers_app, name="peers")
