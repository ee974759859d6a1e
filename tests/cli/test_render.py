"""What a terminal gets to see."""

from __future__ import annotations

import sys

import pytest
from command import Terminal

from paceline.cli.generate import StreamPrinter
from paceline.engine import DrafterMetrics, RequestMetrics


def watch(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Both streams are a terminal from here on (a fixture is too early: pytest sets them again before the test)."""
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    stream = Terminal()
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "stderr", stream)
    return stream


def test_colours_by_drafter_and_a_legend(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = watch(monkeypatch)
    printer = StreamPrinter()
    printer.show([("I", None), (" am", "ngram"), (" here", "draft_model"), (" now", "ngram")])
    printer.end()
    text = terminal.getvalue()
    assert text == "I\x1b[32m am\x1b[0m\x1b[36m here\x1b[0m\x1b[32m now\x1b[0m\n"
    drafters = {"ngram": DrafterMetrics(9, 2), "draft_model": DrafterMetrics(4, 1)}
    printer.legend(RequestMetrics(num_generation_tokens=4, num_steps=2, num_accepted_tokens=3, drafters=drafters))
    legend = terminal.getvalue().removeprefix(text)
    assert "mean acceptance length 2.50" in legend
    assert "\x1b[2;32m■ ngram\x1b[0m" in legend
    assert "\x1b[2;36m■ draft_model\x1b[0m" in legend
    assert "2 of 9 accepted" in legend


def test_no_colour_where_it_is_not_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = watch(monkeypatch)
    monkeypatch.setenv("NO_COLOR", "1")
    StreamPrinter().show([(" am", "ngram")])
    assert terminal.getvalue() == " am"


def test_a_model_cannot_steer_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = watch(monkeypatch)
    StreamPrinter().show([("a\x1b[2J\x07\tb\n", None)])
    assert terminal.getvalue() == "a␛[2J␇\tb\n"


def test_a_pipe_gets_the_bare_text(capsys: pytest.CaptureFixture[str]) -> None:
    printer = StreamPrinter()
    printer.show([("a\x1b\t", "ngram"), ("b", None)])
    printer.rest("a\x1b\tbcd")
    printer.end()
    printer.legend(RequestMetrics())
    assert capsys.readouterr() == ("a\x1b\tbcd\n", "")


def test_a_finished_line_is_not_ended_twice_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = watch(monkeypatch)
    printer = StreamPrinter()
    printer.show([("a\n", None)])
    printer.end()
    assert terminal.getvalue() == "a\n"
