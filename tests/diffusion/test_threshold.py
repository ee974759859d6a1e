"""Bars of confidence: what lies on them, how many slots a bound on the joint allows, what they cost at most."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from paceline.diffusion import Canvas, ConfiguredMethod, Predictions, Step
from tests.diffusion.decoding import fill
from tests.diffusion.toys import Independent, Joint
from tests.diffusion.toys_t4 import t4


def chosen(confidence: list[float], config: dict[str, Any]) -> list[int]:
    """Slots that a rule writes where the model is sure of its tokens to exactly these degrees."""
    n, toy = len(confidence), Independent(confidence)
    canvas, slots, c = Canvas.of((), n, mask_token_id=toy.mask_token_id), np.arange(n), np.asarray(confidence)
    predictions = Predictions(slots, slots % 3, c, 1 - c, c, c, torch.zeros(n, toy.vocab_size))
    found = (
        ConfiguredMethod(config)
        .parts(toy, canvas)
        .transition.commit.choose(Step(canvas, predictions, slots, c, range(n)))
    )
    return sorted(found.tolist())


INCLUSIVE: list[dict[str, Any]] = [
    {"method": "threshold", "confidence_threshold": 0.75},
    {"method": "local_leap", "confidence_threshold": 0.75, "anchor_radius": 0},
    {"method": "ete", "confidence_threshold": 0.75},
    {"method": "bacd", "confidence_low": 0.75, "confidence_high": 0.75},
    {"method": "cad", "confidence_threshold": 0.75},
]


@pytest.mark.parametrize("config", INCLUSIVE, ids=lambda config: config["method"])
def test_a_slot_on_the_bar_is_written(config: dict[str, Any]) -> None:
    assert chosen([0.75, 0.25, 0.875, np.nextafter(0.75, 0)], config) == [0, 2]


def test_confident_decoding_asks_for_more_than_its_bar() -> None:
    assert chosen([0.75, 0.25, 0.875, 0.5], {"method": "dimple", "confidence_threshold": 0.75}) == [2]


def largest(confidence: list[float], factor: float) -> int:
    ranked = sorted(confidence, reverse=True)
    return max([1, *(n for n in range(1, len(ranked) + 1) if (n + 1) * (1 - ranked[n - 1]) < factor)])


def test_the_factor_rule_writes_the_largest_number_that_its_bound_allows() -> None:
    rng = np.random.default_rng(0)
    seen = set()
    for _ in range(200):
        c, factor = (1 - rng.random(7) ** 3).tolist(), float(rng.uniform(0.3, 2.5))
        found = chosen(c, {"method": "factor", "factor": factor})
        assert found == sorted(np.argsort(-np.asarray(c))[: largest(c, factor)].tolist())
        seen.add(len(found))
    assert seen == set(range(1, 8))
    assert chosen([0.5, 0.75], {"method": "factor", "factor": 0.75}) == [1]  # 3 x 0.5 and 2 x 0.25 lie below, or not
    assert chosen([0.75, 0.75], {"method": "factor", "factor": 0.75}) == [0]  # 3 x 0.25 is the bound, not below it
    assert chosen([0.75, 0.75], {"method": "factor", "factor": 0.76}) == [0, 1]


PARALLEL: list[dict[str, Any]] = [
    {"method": "threshold", "confidence_threshold": 0.6},
    {"method": "factor", "factor": 1.5},
    {"method": "dparallel", "entropy_threshold": 0.9},
    {"method": "local_leap", "confidence_threshold": 0.7, "relaxed_threshold": 0.4},
    {"method": "ete", "confidence_threshold": 0.6},
    {"method": "ete_tokens", "confidence_threshold": 0.6},
    {"method": "bacd", "confidence_low": 0.4, "confidence_high": 0.6},
    {"method": "cad", "confidence_threshold": 0.6},
    {"method": "dimple", "confidence_threshold": 0.6},
    {"method": "prophet", "gap_thresholds": (2.0, 1.0, 0.5)},
    {"method": "freedave++", "confidence_threshold": 0.6},
]


@pytest.mark.parametrize("config", PARALLEL, ids=lambda config: config["method"])
def test_never_more_calls_than_slots_and_fewer_in_all(config: dict[str, Any]) -> None:
    """A call for each round, and the round of each slot is the most there can be."""
    joints: list[Callable[[], Any]] = [
        lambda seed=seed: Joint(np.random.default_rng(seed).dirichlet(np.full(256, 0.1)).reshape((2,) * 8))
        for seed in range(3)
    ]
    calls = [fill(toy(), {**config, "block_length": 4}, 8, ()).trajectory.calls for toy in joints]
    calls += [fill(t4(seed=seed), {**config, "block_length": 4}, 8).trajectory.calls for seed in range(3)]
    assert max(calls) <= 8
    assert sum(calls) < 6 * 8
