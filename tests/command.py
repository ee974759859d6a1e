"""The command line called in this process: exit code, standard output, standard error."""

from __future__ import annotations

import io
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import pytest
import typer

from paceline.cli.main import main


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str

    @property
    def line(self) -> str:
        """The one line that explains a failure."""
        lines = [line for line in self.err.splitlines() if line.startswith("paceline: ")]
        assert len(lines) == 1, self.err
        assert "Traceback" not in self.err
        return lines[0].removeprefix("paceline: ")


ENDS = [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")]
"""Signals that end a command which has something to keep: its exit code, and the line that it says."""


def arrive(number: signal.Signals) -> None:
    """Let a signal come now."""
    if number is signal.SIGINT:
        raise KeyboardInterrupt  # it may be ignored here
    assert callable(signal.getsignal(number)), "it would end this process"
    signal.raise_signal(number)


class Terminal(io.StringIO):
    """A text stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


get_command = cache(typer.main.get_command)
"""Reading all flags takes longer than most commands that are wrong."""


class Command:
    """Calls `main`, that of `paceline` or of another program."""

    def __init__(
        self,
        capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
        main: Callable[[list[str]], int] = main,
    ) -> None:
        self.capsys, self.monkeypatch, self.main = capsys, monkeypatch, main
        monkeypatch.setattr(typer.main, "get_command", get_command)

    def __call__(self, *arguments: object, stdin: str | bytes = b"") -> Result:
        data = stdin.encode() if isinstance(stdin, str) else stdin
        self.monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))
        self.capsys.readouterr()
        words = [str(one) for one in arguments]
        self.monkeypatch.setattr(sys, "argv", ["paceline", *words])
        code = self.main(words)
        return Result(code, *self.capsys.readouterr())
