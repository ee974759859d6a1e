"""The benchmark of trained accelerators: which line is called best, and what the record of the baseline still says."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import benchmark_scripts
import pytest

from lab.diffusion import Sample, summarize_samples


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    with benchmark_scripts.imported("accelerators") as (found,):
        yield found


def lines(**figures: tuple[float, float]) -> dict[str, Any]:
    return {
        name: {"calls": calls, "score": {"value": score}, "difference": None}
        for name, (calls, score) in figures.items()
    }


def test_the_best_line_has_the_fewest_calls_of_those_that_are_right_enough(script: ModuleType) -> None:
    original = lines(static=(32, 0.95), fast=(2, 0.945), careful=(2, 0.95), wrong=(1, 0.93))
    tuned = lines(static=(32, 0.96), fast=(1.25, 0.94), wrong=(1, 0.9399))
    models = {
        name: {"lines": found}
        for name, found in (("original", original), ("tuned", tuned), ("bad", lines(static=(32, 0.5))))
    }
    found = script.conclusions(models)["best"]
    assert found["original"]["line"] == "careful"
    assert found["tuned"]["line"] == "fast"
    assert found["tuned"]["fewer_calls_than_training_free"] == pytest.approx(1.6)
    assert found["bad"] is None


def sample(task: str, right: bool, calls: int) -> Sample:
    return Sample(task, right, 5, 8, calls, 40, calls, 1.0, 1.0, 1.0, ())


def test_a_stored_baseline_compares_as_the_one_that_was_stored(script: ModuleType) -> None:
    baseline = [sample(task, right, 32) for task in ("copy", "sort") for right in (True, False, True, True)]
    ours = [sample(one.task, number != 5, 4) for number, one in enumerate(baseline)]
    stored = [
        one
        for task, raw in summarize_samples(baseline, baseline)["tasks"].items()
        for one in script.restored(task, raw)
    ]
    assert summarize_samples(ours, stored) == summarize_samples(ours, baseline)
    assert summarize_samples(ours, stored[::-1]) != summarize_samples(
        ours, baseline
    )  # negative control: prompts in another order


def test_a_model_needs_a_name(script: ModuleType) -> None:
    assert script.pair("tuned=build/a=b") == ("tuned", Path("build/a=b"))
    with pytest.raises(argparse.ArgumentTypeError, match="must be NAME=FOLDER, got 'build'"):
        script.pair("build")
