"""Kept blocks are found by their whole text and by nothing else, belong to one tenant, and go in the order of their
last use.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.models.state.arena import PrefixIndex, pieces_of
from paceline.models.state.block_pool import BlockPool
from paceline.models.state.window_slots import BLOCK


def text(*letters: int) -> list[bytes]:
    """Blocks that hold one token each, sixteen times."""
    return pieces_of([letter for letter in letters for _ in range(BLOCK)])


class Kept:
    """An index with a pool; blocks are made up as they are needed."""

    def __init__(self, size: int = 200) -> None:
        self.pool = BlockPool(size, reserved=1)
        self.index = PrefixIndex(self.pool)

    def add(self, letters: Sequence[int], tenant: str = "default") -> list[int]:
        """Add a text whose blocks a sequence holds, which then ends."""
        start = self.pool.find(len(letters))
        assert start is not None
        blocks = list(range(start, start + len(letters)))
        self.pool.add_reference(blocks)
        self.index.add(tenant, text(*letters), blocks)
        self.pool.drop(blocks)
        return blocks


def test_pieces_are_the_full_blocks() -> None:
    assert pieces_of(range(15)) == []
    assert len(pieces_of(range(40))) == 2
    assert pieces_of(range(40)) == pieces_of(range(32))
    assert pieces_of([1] * 16) != pieces_of([1] * 15 + [2])


def test_the_longest_beginning_is_found() -> None:
    kept = Kept()
    first = kept.add([1, 2, 3])
    second = kept.add([1, 2, 4, 5])
    assert kept.index.find("default", text(1, 2, 3, 9)) == first
    assert kept.index.find("default", text(1, 2, 4, 5)) == [*first[:2], *second[2:]]
    assert kept.index.find("default", text(2, 3)) == []
    assert len(kept.index) == 5
    assert kept.pool.free == 200 - 1 - 5


def test_the_same_block_after_another_text_is_another_block() -> None:
    kept = Kept()
    first, second = kept.add([1, 7]), kept.add([2, 7])
    assert kept.index.find("default", text(1, 7)) == first
    assert kept.index.find("default", text(2, 7)) == second


def test_tenants_share_nothing() -> None:
    kept = Kept()
    own = kept.add([1, 2], tenant="a")
    assert kept.index.find("b", text(1, 2)) == []
    assert kept.index.known("a", text(1, 2)) == 2
    assert kept.index.find("a", text(1, 2)) == own


class Colliding(bytes):
    """Bytes whose hashes are all equal."""

    __slots__ = ()

    def __hash__(self) -> int:
        return 1


class Confused(Colliding):
    """And which are taken for equal where only hashes are compared."""

    __slots__ = ()
    __hash__ = Colliding.__hash__

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Confused)


@pytest.mark.parametrize(("kind", "right"), [(Colliding, True), (Confused, False)])
def test_equal_hashes_do_not_give_the_wrong_block(kind: type[bytes], right: bool) -> None:
    kept = Kept()
    for letter in (1, 2, 3):
        kept.index.add("default", [kind(piece) for piece in text(letter)], [letter])
    found = [kept.index.find("default", [kind(piece) for piece in text(letter)]) for letter in (1, 2, 3, 4)]
    assert (found == [[1], [2], [3], []]) == right


def test_the_least_recently_used_goes_first_and_the_end_before_the_beginning() -> None:
    kept = Kept()
    kept.add([1, 2, 3])
    kept.add([4, 5])
    kept.index.find("default", text(1, 2))
    kept.index.evict(1)
    assert kept.index.known("default", text(1, 2, 3)) == 2
    kept.index.evict(2)
    assert kept.index.known("default", text(4)) == 0
    assert kept.index.known("default", text(1, 2)) == 2
    kept.index.clear()
    assert kept.pool.free == 199


def test_no_more_than_asked_for_are_kept() -> None:
    kept = Kept()
    kept.index.most = 4
    kept.add([1, 2, 3])
    kept.add([4, 5, 6])
    assert len(kept.index) == 4
    assert kept.index.known("default", text(4, 5, 6)) == 3
    assert kept.index.known("default", text(1, 2, 3)) == 1


def test_blocks_in_use_do_not_count_as_won() -> None:
    kept = Kept()
    kept.pool.add_reference([5])
    kept.index.add("default", text(1), [5])
    kept.add([2])
    kept.index.evict(1)
    assert len(kept.index) == 0
    assert kept.pool.counts[5] == 1


def test_counts_can_be_made_anew() -> None:
    kept = Kept()
    kept.add([1, 2, 3])
    before = kept.pool.counts.copy()
    kept.pool.begin()
    kept.pool.counts[:] = 9
    kept.pool.recount()
    assert np.array_equal(kept.pool.counts, before)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=5), st.sampled_from("ab"), st.integers(0, 3)),
        max_size=25,
    )
)
def test_any_history_leaves_right_blocks_and_counts(history: list[tuple[list[int], str, int]]) -> None:
    kept = Kept()
    meaning: dict[int, tuple[str, tuple[int, ...]]] = {}
    for letters, tenant, evicted in history:
        found = kept.index.find(tenant, text(*letters))
        assert [meaning[block] for block in found] == [(tenant, tuple(letters[: i + 1])) for i in range(len(found))]
        for i, block in enumerate(kept.add(letters, tenant)):
            if kept.pool.counts[block]:
                meaning[block] = (tenant, tuple(letters[: i + 1]))
        assert kept.index.known(tenant, text(*letters)) == len(letters)
        kept.index.evict(evicted)
        held = np.bincount([0, *kept.index.blocks], minlength=200)
        assert np.array_equal(held, kept.pool.counts)
