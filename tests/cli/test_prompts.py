"""Where prompts come from, and what is wrong with some of them."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
from command import Command, Terminal

from paceline import ConfigError, PromptError
from paceline.cli import prompts


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "prompts.jsonl"


def test_one_newline_at_the_end_is_left_out(file: Path) -> None:
    file.write_bytes(b"a\n\n")
    assert prompts.read_prompt(None, file) == "a\n"


@pytest.mark.parametrize("data", [b"", b"\n", b"\r\n"])
def test_an_empty_file(file: Path, data: bytes) -> None:
    file.write_bytes(data)
    with pytest.raises(PromptError, match="is empty"):
        prompts.read_prompt(None, file)


def test_two_prompts(file: Path) -> None:
    with pytest.raises(ConfigError, match="not both"):
        prompts.read_prompt("a", file)


def test_no_prompt_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", Terminal())
    with pytest.raises(PromptError, match="no prompt was given"):
        prompts.read_prompt(None, None)
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(PromptError, match="no prompt was given"):
        prompts.read_prompt("-", None)


def test_too_much(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts, "MAX_PROMPT_BYTES", 3)
    file.write_bytes(b"abcd")
    with pytest.raises(PromptError, match="more than 3 bytes"):
        prompts.read_prompt(None, file)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"abcd")))
    with pytest.raises(PromptError, match="more than 3 bytes"):
        prompts.read_prompt(None, None)


def test_a_prompt_a_line(file: Path) -> None:
    file.write_text('{"prompt": "a", "id": 1}\n\n"b"\n')
    assert prompts.read_prompts(file) == {1: "a", 3: "b"}
    text = file.with_suffix(".txt")
    text.write_text("a\n\n b\n")
    assert prompts.read_prompts(text) == {1: "a", 3: " b"}


def test_only_line_feeds_end_a_prompt(file: Path) -> None:
    odd = "a\u2028b\x0cc\x85d\x1ce"
    file.write_bytes(f'{{"prompt": "{odd[:3]}"}}\r\n"f"\r\n'.encode())
    assert prompts.read_prompts(file) == {1: odd[:3], 2: "f"}
    text = file.with_suffix(".txt")
    text.write_bytes(f"{odd}\r\nf\n".encode())
    assert prompts.read_prompts(text) == {1: odd, 2: "f"}


def test_too_many_prompts_are_rejected(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts, "MAX_PROMPTS", 2)
    file.write_text('"a"\n\n"b"\n')
    assert prompts.read_prompts(file) == {1: "a", 3: "b"}
    file.write_text('"a"\n"b"\n"c"\n')
    with pytest.raises(PromptError, match="holds 3 prompts, more than 2; split it"):
        prompts.read_prompts(file)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "no prompts in"),
        (b'{"text": "a"}', "line 1 has no text under 'prompt'"),
        (b'"a"\n{"prompt": 5}', "line 2 has no text"),
        (b'"a"\n{', "line 2 is not JSON"),
        (b"[" * 100_000, "line 1 is not JSON"),
        (b"\x89PNG", "is not UTF-8 text .byte 0x89 at 0"),
    ],
)
def test_prompts_that_cannot_be_read(file: Path, data: bytes, why: str) -> None:
    file.write_bytes(data)
    with pytest.raises(PromptError, match=why):
        prompts.read_prompts(file)


def test_a_prompt_file_that_is_nearly_there(run: Command, tmp_path: Path) -> None:
    (tmp_path / "questions.txt").write_text("one\n")
    shown = run("generate", "-f", tmp_path / "question.txt")
    assert shown.line.endswith(f"give a UTF-8 text file; did you mean {str(tmp_path / 'questions.txt')!r}?")
    assert run("bench", "-w", tmp_path / "question.txt").line.endswith("questions.txt'?")


@pytest.mark.parametrize(
    "command", [("verify",), ("doctor",), ("tune", "--budget", "1"), ("tune", "--chat"), ("count-tokens",)]
)
def test_the_line_of_a_prompt_that_does_not_fit_is_named(
    run: Command, tmp_path: Path, command: tuple[str, ...]
) -> None:
    file = tmp_path / "questions.txt"
    file.write_text(f"one\n\n{'one two three ' * 40}\n")
    found = run(*command, "--prompts", file, "--max-model-len", 64, "--dtype", "float32", "--threads", 1)
    assert (found.code, found.out) == (2, "")
    assert found.line.startswith(f"{str(file)!r} line 3: the prompt has ")
