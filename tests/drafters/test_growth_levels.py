"""Trees grown by levels: EAGLE-2 keeps the likeliest paths, static trees have their shape."""

from __future__ import annotations

from typing import Any

import pytest
from drafters.test_draft_model import PROMPT, VOCAB, begin, drafter_of, propose
from tools.random_drafts import random_target
from tools.random_trees import distribution_error
from toys import ToyRunner

from paceline.errors import ConfigError
from paceline.tree import EMPTY_TREE, PRIOR, Budget, TokenTree, best_shapes


def test_width_1_is_the_greedy_chain() -> None:
    runner = ToyRunner(VOCAB, order=None)
    drafter = drafter_of(runner, tree_policy="eagle2", tree_width=1)
    tree = propose(drafter, begin(drafter), 6)
    assert tree.is_chain
    assert tree.tokens.tolist() == runner.greedy(PROMPT, 6)


@pytest.mark.parametrize("width", [2, 5])
def test_it_is_the_paper_by_brute_force(width: int) -> None:
    """Expand the best `width` paths of each level, rank all, keep the best; every node's parent is among them."""
    runner = ToyRunner(5, order=None)
    drafter = drafter_of(runner, 5, tree_policy="eagle2", tree_width=width)
    tree = propose(drafter, begin(drafter, [1, 2]), 8, 4)
    scores: dict[tuple[int, ...], float] = {}
    front: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(4):
        level: dict[tuple[int, ...], float] = {}
        for path, score in front.items():
            chances, tokens = runner.logits([1, 2, *path]).softmax(0).topk(width)
            level |= {(*path, t): score * c for t, c in zip(tokens.tolist(), chances.tolist(), strict=True)}
        scores |= level
        front = dict(sorted(level.items(), key=lambda item: -item[1])[:width])
    best = set(sorted(scores, key=lambda path: -scores[path])[:8])
    found = {tuple(int(tree.tokens[j]) for j in tree.path(i)) for i in range(len(tree))}
    assert found == best
    assert all(len(path) == 1 or path[:-1] in found for path in found)


def test_above_temperature_0_it_proposes_points_which_keep_the_distribution() -> None:
    drafter = drafter_of(ToyRunner(3, order=None, sharpness=1.0), 3, tree_policy="eagle2", tree_width=2)
    tree = propose(drafter, begin(drafter, [1, 2], temperature=1.0), 4, 2)
    assert not tree.trials
    assert len(tree) == 4
    assert distribution_error(lambda choices: tree, random_target(1, 3), 3) < 1e-9


def test_drawing_is_rejected_by_name() -> None:
    for policy, options in (("eagle2", {}), ("ppd", {}), ("static", {"speculative_token_tree": [[0]]})):
        with pytest.raises(
            ConfigError, match=f"draft_sample_method must be greedy or left out with tree_policy '{policy}'"
        ):
            drafter_of(ToyRunner(VOCAB), tree_policy=policy, draft_sample_method="probabilistic", **options)


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
