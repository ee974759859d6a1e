"""`python -m lab peers`: what is listed, removed, run and refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command import Command

from lab import peers
from lab.commands.peers import random_prompt, words
from lab.peers import PeerRun


class Shift:
    """A peer that answers with tokens of the test's choice."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens

    def generate(self, _prompt: list[int], max_tokens: int, _ignore_eos: bool = True) -> PeerRun:
        return PeerRun(
            token_ids=self.tokens[:max_tokens], seconds=0.5, ttft=0.1, version="s 1", settings={"threads": 1}
        )

    def __enter__(self) -> Shift:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing to end."""


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path))


def test_the_list_names_every_peer(run: Command) -> None:
    rows = json.loads(run("peers", "list", "--json").out)["peers"]
    assert [row["name"] for row in rows] == peers.peer_names()
    assert not any(row["installed"] for row in rows)
    lines = run("peers", "list").out.splitlines()
    assert len(lines) == len(rows)
    assert lines[0].split(maxsplit=1)[0] == "transformers"
    assert "no environment" in lines[0]
    assert lines[0].endswith("; `python -m lab peers install transformers`")
    assert "by URL" in lines[-1]
    assert "install" not in lines[-1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("run", "llama.cpp", "--no-compare"),
            "peer llama.cpp has no environment; run `python -m lab peers install llama.cpp`",
        ),
        (("run", "lama.cpp"), "unknown peer 'lama.cpp'; did you mean llama.cpp?"),
        (("run", "nope"), "unknown peer 'nope'; known are transformers, llama.cpp,"),
        (("run", "llama.cpp", "--options", "[1]"), "--options must be a JSON object or null, got '[1]'"),
        (
            ("run", "llama.cpp", "--options", '{"nonsense": 1}'),
            "--options of peer llama.cpp does not know 'nonsense'; known are",
        ),
        (("run", "llama.cpp", "--options", '{"contxt": 1}'), "does not know 'contxt'; did you mean context?"),
        (
            ("run", "llama.cpp", "--options", '{"context": 1, "context": 2}'),
            "must have each key once, and 'context' occurs",
        ),
        (("run", "llama.cpp", "--options", '{"method": "ngram"}'), "--options holds a method; give it as --method"),
        (("run", "llama.cpp", "--model", "/nowhere"), "/nowhere holds no config.json"),
        (("install", "nobody"), "unknown peer 'nobody'"),
        (("install", "openai"), "endpoint by URL; there is nothing to install"),
    ],
)
def test_mistakes_are_one_line_and_code_2(run: Command, arguments: tuple[str, ...], message: str) -> None:
    result = run("peers", *arguments)
    assert result.code == 2
    assert message in result.line


def test_remove_says_what_it_did(run: Command, tmp_path: Path) -> None:
    (tmp_path / "peers" / "llama.cpp").mkdir(parents=True)
    (tmp_path / "peers" / "converted").mkdir()
    assert run("peers", "remove", "llama.cpp").out == "llama.cpp: removed\n"
    out = run("peers", "remove", "all").out
    assert "llama.cpp: was not installed" in out
    assert "converted weights: removed" in out


@pytest.mark.parametrize("wrong", [False, True])
def test_run_compares_with_our_own_tokens(
    run: Command, monkeypatch: pytest.MonkeyPatch, tiny: Path, wrong: bool
) -> None:
    from paceline import LLM, SamplingParams

    llm = LLM(str(tiny), speculative_config=None, dtype="float32")
    rule = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    (made,) = llm.generate({"prompt_token_ids": random_prompt(tiny, 8)}, rule)
    tokens = made.outputs[0].token_ids
    tokens = [*tokens[:2], tokens[2] + 1, tokens[3]] if wrong else tokens
    monkeypatch.setattr(peers, "open_peer", lambda *_a, **_k: Shift(tokens))
    flags = ("--model", tiny, "--dtype", "float32", "--prompt-tokens", "8", "--max-tokens", "4", "--json")
    report = json.loads(run("peers", "run", "llama.cpp", *flags).out)
    assert report["tokens_per_second"] == 8.0
    assert report["agreement"]["first_difference"] == (2 if wrong else None)
    assert ("first difference at token 2" if wrong else "all 4 equal ours") in words(report)
