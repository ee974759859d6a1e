"""`paceline analyze channels`: which channels of keys carry most of their products, for `kv_selection`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli import outputs
from paceline.cli.options import with_log_level
from paceline.cli.prompts import read_prompt
from paceline.cli.terminal import spinner
from paceline.errors import ConfigError
from paceline.utils import integer

if TYPE_CHECKING:
    from paceline.models import ChannelStatistics

BLOCK = 512
"""Tokens of a text that are read together."""


@with_log_level
def command(
    text: Annotated[str | None, typer.Argument(help="Text to learn from; - or nothing reads standard input.")] = None,
    *,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="File to write (.safetensors).")],
    file: Annotated[
        Path | None, typer.Option("--file", "-f", metavar="FILE", help="Read the text from this file.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", metavar="MODEL", help="Folder or hub id; default: the bundled model."),
    ] = None,
    revision: Annotated[
        str | None, typer.Option("--revision", metavar="NAME", help="Branch, tag or commit on the hub.")
    ] = None,
    gguf_file: Annotated[
        str | None, typer.Option("--gguf-file", metavar="NAME", help="The file meant in a folder of GGUF files.")
    ] = None,
    tokens: Annotated[int, typer.Option("--tokens", help="Most tokens of the text that are read.")] = 16384,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was found as one JSON object.")] = False,
) -> None:
    """Find the channels of keys by which `kv_selection` of method double_sparsity chooses tokens."""
    integer("--tokens", tokens, 1)
    outputs.must_be_writable("--output", output)
    asked = read_prompt(text, file)
    from paceline.checkpoints import BUNDLED_FOLDER, Tokenizer, resolve
    from paceline.models import ChannelStatistics, load_runner

    name = model or "the bundled model"
    folder = resolve(BUNDLED_FOLDER / "target" if model is None else model, revision=revision, gguf_file=gguf_file)
    ids = Tokenizer.load(folder).encode(asked)[:tokens]
    if not ids:
        raise ConfigError("the text has no tokens to learn from; give a longer one")
    statistics = ChannelStatistics()
    with spinner("reading the text"):
        runner = load_runner(folder, name=name, kv_selection=statistics)
        block = min(BLOCK, runner.info.max_context - 1)
        for start in range(0, len(ids), block):
            cache = runner.open()
            runner.extend([cache], [ids[start : start + block]])
            runner.release(cache)
    with outputs.writing("--output", output):
        statistics.save(output, name=name)
    _tell(statistics, output, as_json=as_json)


def _tell(statistics: ChannelStatistics, output: Path, *, as_json: bool) -> None:
    """How much of the products a quarter, an eighth and a sixteenth of the channels carry."""
    shares = {part: statistics.share(part) for part in (4, 8, 16)}
    if as_json:
        print(json.dumps({"path": str(output), "tokens": statistics.tokens, "shares": shares}))
        return
    print(f"{output}: channels of {len(statistics.sums)} layers, from {statistics.tokens:,} tokens")
    for part, share in shares.items():
        print(f"1/{part} of the channels carries {share:.0%} of the products")
