"""SWIFT's stop and its confidence-aware tree."""

from __future__ import annotations

from typing import Any

import pytest
from controllers.steps import plan, requested, step

from paceline import ConfigError
from paceline.controllers.policies.swift import SwiftController
from paceline.tree import TokenTree


def test_the_doubtful_token_is_the_last_one() -> None:
    assert requested(SwiftController(), [0.9, 0.85, 0.79, 0.9])[1] == 3
    assert requested(SwiftController(), [0.99] * 40)[1] == 25
    assert step(SwiftController(), [0.9, 0.7, 0.9], 3, sequential=False) == 2


def level(best: float, width: int = 12) -> list[float]:
    return [best] + [(1.0 - best) / width * (1.0 - i / 100) for i in range(width - 1)]


@pytest.mark.parametrize(("best", "greedy", "sampled"), [(0.97, 3, 1), (0.9, 5, 3), (0.6, 8, 5), (0.4, 10, 10)])
def test_more_candidates_where_the_drafter_doubts(best: float, greedy: int, sampled: int) -> None:
    tree = TokenTree.build(range(12), [-1] * 12, confidence=level(best))
    for temperature, count in ((0.0, greedy), (1.0, sampled)):
        (kept,) = plan(SwiftController(), temperature=temperature).select([tree])
        assert sorted(kept.tokens.tolist()) == list(range(count))


def test_side_branches_hang_off_the_best_tokens_alone() -> None:
    """Two levels of three; the second-best token has children too, which go."""
    parents = [-1, -1, -1, 0, 0, 0, 1, 1]
    tree = TokenTree.build(range(8), parents, confidence=[0.97, 0.02, 0.005, 0.9, 0.05, 0.02, 0.5, 0.4])
    (kept,) = plan(SwiftController()).select([tree])
    assert kept.tokens.tolist() == [0, 1, 2, 3, 4, 5]


def test_nothing_below_a_doubtful_level() -> None:
    tree = TokenTree.build(range(4), [-1, -1, 0, 2], confidence=[0.7, 0.2, 0.9, 0.9])
    (kept,) = plan(SwiftController()).select([tree])
    assert kept.tokens.tolist() == [0, 1]


def test_every_drafter_has_a_chain_of_its_own() -> None:
    tree = TokenTree.build(range(4), [-1, -1, 0, 1], confidence=[0.5, 0.45, 0.9, 0.9], sources=[0, 1, 0, 1])
    (kept,) = plan(SwiftController(stop_threshold=0.3)).select([tree])
    assert len(kept) == 4


@pytest.mark.parametrize("wrong", [{"stop_threshold": -0.1}, {"max_step_draft": 0}])
def test_wrong_options_are_rejected(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        SwiftController(**wrong)
