"""The `paceline` command: its verbs, its exit codes, its logging switch.

Exit codes: 0 fine; 1 a check failed (`demo`, `verify`); 2 bad input, one line on standard error; 130 interrupted, what was produced is
shown. In: arguments. Out: text. Not here: the verbs themselves (one file each); heavy imports happen inside them, so that help is fast.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import Annotated

import typer

from paceline import __version__
from paceline.cli import chat, demo, generate, methods, verify
from paceline.errors import PacelineError

app = typer.Typer(
    name="paceline",
    help="Faster decoding of language models with the same output.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("generate")(generate.command)
app.command("chat")(chat.command)
app.command("methods")(methods.command)
app.command("demo")(demo.command)
app.command("verify")(verify.command)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"paceline {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error; on standard error.")] = "warning",
) -> None:
    """Options of every verb."""
    level = logging.getLevelNamesMapping().get(log_level.upper())
    if level is None:
        raise typer.BadParameter(f"must be debug, info, warning or error, got {log_level!r}", param_hint="--log-level")
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    logging.getLogger("paceline").setLevel(level)


def main() -> None:
    """Run a verb; a PacelineError becomes one line and exit code 2."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        app()
    except PacelineError as error:
        print(f"paceline: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except KeyboardInterrupt:
        print("paceline: interrupted", file=sys.stderr)
        sys.exit(130)
