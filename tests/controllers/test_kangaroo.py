"""Kangaroo's early exit of drafting."""

from __future__ import annotations

from typing import Any

import pytest
from controllers.steps import requested, step

from paceline import ConfigError
from paceline.controllers.policies.kangaroo import KangarooController


def test_the_doubtful_token_is_the_last_one() -> None:
    assert requested(KangarooController(), [0.9, 0.9, 0.5, 0.9, 0.9])[1] == 3
    assert requested(KangarooController(), [0.1, 0.9])[1] == 1
    assert requested(KangarooController(), [0.9] * 20)[1] == 6


def test_confidence_is_the_tokens_own_not_the_paths() -> None:
    assert requested(KangarooController(threshold=0.6, steps=20), [0.7] * 20)[1] == 20


def test_the_ends_of_the_threshold() -> None:
    assert requested(KangarooController(threshold=0.0), [0.001] * 20)[1] == 6
    assert requested(KangarooController(threshold=1.0), [0.999] * 20)[1] == 1


def test_tables_that_propose_everything_at_once_are_cut_there() -> None:
    controller = KangarooController()
    assert step(controller, [0.9, 0.9, 0.5, 0.9, 0.9], 5, sequential=False) == 3
    assert "Of 5 proposed nodes, 3 are scored." in controller.explain(0)
    assert step(controller, [0.9, 0.9, 0.5, 0.9, 0.9], 5) == 3
    assert "It was stopped before level 4." in controller.explain(0)


@pytest.mark.parametrize("wrong", [{"threshold": 1.2}, {"threshold": "high"}, {"steps": 0}])
def test_wrong_options_are_rejected(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        KangarooController(**wrong)
