"""The quick way to a chain gives the tree of the checked one."""

from __future__ import annotations

from dataclasses import FrozenInstanceError

import numpy as np
import pytest
import torch

from paceline.drafters.common import chain_tree
from paceline.drafters.common.chains import chain_of, tree_of
from paceline.tree import COLUMNS, EMPTY_TREE, TokenTree, Trial


@pytest.mark.parametrize("length", [1, 2, 7])
def test_all_columns_are_those_of_the_checked_chain(length: int) -> None:
    tokens, confidence = [5 + i for i in range(length)], [1.0 / (i + 1) for i in range(length)]
    quick, checked = chain_tree(tokens, confidence, 3), TokenTree.chain(tokens, confidence=confidence, source=3)
    for column in COLUMNS:
        a, b = getattr(quick, column), getattr(checked, column)
        assert a.dtype == b.dtype
        assert np.array_equal(a, b)
        assert np.array_equal(b, getattr(chain_of(quick.tokens, quick.confidence, 3), column))
    quick.check(100, length)
    assert quick.is_chain


def test_chances_above_one_by_rounding_are_cut_and_shared_columns_cannot_be_written() -> None:
    tree = chain_tree([1, 2], [1.0000001, 0.5], 0)
    assert tree.confidence.tolist() == [1.0, 0.5]
    with pytest.raises(ValueError, match="read-only"):
        tree.parents[0] = 1


def test_a_quick_chain_is_as_frozen_as_any_tree() -> None:
    tree, checked = chain_tree([1, 2], [0.9, 0.5], 0), TokenTree.chain([1, 2])
    assert type(tree) is TokenTree
    for one in (tree, checked):
        assert dict(one.trials) == dict(one.also) == {}
        with pytest.raises(FrozenInstanceError):
            one.tokens = one.kinds  # type: ignore[misc]
    assert tree.replace(tokens=tree.tokens + 1).tokens.tolist() == [2, 3]


def test_a_drawn_token_is_tried_in_its_row_and_a_point_is_not() -> None:
    row = torch.tensor([0.5, 0.5, 0.0])
    tree = chain_tree([1, 0, 1], [0.5, 0.6, 0.5], 0, [row, None, row])
    assert dict(tree.trials) == {-1: (Trial(0, row),), 1: (Trial(2, row),)}
    tree.check(3, 3)
    assert dict(chain_tree([1], [0.5], 0, [None]).trials) == {}
    assert chain_tree([], [], 0) is chain_tree([], [], 0, []) is EMPTY_TREE


@pytest.mark.parametrize("parents", [[], [-1], [-1, 0, 1], [-1, -1, 1], [-1, 0, 0, 2]])
def test_trees_of_columns_are_those_of_the_checked_build(parents: list[int]) -> None:
    tokens, chances = np.arange(5, 5 + len(parents), dtype=np.int32), np.full(len(parents), 0.25, np.float32)
    checked = TokenTree.build(tokens, parents, confidence=chances, sources=3)
    quick = tree_of(np.stack([tokens, np.array(parents, np.int32), checked.depths], 1), chances, 3)
    for column in COLUMNS:
        a, b = getattr(quick, column), getattr(checked, column)
        assert a.dtype == b.dtype
        assert np.array_equal(a, b)
    quick.check(100, len(parents))
