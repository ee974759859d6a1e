"""LocalLeap: a lower bar near anchors."""

from itertools import pairwise

import numpy as np
import pytest

from paceline.errors import ConfigError
from tests.diffusion.decoding import fill, same
from tests.diffusion.toys import Independent

CARD = [0.95, 0.8, 0.8, 0.6, 0.8, 0.8, 0.8, 0.8]


def first_round(confidence: list[float], **options: float) -> set[int]:
    outcome = fill(Independent(confidence), {"method": "local_leap", **options}, len(confidence), ())
    return set(outcome.trajectory.rounds[0].slots.tolist())


def test_the_trace_of_the_card() -> None:
    outcome = fill(Independent(CARD), "local_leap", 8, ())
    rounds = [sorted(r.slots.tolist()) for r in outcome.trajectory.rounds]
    assert rounds[:2] == [[0, 1, 2, 4], [5]]


@pytest.mark.parametrize("options", [{"relaxed_threshold": 0.8}, {"anchor_radius": 0}])
def test_no_relaxation_is_the_threshold_rule(options: dict[str, float]) -> None:
    toy = Independent([0.85, 0.9, 0.3, 0.79, 0.6, 0.95])
    ours = fill(toy, {"method": "local_leap", "confidence_threshold": 0.8, **options}, 6, ())
    theirs = fill(toy, {"method": "threshold", "confidence_threshold": 0.8}, 6, ())
    assert same(ours, theirs)
    assert not same(fill(toy, {"method": "local_leap", "confidence_threshold": 0.8}, 6, ()), theirs)


def test_more_radius_and_a_lower_bar_write_more() -> None:
    confidence = np.random.default_rng(3).uniform(0.5, 1, 16).tolist()
    by_radius = [first_round(confidence, anchor_radius=r) for r in range(6)]
    by_bar = [first_round(confidence, relaxed_threshold=t) for t in (0.9, 0.8, 0.7, 0.6, 0.5)]
    for sets in (by_radius, by_bar):
        assert all(a <= b for a, b in pairwise(sets))
        assert sets[0] < sets[-1]


def test_a_neighbourhood_ends_with_its_block() -> None:
    outcome = fill(Independent(CARD), {"method": "local_leap", "block_length": 4}, 8, ())
    assert sorted(outcome.trajectory.rounds[0].slots.tolist()) == [0, 1, 2]


def test_wrong_options_are_one_line() -> None:
    with pytest.raises(ConfigError, match="relaxed_threshold must be at most confidence_threshold"):
        fill(Independent(CARD), {"method": "local_leap", "relaxed_threshold": 0.95}, 8, ())
