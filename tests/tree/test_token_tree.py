"""The token tree: construction, shared columns of chains, checks, masks, paths and encodings."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import DrafterError
from paceline.tree import (
    COLUMNS,
    EMPTY_TREE,
    PROBE,
    ROOT,
    TokenTree,
    Trial,
    chain_columns,
    chain_sources,
    first_nodes,
    is_sound_chain,
)

VOCAB = 5


@st.composite
def trees(draw: st.DrawFn, most: int = 12) -> TokenTree:
    """Any tree of points and probes over a small vocabulary."""
    tokens: list[int] = []
    parents: list[int] = []
    for _ in range(draw(st.integers(0, most))):
        parent, token = draw(st.integers(-1, len(tokens) - 1)), draw(st.integers(0, VOCAB - 1))
        if (parent, token) not in zip(parents, tokens, strict=True):
            tokens.append(token)
            parents.append(parent)
    kinds = [draw(st.sampled_from([0, 0, 0, PROBE])) for _ in tokens]
    return TokenTree.build(tokens, parents, kinds=kinds)


def naive_path(tree: TokenTree, node: int) -> list[int]:
    return [] if node == ROOT else [*naive_path(tree, int(tree.parents[node])), node]


@given(trees())
def test_paths_depths_mask_and_reach_follow_their_definitions(tree: TokenTree) -> None:
    mask = tree.ancestor_mask()
    assert mask.shape == (len(tree), len(tree))
    for i in range(len(tree)):
        path = naive_path(tree, i)
        assert list(tree.path(i)) == path
        assert tree.depths[i] == len(path)
        assert set(np.flatnonzero(mask[i])) == set(path)
        assert tree.reach()[i] == pytest.approx(np.prod([tree.confidence[j] for j in path]), rel=1e-5)
    assert tree.max_depth == max(tree.depths, default=0)
    assert set(tree.leaves()) == {i for i in range(len(tree)) if i not in set(tree.parents.tolist())}
    assert tree.is_chain == all(int(p) == i - 1 for i, p in enumerate(tree.parents))


@given(trees())
def test_children_are_the_candidates_in_node_order(tree: TokenTree) -> None:
    for parent in (ROOT, *range(len(tree))):
        expected = [i for i in range(len(tree)) if tree.parents[i] == parent and tree.kinds[i] != PROBE]
        assert tree.children(parent) == expected
        assert [trial.node for trial in tree.trials_of(parent)] == expected
        assert sum(tree.confidence[i] for i in expected) <= 1.0 + 1e-6


@settings(max_examples=30)
@given(st.lists(st.integers(0, VOCAB - 1), max_size=6))
def test_a_chain_is_what_build_makes_of_it(tokens: list[int]) -> None:
    chain, built = TokenTree.chain(tokens, source=3), TokenTree.build(tokens, range(-1, len(tokens) - 1), sources=3)
    assert chain.is_chain
    for name in COLUMNS:
        column, other = getattr(chain, name), getattr(built, name)
        assert column.dtype == other.dtype
        assert np.array_equal(column, other)


def test_an_empty_chain_is_the_empty_tree() -> None:
    assert TokenTree.chain([]) is EMPTY_TREE
    assert (len(EMPTY_TREE), EMPTY_TREE.max_depth, EMPTY_TREE.leaves(), EMPTY_TREE.is_chain) == (0, 0, [], True)


ROW = torch.full((VOCAB,), 1.0 / VOCAB)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: TokenTree.build([1, 1], [-1, -1]), "duplicates"),
        (lambda: TokenTree.build([1, 2], [1, -1]), "parents must come first"),
        (lambda: TokenTree.build([1], [-2]), "parents must come first"),
        (lambda: TokenTree.build([1, 2], [-1]), "one parent per token"),
        (lambda: TokenTree.build([1], [-1], confidence=[1.5]), "between 0 and 1"),
        (lambda: TokenTree.build([1], [-1], confidence=[float("nan")]), "between 0 and 1"),
        (lambda: TokenTree.chain([1, 2], confidence=[0.5, -0.1]), "between 0 and 1"),
        (lambda: TokenTree.chain([1, 2], confidence=[0.5]), "confidence"),
        (lambda: TokenTree.build([1, 2], [-1, -1], trials={-1: [Trial(0, ROW)]}), "trials at node -1"),
        (lambda: TokenTree.build([1, 2], [-1, 0], trials={-1: [Trial(1, ROW)]}), "trials at node -1"),
    ],
)
def test_broken_trees_are_rejected(make, text: str) -> None:
    with pytest.raises(DrafterError, match=text):
        make()


def unchecked(**columns: object) -> TokenTree:
    return TokenTree.build([1, 2], [-1, 0]).replace(**columns)


@pytest.mark.parametrize(
    ("tree", "text"),
    [
        (TokenTree.chain([1, 2, 3]), "exceeds the budget of 2"),
        (TokenTree.chain([VOCAB]), "must lie in 0..4"),
        (TokenTree.chain([-1]), "must lie in 0..4"),
        (unchecked(parents=np.array([1, 0], np.int32)), "parents must come before"),
        (unchecked(parents=np.array([-1, 7], np.int32)), "parents must come before"),
        (unchecked(parents=np.array([-5, 0], np.int32)), "parents must come before"),
        (unchecked(depths=np.array([1, 1], np.int32)), "depths"),
        (unchecked(sources=np.array([1], np.int32)), "sources"),
        (
            unchecked(parents=np.array([-1, -1], np.int32), depths=np.array([1, 1]), tokens=np.array([1, 1])),
            "duplicates",
        ),
        (TokenTree.build([1], [-1], trials={-1: [Trial(0, torch.ones(VOCAB + 1))]}), "row of"),
    ],
)
def test_the_boundary_check_rejects(tree: TokenTree, text: str) -> None:
    with pytest.raises(DrafterError, match=text):
        tree.check(VOCAB, 2)


@given(trees())
def test_the_boundary_check_lets_good_trees_pass(tree: TokenTree) -> None:
    tree.check(VOCAB, 12)


def test_a_read_only_tree_is_the_same_tree() -> None:
    tree = TokenTree.build([5, 6, 7], [-1, 0, 0], confidence=[0.5, 0.25, 0.125])
    shown = tree.read_only()
    for name in COLUMNS:
        assert np.array_equal(getattr(shown, name), getattr(tree, name))
        with pytest.raises(ValueError, match="read-only"):
            getattr(shown, name)[0] = 1
    tree.tokens[0] = 9  # its owner may go on writing


CHAIN = TokenTree.chain([5, 6, 7], confidence=[0.9, 0.8, 0.7], source=2)


def test_columns_are_shared_by_length_and_cannot_be_made_writable() -> None:
    assert CHAIN.parents is chain_columns(3).parents
    assert CHAIN.sources is chain_sources(3, 2)
    for column in (*chain_columns(3), chain_sources(3, 2)):
        with pytest.raises(ValueError, match="WRITEABLE"):
            column.flags.writeable = True


def test_a_chain_of_shared_columns_is_sound_and_a_built_one_is_left_to_the_full_check() -> None:
    assert is_sound_chain(CHAIN, 8)
    assert is_sound_chain(CHAIN, 8, 2)
    assert not is_sound_chain(CHAIN, 8, 1)
    assert first_nodes(3) == CHAIN.path(2)
    built = TokenTree.build([5, 6, 7], [-1, 0, 1])
    assert not is_sound_chain(built, 8)
    built.check(8, 3)
    assert built.is_chain
    assert built.max_depth == CHAIN.max_depth == 3


@pytest.mark.parametrize(
    "columns",
    [
        {"tokens": np.array([5, 6, 8], np.int32)},
        {"tokens": np.array([5, -1, 7], np.int32)},
        {"tokens": np.array([5.0, 6.0, 7.0])},
        {"tokens": np.array([[5], [6], [7]], np.int32)},
        {"confidence": np.array([0.9, np.nan, 0.7], np.float32)},
        {"confidence": np.array([0.9, 1.1, 0.7], np.float32)},
        {"confidence": np.array([0.9, 0.8], np.float32)},
        {"sources": np.zeros(2, np.int32)},
        {"depths": np.array([1, 2, 4], np.int32)},
        {"parents": np.array([-1, 0, 2], np.int32)},
    ],
)
def test_what_is_wrong_beside_shared_columns_is_still_found(columns: dict[str, Any]) -> None:
    wrong = CHAIN.replace(**columns)
    assert not is_sound_chain(wrong, 8)
    with pytest.raises((DrafterError, TypeError)):
        wrong.check(8, 3)


def test_the_chance_of_a_chain_has_the_bits_of_the_trees() -> None:
    chances = np.random.default_rng(0).random(20).astype(np.float32)
    chain = TokenTree.chain(list(range(20)), confidence=chances.tolist())
    branched = TokenTree.build([*range(20), 99], [-1, *range(19), -1], confidence=[*chances.tolist(), 0.0])
    assert not branched.is_chain
    assert np.array_equal(chain.reach(), branched.reach()[:20])
    assert not np.array_equal(chain.reach(), chances)
