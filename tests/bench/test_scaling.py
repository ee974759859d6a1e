"""The law of scaling: planted factors are found, the held-out training is predicted, a law that ended is noticed, and
drafts shrink as batches grow where rows cost time.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from math import log10

import numpy as np
import pytest

from paceline.bench.scaling import TrainingPoint, analyze_scaling, best_drafts, fit_law
from paceline.errors import ConfigError

TOKENS = (1e5, 3e5, 1e6, 3e6, 1e7)


def logarithmic(tokens: float, parameters: float) -> float:
    return 0.4 + 0.3 * log10(tokens) + 0.1 * log10(parameters)


def saturating(tokens: float, parameters: float) -> float:
    return logarithmic(min(tokens, 3e6), parameters)


def linear(tokens: float, parameters: float) -> float:
    return 1.0 + 1e-7 * tokens + 1e-7 * parameters


def trainings(law: Callable[[float, float], float], noise: float = 0.005) -> list[TrainingPoint]:
    draws = np.random.default_rng(0).normal(0, noise, 10)
    grid = [(tokens, size) for tokens in TOKENS for size in (1e6, 4e6)]
    return [
        TrainingPoint(f"{tokens:g}-{size:g}", tokens, size, float(law(tokens, size) + draw))
        for (tokens, size), draw in zip(grid, draws, strict=True)
    ]


def test_planted_factors_are_found_and_the_held_out_training_is_predicted() -> None:
    found = analyze_scaling(trainings(logarithmic))
    assert found.law.data == pytest.approx(0.3, abs=0.02)
    assert found.law.size == pytest.approx(0.1, abs=0.03)
    assert found.law.r_squared > 0.99
    assert (found.held_out.tokens, found.held_out.parameters) == (1e7, 4e6)
    assert found.predicted == pytest.approx(found.held_out.tokens_per_pass, abs=0.03)
    assert not found.ended
    assert found.next_length == pytest.approx(logarithmic(2e7, 4e6), abs=found.error)
    other = analyze_scaling(trainings(linear))
    assert other.law.r_squared < 0.95
    assert abs(other.predicted - other.held_out.tokens_per_pass) > 10 * abs(
        found.predicted - found.held_out.tokens_per_pass
    ), "the control: of another law the logarithm predicts badly"


def test_it_is_said_when_more_data_stops_paying() -> None:
    found = analyze_scaling(trainings(logarithmic, noise=0.0), least_gain=0.03)
    assert found.worth_until is not None
    length = logarithmic(found.worth_until, 4e6)
    assert (logarithmic(2 * found.worth_until, 4e6) - length) / length == pytest.approx(0.03, rel=1e-6)
    assert analyze_scaling(trainings(saturating)).ended
    slow = analyze_scaling(trainings(lambda tokens, size: 1e-3 * log10(tokens), noise=0.0), least_gain=1e-6)
    assert slow.worth_until == 1e300, "a number that JSON has"
    assert analyze_scaling(trainings(lambda tokens, size: 3 - 0.1 * log10(tokens))).worth_until is None


def test_one_factor_alone_and_grids_that_tell_nothing() -> None:
    by_data = [point for point in trainings(logarithmic) if point.parameters == 1e6]
    assert fit_law(by_data).size == 0.0
    by_size = [TrainingPoint("x", 1e6, size, logarithmic(1e6, size)) for size in (1e6, 2e6, 4e6, 8e6)]
    assert fit_law(by_size).data == 0.0
    with pytest.raises(ConfigError, match="trainings must be 4 or more, got 3"):
        analyze_scaling(by_data[:3])
    with pytest.raises(ConfigError, match="trainings must be 5 or more, since both data and size vary, got 4"):
        analyze_scaling(trainings(logarithmic)[:4])
    with pytest.raises(ConfigError, match="differ in neither data nor size"):
        analyze_scaling([by_data[0]] * 4)
    together = [TrainingPoint("x", size, size, logarithmic(size, size)) for size in TOKENS]
    with pytest.raises(ConfigError, match="data and size grow together"):
        analyze_scaling(together)


def test_drafts_shrink_as_batches_grow_where_rows_cost_time() -> None:
    batches = (1, 2, 4, 8, 16, 64)
    knee = {1: 1.0, 8: 1.05, 16: 1.3, 64: 4.0}
    found = best_drafts(knee, 0.8, batches, draft_seconds=0.01)
    assert all(later <= sooner for sooner, later in pairwise(found.values()))
    assert found[1] > 4 > found[64]
    flat = best_drafts(dict.fromkeys(knee, 1.0), 0.8, batches, draft_seconds=0.01)
    assert len(set(flat.values())) == 1, "the control: where rows cost nothing the batch makes no difference"
