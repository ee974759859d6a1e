"""`paceline analyze scaling`: reports are read, findings are said and drawn, and what is no training is refused."""

from __future__ import annotations

import json
from dataclasses import asdict
from math import log10
from pathlib import Path

import torch
from command import Command
from safetensors.torch import save_file

from paceline.bench import read_training
from paceline.training.judging import Judged

GRID = [(tokens, size) for tokens in (1e5, 3e5, 1e6, 3e6, 1e7) for size in (1e6, 4e6)]


def written(folder: Path, tokens: float, size: float) -> Path:
    """What a training leaves, as far as it is read."""
    folder.mkdir()
    save_file({"weight": torch.zeros(int(size) // 1000, 10)}, folder / "model.safetensors")
    curve = [asdict(Judged(step, int(tokens), 1.0, [0.5])) for step, tokens in ((0, 0), (9, tokens), (20, 1e9))]
    report = {
        "tokens_per_pass": 0.4 + 0.3 * log10(tokens) + 0.1 * log10(size),
        "steps": 9,
        "curve": curve,
        "speed": None,
    }
    (folder / "report.json").write_text(json.dumps(report))
    return folder


def test_reports_are_read_and_the_findings_said_and_drawn(run: Command, tmp_path: Path) -> None:
    folders = [written(tmp_path / f"{tokens:g}-{size:g}", tokens, size) for tokens, size in GRID]
    point = read_training(folders[0])
    assert (point.tokens, point.parameters) == (1e5, 1e4)
    passes, plot = tmp_path / "doctor.json", tmp_path / "law.png"
    passes.write_text(json.dumps({"passes": {"seconds": {"1": 0.01, "8": 0.02}}}))
    flags = ("--passes", str(passes), "--batches", "1,8", "--plot", str(plot))
    found = run("analyze", "scaling", *map(str, folders), *flags, "--json")
    assert found.code == 0, found.err
    told = json.loads(found.out)
    assert told["law"]["r_squared"] > 0.99
    assert told["best_drafts"]["8"] <= told["best_drafts"]["1"]
    assert plot.read_bytes().startswith(b"\x89PNG")
    shown = " ".join(run("analyze", "scaling", *(str(one / "report.json") for one in folders)).out.split())
    assert "Held out, 1e+07-4e+06 has" in shown
    assert "Doubling the data gives 1 % more tokens per pass up to" in shown


def test_what_is_no_training_is_refused(run: Command, tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text('{"right": 0.5, "curve": [], "steps": 1}')
    found = run("analyze", "scaling", str(tmp_path))
    assert (found.code, "is no report of a drafter's training" in found.err) == (2, True)
    found = run("analyze", "scaling", str(tmp_path / "none"))
    assert (found.code, found.err.count("\n")) == (2, 1)
    folder = written(tmp_path / "one", 1e5, 1e6)
    (folder / "model.safetensors").unlink()
    assert "there are no weights in" in run("analyze", "scaling", str(folder)).err
    (tmp_path / "x.json").write_text("{}")
    found = run("analyze", "scaling", str(folder), "--passes", str(tmp_path / "x.json"))
    assert "is no output of `paceline doctor --json`" in found.err
