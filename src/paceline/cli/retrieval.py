"""`paceline retrieval`: builds indices to retrieve from while a text is written, and says what is in one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli import outputs
from paceline.cli.options import with_log_level
from paceline.cli.terminal import spinner
from paceline.errors import ConfigError
from paceline.utils import choice

if TYPE_CHECKING:
    from paceline.drafters.retrieval import Sources as Found

app = typer.Typer(
    name="retrieval", help="Indices that --retrieval writes with what they find: build, info.", add_completion=False
)


@app.command("build")
@with_log_level
def build(
    *,
    sources: Annotated[
        list[Path], typer.Argument(metavar="SOURCE...", help="Text, JSONL or JSON files (.gz too), or folders of them.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FOLDER", help="Folder to write.")],
    kind: Annotated[
        str,
        typer.Option(
            "--kind",
            metavar="KIND",
            help="bm25: passages by their words; dense: passages by vectors; knn: tokens by the model's states.",
        ),
    ] = "bm25",
    vectors: Annotated[
        str, typer.Option("--vectors", metavar="HOW", help="How vectors are searched: exact, hnsw or ivf.")
    ] = "exact",
    encoder: Annotated[
        str,
        typer.Option(
            "--encoder",
            metavar="NAME",
            help="What makes vectors of passages: tokens, the model's input embeddings, or module:function of texts.",
        ),
    ] = "tokens",
    passage_words: Annotated[int, typer.Option("--passage-words", help="Most words of a passage.")] = 100,
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", metavar="MODEL", help="Folder or hub id; default: the bundled model."),
    ] = None,
    field: Annotated[
        list[str] | None,
        typer.Option(
            "--field", metavar="NAME", help="Field of JSON rows to read; may be repeated. Default: by their keys."
        ),
    ] = None,
) -> None:
    """Make an index of texts, for this model where KIND is knn or the encoder is tokens."""
    from paceline.search import INDEX_KINDS, build_index

    choice("--kind", kind, INDEX_KINDS)
    choice("--vectors", vectors, ("exact", "hnsw", "ivf"))
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ConfigError(f"--output {str(output)!r} is there already; choose another folder, or empty it")
    from paceline.checkpoints import BUNDLED_FOLDER, Tokenizer, resolve
    from paceline.drafters.retrieval import Sources as Found
    from paceline.models import load_runner

    files = Found.find(sources, field or ())
    folder = resolve(BUNDLED_FOLDER / "target" if model is None else model)
    reads = kind == "knn" or (kind == "dense" and encoder == "tokens")
    with spinner("reading the texts"):
        index = build_index(
            documents(files), kind, tokenizer=Tokenizer.load(folder), vectors=vectors, encoder=encoder,
            runner=load_runner(folder, name=model or "the bundled model") if reads else None,
            passage_words=passage_words,
        )  # fmt: skip
    with outputs.writing("--output", output):
        output.mkdir(parents=True, exist_ok=True)
        index.save(output)
    _print(output, as_json=False)


def documents(files: Found) -> Iterator[str]:
    """The texts of files, whole."""
    pieces: list[str] = []
    for piece in files.pieces():
        pieces.append(piece.text)
        if piece.last:
            yield "".join(pieces)
            pieces = []


@app.command("info")
@with_log_level
def info(
    path: Annotated[Path, typer.Argument(metavar="FOLDER", help="An index.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say what is in an index, once it was read."""
    from paceline.retrieval import open_index

    open_index(path)
    _print(path, as_json=as_json)


def _print(path: Path, *, as_json: bool) -> None:
    from paceline.retrieval import facts_of

    facts = {"path": str(path), **facts_of(path)}
    if as_json:
        print(json.dumps(facts))
        return
    width = max(map(len, facts))
    for name, value in facts.items():
        print(f"{name:<{width}}  {f'{value:,}' if isinstance(value, int) else value}")
