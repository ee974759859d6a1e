"""`paceline demo`: its table, its object, its exit code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny_checkpoint
from command import Command

from paceline.bench import demo as bench
from paceline.cli import demo as command
from paceline.verify import Difference

FAST = ("--dtype", "float32", "--threads", "1", "--max-tokens", "6", "--repeats", "1")


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PACELINE_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture
def real_model() -> Path:
    """A tiny model where the real one of the benchmarks would be."""
    return tiny_checkpoint.write(bench.smollm2_folder())


@pytest.fixture(autouse=True)
def few_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [
        bench.DemoPrompt("a", "code", "Write a function that adds two numbers.", repetitive=False),
        bench.DemoPrompt("b", "summary", "Say one two three, one two three, one two three.", repetitive=True),
    ]
    monkeypatch.setattr("paceline.bench.bundled_prompts", lambda: prompts)


def test_the_table_fits_80_columns(run: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    found = run("demo", *FAST)
    lines = found.out.splitlines()
    assert found.code == 0
    assert max(map(len, lines)) <= 80
    assert "…" not in found.out
    for name in ("code (1)", "summary (1)", "with repetition (1)", "all (2)"):
        assert any(line.strip().startswith(name) and line.strip().endswith("yes") for line in lines)


def test_json(run: Command) -> None:
    made = json.loads(run("demo", *FAST, "--json").out)
    assert made["totals"][-1]["name"] == "all"
    assert made["totals"][-1]["identical"] == 2


@pytest.mark.parametrize(("gap", "code", "remark"), [(1.0, 1, "this is a defect"), (1e-6, 0, "differ at 4 near ties")])
def test_a_text_that_differs(run: Command, monkeypatch: pytest.MonkeyPatch, gap: float, code: int, remark: str) -> None:
    def differ(*arguments: Any) -> list[Difference]:
        return [Difference(position=2, plain=5, fast=6, gap=gap, epsilon=1e-3, near_tie=gap < 1e-3)] * 2

    monkeypatch.setattr(bench, "differences", differ)
    found = run("demo", *FAST)
    assert found.code == code
    assert "no (0 of 2)" in found.out
    assert remark in " ".join(found.out.split())


def test_without_a_real_model_the_demo_says_how_to_make_it(run: Command) -> None:
    found = run("demo", *FAST)
    words = " ".join(found.out.split())
    assert found.code == 0
    assert "say little about other models" in words
    assert f"run `{bench.MAKE_SMOLLM2}`" in words
    assert found.out.count("speed-up") == 1


@pytest.mark.usefixtures("real_model")
def test_a_real_model_gets_a_table_of_its_own(run: Command) -> None:
    found = run("demo", *FAST)
    words = " ".join(found.out.split())
    assert found.code == 0
    assert found.out.count("speed-up") == 2
    assert f"{bench.SMOLLM2} in float32" in words
    assert "say little about other models" in words
    assert bench.MAKE_SMOLLM2 not in words
    made = json.loads(run("demo", *FAST, "--json").out)
    assert made[bench.SMOLLM2]["totals"][-1]["identical"] == 2


@pytest.mark.usefixtures("real_model")
def test_a_named_model_or_method_is_all_that_runs(run: Command) -> None:
    for choice in (("--model", str(bench.smollm2_folder())), ("--speculative-config", '{"method": "ngram"}')):
        found = run("demo", *FAST, *choice)
        assert found.code == 0
        assert found.out.count("speed-up") == 1
        assert "say little" not in found.out


@pytest.mark.usefixtures("real_model")
def test_a_wrong_text_of_the_real_model_fails_the_demo(run: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def differ(runner: Any, *arguments: Any) -> list[Difference]:
        real = runner.info.num_layers == 2
        return [Difference(position=2, plain=5, fast=6, gap=1.0, epsilon=1e-3, near_tie=False)] if real else []

    monkeypatch.setattr(bench, "differences", differ)
    assert run("demo", *FAST).code == 1


@pytest.mark.parametrize(("load", "named"), [(1.2, True), (0.1, False)])
def test_a_busy_machine_is_named(run: Command, monkeypatch: pytest.MonkeyPatch, load: float, named: bool) -> None:
    monkeypatch.setattr(command, "others_load", lambda: load)
    found = run("demo", *FAST)
    assert found.code == 0
    assert ("Other processes kept 1.2 of" in found.out) is named
