"""The commands of `paceline`, and what becomes of whatever ends one of them.

Exit codes: 0 fine; 1 a check failed (`demo`, `verify`) or a request did (`batch`); 2 bad input, one line on standard
error; 130 interrupted, what was produced is shown; 143 `train` was terminated, its state is kept; 141 the reader of a
pipe went away; 70 a bug of ours, still one line. Heavy imports happen inside the commands, so that help is fast.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from traceback import extract_tb
from typing import Annotated, Any

import typer

from paceline.cli import (
    analyze,
    batch,
    bench,
    cache,
    chat,
    codebooks,
    convert,
    count_tokens,
    datastore,
    demo,
    doctor,
    explain,
    generate,
    interrupts,
    methods,
    profile,
    retrieval,
    serve,
    train,
    transcribe,
    tune,
    verify,
    warmup,
)
from paceline.cli.terminal import report, set_log_level, spinner, start_logging
from paceline.errors import PacelineError
from paceline.utils import shortened, shown_by
from paceline.version import __version__

BAD_INPUT, BUG, NO_READER = 2, 70, 141
IN_LAB = "`python -m lab bench` in the repository has it"
INSTEAD = {
    "command 'run'": "use generate or chat",
    "command 'complete'": "use generate or chat",
    "command 'peers'": "run `python -m lab peers` in the repository",
    "command 'structured'": "run `python -m lab structured` in the repository",
    "command 'diffusion'": "run `python -m lab diffusion` in the repository",
    "option: -p": "the prompt needs no flag",
    "option: --prompt": "the prompt needs no flag",
    "option: -n": "use --max-tokens",
    "option: --n-predict": "use --max-tokens",
    "option: -c": "use --max-model-len",
    "option: -t": "use --threads",
    "option: -m": "say first what to do with it, as in `paceline generate -m MODEL`",
    "option: --model": "say first what to do with it, as in `paceline generate --model MODEL`",
    "option: --peers": IN_LAB,
    "option: --peer-url": IN_LAB,
    "option: --peer-model": IN_LAB,
}
"""Commands of other tools, and what has left the package -> what to do."""

NO_MEMORY = ("can't allocate memory", "not enough memory", "out of memory", "cannot allocate memory")

logger = logging.getLogger("paceline")

app = typer.Typer(
    name="paceline",
    help="Faster decoding of language models with the same output.",
    add_completion=False,
    pretty_exceptions_enable=False,
)
GROUPS: dict[str, dict[str, Callable[..., None] | typer.Typer]] = {
    "Generate text": {
        "demo": demo.command,
        "generate": generate.command,
        "chat": chat.command,
        "transcribe": transcribe.command,
        "serve": serve.command,
        "batch": batch.app,
    },
    "Prove, measure and look": {
        "verify": verify.command,
        "bench": bench.app,
        "explain": explain.command,
        "analyze": analyze.app,
        "methods": methods.command,
    },
    "Set up": {
        "doctor": doctor.command,
        "warmup": warmup.command,
        "tune": tune.command,
        "profile": profile.app,
        "cache": cache.app,
    },
    "Make drafters": {
        "train": train.app,
        "convert": convert.command,
        "datastore": datastore.app,
        "retrieval": retrieval.app,
        "count-tokens": count_tokens.command,
        "codebooks": codebooks.app,
    },
}
"""The commands in the order of the help, under what a user wants."""

for title, commands_of_group in GROUPS.items():
    for command_name, command in commands_of_group.items():
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=command_name, rich_help_panel=title)
        else:
            app.command(command_name, rich_help_panel=title)(command)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"paceline {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
    log_level: Annotated[
        str | None,
        typer.Option("--log-level", metavar="LEVEL", help="debug, info, warning or error; also after the command."),
    ] = None,
) -> None:
    """Options of every command."""
    if log_level is not None:
        set_log_level(log_level)


def run(arguments: Sequence[str], commands: typer.Typer = app, name: str = "paceline") -> int:
    """Run a command and return its exit code; whatever goes wrong becomes one line on standard error.

    Args:
        arguments: without the program's name; none at all show the help.
        commands: the program's.
        name: of the program.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    _prepare_streams()
    start_logging()
    try:
        # Not app(): that would turn interrupts, broken pipes and mistakes into messages of its own, over several lines.
        words = list(arguments) or ["--help"]
        if "--help" in words:
            _style_help()
        context = typer.main.get_command(commands).make_context(name, words)
        with context, shown_by(spinner):
            context.command.invoke(context)
        sys.stdout.flush()
        return 0
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):  # rich makes an exit with code 1 of it
            return NO_READER
        raise
    except BaseException as error:  # panics of libraries in Rust are no Exceptions
        return _last_words(error)


def _style_help() -> None:
    """Let help have no styles where the variable NO_COLOR is set: typer would leave those that are no colours."""
    from typer import rich_utils

    rich_utils.COLOR_SYSTEM = None if os.environ.get("NO_COLOR") else "auto"


def _last_words(error: BaseException) -> int:
    """Report in one line what ended a command, after the text so far; returns the exit code."""
    try:
        sys.stdout.flush()
    except OSError as second:
        error = second if not isinstance(error, KeyboardInterrupt) else error
        _abandon(sys.stdout)
    ended = interrupts.came()
    words = "terminated" if ended == interrupts.TERMINATED else "interrupted"
    code, line = (ended, words) if ended else _explain(error)
    if code == BUG or isinstance(error, PacelineError):
        logger.debug("where it happened", exc_info=error)
    if line:
        try:
            report(f"paceline: {' '.join(line.split())}")
        except OSError:
            _abandon(sys.stderr)
    return code


def _explain(error: BaseException) -> tuple[int, str]:
    """Exit code and line of an error; an empty line says nothing."""
    if isinstance(error, KeyboardInterrupt | typer.Abort):
        return interrupts.INTERRUPTED, "interrupted"
    if isinstance(error, typer.Exit):
        return error.exit_code, "interrupted" if error.exit_code == interrupts.INTERRUPTED else ""
    if isinstance(error, PacelineError):
        return BAD_INPUT, str(error)
    format_message = getattr(error, "format_message", None)
    if format_message is not None:  # a mistake in the command line, found by typer
        path = getattr(getattr(error, "ctx", None), "command_path", "paceline")
        text = _bad_number(error) or format_message().rstrip(".")
        if "unexpected extra argument" in text:
            text += f"; {_extra(error)}"
        for name, instead in INSTEAD.items():
            if re.match(rf"No such {re.escape(name)}(?![\w-])", text):
                text = f"No such {name}; {instead}"
        if (model := re.match(r"No such command '(.*\.gguf)'", text, re.IGNORECASE)) is not None:
            file = shlex.quote(model[1])
            text = f"{model[0]}; say first what to do with it, as in `paceline chat -m {file}` or `paceline generate "
            text += f"-m {file} PROMPT`"
        return BAD_INPUT, f"{text} See `{path} --help`" if text.endswith("?") else f"{text}; see `{path} --help`"
    return _explain_system(error)


def _extra(error: BaseException) -> str:
    """What to do about an argument too many: whether the command takes a text at all."""
    command = getattr(getattr(error, "ctx", None), "command", None)
    takes = any(parameter.param_type_name == "argument" for parameter in getattr(command, "params", ()))
    return "put a text of several words into quotes" if takes else "this command takes flags only"


def _bad_number(error: BaseException) -> str | None:
    """The line of a flag that takes a number, where typer tells neither what was typed nor the whole range.

    None for other errors, and for versions of typer that do tell it.
    """
    errors, flag = getattr(error.__cause__, "errors", None), getattr(error, "param", None)
    annotation = getattr(getattr(flag, "type_descriptor", None), "annotation", None)
    if errors is None or flag is None or annotation not in (int, float):
        return None
    kind = "an integer" if annotation is int else "a number"
    low, high = flag.min, flag.max
    bounds = "" if low is None else f" of {low:g} or more" if high is None else f" in {low:g}..{high:.16g}"
    return f"{flag.opts[0]} must be {kind}{bounds}, got {shortened(errors()[0]['input'])}"


def _explain_system(error: BaseException) -> tuple[int, str]:
    """Errors of the machine, and of ours."""
    text = str(error)
    if isinstance(error, MemoryError) or any(sign in text.lower() for sign in NO_MEMORY):
        return BAD_INPUT, "not enough memory; use a smaller model, dtype, --max-model-len or prompt"
    if isinstance(error, OSError):
        if error.errno == errno.EPIPE:
            return NO_READER, ""
        return BAD_INPUT, f"{error.strerror or text}" + (f": {error.filename}" if error.filename else "")
    frames = extract_tb(error.__traceback__)
    where = f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    return (
        BUG,
        f"internal error, {type(error).__name__}: {text[:300]}{where}; please report it with the output of "
        f"--log-level debug",
    )


def _prepare_streams() -> None:
    """Standard streams that are closed read and write nothing; characters that an encoding lacks are replaced."""
    for name in ("stdout", "stderr"):
        stream: Any = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - lives as long as the process
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")


def _abandon(stream: Any) -> None:
    """Let the rest of a stream go nowhere, so that the interpreter does not complain about it at its end."""
    try:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)
    except (OSError, ValueError) as error:
        logger.debug("cannot redirect %r: %s", stream, error)
