"""`paceline convert`: a trained head in the files of another engine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.cli.options import open_llm, with_flags
from paceline.cli.terminal import say


@with_flags(sampling=False)
def command(
    head: Annotated[str, typer.Argument(help="Folder or hub id of a head, in any format that can be read.")],
    *,
    to: Annotated[
        str,
        typer.Option(
            "--to",
            help="paceline, speculators, dflash, deepspec, eagle, falcon, longspec, medusa, medusa_vllm, hydra or "
            "mlp_speculator.",
        ),
    ],
    output: Annotated[Path, typer.Option("-o", "--output", metavar="FOLDER", help="Where the files go.")],
    flag_values: dict[str, Any],
) -> None:
    """Write a head for another engine, or one of another engine for this; --model names its target."""
    from paceline.training import convert

    written = convert(open_llm(flag_values | {"speculative_config": "null"}), head, to, output)
    say(f"Wrote {written}.")
