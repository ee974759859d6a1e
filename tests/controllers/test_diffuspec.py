"""Adaptive draft length of DiffuSpec: the checks of its description."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from controllers.steps import requested, step

from paceline import ConfigError
from paceline.controllers.policies.diffuspec import DiffuSpecController

SURE = [0.9] * 100


def lengths(accepted: list[int], proposed: int = 100, **options: Any) -> list[int]:
    controller = DiffuSpecController(**options)
    found = []
    for stands in accepted:
        found.append(requested(controller, SURE)[0].depth)
        step(controller, SURE[:proposed], stands)
    return found


def test_a_perfect_drafter_drives_it_to_the_most() -> None:
    assert lengths([100] * 4) == [20, 30, 30, 30]


def test_a_poor_drafter_keeps_it_at_the_least() -> None:
    assert set(lengths([0, 3, 1, 0, 7] * 4)) == {20}


def test_it_never_leaves_its_bounds() -> None:
    rng = np.random.default_rng(0)
    found = lengths(rng.integers(0, 15, 300).tolist(), k_min=3, k_max=9, delta=4, rho=1.0)
    assert (min(found), max(found)) == (3, 9)
    assert len(set(found)) > 2


def test_equal_bounds_fix_the_length() -> None:
    assert set(lengths([100, 0] * 20, k_min=7, k_max=7)) == {7}


def test_the_averages_by_hand() -> None:
    controller = DiffuSpecController(k_min=4, k_max=12, delta=3, rho=0.5)
    assert step(controller, SURE, 2) == 4  # the averages begin: L_gen 4, L_acc 2
    assert step(controller, SURE, 4) == 4  # L_gen 4, L_acc 3
    assert step(controller, SURE[:2], 2) == 2  # L_gen 3, L_acc 2.5
    assert step(controller, SURE[:2], 2) == 2  # L_gen 2.5, L_acc 2.25
    assert controller.batch[0].memory.generated == 2.5
    assert controller.batch[0].memory.accepted == 2.25
    assert step(controller, SURE[:2], 2) == 2  # L_gen 2.25, L_acc 2.125
    assert requested(controller, SURE)[0].depth == 4


def test_more_while_everything_stands() -> None:
    controller = DiffuSpecController(k_min=4, k_max=12, delta=3)
    assert step(controller, SURE, 99) == 4  # L_gen 4, L_acc 4
    assert step(controller, SURE, 99) == 7  # both 5.5
    assert step(controller, SURE, 0) == 8  # L_gen 6.75, L_acc 2.75
    assert step(controller, SURE, 0) == 6


def test_steps_cut_short_by_the_end_say_nothing() -> None:
    controller = DiffuSpecController()
    step(controller, SURE, 20, remaining=6)
    assert controller.batch[0].memory.generated == 20.0


@pytest.mark.parametrize("wrong", [{"k_min": 0}, {"k_min": 9, "k_max": 8}, {"delta": -1}, {"rho": 1.5}])
def test_wrong_options_are_rejected(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        DiffuSpecController(**wrong)
