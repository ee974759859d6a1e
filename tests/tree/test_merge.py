"""Merging, pruning and re-rooting: what the merged tree holds, and that its output distribution is the target's."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tools.enumerate_draws import Choices
from tools.random_drafts import RandomDrafter, random_target
from tools.random_trees import TOLERANCE, WRONG, distribution_error, merged

from paceline.errors import DrafterError
from paceline.tree import EMPTY_TREE, PROBE, ROOT, TokenTree, Trial, merge, prune

VOCAB = 4
ROW, OTHER = torch.tensor([0.1, 0.2, 0.3, 0.4]), torch.tensor([0.4, 0.3, 0.2, 0.1])


def texts(tree: TokenTree) -> set[tuple[int, ...]]:
    return {tuple(int(tree.tokens[j]) for j in tree.path(i)) for i in range(len(tree))}


@st.composite
def point_trees(draw: st.DrawFn) -> TokenTree:
    tokens: list[int] = []
    parents: list[int] = []
    for _ in range(draw(st.integers(0, 8))):
        parent, token = draw(st.integers(-1, len(tokens) - 1)), draw(st.integers(0, VOCAB - 1))
        if (parent, token) not in zip(parents, tokens, strict=True):
            tokens.append(token)
            parents.append(parent)
    confidence = [draw(st.floats(0, 1, width=32)) for _ in tokens]
    return TokenTree.build(tokens, parents, confidence=confidence, sources=draw(st.integers(0, 3)))


@given(st.lists(point_trees(), max_size=4))
def test_the_merged_tree_holds_every_path_once(trees: list[TokenTree]) -> None:
    tree = merge(trees)
    tree.check(VOCAB, sum(map(len, trees)))
    assert texts(tree) == set().union(*map(texts, trees))
    for parent in (ROOT, *range(len(tree))):
        if sum(len(t) > 0 for t in trees) > 1:
            assert sum(tree.confidence[i] for i in tree.children(parent)) <= 1.0 + 1e-5


@given(st.lists(point_trees(), max_size=4))
def test_every_proposer_is_on_record_and_the_first_one_is_the_source(trees: list[TokenTree]) -> None:
    tree = merge(trees)
    for i in range(len(tree)):
        text = tuple(int(tree.tokens[j]) for j in tree.path(i))
        proposers = [int(t.sources[0]) for t in trees if text in texts(t)]
        assert tree.sources[i] == proposers[0]
        assert set(tree.also.get(i, ())) == set(proposers) - {proposers[0]}


def test_nothing_to_merge() -> None:
    one = TokenTree.chain([1, 2])
    assert merge([]) is EMPTY_TREE
    assert merge([EMPTY_TREE, one, EMPTY_TREE]) is one


def test_shared_nodes_take_the_highest_confidence_and_siblings_are_scaled() -> None:
    tree = merge(
        [TokenTree.chain([1], confidence=[0.5]), TokenTree.build([2, 1], [-1, -1], confidence=[0.6, 0.2], sources=1)]
    )
    assert tree.tokens.tolist() == [1, 2]
    assert tree.confidence.tolist() == pytest.approx([0.5 / 1.1, 0.6 / 1.1])


def test_kinds_are_kept() -> None:
    probe = TokenTree.build([1, 2], [-1, 0], kinds=[PROBE, PROBE])
    tree = merge([TokenTree.build([3], [-1]), probe, TokenTree.build([1], [-1])])
    assert tree.tokens.tolist() == [3, 1, 2]
    assert tree.kinds.tolist() == [0, 0, PROBE]


def test_trials_are_concatenated_and_share_nodes() -> None:
    points = TokenTree.build([3, 1], [-1, -1])
    drawn = TokenTree.build([2, 3, 0], [-1, -1, 1], trials={-1: [Trial(0, ROW), Trial(1, ROW, (2,))]}, sources=1)
    again = TokenTree.build([3], [-1], trials={-1: [Trial(0, OTHER)]}, sources=2)
    tree = merge([points, drawn, again])
    tree.check(VOCAB, 4)
    assert tree.tokens.tolist() == [3, 1, 2, 0]
    assert [(t.node, t.drawn, t.removed) for t in tree.trials[ROOT]] == [
        (0, False, ()),
        (1, False, ()),
        (2, True, ()),
        (0, True, (2,)),
        (0, True, ()),
    ]
    assert tree.trials[ROOT][2].row is ROW
    assert list(tree.trials) == [ROOT], "a parent of points alone needs no list"
    assert tree.trials[ROOT][4].order > tree.trials[ROOT][3].order, "later trees were drawn later"


def test_a_second_point_on_a_node_is_no_new_trial() -> None:
    drawn = TokenTree.build([2], [-1], trials={-1: [Trial(0, ROW)]})
    tree = merge([drawn, TokenTree.chain([1]), TokenTree.chain([1])])
    assert [(t.node, t.drawn) for t in tree.trials[ROOT]] == [(0, True), (1, False)]


@pytest.mark.parametrize("seed", range(25))
def test_merged_trees_keep_the_output_distribution(seed: int) -> None:
    """Point and drawn trials of two drafters, sharing parents and nodes: exact by enumeration."""
    assert distribution_error(merged(seed, 3), random_target(seed, 3), 3) < TOLERANCE


def drop_repeats(tree: TokenTree) -> TokenTree:
    """Wrong: a drawn trial whose token is a node already is merged away instead of tried."""
    trials = {}
    for parent, ts in tree.trials.items():
        seen: set[int] = set()
        trials[parent] = tuple(t for t in ts if not (t.node in seen or seen.add(t.node)))
    return tree.replace(trials=trials)


def test_the_distribution_check_catches_merging_drawn_trials_away() -> None:
    assert any(
        distribution_error(lambda c, s=s: drop_repeats(merged(s, 3)(c)), random_target(s, 3), 3) > WRONG
        for s in range(10)
    )


def points_after_a_look(choices: Choices) -> TokenTree:
    """Wrong: the later drafter's points are tried first although they were chosen by looking at the drawn token."""
    row = [0.5, 0.3, 0.2]
    token = choices.choose(row)
    drawn = TokenTree.build([token], [-1], trials={-1: [Trial(0, torch.tensor(row))]})
    points = TokenTree.chain([(token + 1) % 3])
    return merge([points, drawn])


def test_the_distribution_check_catches_trees_merged_in_the_wrong_order() -> None:
    assert any(distribution_error(points_after_a_look, random_target(seed, 3), 2) > WRONG for seed in range(5))


@given(point_trees(), st.data())
def test_prune_keeps_what_it_is_told(tree: TokenTree, data: st.DataObject) -> None:
    leaves_cut = data.draw(st.sets(st.integers(0, max(len(tree) - 1, 0))))
    keep = [i for i in range(len(tree)) if not leaves_cut & set(tree.path(i))]
    small = prune(tree, keep)
    small.check(VOCAB, len(keep))
    assert texts(small) == {tuple(int(tree.tokens[j]) for j in tree.path(i)) for i in keep}
    assert small.confidence.tolist() == tree.confidence[keep].tolist()
    as_mask = np.zeros(len(tree), bool)
    as_mask[keep] = True
    assert texts(prune(tree, as_mask)) == texts(small)


def test_prune_rejects_orphans() -> None:
    with pytest.raises(DrafterError, match="without its parent"):
        prune(TokenTree.chain([1, 2]), [1])


@pytest.mark.parametrize("seed", range(10))
def test_prunes_keep_their_trials(seed: int) -> None:
    tree = RandomDrafter(seed, 3, depth=3, draws=6)(Choices([]))
    first_level = [i for i in range(len(tree)) if tree.depths[i] == 1]
    small = prune(tree, first_level)
    small.check_structure()
    assert [(t.drawn, t.removed) for t in small.trials_of(ROOT)] == [(t.drawn, t.removed) for t in tree.trials_of(ROOT)]
