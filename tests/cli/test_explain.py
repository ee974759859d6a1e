"""`paceline explain`: the page, the object, what it refuses to overwrite."""

from __future__ import annotations

import json
import signal
import webbrowser
from pathlib import Path

import pytest
from command import ENDS, Command, arrive

from paceline.engine import Engine
from paceline.explain import EXPLAIN_MARK

FAST = ("--dtype", "float32", "--threads", "1", "--max-tokens", "6")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_page_and_what_it_says(run: Command, here: Path) -> None:
    found = run("explain", "One day", *FAST)
    assert found.code == 0
    assert found.out.splitlines()[0].startswith("explain.html: ")
    assert "tokens took" in found.out
    page = (here / "explain.html").read_text(encoding="utf-8")
    assert EXPLAIN_MARK in page
    assert run("explain", "Once", *FAST).code == 0
    assert (here / "explain.html").read_text(encoding="utf-8") != page


def test_json_prints_the_data_and_writes_a_page_only_where_told(run: Command, here: Path) -> None:
    data = json.loads(run("explain", "One day", *FAST, "--json").out)
    assert (data["format"], data["version"], len(data["tokens"])) == ("paceline-replay", 1, 6)
    assert data["prompt"]["text"] == "One day"
    assert not list(here.iterdir())
    run("explain", "One day", *FAST, "--json", "--output", "page.html")
    assert [path.name for path in here.iterdir()] == ["page.html"]


def test_chat_renders_the_template_and_sampling_flags_count(run: Command) -> None:
    data = json.loads(
        run("explain", "--chat", "Add two numbers.", *FAST, "--json", "--temperature", "0.8", "--seed", "3").out
    )
    assert data["prompt"]["text"].startswith("<|user|>")
    assert data["sampling"] == {"temperature": 0.8, "max_tokens": 6, "seed": 3}


@pytest.mark.parametrize("flag", ["--logprobs", "--prompt-logprobs"])
def test_what_a_replay_does_not_show_is_rejected(run: Command, here: Path, flag: str) -> None:
    found = run("explain", "One day", *FAST, flag, "1")
    assert (found.code, found.out) == (2, "")
    assert (
        found.line == "--logprobs and --prompt-logprobs are not available in a replay; use `paceline generate --json`"
    )
    assert not list(here.iterdir())


def test_other_files_are_not_overwritten(run: Command, here: Path) -> None:
    mine = here / "mine.html"
    mine.write_text("<p>mine</p>")
    found = run("explain", "One day", *FAST, "--output", mine)
    assert found.code == 2
    assert found.line.endswith("exists and is not a page of `paceline explain`; add --force to overwrite it")
    assert mine.read_text() == "<p>mine</p>"
    assert run("explain", "One day", *FAST, "--output", mine, "--force").code == 0
    assert EXPLAIN_MARK in mine.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("--output", "."), "--output must be a file, got the folder '.'; name a file in it"),
        (
            ("--output", "no/x.html"),
            "--output must lie in a folder that exists, got 'no/x.html'; make the folder 'no' first",
        ),
        (("--n", "2", "--temperature", "1"), "n must be 1 in a replay, which follows one output, got 2"),
        (("--temperature", "-1"), "temperature must be 0 (greedy) or positive, got -1.0"),
    ],
)
def test_bad_input_is_one_line(run: Command, arguments: tuple[str, ...], line: str) -> None:
    found = run("explain", "One day", *FAST, *arguments)
    assert (found.code, found.line) == (2, line)


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a folder in which no file can be made")
def test_a_page_that_cannot_be_written_names_its_flag(run: Command) -> None:
    found = run("explain", "One day", *FAST, "--output", "/proc/x.html")
    assert (found.code, found.out) == (2, "")
    assert found.line == "--output '/proc/x.html' cannot be written (No such file or directory); name another file"


def test_open_shows_the_page(run: Command, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", lambda address: bool(opened.append(address)))
    assert run("explain", "One day", *FAST, "--open").code == 0
    assert opened == [(here / "explain.html").as_uri()]


@pytest.mark.parametrize(
    ("steps", "number", "code"),
    [(steps, number, code) for steps in (None, 0, 2) for number, code, _ in ENDS if steps is not None or code == 130],
)
def test_a_signal_keeps_the_steps_so_far(
    run: Command, here: Path, monkeypatch: pytest.MonkeyPatch, steps: int | None, number: signal.Signals, code: int
) -> None:
    """None: in the warm-up, which nobody watches."""
    decode, calls = Engine.decode, []

    def interrupted(self: Engine, running: object) -> object:
        calls.extend([1] * bool(self.watchers))
        if steps is None or len(calls) > steps:
            arrive(number)
        return decode(self, running)  # type: ignore[arg-type]

    monkeypatch.setattr(Engine, "decode", interrupted)
    found = run("explain", "One day", *FAST)
    assert found.code == code
    assert (here / "explain.html").exists() == bool(steps)
    assert found.out.startswith(f"explain.html: {steps} steps") == bool(steps)
