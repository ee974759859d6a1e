"""The fixed controller."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import pytest
import torch

from paceline.controllers.base import Signal
from paceline.controllers.fixed import FixedController
from paceline.errors import ConfigError
from paceline.tree.merge import merge
from paceline.tree.token_tree import EMPTY_TREE, TokenTree, Trial
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


# Beside a fusion, which joins what it finds to the trees of all others

FUSED = ("draft_model", "rasd")


def test_a_fusion_may_propose_whatever_the_others_left() -> None:
    controller, whole = planned(FixedController(5, drafters=FUSED)), TokenTree.chain(range(5))
    assert controller.budget(0, 1, whole).nodes == 5
    assert controller.budget(0, 0, whole) is NO_BUDGET
    assert planned(FixedController(5, drafters=("ngram", "draft_model"))).budget(0, 1, whole) is NO_BUDGET


def test_the_likeliest_nodes_of_a_joined_tree_stay() -> None:
    draft = TokenTree.chain([1, 2, 3, 4], confidence=[0.9, 0.5, 0.5, 0.5])
    found = TokenTree.chain([1, 7, 8], confidence=[0.4, 0.4, 0.9], source=1)
    controller = planned(FixedController(4, drafters=FUSED))
    (kept,) = controller.select([merge([draft, found])])
    assert [[int(kept.tokens[node]) for node in kept.path(leaf)] for leaf in kept.leaves()] == [[1, 2], [1, 7, 8]]
    assert controller.select([draft])[0] is draft, "nothing was found: the draft stays whole"


def drawn(tokens: Sequence[int]) -> TokenTree:
    row = torch.full((9,), 1 / 9)
    trials = {i - 1: [Trial(i, row)] for i in range(len(tokens))}
    return TokenTree.build(tokens, range(-1, len(tokens) - 1), confidence=[0.2] * len(tokens), trials=trials)


def draws_kept(controller: FixedController, found: TokenTree) -> set[int]:
    """How many drawn trials stay beside this tree, over all that can be drawn."""
    trees = [merge([drawn(tokens), found]) for tokens in product((1, 2, 3), repeat=4)]
    planned(controller, len(trees))
    return {sum(trial.drawn for trials in tree.trials.values() for trial in trials) for tree in controller.select(trees)}


@pytest.mark.parametrize(("found", "count"), [([], 4), ([1], 3), ([1, 2], 2), ([1, 2, 3], 2), ([1, 2, 3, 1], 2)])
def test_how_many_draws_stay_follows_from_what_was_found_and_not_from_what_was_drawn(found: list[int], count: int) -> None:
    tree = TokenTree.chain(found, confidence=[0.4] * len(found), source=1) if found else EMPTY_TREE
    controller = FixedController(4, drafters=FUSED)
    assert draws_kept(controller, tree) == {count}
    assert all(len(kept) <= 4 for kept in controller.select([merge([drawn([2, 3, 3, 1]), tree])]))
    assert found != [1, 2] or draws_kept(Careless(4, drafters=FUSED), tree) == {2, 4}, "negative control"


class Careless(FixedController):
    """Wrong: leaves a tree whole where the draws fell on what was found, so that it is small enough."""

    def select(self, trees: Sequence[TokenTree]) -> list[TokenTree]:
        return [tree if len(tree) <= self.num_speculative_tokens else self._cut(tree) for tree in trees]
