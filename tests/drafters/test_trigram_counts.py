"""Counts of tri-grams: chances worked out by hand, a proper distribution, bounded memory."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.drafters.diffusion.trigram_counts import CHUNK, SMALLEST, TrigramCounts

TEXT = [1, 2, 3, 1, 2, 3, 1, 2, 4]
LONG = np.random.default_rng(0).integers(0, 30, 5 * CHUNK + 7).tolist()


def counts(text: list[int], vocab_size: int = 8, most: int = 2**18) -> TrigramCounts:
    found = TrigramCounts(most, vocab_size)
    found.learn(text)
    return found


def test_chances_are_those_worked_out_by_hand() -> None:
    one = counts(TEXT)
    three = (2 + 1 / 8) / 10
    after_two = (2 + three) / (3 + 1)
    assert one.chance(-1, -1, 3) == pytest.approx(three)
    assert one.chance(-1, 2, 3) == pytest.approx(after_two)
    assert one.chance(1, 2, 3) == pytest.approx((2 + after_two) / (3 + 1))
    assert one.chance(7, 2, 3) == pytest.approx(after_two)  # an unknown pair says nothing
    assert counts([]).chance(-1, -1, 5) == pytest.approx(1 / 8)


@pytest.mark.parametrize("pair", [(-1, -1), (-1, 2), (1, 2), (3, 1), (5, 5), (2, 4)])
def test_chances_sum_to_one(pair: tuple[int, int]) -> None:
    one = counts(TEXT)
    assert sum(one.chance(*pair, token) for token in range(8)) == pytest.approx(1.0)


def entries(one: TrigramCounts) -> dict[int, int]:
    arrays = one.to_arrays()
    return dict(zip(arrays["hashes"].tolist(), arrays["counts"].tolist(), strict=True))


@pytest.mark.parametrize("cuts", [[3], [1, 2], [CHUNK, CHUNK + 1, 4 * CHUNK]])
def test_a_text_may_come_in_pieces(cuts: list[int]) -> None:
    whole, pieces = counts(LONG, 30), TrigramCounts(2**18, 30)
    for first, stop in zip([0, *cuts], [*cuts, len(LONG)], strict=True):
        pieces.learn(LONG[:stop], first)
    assert entries(whole) == entries(pieces)
    assert entries(counts(LONG[:-1], 30)) != entries(whole)
    assert whole.used == len(entries(whole))


def test_a_full_table_halves_and_stays_within_its_size() -> None:
    rng = np.random.default_rng(1)
    one = TrigramCounts(SMALLEST, 50_000)
    for _ in range(12):
        one.learn([7, 8, 9] * 20)
        one.learn(rng.integers(0, 50_000, 1000).tolist())
        assert len(one.slots[0]) == SMALLEST
        assert one.used == int((one.slots[0] != 0).sum()) <= SMALLEST // 2
    assert one.chance(7, 8, 9) > 0.7
    assert sum(one.chance(7, 8, token) for token in range(50_000)) <= 1 + 1e-6


def test_kept_and_read_again() -> None:
    one, other = counts(LONG, 30), TrigramCounts(2**18, 30)
    other.read_arrays(one.to_arrays())
    assert entries(one) == entries(other)
    assert other.chance(*LONG[:3]) == one.chance(*LONG[:3])
    small = TrigramCounts(SMALLEST, 30)
    small.read_arrays(one.to_arrays())
    assert small.used == SMALLEST // 4 < one.used


FINE = {"hashes": np.array([1, 3]), "counts": np.array([1, 2], np.int32)}


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"counts": FINE["counts"]},
        FINE | {"hashes": np.array([1, 3], np.int32)},
        FINE | {"hashes": np.array([1, 2])},
        FINE | {"hashes": np.array([1, 1])},
        FINE | {"counts": np.array([1, 0], np.int32)},
        FINE | {"counts": np.ones(3, np.int32)},
    ],
)
def test_what_cannot_be_counts_is_rejected(given: dict[str, np.ndarray]) -> None:
    TrigramCounts(SMALLEST, 9).read_arrays(FINE)
    with pytest.raises(ValueError, match=r"hashes|counts"):
        TrigramCounts(SMALLEST, 9).read_arrays(given)
