"""`paceline demo`: its tasks, its table, its object, its exit code, and the model that it runs on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from threading import Event
from typing import Any

import fake_hub
import pytest
import tiny_checkpoint
from command import Command
from forked import Forked

from paceline.bench import demo as bench
from paceline.bench.bundled import SMOLLM2, smollm2_folder
from paceline.bench.demo_model import HUB_ID, offer_of_hub
from paceline.cli import demo as command
from paceline.verify import Difference

FAST = ("--dtype", "float32", "--threads", "1", "--max-tokens", "6", "--repeats", "1", "--offline")


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PACELINE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))


@pytest.fixture
def real_model() -> Path:
    """A tiny model where the real one of the benchmarks would be."""
    return tiny_checkpoint.write(smollm2_folder(), max_position_embeddings=1024)


@pytest.fixture
def _few_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = [
        bench.DemoTask("a", "code", "Write a function that adds two numbers."),
        bench.DemoTask("b", "JSON", "Say yes as JSON.", schema={"type": "boolean"}),
    ]
    monkeypatch.setattr("paceline.bench.demo_tasks", lambda: tasks)


def test_the_bundled_model_shows_equal_texts_of_every_kind_and_no_speed(
    run: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = run("demo", *FAST)
    assert shown.code == 0, shown.err
    assert max(map(len, shown.out.splitlines())) <= 80
    for kind in ("chat", "code", "rewriting", "JSON", "asked again"):
        row = next(line for line in shown.out.splitlines() if line.strip().startswith(kind))
        assert row.strip().endswith("2 of 2")
    assert "10 of 10" in shown.out
    assert "All 10 texts are equal" in shown.out
    assert "bundled model" in shown.out
    assert "speed-up" not in shown.out
    assert "/s" not in shown.out
    assert "prediction" not in shown.err


@pytest.mark.usefixtures("_few_tasks")
def test_json(run: Command) -> None:
    printed = json.loads(run("demo", *FAST, "--json").out)
    assert printed["totals"][-1]["name"] == "all"
    assert printed["totals"][-1]["identical"] == 2
    assert printed["model"].endswith("target")


@pytest.mark.usefixtures("_few_tasks")
@pytest.mark.parametrize(("gap", "code", "remark"), [(1.0, 1, "this is a defect"), (1e-6, 0, "differ at 4 near ties")])
def test_a_text_that_differs(run: Command, monkeypatch: pytest.MonkeyPatch, gap: float, code: int, remark: str) -> None:
    def differ(*arguments: Any, **named: Any) -> list[Difference]:
        return [Difference(position=2, plain=5, fast=6, gap=gap, epsilon=1e-3, near_tie=gap < 1e-3)] * 2

    monkeypatch.setattr(bench, "differences", differ)
    shown = run("demo", *FAST)
    assert shown.code == code
    assert "0 of 2" in shown.out
    assert remark in " ".join(shown.out.split())
    assert "texts are equal to" not in shown.out


@pytest.mark.usefixtures("_few_tasks")
def test_a_real_model_at_hand_or_named_is_timed(run: Command, real_model: Path) -> None:
    for choice in ((), ("--model", str(real_model))):
        shown = run("demo", *FAST, *choice)
        assert shown.code == 0
        assert "speed-up" in shown.out
        assert SMOLLM2 in shown.out
        assert "bundled model" not in shown.out


@pytest.mark.usefixtures("_few_tasks")
@pytest.mark.parametrize(("load", "named"), [(1.2, True), (0.1, False)])
def test_a_busy_machine_is_named(
    run: Command, monkeypatch: pytest.MonkeyPatch, real_model: Path, load: float, named: bool
) -> None:
    monkeypatch.setattr(command, "others_load", lambda: load)
    shown = run("demo", *FAST, "--model", real_model)
    assert shown.code == 0
    assert ("Other processes kept 1.2 of" in shown.out) is named


# ------------------------------------------------------------------------------------------------ the hub


ARGUMENTS = ("demo", "--json", "--dtype", "float32", "--threads", "1", "--max-tokens", "2", "--repeats", "1")


def start(address: str, cache: Path) -> Forked:
    """In a process of its own, since huggingface_hub reads its environment once: as it is imported there."""
    environment = {key: value for key, value in os.environ.items() if not key.lower().endswith("_proxy")}
    environment |= {
        "HF_ENDPOINT": address,
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
        "HF_HOME": str(cache / "home"),
        "HF_HUB_CACHE": str(cache / "hub"),
        "PACELINE_CACHE_DIR": str(cache / "paceline"),
    }
    return Forked(ARGUMENTS, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_hub_that_answers_gives_the_model(run: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    there = tiny_checkpoint.write(tmp_path / "there", max_position_embeddings=1024)
    with fake_hub.serve(HUB_ID, there) as address:
        out, err = start(address, tmp_path).communicate(timeout=300)
    assert json.loads(out)["model"] == HUB_ID, err
    said = " ".join(err.split())
    assert f"fetching {SMOLLM2} (2 MB) from {address}/{HUB_ID}; Ctrl-C takes the bundled model instead" in said
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    again = run(*ARGUMENTS)  # from the cache, without a question
    assert HUB_ID.replace("/", "--") in json.loads(again.out)["model"], again.err
    assert "fetching" not in again.err


def test_ctrl_c_while_it_comes_takes_the_bundled_model(tmp_path: Path) -> None:
    there = tiny_checkpoint.write(tmp_path / "there", max_position_embeddings=1024)
    with fake_hub.serve(HUB_ID, there, stuck=Event()) as address:
        process = start(address, tmp_path)
        assert process.stderr is not None
        said = process.stderr.readline()
        assert said.startswith("fetching"), said
        time.sleep(1)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert "taking the bundled model" in err
    assert json.loads(out)["model"].endswith("target")


def test_no_hub_and_no_leave_to_ask_one_offer_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    there = tiny_checkpoint.write(tmp_path / "there")
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    assert offer_of_hub() is None
    with fake_hub.serve(HUB_ID, there) as address:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)
        assert offer_of_hub() is not None
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        assert offer_of_hub() is None
