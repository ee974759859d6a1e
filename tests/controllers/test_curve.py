"""Curves and lines: interpolation, monotony, robustness."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from paceline.controllers.curve import Curve, Line


def test_a_curve_interpolates_between_its_points_and_goes_on_with_its_last_slope() -> None:
    curve = Curve({1: 10.0, 4: 13.0, 8: 21.0})
    assert curve.at(1) == 10.0
    assert curve.at(2) == pytest.approx(11.0)
    assert curve.at(6) == pytest.approx(17.0)
    assert curve.at(16) == pytest.approx(37.0)
    assert curve.table(16) == pytest.approx([curve.at(max(rows, 1)) for rows in range(17)])


def test_a_curve_never_falls_however_noisy_its_points() -> None:
    table = Curve({1: 10.0, 2: 14.0, 4: 12.0, 8: 15.0}).table(100)
    assert all(later >= earlier for earlier, later in pairwise(table))
    assert Curve({1: 10.0, 2: 14.0, 4: 12.0}).at(4) == 14.0


def test_one_point_is_continued_by_the_prior_in_both_directions() -> None:
    curve = Curve({8: 11.4})
    assert curve.at(1) == pytest.approx(10.0)
    assert 11.4 < curve.at(64) < 30.0


FREE_THEN_DEAR = {1: 120.0, 2: 132.0, 3: 145.0, 4: 176.0, 6: 248.0, 8: 316.0, 12: 460.0, 16: 600.0}


def test_points_that_were_disturbed_are_smoothed_and_real_bends_stay() -> None:
    disturbed = Curve(FREE_THEN_DEAR | {2: 144.0, 6: 270.0})
    disturbed.smooth(0.15)
    assert disturbed.values == pytest.approx(FREE_THEN_DEAR | {2: 132.5, 6: 246.0, 12: 458.0})
    steps = Curve({1: 100.0, 2: 100.0, 4: 100.0, 6: 200.0, 8: 200.0})
    steps.smooth(0.15)
    assert steps.values[6] == 200.0, "no disturbance doubles the least of many measurements"


def test_a_straight_line_would_not_keep_the_bend() -> None:
    slope, start = np.polyfit(list(FREE_THEN_DEAR), list(FREE_THEN_DEAR.values()), 1)
    assert abs(start + 3 * slope - FREE_THEN_DEAR[3]) > 0.05 * FREE_THEN_DEAR[3] or slope > 2 * 12.5


def learned(truth: float, outliers: float, steps: int = 400) -> float:
    rng, curve = np.random.default_rng(0), Curve()
    for _ in range(steps):
        spoilt = 50.0 if rng.random() < outliers else 1.0
        rows = int(rng.integers(1, 12))
        curve.observe(rows, truth * (1 + 0.1 * rows) * spoilt * float(np.exp(0.05 * rng.standard_normal())))
    return curve.at(8) / (truth * 1.8)


def test_a_curve_learns_from_steps_alone_with_some_of_them_descheduled() -> None:
    assert learned(0.01, outliers=0.03) == pytest.approx(1.0, abs=0.15)


def test_a_plain_mean_would_not_survive_those_outliers() -> None:
    rng = np.random.default_rng(0)
    mean = np.mean([50.0 if rng.random() < 0.03 else 1.0 for _ in range(400)])
    assert abs(mean - 1.0) > 0.5


def test_a_lasting_change_is_followed() -> None:
    curve = Curve({1: 1.0, 2: 1.0, 4: 1.0, 8: 1.0}, count=100.0)
    for _ in range(100):
        curve.observe(8, 2.0)
    assert curve.at(8) == pytest.approx(2.0, rel=0.05)


def test_a_line_separates_the_fixed_part_from_the_part_per_level() -> None:
    rng, line = np.random.default_rng(0), Line()
    for _ in range(2000):
        levels = int(rng.integers(0, 9))
        line.observe(
            levels, (2.0 + 3.0 * levels) * float(np.exp(0.05 * rng.standard_normal())) * (20 if rng.random() < 0.02 else 1)
        )
    assert line.fixed == pytest.approx(2.0, abs=1.0)
    assert line.per_level == pytest.approx(3.0, abs=0.4)


def test_a_slow_first_call_does_not_count() -> None:
    line = Line()
    for seconds in (100.0, 4.5, 4.5):
        line.observe(4, seconds)
    assert line.at(4) == pytest.approx(4.5)
