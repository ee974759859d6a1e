"""Static trees: every node is its parent's candidate of the rank that the shape names."""

from __future__ import annotations

from typing import Any

import pytest
from drafters.test_draft_model import PROMPT, VOCAB, begin, drafter_of, propose
from toys import ToyRunner

from paceline.tree import EMPTY_TREE, PRIOR, Budget, TokenTree, best_shapes

PATHS = [(0,), (1,), (3,), (0, 0), (0, 2), (1, 0), (0, 0, 0)]


def ranks_of(tree: TokenTree, runner: ToyRunner) -> set[tuple[int, ...]]:
    """The nodes as paths of ranks, read off the draft model."""
    found: dict[int, tuple[int, ...]] = {-1: ()}
    for node, parent in enumerate(tree.parents.tolist()):
        text = [*PROMPT, *(int(tree.tokens[i]) for i in tree.path(parent))]
        ranked = runner.logits(text).argsort(descending=True).tolist()
        found[node] = (*found[parent], ranked.index(int(tree.tokens[node])))
    return set(found.values()) - {()}


@pytest.mark.parametrize("given", [str(PATHS), PATHS, [list(path) for path in reversed(PATHS)]])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_shape_is_filled_by_rank(given: Any, temperature: float) -> None:
    runner = ToyRunner(VOCAB, order=None)
    drafter = drafter_of(runner, speculative_token_tree=given)
    tree = propose(drafter, begin(drafter, temperature=temperature), 99)
    assert ranks_of(tree, runner) == set(PATHS)
    assert runner.calls == 3, "one pass a level"
    assert not tree.trials


def test_a_budget_cuts_the_shape_before_it_is_drafted() -> None:
    runner = ToyRunner(VOCAB, order=None)
    drafter = drafter_of(runner, tree_policy="static", speculative_token_tree=PATHS)
    assert ranks_of(propose(drafter, begin(drafter), 3), runner) == {(0,), (0, 0), (0, 0, 0)}
    assert ranks_of(propose(drafter, begin(drafter), 99, 1), runner) == {(0,), (1,), (3,)}
    assert runner.calls == 4


def test_ranks_beyond_the_vocabulary_and_forbidden_tokens_are_left_out() -> None:
    runner = ToyRunner(3, order=None)
    drafter = drafter_of(runner, 3, speculative_token_tree=[(0,), (2,), (5,), (5, 0), (2, 0)])
    assert ranks_of(propose(drafter, begin(drafter, [1, 2]), 99), runner).isdisjoint({(5,), (5, 0)})


def test_ppd_fills_the_shape_that_the_controller_chose_or_else_the_best_one_unlearned() -> None:
    runner = ToyRunner(VOCAB, order=None)
    drafter = drafter_of(runner, tree_policy="ppd")
    shape = best_shapes([0.4, 0.3, 0.2], 6)
    (tree,) = drafter.propose([begin(drafter)], [Budget(6, 6, shape=shape)], [EMPTY_TREE])
    assert ranks_of(tree, runner) == set(shape.paths())
    (tree,) = drafter.propose([begin(drafter)], [Budget(6, 6)], [EMPTY_TREE])
    assert ranks_of(tree, runner) == set(best_shapes(PRIOR, 6).paths()) != set(shape.paths())
