"""EAGLE-2's trees: the best of all nodes by path, ancestor-closed, a chain at width 1, points at any temperature."""

from __future__ import annotations

import pytest
from drafters.test_draft_model import PROMPT, VOCAB, begin, drafter_of, propose
from tools.random_drafts import random_target
from tools.random_trees import distribution_error
from toys import ToyRunner

from paceline.errors import ConfigError


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


def test_drawing_is_refused_by_name() -> None:
    for policy, options in (("eagle2", {}), ("ppd", {}), ("static", {"speculative_token_tree": [[0]]})):
        with pytest.raises(
            ConfigError, match=f"draft_sample_method must be greedy or left out with tree_policy '{policy}'"
        ):
            drafter_of(ToyRunner(VOCAB), tree_policy=policy, draft_sample_method="probabilistic", **options)
