"""Which differences are allowed under which claim, with and without a seed's noise."""

from __future__ import annotations

import pytest
from toys import ToyRunner

from paceline.verify import APPROXIMATE, IN_DISTRIBUTION, UP_TO_NEAR_TIES, Pair, compare_pairs
from paceline.verify.tokens import BIT_EQUAL, difference

PROMPT = [1, 2, 3]
RUNNER = ToyRunner(11, seed=3)
RIGHT = RUNNER.greedy(PROMPT, 6)
WRONG = [*RIGHT[:3], (RIGHT[3] + 1) % 11, *RIGHT[4:]]


def pairs(other: list[int], repeats: int = 2) -> list[Pair]:
    return [Pair("p", 0, repeat, PROMPT, RIGHT, other) for repeat in range(repeats)]


@pytest.mark.parametrize(
    ("claimed", "other", "units", "allowed", "counts"),
    [
        (UP_TO_NEAR_TIES, RIGHT, 2.0, True, (2, 2, 0, 0)),
        (UP_TO_NEAR_TIES, WRONG, 2.0, False, (2, 0, 0, 2)),
        (UP_TO_NEAR_TIES, RIGHT[:4], 2.0, False, (2, 0, 0, 2)),
        (UP_TO_NEAR_TIES, WRONG, 1e9, True, (2, 0, 2, 0)),
        (BIT_EQUAL, WRONG, 1e9, False, (2, 0, 2, 0)),
        (APPROXIMATE, WRONG, 2.0, True, (2, 0, 0, 2)),
        (IN_DISTRIBUTION, WRONG, 2.0, True, (0, 0, 0, 0)),
    ],
)
def test_claims(claimed: str, other: list[int], units: float, allowed: bool, counts: tuple[int, ...]) -> None:
    found = compare_pairs(RUNNER, pairs(other), claimed, 0.0, units)
    assert found.allowed is allowed
    assert (found.compared, found.identical, found.near_ties, found.different) == counts
    assert (found.reason is None) is allowed
    if not allowed and len(other) == 6:
        assert "token 3" in str(found.reason)


def test_above_0_the_seeds_noise_decides_what_is_near() -> None:
    one = Pair("p", 0, 0, PROMPT, RIGHT, WRONG, seed=5)
    found = difference(RUNNER, one, 1.0)
    assert found is not None
    assert found.position == 3
    other = difference(RUNNER, Pair("p", 0, 0, PROMPT, RIGHT, WRONG, seed=6), 1.0)
    assert other is not None
    assert found.gap != other.gap
