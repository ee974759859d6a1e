"""Bits to rounds, AR-ness of orders."""

from __future__ import annotations

from math import log

import numpy as np
import pytest

from paceline.diffusion import BitsToRounds, Round, global_ar, local_ar, order_of
from paceline.diffusion.trajectory import Trajectory
from paceline.errors import ConfigError
from tests.diffusion.decoding import fill
from tests.diffusion.toys import Independent, Joint, permutation


@pytest.mark.parametrize("k", [1, 2, 5])
def test_left_to_right_is_all_one(k: int) -> None:
    order = np.arange(3, 23)
    assert local_ar(order, k) == global_ar(order, k) == 1.0


def test_right_to_left_is_local_never_and_global_k_in_n() -> None:
    order = np.arange(20)[::-1]
    assert local_ar(order) == 0.0
    for k in (1, 4, 20):
        assert global_ar(order, k) == pytest.approx(k / 20)


def test_random_orders_give_the_harmonic_number() -> None:
    n, runs = 12, 800
    rng = np.random.default_rng(0)
    orders = [rng.permutation(n) for _ in range(runs)]
    globals_, locals_ = [global_ar(order) for order in orders], [local_ar(order) for order in orders]
    harmonic = sum(1 / m for m in range(1, n + 1)) / n
    for values, expected in ((globals_, harmonic), (locals_, 1 / n)):
        error = np.std(values) / runs**0.5
        assert abs(np.mean(values) - expected) < 4 * error
        assert abs(np.mean(values) - 1.5 * expected) > 4 * error


def test_runs_are_by_rank_among_written_slots() -> None:
    assert local_ar(np.array([0, 3, 7])) == 1.0
    assert local_ar(np.array([0, 1, 3, 2])) == pytest.approx(1 / 3)
    assert local_ar(np.array([0, 1, 3, 2]), 2) == 0.0
    assert global_ar(np.array([0, 1, 3, 2])) == pytest.approx(3 / 4)


def test_methods_in_order_and_out_of_it() -> None:
    toy = Joint(np.random.default_rng(0).dirichlet(np.full(64, 0.3)).reshape((2,) * 6))
    left = order_of(fill(toy, "leftmost", 6, ()).trajectory)
    assert global_ar(left) == local_ar(left) == 1.0
    assert global_ar(order_of(fill(toy, {"method": "random"}, 6, (), seed=3).trajectory)) < 1.0


def test_within_a_round_the_surest_comes_first() -> None:
    outcome = fill(Independent([0.5, 0.9, 0.3, 0.7]), {"method": "leftmost", "denoising_steps": 2}, 4, ())
    assert outcome.trajectory.order.tolist() == order_of(outcome.trajectory).tolist() == [1, 0, 3, 2]


def test_a_bound_is_a_whole_number_of_rounds() -> None:
    measured = BitsToRounds(4, 2.5, 1.0)
    assert [measured.bound(), measured.bound(2.0), measured.bound(2.1), measured.bound(0.0)] == [3, 2, 3, 0]


def test_a_slot_written_twice_counts_where_it_was_written_last() -> None:
    none = np.empty(0, np.int64)

    def wrote(*slots: int) -> Round:
        return Round(np.array(slots), np.zeros(len(slots), np.int64), np.full(len(slots), 0.5), none, none)

    assert order_of(Trajectory([wrote(2, 0), wrote(1), wrote(0)])).tolist() == [2, 1, 0]


@pytest.mark.parametrize("method", ["static", "random", "leftmost", "entropy"])
@pytest.mark.parametrize("seed", range(4))
def test_one_slot_a_round_commits_the_information_of_the_text(method: str, seed: int) -> None:
    """The chain rule: with an exact model, the nats of the rounds sum to -log p of the text, whatever the order."""
    weights = np.random.default_rng(seed).dirichlet(np.full(81, 0.5)).reshape((3,) * 4)
    outcome = fill(Joint(weights), {"method": method, "temperature": 1.0}, 4, (), seed)
    measured = BitsToRounds.of(outcome.trajectory)
    nats = -np.log(weights[tuple(outcome.canvas.tokens)])
    assert measured.nats == pytest.approx(nats, abs=1e-9)
    assert measured.rounds >= measured.bound(nats)


def test_several_slots_a_round_commit_more_than_the_text_holds() -> None:
    measured = BitsToRounds.of(fill(permutation(3), {"method": "static", "denoising_steps": 1}, 3, ()).trajectory)
    assert measured.nats == pytest.approx(3 * log(3))
    assert measured.nats > log(6)


def test_a_threshold_bounds_the_nats_of_a_token() -> None:
    toy = Joint(np.random.default_rng(1).dirichlet(np.full(64, 0.1)).reshape((2,) * 6))
    for round_ in fill(toy, {"method": "threshold", "confidence_threshold": 0.9}, 6, ()).trajectory.rounds:
        assert round_.slots.size == 1 or round_.information <= -log(0.9) * round_.slots.size + 1e-12


def test_nothing_to_measure() -> None:
    assert BitsToRounds.of(Trajectory()) == BitsToRounds(0, 0.0, 0.0)
    assert BitsToRounds(0, 0.0, 0.0).bound() == 0
    with pytest.raises(ConfigError, match=r"k must lie in 1..2"):
        local_ar(np.arange(3), 3)
    with pytest.raises(ConfigError, match="k must be at least 1"):
        global_ar(np.arange(3), 0)
