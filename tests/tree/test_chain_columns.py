"""Shared columns of chains: nobody can write to them, and what they vouch for is right."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from paceline.errors import DrafterError
from paceline.tree import TokenTree, chain_columns, chain_sources, first_nodes, is_sound_chain

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
        {"slots": np.zeros(4, np.int32)},
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
