"""`paceline chat` through a pipe, and at a terminal."""

from __future__ import annotations

import json
import os
import select
import shutil
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from command import Command
from command import Terminal as TextTerminal
from forked import Forked
from tiny_checkpoint import edit_json

from paceline.utils import read_prompts

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


def test_an_answer_that_a_limit_cut_off_says_so_at_a_terminal(run: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ("chat", *FAST, "--ignore-eos")
    assert "cut off" not in run(*asked, stdin="hello\n").err
    monkeypatch.setattr(sys, "stderr", screen := TextTerminal())
    assert run(*asked, stdin="hello\n").code == 0
    assert "the answer was cut off at 12 tokens: --max-tokens raises the limit" in screen.getvalue()


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


def test_a_message_that_does_not_fit_alone_takes_no_earlier_one_with_it(tmp_path: Path) -> None:
    flags = ("--max-model-len", "96", *FAST)
    talk, file = Terminal(tmp_path, *flags), tmp_path / "kept.jsonl"
    talk.type("", until="> ")
    talk.type("What is two plus two?\r", until="> ")
    assert "the context holds 96" in " ".join(talk.type(f"{'one two three ' * 100}\r", until="max_model_len").split())
    assert "starts over" not in talk.type("caf\udce9 au lait\r".encode("utf-8", "surrogateescape"), until="> ")
    talk.type(f"/save {file}\r", until="messages in")
    assert (tmp_path / "history" / "chat").exists(), "before the end"
    talk.type("/exit\r", until="/exit")
    assert talk.process.wait() == 0
    assert json.loads(file.read_text())["messages"][0]["content"] == "What is two plus two?"


def test_a_message_longer_than_the_context_ends_it(run: Command) -> None:
    found = run("chat", "--max-model-len", 64, *FAST, stdin="one two three " * 100 + "\n")
    assert found.code == 2
    assert "the context holds 64" in found.line


def test_input_that_is_no_text(run: Command) -> None:
    found = run("chat", *FAST, stdin=b"\xff\xfe\n")
    assert (found.code, found.out) == (2, "")
    assert "not UTF-8" in found.line


# ------------------------------------------------------------------------------------------------ commands


def test_commands_are_no_messages(run: Command, tmp_path: Path) -> None:
    file = tmp_path / "kept.jsonl"
    said = f"/help\nWhat is two plus two?\n/save {file}\n/exit\nnot read\n"
    talk = run("chat", *FAST, "--system", "Be brief.", stdin=said)
    assert talk.code == 0
    (answer,) = talk.out.splitlines()
    for name in ("/help", "/system", "/reset", "/save", "/stats", "/exit"):
        assert name in talk.err
    messages = json.loads(file.read_text())["messages"]
    assert [message["role"] for message in messages] == ["system", "user", "assistant"]
    assert messages[2]["content"].strip() == answer.strip()
    assert "not read" not in file.read_text()
    (kept,) = read_prompts(file).conversations
    assert kept.turns == ("What is two plus two?",)


def test_reset_and_system_change_what_the_model_reads(run: Command) -> None:
    plain = run("chat", *FAST, stdin="What is two plus two?\n").out
    after = run("chat", *FAST, stdin="Write SQL.\n/reset\nWhat is two plus two?\n").out
    assert after.splitlines()[-1] == plain.splitlines()[-1]
    kept = run("chat", *FAST, stdin="Write SQL.\nWhat is two plus two?\n").out  # the control: it remembers
    assert kept.splitlines()[-1] != plain.splitlines()[-1]
    system = run("chat", *FAST, stdin="/system Answer in SQL.\n/system\nWhat is two plus two?\n")
    assert system.out == run("chat", *FAST, "--system", "Answer in SQL.", stdin="What is two plus two?\n").out
    assert "Answer in SQL." in system.err


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("/nothing", "there is no command /nothing; /help lists them"),
        ("/reset now", "/reset stands alone, got 'now' behind it"),
        ("/save", "/save needs a file"),
        ("/save /no/such/folder/x", "/no/such/folder/x cannot be written"),
        (f"/save {__file__}", "is there already; give another file"),
    ],
)
def test_a_command_that_is_wrong_ends_nothing(run: Command, line: str, words: str) -> None:
    talk = run("chat", *FAST, stdin=f"{line}\nWhat is two plus two?\n")
    assert talk.code == 0
    assert words in " ".join(talk.err.split())
    assert talk.out.strip()


def test_other_names_of_commands(run: Command) -> None:
    assert "/stats" in run("chat", *FAST, stdin="/?\n").err
    assert "/stats" in run("chat", *FAST, stdin="/HELP\n").err
    assert not run("chat", *FAST, stdin="/quit\nWhat is two plus two?\n").out


def test_a_message_may_begin_with_a_path(run: Command) -> None:
    talk = run("chat", *FAST, stdin="/etc/hosts: what is this file?\n")
    assert talk.code == 0
    assert talk.out.strip()
    assert "command" not in talk.err


def test_stats(run: Command) -> None:
    err = run("chat", *FAST, stdin="/stats\nWhat is two plus two?\n/stats\n").err
    assert err.count("load  ") == 2
    for name in ("first token", "prompt", "decoding", "drafts", "context", "all answers", "memory"):
        assert err.count(f"{name} ") >= 1


# ------------------------------------------------------------------------------------------------ a terminal


class Terminal:
    """A chat at a pseudo-terminal."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self.end, theirs = os.openpty()
        streams = dict.fromkeys(("stdin", "stdout", "stderr"), theirs)
        environment = {**os.environ, "TERM": "xterm", "PACELINE_CACHE_DIR": str(folder)}
        self.process = Forked(["chat", *flags], env=environment, **streams)
        os.close(theirs)

    def type(self, text: str | bytes, until: str, seconds: float = 120) -> str:
        """Type something and read until a text comes."""
        os.write(self.end, text.encode() if isinstance(text, str) else text)
        return self.read(until, seconds)

    def read(self, until: str, seconds: float = 120) -> str:
        new, limit = "", time.monotonic() + seconds
        while until not in new:
            assert time.monotonic() < limit, f"{until!r} is not in {new!r}"
            if select.select([self.end], [], [], 0.2)[0]:
                new += os.read(self.end, 65536).decode(errors="replace")
        return new

    def press_until(self, key: str, until: str) -> None:
        """Press a key, again where nothing comes: `input` of Python may miss a signal of its first moment."""
        for _ in range(20):
            os.write(self.end, key.encode())
            with suppress(AssertionError):
                self.read(until, 3)
                return
        raise AssertionError(f"{key!r} brings no {until!r}")


@pytest.mark.skipif(sys.platform == "win32", reason="no pseudo-terminals")
def test_at_a_terminal(tmp_path: Path) -> None:
    flags = ("--dtype", "float32", "--threads", "1", "--max-tokens", "1500", "--ignore-eos", "--seed", "1")
    talk, file = Terminal(tmp_path, *flags), tmp_path / "kept.jsonl"
    assert "/help lists commands" in talk.type("", until="> ")
    for _ in range(10):  # an answer may end before the key is pressed
        talk.type("Count to a thousand.\r", until="thousand.")
        talk.type("", until="1")  # it answers
        if "the conversation goes on" in talk.type("\x03", until="> "):
            break
        talk.type("/reset\r", until="> ")
    else:
        raise AssertionError("Ctrl-C stopped no answer")
    talk.press_until("\x03", until="/exit or Ctrl-D ends")
    talk.type("\x1b[200~/system two\nlines\x1b[201~\r", until="replaced")
    talk.type(f"/save {file}\r", until="3 messages in")
    talk.type("/exit\r", until="/exit")
    assert talk.process.wait() == 0
    system, question, answer = json.loads(file.read_text())["messages"]
    assert system["content"] == "two\nlines"
    assert question["content"] == "Count to a thousand."
    assert answer["content"]  # what was written before Ctrl-C
    assert "Count to a thousand." in (tmp_path / "history" / "chat").read_text()
    assert (tmp_path / "history" / "chat").stat().st_mode & 0o077 == 0
