"""`paceline verify`: the report, and an exit code that is 0 only if the claim holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command import Command

from paceline import llm
from paceline.assembly import Exactness
from paceline.cli.verify import words
from paceline.models import Inputs
from paceline.verify import Difference, SamplingTest, VerifyReport
from paceline.verify import proof as bench

FAST = ("--dtype", "float32", "--threads", "1", "--max-tokens", "8", "--samples", "2")


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.txt"
    file.write_text("Once upon a time\nThe sum of two and two is\n")
    return file


def test_the_claim_holds(run: Command, prompts: Path) -> None:
    found = run("verify", "--prompts", prompts, *FAST)
    assert (found.code, found.err) == (0, "")
    assert "2 of 2 outputs identical" in found.out
    assert "no deviation" in found.out
    assert found.out.endswith("\nthe claim holds at temperature 0 and in distribution at temperature 1\n")


def test_points_are_compared_seed_by_seed(run: Command, prompts: Path) -> None:
    found = run("verify", "--prompts", prompts, *FAST, "-s", '{"method": "ngram"}')
    assert found.code == 0
    assert "temperature 1, equal seeds: 4 of 4 outputs identical" in found.out
    assert "the claim holds at temperature 0, for equal seeds at temperature 1 and in distribution" in " ".join(
        found.out.split()
    )


def test_where_nothing_is_drafted_nothing_is_proven(run: Command, prompts: Path) -> None:
    found = run("verify", "--prompts", prompts, *FAST, "-s", "null")
    assert found.code == 1
    assert "\n0 drafted tokens verified\n" in found.out
    assert "NOTHING WAS DRAFTED, so plain decoding was compared with itself" in " ".join(found.out.splitlines()[-2:])
    assert "the claim holds" not in found.out


@pytest.mark.parametrize("flags", [("--samples", 0), ("--temperature", 0)])
def test_what_was_not_tested_is_not_claimed(run: Command, prompts: Path, flags: tuple[str, int]) -> None:
    found = run("verify", "--prompts", prompts, *FAST, *flags)
    assert found.code == 0
    assert found.out.endswith("\nthe claim holds at temperature 0; nothing was tested above temperature 0\n")
    assert "distribution" not in found.out.splitlines()[-1]


def test_an_approximate_rule_that_deviates() -> None:
    off = SamplingTest(300, 90.0, 1e-9)
    claimed = ("bit-equal up to near ties", "approximate")
    report = VerifyReport(
        "m", claimed, "float32", drafted_tokens=9, temperature=1.0, distribution=off, plain_distribution=off
    )
    text = " ".join(words(report).split())
    assert "accelerated: deviates from the model's own distribution, as an approximate rule may" in text
    assert "plain (control): DEVIATES" in text
    assert "the control deviates" in text
    assert text.endswith("the claim holds at temperature 0; nothing exact is claimed above temperature 0")


@pytest.mark.parametrize("columns", [80, 120])
def test_the_report_fits_the_terminal(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    report = VerifyReport(
        "m", ("bit-equal up to near ties",) * 2, "float32", temperature=1.0, distribution=SamplingTest(300, 20.0, 0.4)
    )
    report.greedy.add(
        [1, 2], [Difference(position=1234, plain=51234, fast=66789, gap=1e-5, epsilon=1.234e-3, near_tie=True)]
    )
    assert max(map(len, words(report).splitlines())) <= columns


def test_json(run: Command, prompts: Path) -> None:
    made = json.loads(run("verify", "--prompts", prompts, "--json", *FAST).out)
    assert made["holds"] is True
    assert made["greedy"]["identical"] == made["prompts"] == 2
    assert made["conclusion"] == "the claim holds at temperature 0 and in distribution at temperature 1"
    assert made["tested"] == {"temperature_0": True, "equal_seeds": True, "distribution": True}
    assert made["distribution"]["error"] < 0.01
    assert "near_ties" in made


@pytest.mark.parametrize(("gap", "reason", "code"), [(1.0, "why", 1), (1e-6, "why", 0), (1e-6, None, 1)])
def test_a_difference(
    run: Command, prompts: Path, monkeypatch: pytest.MonkeyPatch, gap: float, reason: str | None, code: int
) -> None:
    """In strict mode, a near tie is no excuse."""

    def differ(*arguments: Any, inputs: Inputs) -> list[Difference]:
        return [Difference(position=2, plain=5, fast=6, gap=gap, epsilon=1e-3, near_tie=gap < 1e-3)]

    monkeypatch.setattr(bench, "differences", differ)
    monkeypatch.setattr(llm, "find_exactness", lambda runner, requested: Exactness(reason))
    found = run("verify", "--prompts", prompts, "--temperature", 0, *FAST)
    assert found.code == code
    text = " ".join(found.out.split())
    assert f"output 0, token 2: 5 against 6, top-2 gap {gap:.4g}" in text
    assert ("NOT a near tie" in text) is (gap == 1.0)
    assert ("THE CLAIM DOES NOT HOLD at temperature 0" in text) is bool(code)
    assert f"exactness: {Exactness(reason)}" in text


def test_a_prompt_file_is_read_before_the_model(run: Command, tmp_path: Path) -> None:
    found = run("verify", "--prompts", tmp_path / "none.txt", "--model", "/no/such/model")
    assert found.code == 2
    assert "none.txt" in found.line
