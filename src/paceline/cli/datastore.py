"""`paceline datastore`: builds datastores of texts for the methods `rest` and `rasd`, and says what is in one."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.options import with_log_level
from paceline.cli.terminal import progress_bar
from paceline.errors import ConfigError

if TYPE_CHECKING:
    from paceline.drafters.retrieval import Datastore
    from paceline.drafters.retrieval import Sources as Found

app = typer.Typer(name="datastore", help="Datastores of texts to draft from: build, info.", add_completion=False)

Sources = Annotated[
    list[Path], typer.Argument(metavar="SOURCE...", help="Text, JSONL or JSON files (.gz too), or folders of them.")
]


@app.command("build")
@with_log_level
def build(
    *,
    sources: Sources,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="PATH", help="File to write.")],
    model: Annotated[
        str | None,
        typer.Option(
            "--model", "-m", metavar="MODEL", help="Folder or hub id of the target; default: the bundled model."
        ),
    ] = None,
    revision: Annotated[
        str | None, typer.Option("--revision", metavar="NAME", help="Branch, tag or commit on the hub.")
    ] = None,
    field: Annotated[
        list[str] | None,
        typer.Option(
            "--field", metavar="NAME", help="Field of JSON rows to read; may be repeated. Default: by their keys."
        ),
    ] = None,
    shard_tokens: Annotated[
        int, typer.Option("--shard-tokens", min=2, help="Tokens sorted at once, at 20 bytes of memory each.")
    ] = 2**24,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing file.")] = False,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run code that comes with the tokenizer.")
    ] = False,
) -> None:
    """Make a datastore of texts with the tokenizer of a model."""
    files = _found(sources, output, field or (), overwrite=overwrite)
    from paceline.checkpoints import BUNDLED_FOLDER, Tokenizer, resolve
    from paceline.drafters.retrieval import build_datastore as make

    folder = resolve(BUNDLED_FOLDER / "target" if model is None else model, revision=revision, code=trust_remote_code)
    tokenizer = Tokenizer.load(folder, trust_remote_code=trust_remote_code)
    with _bar(files.total) as show:
        name = model or "the bundled model"
        make(files, tokenizer, output, name=name, shard_tokens=shard_tokens, overwrite=overwrite, progress=show)
    _print(output, as_json=False, check=False)


def _found(sources: list[Path], output: Path, field: Sequence[str], *, overwrite: bool) -> Found:
    """The files to read, once it is clear that what is made of them may be written."""
    if output.is_dir():
        raise ConfigError(f"--output {str(output)!r} is a folder; give the path of a file")
    if output.exists() and not overwrite:
        raise ConfigError(f"there is a file {str(output)!r} already; choose another --output, or add --overwrite")
    from paceline.drafters.retrieval import Sources as Found

    files = Found.find(sources, field)
    if field and not any(path.name.removesuffix(".gz").endswith((".json", ".jsonl")) for path in files.files):
        raise ConfigError(
            "--field chooses among the fields of .json and .jsonl files, and there are none; leave it out"
        )
    if output.resolve() in {path.resolve() for path in files.files}:
        raise ConfigError(f"--output {str(output)!r} is one of the sources; choose another")
    return files


@app.command("info")
@with_log_level
def info(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A datastore.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say what is in a datastore, and whether all of it is as it was written."""
    _print(path, as_json=as_json, check=True)


def _print(path: Path, *, as_json: bool, check: bool) -> None:
    from paceline.drafters.retrieval import Datastore

    store = Datastore(path)
    if check:
        store.check()
    facts = _facts(store)
    if as_json:
        print(json.dumps(facts))
        return
    width = max(map(len, facts))
    for name, value in facts.items():
        print(f"{name.replace('_', ' '):<{width}}  {f'{value:,}' if isinstance(value, int) else value}")


def _facts(store: Datastore) -> dict[str, Any]:
    header = store.header
    return {
        "path": str(store.path),
        "bytes": store.file_bytes,
        "tokens": header.tokens,
        "documents": header.documents,
        "files": header.sources,
        "shards": len(store.shards),
        "tokenizer": header.tokenizer,
        "made_for": header.tokenizer_name,
        "vocab_size": header.vocab_size,
        "sha256": header.sha256,
    }


@contextmanager
def _bar(total: int) -> Iterator[Callable[[int, str], None]]:
    """A bar on standard error, where that is a terminal."""
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with progress_bar(*columns) as bar:
        task = bar.add_task("reading", total=total)
        yield lambda done, what: bar.update(task, description=what, completed=done if done >= 0 else None)
