"""`paceline chat` through a pipe."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from command import Command
from tiny_checkpoint import edit_json

FAST = ("--dtype", "float32", "--threads", "1", "--max-tokens", "12")


def test_a_conversation(run: Command) -> None:
    one = run("chat", *FAST, stdin="What is two plus two?\n")
    both = run("chat", *FAST, stdin="What is two plus two?\nAnd three?\n\nnot read\n")
    assert one.code == both.code == 0
    assert both.out.startswith(one.out)
    assert len(both.out) > len(one.out)


@pytest.mark.parametrize("flag", ["--logprobs", "--prompt-logprobs"])
def test_what_a_conversation_does_not_show_is_rejected(run: Command, flag: str) -> None:
    found = run("chat", *FAST, flag, "1", stdin="hello\n")
    assert (found.code, found.out) == (2, "")
    assert (
        found.line
        == "--logprobs and --prompt-logprobs are not available in a conversation; use `paceline generate --json`"
    )


def test_nothing_said(run: Command) -> None:
    assert run("chat", *FAST).out == ""


def test_a_checkpoint_without_a_template_is_rejected_with_a_hint(run: Command, tiny: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny, tmp_path / "plain")
    edit_json(folder / "tokenizer_config.json", chat_template=None)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    found = run("chat", "-m", folder, *FAST, stdin="hello\n")
    assert (found.code, found.out) == (2, "")
    assert "has no chat template; use `paceline generate`" in found.line


def test_a_conversation_that_outgrows_the_context_starts_over(run: Command) -> None:
    message = "one two three four five six seven " * 3
    found = run("chat", "--max-model-len", 64, *FAST, stdin=f"{message}\n{message}\n")
    assert found.code == 0
    assert "starts over" in found.line
    assert len(found.out.splitlines()) >= 2


def test_a_message_longer_than_the_context_ends_it(run: Command) -> None:
    found = run("chat", "--max-model-len", 64, *FAST, stdin="one two three " * 100 + "\n")
    assert found.code == 2
    assert "the context holds 64" in found.line


def test_input_that_is_no_text(run: Command) -> None:
    found = run("chat", *FAST, stdin=b"\xff\xfe\n")
    assert (found.code, found.out) == (2, "")
    assert "not UTF-8" in found.line
