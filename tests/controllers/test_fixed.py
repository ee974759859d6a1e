"""The fixed controller."""

from __future__ import annotations

import pytest

from paceline.controllers.base import Signal
from paceline.controllers.fixed import FixedController
from paceline.errors import ConfigError
from paceline.tree.token_tree import EMPTY_TREE, TokenTree
from paceline.tree.types import NO_BUDGET


def planned(controller: FixedController, size: int = 1, remaining: int = 100) -> FixedController:
    controller.plan([Signal(key, 10, remaining, 0.0) for key in range(size)])
    return controller


def test_every_step_gets_the_same_budget() -> None:
    budget = planned(FixedController(5)).budget(0, 0, EMPTY_TREE)
    assert (budget.nodes, budget.depth) == (5, 5)
    assert budget.go_on(5, 0.0, None)


def test_the_nodes_of_the_first_drafter_count_within_the_total() -> None:
    controller = planned(FixedController(5))
    assert controller.budget(0, 1, TokenTree.chain([1, 2, 3])).nodes == 2
    assert controller.budget(0, 1, TokenTree.chain([1, 2, 3, 4, 5])) is NO_BUDGET


def test_no_level_that_the_sequence_could_not_use() -> None:
    assert planned(FixedController(5), remaining=3).budget(0, 0, EMPTY_TREE).depth == 2
    assert planned(FixedController(5), remaining=1).budget(0, 0, EMPTY_TREE) is NO_BUDGET


def test_nothing_from_the_given_batch_size_on() -> None:
    controller = FixedController(5, disable_by_batch_size=4)
    assert planned(controller, 3).budget(0, 0, EMPTY_TREE).nodes == 5
    assert planned(controller, 4).budget(0, 0, EMPTY_TREE) is NO_BUDGET


def test_trees_stay_as_they_are() -> None:
    trees = [TokenTree.chain([1, 2]), EMPTY_TREE]
    assert planned(FixedController(5), 2).select(trees) == trees


def test_zero_is_plain_decoding_and_less_is_refused() -> None:
    assert planned(FixedController(0)).budget(0, 0, EMPTY_TREE) is NO_BUDGET
    assert "0 speculative tokens" in FixedController(0).explain()
    with pytest.raises(ConfigError, match="num_speculative_tokens must be 0 or more, got -1"):
        FixedController(-1)
