"""The spinner of long waits: on terminals only, never beside another display, nothing on standard output."""

from __future__ import annotations

import json
import logging
import sys
from typing import Any

import pytest
from command import Command, Terminal

from paceline import registry
from paceline.cli import waits
from paceline.utils import progress


def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Standard error as a terminal, from here on."""
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    found = Terminal()
    monkeypatch.setattr(sys, "stderr", found)
    return found


def test_a_terminal_shows_what_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    screen = terminal(monkeypatch)
    with waits.spinner("compiling all"):
        print("text")
    shown = screen.getvalue()
    assert "compiling all" in shown
    assert shown.rstrip().endswith("\x1b[2K")  # wiped
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")  # the cursor is there
    assert capsys.readouterr().out == "text\n"


def test_the_cursor_is_there_while_the_wait_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = terminal(monkeypatch)
    with waits.spinner("compiling all"):
        shown = screen.getvalue()
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")


def test_no_terminal_shows_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with waits.spinner("compiling all"):
        pass
    assert capsys.readouterr() == ("", "")


def test_another_display_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from rich.console import Console
    from rich.status import Status

    screen = terminal(monkeypatch)
    with Status("measuring", console=Console(stderr=True)), waits.spinner("compiling all"):
        pass
    assert "measuring" in screen.getvalue()
    assert "compiling all" not in screen.getvalue()


def test_verbs_show_their_waits(run: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    screen, table = terminal(monkeypatch), registry.table

    def slow(family: str) -> Any:
        with progress.waiting("compiling all", "which takes a minute", logging.WARNING):
            return table(family)

    monkeypatch.setattr(registry, "table", slow)
    assert json.loads(run("methods", "--json").out)
    shown = screen.getvalue()
    assert shown.startswith("WARNING paceline: compiling all, which takes a minute\n")
    assert "\x1b[?25l" in shown
    screen.truncate(0)
    assert json.loads(run("--log-level", "error", "methods", "--json").out)
    assert "compiling" not in screen.getvalue()


def test_verbs_without_a_terminal_say_one_line(run: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    table, waited = registry.table, []

    def slow(family: str) -> Any:
        if not waited:
            with progress.waiting("compiling all", "which takes a minute", logging.WARNING):
                waited.append(family)
        return table(family)

    monkeypatch.setattr(registry, "table", slow)
    found = run("methods", "--json")
    assert json.loads(found.out)
    assert found.err == "WARNING paceline: compiling all, which takes a minute\n"
