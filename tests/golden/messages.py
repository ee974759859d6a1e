"""What a user reads: the methods, the help of every command, and the line that each bad input gets."""

from __future__ import annotations

import contextlib
import io
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import test_bad_input
import test_config
import tiny_checkpoint
import typer
from golden.bad_inputs import COMMANDS, CONFIGS, ENGINES
from toy_models import ToyModels, letters
from toys import ToyRunner

from paceline import LLM, PacelineError, SamplingParams, SpeculativeConfig
from paceline.assembly import build_parts, check_methods
from paceline.cli.app import app
from paceline.cli.main import main
from paceline.config import EngineConfig

ROOT = Path(__file__).resolve().parents[2]


def called(arguments: list[str]) -> tuple[int, list[str]]:
    """Exit code and lines of a command, with an empty standard input."""
    out, before = io.StringIO(), sys.stdin
    sys.stdin = io.TextIOWrapper(io.BytesIO(b""), encoding="utf-8")
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            code = main(arguments)
    finally:
        sys.stdin = before
    lines = [line.rstrip() for line in out.getvalue().splitlines()]
    return code, [
        line for line in lines if not line.startswith("WARNING paceline: compiling")
    ]  # the first time on a machine


def commands() -> list[list[str]]:
    """Every command and group, from the application itself."""
    names: list[list[str]] = []

    def walk(command: Any, path: list[str]) -> None:
        names.append(path)
        for name, inner in getattr(command, "commands", {}).items():
            walk(inner, [*path, name])

    walk(typer.main.get_command(app), [])
    return names


def line_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except PacelineError as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


def build(given: Any) -> None:
    """What `LLM` does with a speculative_config, over the toy target."""
    config, runner, draft = SpeculativeConfig.parse(given), ToyRunner(11), ToyRunner(11)
    check_methods(config)
    build_parts(runner, config, load=lambda name: draft, models=ToyModels(runner, draft), tokenizer=letters())


def _shown(value: Any) -> str:
    text = str(value)
    return text if len(text) < 120 else f"{text[:60]}... ({len(text)} characters)"


def _errors(folder: Path) -> dict[str, dict[str, str]]:
    llm = LLM(folder, threads=1, speculative_config=None)
    typed = [*(list(arguments) for arguments, _ in test_bad_input.ARGUMENTS.values()), *COMMANDS]
    few = SamplingParams(max_tokens=2)
    return {
        "speculative_config": {_shown(given): line_of(lambda given=given: build(given)) for given in CONFIGS},
        "SamplingParams": {
            _shown(given): line_of(lambda given=given: SamplingParams.from_dict(given)) for given, _ in test_config.BAD
        },
        "EngineConfig": {_shown(given): line_of(lambda given=given: EngineConfig(**given)) for given in ENGINES},
        "calls": {name: line_of(lambda call=call: call(llm)) for name, (call, _) in test_bad_input.CALLS.items()},
        "prompts": {name: line_of(lambda p=p: llm.generate(p, few)) for name, (p, _) in test_bad_input.PROMPTS.items()},
        "commands": {_shown(" ".join(arguments)): _line(arguments) for arguments in typed},
    }


def _line(arguments: list[str]) -> str:
    code, lines = called(arguments)
    return f"{code}: {' | '.join(lines) if len(lines) < 4 else f'{len(lines)} lines'}"


def _same(line: str, work: str) -> str:
    """The line without what differs from machine to machine and run to run."""
    for path, name in ((work, "WORK"), (str(ROOT), "ROOT"), (str(Path.home()), "~")):
        line = line.replace(path, name)
    return re.sub(r" at 0x[0-9a-f]+", " at ADDRESS", line)


def found(golden: Any) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as work:
        folder = tiny_checkpoint.write(Path(work) / "whole")
        errors = {
            kind: {_same(given, work): _same(line, work) for given, line in lines.items()}
            for kind, lines in _errors(folder).items()
        }
    return {
        "methods": called(["methods"])[1],
        "help": {" ".join(["paceline", *path]): called([*path, "--help"])[1] for path in commands()},
        "errors": errors,
    }
