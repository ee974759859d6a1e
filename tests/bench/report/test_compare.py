"""Documents side by side: what counts as one measurement."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from paceline.bench.report import ComparedLine, compare_documents
from paceline.errors import ConfigError


def document(seconds: dict[str, list[float]], batch: int = 1, tokens: int = 100) -> dict[str, Any]:
    """Plain decoding alone; `seconds` holds a value per repeat for every group of `batch` prompts."""
    rows = [
        {"prompt": f"{name}-{i}", "turn": 0, "group": g, "repeat": r, "tokens": tokens, "seconds": value, "error": None}
        for g, (name, values) in enumerate(seconds.items())
        for r, value in enumerate(values)
        for i in range(batch)
    ]
    cell = {"setting": "plain", "workload": "w", "temperature": 0.0, "batch": batch, "comparable": True, "rows": rows}
    machine = {"cpu": "x", "cores": 2, "threads": 2, "gpu": None}
    return {
        "baseline": "plain",
        "cells": [cell],
        "provenance": {"machine": machine, "packages": {}},
        "model": {"fingerprint": "f", "dtype": "float32", "device": "cpu"},
        "options": {"max_tokens": 16},
        "interrupted": False,
    }


def line(a: dict[str, Any], b: dict[str, Any]) -> ComparedLine:
    (found,) = compare_documents(a, b).lines
    return found


def test_a_batch_is_one_measurement() -> None:
    """Sixteen prompts in one batch that happened to be quick are no evidence of sixteen."""
    rng = np.random.default_rng(0)
    a = {f"g{i}": [1.0, 1.0] for i in range(4)}
    b = {name: [float(np.exp(rng.normal(-0.1, 0.3)))] * 2 for name in a}
    batched = line(document(a, 16), document(b, 16))
    assert batched.speed is not None
    assert batched.prompts == 64
    assert batched.speed.n == 4
    as_prompts = {f"{name}{i}": values for name, values in b.items() for i in range(16)}
    alone = line(document({name: [1.0, 1.0] for name in as_prompts}), document(as_prompts))
    assert alone.speed is not None
    assert alone.speed.n == 64
    assert batched.speed.high - batched.speed.low > 1.3 * (alone.speed.high - alone.speed.low)


def test_a_cell_given_twice_is_rejected_by_its_key() -> None:
    fine, twice = document({"g": [1.0]}), document({"g": [2.0]})
    twice["cells"] += document({"g": [3.0]})["cells"]
    assert line(fine, fine).speed is not None
    with pytest.raises(ConfigError, match=r"document B must have each cell once, and plain, w, 0\.0, 1 occurs twice"):
        compare_documents(fine, twice)


def test_the_speed_of_a_batch_is_that_of_all_its_prompts() -> None:
    found = line(document({"g": [2.0]}, 4), document({"g": [1.0]}, 4))
    assert found.speed is not None
    assert found.speed.value == pytest.approx(2.0)


def test_failures_bring_nothing() -> None:
    a, b = document({"g": [1.0], "h": [1.0]}, 2), document({"g": [1.0], "h": [1.0]}, 2)
    for row in b["cells"][0]["rows"]:
        if row["prompt"] == "g-0":
            row["error"] = "no"
    found = line(a, b)
    assert found.speed is not None
    assert found.speed.value == pytest.approx(0.75)


def test_batches_of_other_prompts_are_not_paired() -> None:
    found = line(document({"g": [1.0]}, 2), document({"h": [1.0]}, 2))
    assert found.speed is None
    assert found.reason == "no batch of the same prompts was decoded in both"
