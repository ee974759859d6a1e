"""The fixed controller."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import pytest
import torch
from controllers.steps import granted, outcome, plan, planned
from controllers.worlds import judged

from paceline.controllers.policies import FixedController
from paceline.errors import ConfigError
from paceline.tree import EMPTY_TREE, TokenTree, Trial, merge


def test_every_step_gets_the_same_budget() -> None:
    budget = granted(FixedController(5))
    assert (budget.nodes, budget.depth) == (5, 5)
    assert budget.go_on(5, 0.0, None)


def test_every_drafter_may_propose_the_whole_number() -> None:
    (budgets,) = planned(FixedController(5, drafters=("ngram", "draft_model"))).budgets
    assert [(budget.nodes, budget.depth) for budget in budgets] == [(5, 5), (5, 5)]


def test_nothing_from_the_given_batch_size_on() -> None:
    controller = FixedController(5, disable_by_batch_size=4)
    assert granted(controller, size=3).nodes == 5
    assert not planned(controller, size=4).drafts


def test_trees_stay_as_they_are() -> None:
    trees = [TokenTree.chain([1, 2]), EMPTY_TREE]
    assert plan(FixedController(5), size=2).select(trees) == trees


def test_zero_is_plain_decoding_and_less_is_rejected() -> None:
    assert not planned(FixedController(0)).drafts
    assert "0 speculative tokens" in FixedController(0).explain()
    with pytest.raises(ConfigError, match="num_speculative_tokens must be 0 or more, got -1"):
        FixedController(-1)


# Several drafters

FUSED = ("draft_model", "rasd")
CHEAP = ("token_recycling", "draft_model")


def test_the_likeliest_nodes_of_a_merged_tree_stay() -> None:
    draft = TokenTree.chain([1, 2, 3, 4], confidence=[0.9, 0.5, 0.5, 0.5])
    found = TokenTree.chain([1, 7, 8], confidence=[0.4, 0.4, 0.9], source=1)
    controller = plan(FixedController(4, drafters=FUSED))
    (kept,) = controller.select([merge([draft, found])])
    assert [[int(kept.tokens[node]) for node in kept.path(leaf)] for leaf in kept.leaves()] == [[1, 2], [1, 7, 8]]
    assert controller.select([draft])[0] is draft, "nothing was found: the draft stays whole"


def test_a_cheap_drafter_that_fills_the_number_leaves_the_likelier_nodes_of_the_next_one() -> None:
    """A bushy tree of a table beside the chain of a draft model."""
    table = TokenTree.build([1, 2, 3, 4, 5], [-1, -1, -1, 0, 1], confidence=[0.3, 0.2, 0.1, 0.2, 0.2])
    draft = TokenTree.chain([7, 8, 9], confidence=[0.9, 0.9, 0.9], source=1)
    (kept,) = plan(FixedController(5, drafters=CHEAP)).select([merge([table, draft])])
    assert {7, 8, 9} < set(kept.tokens.tolist())
    assert len(kept) == 5


def test_the_earlier_drafter_stays_where_both_are_equally_likely() -> None:
    for first, second in ((3, 4), (4, 3)):
        trees = [
            TokenTree.chain([token], confidence=[0.5], source=source) for source, token in enumerate((first, second))
        ]
        tree = merge(trees)
        reach = plan(FixedController(1, drafters=CHEAP)).select([tree])
        assert reach[0].tokens.tolist() == [first]


def test_which_nodes_stay_follows_what_was_accepted_and_not_what_drafters_claim() -> None:
    """One is sure and wrong, the other modest and right."""
    controller = FixedController(2, drafters=CHEAP)

    def kept() -> list[int]:
        vain = TokenTree.chain([2, 2], confidence=[0.95, 0.95])
        modest = TokenTree.chain([1, 1], confidence=[0.3, 0.3], source=1)
        whole = merge([vain, modest])
        (tree,) = plan(controller).select([whole])
        controller.observe(outcome([tree], [judged(tree, whole)], proposed=[whole]))
        return sorted(tree.tokens.tolist())

    assert kept() == [2, 2]
    for _ in range(60):
        last = kept()
    assert last == [1, 1]
    controller.forget(0)
    assert not controller.odds


def drawn(tokens: Sequence[int]) -> TokenTree:
    row = torch.full((9,), 1 / 9)
    trials = {i - 1: [Trial(i, row)] for i in range(len(tokens))}
    return TokenTree.build(tokens, range(-1, len(tokens) - 1), confidence=[0.2] * len(tokens), trials=trials)


def draws_kept(controller: FixedController, found: TokenTree) -> set[int]:
    """How many drawn trials stay beside this tree, over all that can be drawn."""
    trees = [merge([drawn(tokens), found]) for tokens in product((1, 2, 3), repeat=4)]
    plan(controller, size=len(trees))
    return {
        sum(trial.drawn for trials in tree.trials.values() for trial in trials) for tree in controller.select(trees)
    }


@pytest.mark.parametrize(("found", "count"), [([], 4), ([1], 3), ([1, 2], 2), ([1, 2, 3], 2), ([1, 2, 3, 1], 2)])
def test_how_many_draws_stay_follows_from_what_was_found_and_not_from_what_was_drawn(
    found: list[int], count: int
) -> None:
    tree = TokenTree.chain(found, confidence=[0.4] * len(found), source=1) if found else EMPTY_TREE
    controller = FixedController(4, drafters=FUSED)
    assert draws_kept(controller, tree) == {count}
    assert all(len(kept) <= 4 for kept in plan(controller).select([merge([drawn([2, 3, 3, 1]), tree])]))
    assert found != [1, 2] or draws_kept(Careless(4, drafters=FUSED), tree) == {2, 4}, "negative control"


class Careless(FixedController):
    """Wrong: leaves a tree whole where the draws fell on what was found, so that it is small enough."""

    def select(self, trees: Sequence[TokenTree]) -> list[TokenTree]:
        whole = super().select(trees)
        return [
            tree if len(tree) <= self.num_speculative_tokens else cut for tree, cut in zip(trees, whole, strict=True)
        ]
