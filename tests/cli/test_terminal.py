"""What is printed beside results: the spinner of long waits (on terminals only, never beside another display), wrapped
text, log records.
"""

from __future__ import annotations

import json
import logging
import sys
from typing import Any

import pytest
from command import Command, Terminal
from rich.text import Text

from paceline import registry
from paceline.cli.terminal import BUNDLED, console, remark, report, say, spinner, start_logging
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
    with spinner("compiling all"):
        print("text")
    shown = screen.getvalue()
    assert "compiling all" in shown
    assert shown.rstrip().endswith("\x1b[2K")  # wiped
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")  # the cursor is there
    assert capsys.readouterr().out == "text\n"


def test_a_wait_whose_share_is_known_is_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = terminal(monkeypatch)
    with spinner("packing all") as move:
        assert move is not None
        before = screen.getvalue()
        move(0.4)
    assert "%" not in before
    assert "40%" in screen.getvalue()


def test_the_cursor_is_there_while_the_wait_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = terminal(monkeypatch)
    with spinner("compiling all"):
        shown = screen.getvalue()
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")


def test_no_terminal_shows_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with spinner("compiling all"):
        pass
    assert capsys.readouterr() == ("", "")


def test_another_display_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from rich.console import Console
    from rich.status import Status

    screen = terminal(monkeypatch)
    with Status("measuring", console=Console(stderr=True)), spinner("compiling all"):
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


@pytest.mark.parametrize(("columns", "widest"), [(None, 80), ("40", 40), ("500", 100)])
def test_text_is_wrapped_by_words(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], columns: str | None, widest: int
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns is not None:
        monkeypatch.setenv("COLUMNS", columns)
    say("  " + "self-speculative decoding " * 20, indent="  ")
    lines = capsys.readouterr().out.splitlines()
    assert widest - len("self-speculative ") < max(map(len, lines)) <= widest
    assert lines[0].startswith("  self")
    assert all(line.startswith("    ") for line in lines[1:])
    assert {word for line in lines for word in line.split()} == {"self-speculative", "decoding"}


def test_models_of_the_package_have_short_names(capsys: pytest.CaptureFixture[str]) -> None:
    say(f"cannot read {BUNDLED}/target")
    report(f"cannot read {BUNDLED}/draft")
    assert capsys.readouterr() == ("cannot read bundled/target\n", "cannot read bundled/draft\n")


def test_nothing_that_is_printed_beside_results_steers_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    start_logging()
    for print_it in (remark, report, say, logging.getLogger("paceline").warning):
        print_it("a\x1b[2J\x9b31m\x90\x07b")
    shown = capsys.readouterr()
    assert shown.err.count("a␛[2J␛31m␛␇b") == 3
    assert shown.out == "a␛[2J␛31m␛␇b\n"
    remark("first\n\tsecond")
    assert capsys.readouterr().err.split() == ["first", "second"], "control"


def test_without_colours_nothing_is_dim_or_bold_either(monkeypatch: pytest.MonkeyPatch) -> None:
    for plain in (False, True):
        screen = terminal(monkeypatch)
        if plain:
            monkeypatch.setenv("NO_COLOR", "1")
        remark(Text("tokens", style="dim"))
        console(stderr=True).print(Text("all", style="bold red"))
        assert ("\x1b[" in screen.getvalue()) is not plain
        assert "tokens" in screen.getvalue()


def test_a_warning_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    start_logging()
    for _ in range(3):
        logging.getLogger("paceline").warning("slow on %s", "this machine")
    logging.getLogger("paceline").warning("slow on another one")
    assert capsys.readouterr().err.count("slow") == 2
    start_logging()
    logging.getLogger("paceline").warning("slow on %s", "this machine")
    assert capsys.readouterr().err.count("slow") == 1


def test_an_error_is_one_line_in_a_pipe_and_wrapped_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    report("long " * 40)
    assert capsys.readouterr().err.count("\n") == 1
    screen = terminal(monkeypatch)
    monkeypatch.setenv("COLUMNS", "80")
    report("long " * 40)
    assert max(map(len, screen.getvalue().splitlines())) <= 80
