"""`python -m lab diffusion`: tables, documents, plots, exit codes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from command import ENDS, Command, arrive

from lab.diffusion import DiffusionBench
from tests.lab.diffusion.test_caches_and_constraints import folder_of

SMALL = ("--task", "copy", "--count", "1", "--timed", "1", "--repeats", "1", "--length", "8", "--threads", "1")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_of(tmp_path_factory.mktemp("model"), "llada")


@pytest.fixture(autouse=True)
def _width(monkeypatch: pytest.MonkeyPatch) -> None:
    """As narrow as a pipe."""
    monkeypatch.setenv("COLUMNS", "80")


def test_a_run_prints_a_table_and_writes_a_document_and_a_plot(run: Command, model: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    where = ("-o", tmp_path / "run.json", "--plot", tmp_path / "run.svg")
    found = run(
        "diffusion",
        "-m",
        model,
        *SMALL,
        "-s",
        "freedave",
        "-s",
        '{"method": "static", "denoising_steps": 2}',
        *where,
    )
    assert found.code == 0, found.err
    before, *results = found.err.splitlines()
    assert re.search(r"^3 methods on 1 prompts, 1 of them timed: up to about \d+ (s|min)\. Ctrl-C ends it and", before)
    assert [line.partition(": ")[0] for line in results] == ["static", "freedave", "static denoising_steps=2"]
    for text in (
        "1 held-out prompts of 1 tasks, 8 slots each",
        "freedave",
        "static denoising_steps=2",
        "all",
        "Global@1",
    ):
        assert text in found.out
    assert found.out.count("static denoising_steps=2") == 3, "a row of each table"
    made = json.loads((tmp_path / "run.json").read_text())
    assert made["kind"] == "diffusion methods"
    assert made["lines"]["static"]["calls"] == 8
    assert made["lines"]["static denoising_steps=2"]["calls"] == 4
    assert made["options"]["block_length"] == 4
    assert made["lines"]["freedave"]["times"]["seconds"] > 0
    assert made["provenance"]["machine"]["threads"] == 1
    assert (tmp_path / "run.svg").stat().st_size > 1000


@pytest.mark.parametrize(("texts", "shown", "end"), [(3, True, 0), (2, False, 0), (3, True, 1)])
def test_a_signal_keeps_what_is_there(
    run: Command, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, texts: int, shown: bool, end: int
) -> None:
    """Two texts tell how long it will take, the third is the baseline's."""
    decode, done = DiffusionBench.decode, [0]
    number, code, _ = ENDS[end]

    def interrupted(self: DiffusionBench, *given: Any) -> Any:
        done[0] += 1
        if done[0] > texts:
            arrive(number)
        return decode(self, *given)

    monkeypatch.setattr(DiffusionBench, "decode", interrupted)
    found = run("diffusion", "-m", model, *SMALL, "-s", "threshold", "-o", tmp_path / "run.json")
    assert found.code == code
    assert ("answers" in found.out) is shown
    assert "interrupted: the figures are of what was done until then." in found.out
    made = json.loads((tmp_path / "run.json").read_text())
    assert list(made["lines"]) == (["static"] if shown else [])


def test_the_other_parts(run: Command, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lab.diffusion.caches_and_constraints.RULES", ("static",))
    found = run("diffusion", "-m", model, *SMALL, "--part", "caches")
    assert found.code == 0, found.err
    assert found.out.count("static, dual, renewed") == 2


def test_a_lossless_line_that_differs_is_exit_1(run: Command, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "paceline.diffusion.verification.FreeDave.choose", lambda self, drafts, predictions: len(predictions) - 1
    )
    found = run("diffusion", "-m", model, *SMALL, "--length", "16", "-s", "freedave")
    assert found.code == 1, found.out
    assert "freedave is not lossless here (0 of 1 canvases); its speed is withheld" in found.out


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (("-s", "treshold"), "unknown diffusion method 'treshold'; did you mean threshold"),
        (("--task", "count"), "--task must be one of copy, "),
        (("--count", "0"), "--count must be an integer of 1 or more, got 0"),
        (("--length", "10", "--block-length", "4"), "block_length must divide the 10 slots of the text"),
        (("-s", '{"method": "static", "denoising_steps": 99}'), "denoising_steps must lie in 1..4"),
        (("--part", "caches", "--plot", "x.png"), "--plot draws --part methods, got --part caches"),
        (("--plot", "x.txt"), "--plot must end with one of"),
        (("-o", "/nowhere/run.json"), "must lie in a folder that exists"),
        (("-m", "/nowhere"), "/nowhere"),
    ],
)
def test_one_line_for_wrong_use(run: Command, model: Path, more: tuple[str, ...], told: str) -> None:
    found = run("diffusion", "-m", model, *SMALL, *more)
    assert found.code == 2, found.out
    assert told in found.line
