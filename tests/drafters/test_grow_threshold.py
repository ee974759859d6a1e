"""DySpec by levels: all that is worth the threshold, one pass a level. The output distribution: `test_grow_dyspec`."""

from __future__ import annotations

import pytest
from drafters.test_draft_model import PROMPT, VOCAB, begin, drafter_of, propose
from toys import ToyRunner

from paceline.errors import ConfigError


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_place_worth_the_threshold_has_a_child_and_no_other(temperature: float) -> None:
    """v of a place that got a child: reach times what was left (drawn) or times the child's share (points)."""
    runner, least = ToyRunner(VOCAB, order=None), 0.05
    drafter = drafter_of(runner, tree_policy="dyspec_threshold", tree_threshold=least)
    tree = propose(drafter, begin(drafter, temperature=temperature), 500, 4)
    reach_n = tree.reach()
    assert bool(tree.trials) == (temperature > 0)
    for parent in [-1, *(i for i in range(len(tree)) if tree.depths[i] < 4)]:
        above, left = 1.0 if parent < 0 else float(reach_n[parent]), 1.0
        row = runner.logits([*PROMPT, *(int(tree.tokens[i]) for i in tree.path(parent))]).softmax(0)
        ranked = sorted(row.tolist(), reverse=True)
        children = tree.children(parent)
        for i, node in enumerate(children):
            assert above * (left if temperature else ranked[i]) >= least - 1e-6
            left -= float(row[int(tree.tokens[node])])
        following = left if temperature else ranked[len(children)]
        assert above * following < least + 1e-6


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_one_pass_a_level(temperature: float) -> None:
    runner = ToyRunner(VOCAB, order=None)
    drafter = drafter_of(runner, tree_policy="dyspec_threshold")
    tree = propose(drafter, begin(drafter, temperature=temperature), 24, 5)
    assert tree.max_depth <= runner.calls <= tree.max_depth + 1
    assert 8 <= len(tree) <= 24


def test_a_lower_threshold_gives_more_nodes_and_the_first_child_always_comes() -> None:
    sizes = []
    for least in (1.0, 0.1, 0.03):
        drafter = drafter_of(ToyRunner(VOCAB, order=None), tree_policy="dyspec_threshold", tree_threshold=least)
        sizes.append(len(propose(drafter, begin(drafter), 200, 4)))
    assert sizes[0] == 1
    assert sizes == sorted(set(sizes))


@pytest.mark.parametrize("wrong", [0.0, -0.1, 1.5, "small", True])
def test_a_wrong_threshold_is_refused(wrong: object) -> None:
    with pytest.raises(ConfigError, match="tree_threshold must be above 0"):
        drafter_of(ToyRunner(VOCAB), tree_policy="dyspec_threshold", tree_threshold=wrong)
