"""`paceline codebooks`: which codes fire on a text, and what a model writes where codes are forced."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.prompts import read_prompt
from paceline.cli.terminal import spinner
from paceline.errors import ConfigError

if TYPE_CHECKING:
    from paceline.codebooks import CodebookModel, Firing

NAMED = 6
"""Tokens in a line on which a code fires."""

app = typer.Typer(help="Look at the codes of a model that `paceline train codebooks` made, and force them.")

Folder = Annotated[Path, typer.Argument(metavar="FOLDER", help="What `paceline train codebooks` wrote.")]
Text = Annotated[str | None, typer.Argument(metavar="TEXT", help="- or nothing reads standard input.")]
File = Annotated[Path | None, typer.Option("--file", metavar="FILE", help="Read the text from a file.")]


@app.command("show")
def show(
    folder: Folder,
    text: Text = None,
    *,
    file: File = None,
    book: Annotated[list[str] | None, typer.Option("--book", help="As 3.mlp; may be repeated. All by default.")] = None,
    against: Annotated[
        Path | None, typer.Option("--against", metavar="FILE", help="Leave out codes that fire on this text too.")
    ] = None,
    most: Annotated[int, typer.Option("--most", min=1, help="Codes of a book.")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="Print all codes of all tokens as one JSON object.")] = False,
) -> None:
    """List the codes that fire on a text most often, and where."""
    asked, other = read_prompt(text, file), None if against is None else read_prompt(None, against)
    model = _opened(folder)
    chosen = _books(model, book)
    firing, apart = model.firing(asked), None if other is None else model.firing(other)
    if as_json:
        print(json.dumps({"tokens": firing.tokens, "codes": {name: firing.codes[name] for name in chosen}}))
        return
    for name in chosen:
        print(name)
        for line in _lines(firing, name, apart, most):
            print(f"  {line}")


@app.command("generate")
def generate(
    folder: Folder,
    prompt: Text = None,
    *,
    file: File = None,
    force: Annotated[
        list[str] | None,
        typer.Option("--force", metavar="BOOK=CODES", help="As 3.mlp=17 or 3.mlp=17,40; may be repeated."),
    ] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, max=8192, help="New tokens.")] = 64,
    temperature: Annotated[float, typer.Option("--temperature", min=0.0, help="0 takes the likeliest tokens.")] = 0.0,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of the draws.")] = 0,
) -> None:
    """Go on with a prompt, with codes forced from its last token on."""
    asked, wanted = read_prompt(prompt, file), dict(_forced(choice) for choice in force or ())
    model = _opened(folder)
    print(model.generate(asked, force=wanted, max_tokens=max_tokens, temperature=temperature, seed=seed))


def _opened(folder: Path) -> CodebookModel:
    from paceline.codebooks import CodebookModel

    with spinner("loading the model"):
        return CodebookModel.load(folder)


def _books(model: CodebookModel, wanted: list[str] | None) -> list[str]:
    known = list(model.books.names)
    if unknown := [book for book in wanted or () if book not in known]:
        raise ConfigError(f"--book must be one of {known[0]} to {known[-1]}, got {unknown[0]!r}")
    return wanted or known


def _forced(typed: str) -> tuple[str, list[int]]:
    """A book and its codes, of BOOK=CODES.

    Raises:
        ConfigError: something else.
    """
    name, _, codes = typed.partition("=")
    try:
        return name, [int(code) for code in codes.split(",")]
    except ValueError:
        raise ConfigError(f"--force must be as 3.mlp=17 or 3.mlp=17,40, got {typed!r}") from None


def _lines(firing: Firing, name: str, apart: Firing | None, most: int) -> list[str]:
    """The codes of a book that fire most often, each with its number of tokens and some of them."""
    where: dict[int, list[str]] = {}
    for token, ids in zip(firing.tokens, firing.codes[name], strict=True):
        for code in ids:
            where.setdefault(code, []).append(token)
    left_out = set() if apart is None else {code for ids in apart.codes[name] for code in ids}
    ordered = sorted((code for code in where if code not in left_out), key=lambda code: (-len(where[code]), code))
    lines = []
    for code in ordered[:most]:
        tokens = " ".join(repr(token) for token, _ in Counter(where[code]).most_common(NAMED))
        lines.append(f"{code:>6}  {len(where[code]):>4}  {tokens}")
    return lines
