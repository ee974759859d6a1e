"""A training run: cut short and taken up with all it needs; the rate falls; flags are those of the table."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from paceline import training
from recipes.bundled_diffusion import run as run_module
from recipes.common import options as options_module
from tests.recipes.test_denoisers import net_of


def begun(out: Path, steps: int, seed: int = 0) -> Any:
    """A run of a tiny net, another one beside it; minutes never end."""
    options = SimpleNamespace(out=out, minutes=1e9, most_steps=steps, rate=0.01, report=1e9, seed=0)
    nets = [net_of("plain", seed + i, width=8, layers=1) for i in range(2)]
    return run_module.begin(options, nets[0], warmup=1, decay=0.0, beside={"other": nets[1]})


def learned(run: Any, steps: int | None = None) -> Any:
    """Go on, each step with a loss of noise that the step itself draws; cut short after `steps`."""

    def learn(generator: torch.Generator) -> dict[str, float]:
        if run.progress.step == steps:
            raise KeyboardInterrupt
        loss = sum((part * torch.randn(part.shape)).sum() for part in run.net.parameters())
        assert isinstance(loss, torch.Tensor)
        loss.backward()
        run.optimizer.step()
        run.optimizer.zero_grad()
        with torch.no_grad():
            run.beside["other"].head.weight.add_(1)
        return {"loss": float(run.progress.step)}

    return run.go(learn, lambda: {"rate": run.optimizer.param_groups[0]["lr"]})


def weights(net: torch.nn.Module) -> torch.Tensor:
    return torch.cat([part.detach().flatten() for part in net.parameters()])


def test_a_run_that_was_cut_short_ends_as_if_it_had_not_been(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_module, "KEPT_EVERY", -1)
    torch.manual_seed(0)
    whole = begun(tmp_path / "whole", 6)
    torch.manual_seed(1)
    learned(whole)
    cut = begun(tmp_path / "cut", 6)
    torch.manual_seed(1)
    with pytest.raises(KeyboardInterrupt):
        learned(cut, 3)
    again = begun(tmp_path / "cut", 6, seed=5)  # other first weights, which the state replaces
    assert again.progress.step == 3
    assert not torch.equal(weights(again.net), weights(whole.net)), "the cut run must have stopped early"
    last = learned(again)
    for one, other in ((again.net, whole.net), (again.beside["other"], whole.beside["other"])):
        assert torch.equal(weights(one), weights(other))
    history = json.loads((tmp_path / "cut" / "history.json").read_text())
    assert [line["step"] for line in history] == [0, 6]
    assert last == history[-1]
    assert last["loss"] == 4.0  # the mean of what steps 3 to 5 said


def test_the_rate_falls_as_the_run_goes_on(tmp_path: Path) -> None:
    run = begun(tmp_path, 4)
    rates = []
    while run.done < 1:
        run.step(lambda _: {}, torch.Generator())
        rates.append(run.optimizer.param_groups[0]["lr"])
    assert rates == [training.learning_rate(step / 4, step, 0.01, 1) for step in range(4)]
    assert rates == sorted(rates, reverse=True)
    assert rates[0] > 2 * rates[-1]


def test_minutes_are_of_the_given_clock_and_end_a_run(tmp_path: Path) -> None:
    run = begun(tmp_path, 1000)
    ticks = iter(range(0, 6000, 30))
    run.clock, run.options.minutes = lambda: float(next(ticks)), 2.0
    learned(run)
    assert run.progress.step == 4  # of half a minute each


def test_a_flag_is_the_tables_with_a_scripts_default(capsys: pytest.CaptureFixture[str]) -> None:
    parser: ArgumentParser = options_module.new_parser("What it does.")
    options_module.add_flags(parser, "out", "threads", most_steps=7, rate=0.5)
    found = parser.parse_args(["--out", "there", "--rate", "0.25"])
    assert vars(found) == {"out": Path("there"), "threads": 1, "most_steps": 7, "rate": 0.25}
    with pytest.raises(SystemExit):
        parser.parse_args([])
    assert "the following arguments are required: --out" in capsys.readouterr().err
    with pytest.raises(KeyError):
        options_module.add_flags(parser, "no_such_flag")
