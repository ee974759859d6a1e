"""`paceline batch run`: answers a file of requests, and goes on where a run was killed."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.interrupts import raise_from_now_on
from paceline.cli.options import engine_options, open_llm, with_flags
from paceline.cli.outputs import must_be_writable
from paceline.cli.terminal import counted, progress_bar, remark, say, spinner
from paceline.config import ReplicaConfig, ServerConfig, cores
from paceline.errors import ConfigError
from paceline.utils import MAX_COUNT, alive, local_ray, need_ray

if TYPE_CHECKING:
    import httpx

    from paceline.async_llm import AsyncLLM
    from paceline.batch import Requests, ResultFile, Summary

app = typer.Typer(name="batch", help="Files of requests in the format of OpenAI's batches: run.", add_completion=False)

SERVER = (
    "served_model_name",
    "chat_template",
    "allow_special_tokens",
    "tool_call_parser",
    "strict_schemas",
    "max_body_bytes",
    "max_n",
    "max_prompts",
    "max_request_tokens",
    "enable_search_programs",
    "max_search_tokens",
    "request_timeout",
)
"""Options of `paceline serve` that say what requests may hold and how they are answered."""

DAY, HOUR = 86400.0, 3600.0
"""Default of --request-timeout for an engine of ours, since nobody waits, and for a server."""

REMOTE = 32
"""Default of --concurrency for a server."""

SHOWN = 5
"""Reasons of failed requests that are told."""


@app.callback()
def _group() -> None:
    """Files of requests in the format of OpenAI's batches."""


Source = Annotated[Path, typer.Argument(metavar="IN", help="File of JSON lines: custom_id, method, url, body.")]
Output = Annotated[
    Path, typer.Option("--output", "-o", metavar="OUT", help="File of the answers; one that is there goes on.")
]
Errors = Annotated[
    Path | None, typer.Option("--errors", metavar="FILE", help="File of the failures; default: OUT.errors.jsonl.")
]
Url = Annotated[
    str | None, typer.Option("--url", metavar="URL", help="Send to this server instead of loading a model.")
]
ApiKey = Annotated[str | None, typer.Option("--api-key", metavar="KEY", help="For that server. Or PACELINE_API_KEY.")]
RetryFor = Annotated[
    float, typer.Option("--retry-for", min=0.0, metavar="SECONDS", help="Try a busy or unreachable server for so long.")
]
Concurrency = Annotated[
    int | None,
    typer.Option(
        "--concurrency",
        min=1,
        max=10000,
        help="Requests on their way at a time; default: twice --max-num-seqs, 32 for a server.",
    ),
]
MaxNumSeqs = Annotated[
    int | None, typer.Option("--max-num-seqs", min=1, help="Sequences decoded together; default: 16.")
]
OnRay = Annotated[bool, typer.Option("--ray", help="Spread the work over engines of their own.", rich_help_panel="Ray")]
Replicas = Annotated[int | None, typer.Option("--replicas", help="How many; default: 2.", rich_help_panel="Ray")]
RayAddress = Annotated[
    str | None,
    typer.Option(
        "--ray-address",
        metavar="HOST:PORT",
        help="Ray cluster that runs them; default: Ray on this machine alone.",
        rich_help_panel="Ray",
    ),
]


@app.command("run")
@with_flags(sampling=False, diffusion=True, server=SERVER)
def run(
    *,
    source: Source,
    output: Output,
    errors: Errors = None,
    url: Url = None,
    api_key: ApiKey = None,
    retry_for: RetryFor = 300.0,
    concurrency: Concurrency = None,
    max_num_seqs: MaxNumSeqs = None,
    ray: OnRay = False,
    replicas: Replicas = None,
    ray_address: RayAddress = None,
    flag_values: dict[str, Any],
) -> None:
    """Answer a file of requests; run again after a crash, it goes on where it stopped."""
    if missing := [name for name in ("httpx", "fastapi", "prometheus_client") if find_spec(name) is None]:
        raise ConfigError(f"`paceline batch` needs {missing[0]}; pip install '.[serve]' in a checkout")
    from paceline.batch import Requests, ResultFile

    flag_values |= {} if max_num_seqs is None else {"max_num_seqs": max_num_seqs}
    if url is not None:
        _reject(flag_values)
    elif api_key is not None:
        raise ConfigError("--api-key is for a server; give its --url")
    spread = _spread(url, replicas, ray_address, on_ray=ray)
    failures = _checked(source, output, errors)
    with spinner("reading the requests"):
        requests = Requests(source)
    name = (
        None
        if url is not None
        else (flag_values.get("served_model_name") or [str(flag_values.get("model", "bundled"))])[0]
    )
    with (
        closing(requests),
        ResultFile(output, requests, model=name) as results,
        ResultFile(failures, requests, fresh=True) as failed,
    ):
        job = BatchJob(requests, results, failed, retry_for)
        summary = _run(job, flag_values, url=url, api_key=api_key, size=concurrency, spread=spread)
    _tell(requests, output, failures, summary)


@dataclass(frozen=True, slots=True)
class BatchJob:
    """Answers a file of requests.

    Attributes:
        results, failed: files of what was answered, and of what failed.
        patience: seconds for which a busy or unreachable server is tried again.
    """

    requests: Requests
    results: ResultFile
    failed: ResultFile
    patience: float

    async def run(self, client: httpx.AsyncClient, concurrency: int, application: Any = None) -> Summary:
        """Answer what is left, behind a bar.

        Args:
            application: behind the client, where no server is.
        """
        from paceline.batch import Sender, answer_all

        sender = Sender(client, patience=self.patience)
        with _bar(len(self.requests), self.results.count) as show:
            async with client, nullcontext() if application is None else alive(application):
                return await answer_all(
                    self.requests, self.results, self.failed, sender, concurrency=concurrency, progress=show
                )


def _run(
    job: BatchJob,
    flag_values: dict[str, Any],
    *,
    url: str | None,
    api_key: str | None,
    size: int | None,
    spread: ReplicaConfig | None,
) -> Summary:
    """Answer what is left of a batch."""
    from paceline.batch import Summary

    results, total = job.results, len(job.requests)
    if results.count:
        remark(f"{results.count} of {counted(total, 'request')} are answered already")
    if results.count == total:
        results.sort()
        job.failed.sort()
        return Summary()
    try:
        if spread is not None:
            return _decode_on_ray(job, flag_values, size, spread)
        if url is None:
            return _decode(job, flag_values, size)
        size = size or REMOTE
        return asyncio.run(job.run(_client(url, api_key, flag_values.get("request_timeout", HOUR), size), size))
    except KeyboardInterrupt:
        remark(f"{results.count} of {counted(total, 'request')} are answered; the same command goes on")
        raise


def _spread(url: str | None, replicas: int | None, ray_address: str | None, *, on_ray: bool) -> ReplicaConfig | None:
    """How Ray is to spread the work; None: it is not.

    Raises:
        ConfigError: options that contradict each other, or Ray is not installed.
    """
    if not on_ray:
        if replicas is not None or ray_address is not None:
            raise ConfigError("--replicas and --ray-address are for Ray; add --ray")
        return None
    if url is not None:
        raise ConfigError("--ray loads models, and --url asks a server; give one of them")
    need_ray("--ray")
    return ReplicaConfig(replicas=2 if replicas is None else replicas, ray_address=ray_address)


def _reject(flag_values: dict[str, Any]) -> None:
    """What an engine of ours would need.

    Raises:
        ConfigError: with the names.
    """
    wrong = [f"--{name.replace('_', '-')}" for name in flag_values if name != "request_timeout"]
    if wrong:
        raise ConfigError(f"the server of --url has its own settings; leave {', '.join(wrong)} out")


def _checked(source: Path, output: Path, errors: Path | None) -> Path:
    """Where failures go.

    Raises:
        ConfigError: files that cannot be written, or that are the same.
    """
    must_be_writable("--output", output)
    failures = errors or output.with_name(f"{output.name.removesuffix('.jsonl')}.errors.jsonl")
    must_be_writable("--errors", failures)
    for flag, path in (("--output", output), ("--errors", failures), ("the file of requests", source)):
        if path.exists() and not (path.is_file() or path.is_dir()):
            why = "since it is read again where a run goes on"
            raise ConfigError(f"{flag} must be a file on a disk, {why}, got {str(path)!r}; name one")
    places = [path.resolve() for path in (source, output, failures)]
    if len(set(places)) < len(places):
        raise ConfigError("the requests, --output and --errors must be three files; name another one")
    return failures


def _client(url: str, key: str | None, timeout: float, concurrency: int) -> httpx.AsyncClient:
    import httpx

    base = url.rstrip("/").removesuffix("/v1")
    if not re.match(r"https?://[^\s/?#]+(/[^\s?#]*)?$", base):
        raise ConfigError(f"--url must be as http://host:8000/v1, got {url!r}")
    key = key or os.environ.get("PACELINE_API_KEY")
    return httpx.AsyncClient(
        base_url=base,
        timeout=httpx.Timeout(timeout, connect=min(timeout, 10.0)),
        limits=httpx.Limits(max_connections=concurrency),
        headers={"authorization": f"Bearer {key}"} if key else {},
    )


def _decode(job: BatchJob, flag_values: dict[str, Any], concurrency: int | None) -> Summary:
    """Load a model and ask its application, without a server in between."""
    from paceline.async_llm import AsyncLLM

    server_config = _server_config(flag_values)
    model = AsyncLLM(open_llm(flag_values, diffusion=True))
    client, application = _behind(model, server_config)
    try:
        return asyncio.run(job.run(client, concurrency or 2 * flag_values.get("max_num_seqs", 16), application))
    finally:
        model.close()


def _decode_on_ray(
    job: BatchJob, flag_values: dict[str, Any], concurrency: int | None, replica_config: ReplicaConfig
) -> Summary:
    """Let Ray's actors load the model, and ask theirs."""
    if replica_config.ray_address is not None and "threads" not in flag_values:
        raise ConfigError("--ray-address needs --threads: how many cores its machines have is not known here")
    server_config, threads = _server_config(flag_values), replica_config.threads(flag_values.get("threads"))
    make = partial(_loaded, engine_options(flag_values) | {"threads": threads}, server_config)
    with local_ray(max(cores(), threads * replica_config.replicas), replica_config.ray_address):
        from paceline.batch import ray_data

        run = ray_data.RayRun(
            make,
            actors=replica_config.replicas,
            threads=threads,
            concurrency=concurrency or 2 * flag_values.get("max_num_seqs", 16),
            patience=job.patience,
        )
        with _bar(len(job.requests), job.results.count) as show:
            return ray_data.answer_all_on_ray(job.requests, job.results, job.failed, run, progress=show)


def _server_config(flag_values: dict[str, Any]) -> ServerConfig:
    """How requests are answered; its options are taken out of those for the model."""
    options = {name: flag_values.pop(name) for name in SERVER if name in flag_values}
    options = {"served_model_name": [str(flag_values.get("model", "bundled"))], "request_timeout": DAY, **options}
    most = MAX_COUNT
    unlimited: dict[str, Any] = dict.fromkeys(("max_waiting", "max_streams_per_key", "max_outputs_per_key"), most)
    return ServerConfig(enable_search=True, **unlimited, **options)


def _loaded(options: dict[str, Any], config: ServerConfig) -> tuple[httpx.AsyncClient, Any]:
    """A client, and the application of a model that is loaded for it."""
    from paceline.async_llm import AsyncLLM
    from paceline.llm import LLM

    return _behind(AsyncLLM(LLM(**options)), config)


def _behind(model: AsyncLLM, config: ServerConfig) -> tuple[httpx.AsyncClient, Any]:
    """A client, and the application that it asks."""
    import httpx

    from paceline.serving import create_app, read_keys

    application, keys = create_app(model, config), [*chain(*read_keys(config))]
    client = httpx.AsyncClient(
        base_url="http://localhost",
        transport=httpx.ASGITransport(application, raise_app_exceptions=False),
        timeout=None,
        headers={"authorization": f"Bearer {keys[0]}"} if keys else {},
    )
    return client, application


@contextmanager
def _bar(total: int, answered: int) -> Iterator[Callable[[Summary], None]]:
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with progress_bar(*columns, TextColumn("left"), TimeRemainingColumn()) as bar:
        task = bar.add_task("requests", total=total, completed=answered)
        raise_from_now_on()

        def show(summary: Summary) -> None:
            failed = f", {summary.failed} failed" if summary.failed else ""
            done = answered + summary.answered + summary.failed
            bar.update(task, completed=done, description=f"requests{failed}")

        yield show


def _tell(requests: Requests, output: Path, failures: Path, summary: Summary) -> None:
    """What came of it; failures end with exit code 1."""
    from rich.text import Text

    total = len(requests)
    is_are = "is" if total == 1 else "are"
    say(f"{total - summary.failed} of {counted(total, 'request')} {is_are} answered in {output}")
    if not summary.failed:
        return
    remark(f"{counted(summary.failed, 'request')} failed, see {failures}; the same command tries them again:")
    for reason, count in summary.failures.most_common(SHOWN):
        times = f"{count} times, first in line" if count > 1 else "line"
        remark(Text(f"  {times} {summary.first[reason]}: {reason}"))
    if (more := len(summary.failures) - SHOWN) > 0:
        remark(f"  and {counted(more, 'other reason')}")
    raise typer.Exit(1)
