"""Cutting trees: what stays, and that no cut changes the output distribution; every tempting shortcut does."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tools.enumerate_draws import Choices
from tools.random_drafts import random_target
from tools.random_trees import TOLERANCE, WRONG, distribution_error, merged

from paceline.tree import EMPTY_TREE, PROBE, ROOT, TokenTree, Trial, merge, prune, select_nodes

VOCAB = 4


@st.composite
def point_trees(draw: st.DrawFn) -> TokenTree:
    tokens: list[int] = []
    parents: list[int] = []
    for _ in range(draw(st.integers(0, 8))):
        parent, token = draw(st.integers(-1, len(tokens) - 1)), draw(st.integers(0, VOCAB - 1))
        if (parent, token) not in zip(parents, tokens, strict=True):
            tokens.append(token)
            parents.append(parent)
    shares = [draw(st.floats(0, 1, width=32)) for _ in tokens]
    counts = np.bincount(np.asarray(parents, int) + 1, minlength=1)
    return TokenTree.build(
        tokens, parents, confidence=[s / counts[p + 1] for s, p in zip(shares, parents, strict=True)]
    )


def closed(tree: TokenTree, nodes: tuple[int, ...]) -> bool:
    return all(int(tree.parents[i]) in (ROOT, *nodes) for i in nodes)


@given(point_trees(), st.integers(0, 8))
def test_points_are_kept_by_their_reach(tree: TokenTree, nodes: int) -> None:
    """No subset of that size that holds its ancestors has a higher sum of reach."""
    found, reach = select_nodes(tree, nodes), tree.reach()
    found.check(VOCAB, nodes)
    size = min(nodes, len(tree))
    best = max(
        sum(float(reach[i]) for i in c) for c in itertools.combinations(range(len(tree)), size) if closed(tree, c)
    )
    assert len(found) == size
    assert float(found.reach().sum()) == pytest.approx(best, abs=1e-5)


def test_a_tree_that_fits_comes_back_itself() -> None:
    tree = TokenTree.chain([1, 2, 3])
    assert select_nodes(tree, 3) is tree
    assert select_nodes(tree, 0) is EMPTY_TREE
    assert select_nodes(EMPTY_TREE, 5) is EMPTY_TREE


def test_probes_stay_with_their_parents_and_cost_nothing() -> None:
    tree = TokenTree.build(
        [1, 2, 3, 0, 0], [-1, -1, 0, 0, 2], kinds=[0, 0, 0, PROBE, PROBE], confidence=[0.6, 0.3, 0.5, 0, 0]
    )
    assert select_nodes(tree, 1).tokens.tolist() == [1, 0]
    assert select_nodes(tree, 2).tokens.tolist() == [1, 2, 0] or select_nodes(tree, 2).tokens.tolist() == [1, 3, 0, 0]
    probes = TokenTree.build([1, 2], [-1, 0], kinds=[PROBE, PROBE])
    assert len(select_nodes(probes, 1)) == 2


ROWS = [torch.full((VOCAB,), 0.25) for _ in range(4)]


def test_drawn_trials_are_cut_from_the_end_of_the_drawing() -> None:
    """Level by level: two draws at the root, then one below each."""
    trials = {-1: [Trial(0, ROWS[0]), Trial(1, ROWS[0], (1,))], 0: [Trial(2, ROWS[1])], 1: [Trial(3, ROWS[2])]}
    tree = TokenTree.build([1, 2, 3, 0], [-1, -1, 0, 1], trials=trials, confidence=[0.01, 0.9, 0.01, 0.9])
    assert [select_nodes(tree, n).tokens.tolist() for n in range(5)] == [[], [1], [1, 2], [1, 2, 3], [1, 2, 3, 0]]
    assert select_nodes(tree, 4, drawn_nodes=1).tokens.tolist() == [1]
    assert [t.removed for t in select_nodes(tree, 2).trials[ROOT]] == [(), (1,)]


def test_order_says_when_a_draw_was_made() -> None:
    """A drafter that goes deep first: the second draw at the root came last."""
    trials = {-1: [Trial(0, ROWS[0]), Trial(2, ROWS[0], (1,), order=2)], 0: [Trial(1, ROWS[1], order=1)]}
    tree = TokenTree.build([1, 3, 2], [-1, 0, -1], trials=trials)
    assert select_nodes(tree, 2).tokens.tolist() == [1, 3]


def test_equal_draws_count_as_new_nodes_when_they_come_up() -> None:
    trials = {-1: [Trial(0, ROWS[0]), Trial(0, ROWS[0])]}
    tree = TokenTree.build([1], [-1], trials=trials)
    assert len(select_nodes(tree, 1).trials[ROOT]) == 1
    assert len(select_nodes(tree, 2).trials[ROOT]) == 2


def test_what_a_drawn_trial_stands_on_stays() -> None:
    """The point tried before it, and the point above its parent, whatever their confidence."""
    points = TokenTree.build([0, 1, 2], [-1, -1, 1], confidence=[0.001, 0.001, 0.9])
    drawn = TokenTree.build([1, 3], [-1, 0], trials={0: [Trial(1, ROWS[0])]}, confidence=[0.001, 0.9])
    tree = merge([points, drawn])
    assert select_nodes(tree, 3).tokens.tolist() == [1, 2, 3]
    assert select_nodes(tree, 2).tokens.tolist() == [0, 1], "the drawn trial does not fit; what is left are free points"
    assert not select_nodes(tree, 2).trials


def test_points_drop_out_from_under_cut_draws() -> None:
    """A child of a cut drawn node cannot stay; a node that a point names too can."""
    points = TokenTree.build([1], [-1], confidence=[0.2])
    trials = {-1: [Trial(0, ROWS[0]), Trial(1, ROWS[0], (3,))]}
    drawn = TokenTree.build([3, 1, 2], [-1, -1, 0], trials=trials, confidence=[0.5, 0.2, 0.9])
    tree = merge([points, drawn])
    assert select_nodes(tree, 1).tokens.tolist() == [1]
    assert select_nodes(tree, 2).tokens.tolist() == [1, 3]
    assert [t.drawn for t in select_nodes(tree, 2).trials[ROOT]] == [False, True]


CUTS = [{"nodes": n} for n in range(7)] + [{"nodes": 5, "drawn_nodes": 2}, {"nodes": 5, "drawn_nodes": 0}]


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_no_cut_changes_the_output_distribution(cut: dict[str, float]) -> None:
    """Trees of two merged drafters with draws, equal draws, points and probes, whose confidences know the drawn
    tokens.
    """
    for seed in range(10):
        propose = merged(seed, 3)
        assert (
            distribution_error(lambda c, p=propose: select_nodes(p(c), **cut), random_target(seed, 3), 3) < TOLERANCE
        ), seed


def by_reach(tree: TokenTree, nodes: int) -> TokenTree:
    """Wrong: the likeliest nodes stay, drawn or not."""
    return prune(tree, sorted(np.argsort(-tree.reach(), kind="stable")[:nodes].tolist()))


def unlikely_draws_out(tree: TokenTree, nodes: int) -> TokenTree:
    """Wrong: a leaf stays if the draft thought its token likely."""
    leaves = set(tree.leaves())
    return prune(tree, [i for i in range(len(tree)) if i not in leaves or tree.confidence[i] > 0.3])


def points_first_by_reach(tree: TokenTree, nodes: int) -> TokenTree:
    """Wrong: points before drawn trials are dropped by confidences that later draws have changed."""
    drawn = {t.node for ts in tree.trials.values() for t in ts if t.drawn}
    keep = [i for i in range(len(tree)) if all(j in drawn or tree.confidence[j] > 0.25 for j in tree.path(i))]
    return prune(tree, keep)


@pytest.mark.parametrize("wrong", [by_reach, unlikely_draws_out, points_first_by_reach])
def test_the_distribution_check_catches_cuts_that_look_at_drawn_tokens(wrong) -> None:
    errors = []
    for seed, nodes in itertools.product(range(20), (1, 2, 3)):
        propose = merged(seed, 3)
        errors.append(distribution_error(lambda c, p=propose, n=nodes: wrong(p(c), n), random_target(seed, 3), 3))
        if max(errors) > WRONG:
            return
    pytest.fail(f"{wrong.__name__} was not caught, worst error {max(errors)}")


def deep_first(choices: Choices) -> TokenTree:
    """Draws x at the root, then y below it, then z at the root if the budget of 3 allows: nodes in drawing order,
    `order` set.
    """
    row = [0.5, 0.3, 0.2]
    x, y = choices.choose(row), choices.choose(row)
    rest = [0.0 if i == x else q for i, q in enumerate(row)]
    z = choices.choose([q / sum(rest) for q in rest])
    q = torch.tensor(row, dtype=torch.float64)
    trials = {-1: [Trial(0, q), Trial(2, q, (x,), 2)], 0: [Trial(1, q, (), 1)]}
    return TokenTree.build([x, y, z], [-1, 0, -1], trials=trials)


@pytest.mark.parametrize("nodes", [1, 2, 3])
def test_drafters_that_go_deep_first_keep_the_distribution(nodes: int) -> None:
    for seed in range(5):
        assert distribution_error(lambda c: select_nodes(deep_first(c), nodes), random_target(seed, 3), 3) < TOLERANCE


def two_equal_draws(choices: Choices) -> TokenTree:
    """Two draws with replacement at the root, which may be the same node."""
    row = [0.4, 0.3, 0.2, 0.1]
    drawn = [choices.choose(row), choices.choose(row)]
    tokens = list(dict.fromkeys(drawn))
    q = torch.tensor(row, dtype=torch.float64)
    return TokenTree.build(tokens, [-1] * len(tokens), trials={-1: [Trial(tokens.index(token), q) for token in drawn]})


def test_repeats_are_no_free_rides() -> None:
    """Leaving a tree alone because it has few enough *nodes* keeps the second draw only where it fell on the first."""

    def free_repeats(choices: Choices) -> TokenTree:
        tree = two_equal_draws(choices)
        return tree if len(tree) <= 1 else select_nodes(tree, 1)

    targets = [random_target(seed, 4) for seed in range(10)]
    assert (
        max(distribution_error(lambda c: select_nodes(two_equal_draws(c), 1), target, 2) for target in targets)
        < TOLERANCE
    )
    assert any(distribution_error(free_repeats, target, 2) > WRONG for target in targets)
