"""`paceline verify`: the report, and an exit code that is 0 only if the claim holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command import Command

from paceline.bench import verify as bench
from paceline.bench.compare import Difference

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
    assert found.out.endswith("the claim holds\n")


def test_json(run: Command, prompts: Path) -> None:
    made = json.loads(run("verify", "--prompts", prompts, "--json", *FAST).out)
    assert made["holds"] is True
    assert made["identical"] == made["prompts"] == 2
    assert made["law"]["error"] < 0.01
    assert "near_ties" in made


@pytest.mark.parametrize(("gap", "code"), [(1.0, 1), (1e-6, 0)])
def test_a_difference(run: Command, prompts: Path, monkeypatch: pytest.MonkeyPatch, gap: float, code: int) -> None:
    def differ(*arguments: Any) -> Difference:
        return Difference(position=2, plain=5, fast=6, gap=gap, epsilon=1e-3, tied=gap < 1e-3)

    monkeypatch.setattr(bench, "first_difference", differ)
    found = run("verify", "--prompts", prompts, "--temperature", 0, *FAST)
    assert found.code == code
    assert f"first difference at token 2 (5 against 6), top-2 gap {gap:.4g}" in found.out


def test_a_prompt_file_is_read_before_the_model(run: Command, tmp_path: Path) -> None:
    found = run("verify", "--prompts", tmp_path / "none.txt", "--model", "/no/such/model")
    assert found.code == 2
    assert "none.txt" in found.line
