"""Successive halving on a simulated world: the best arm is known, noise is heavy, time is a sum; nothing is
measured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from paceline.tune import Interval, search
from paceline.tune.search import LEAST_ARMS, MIN_PAIRS, Gain, Race, RejectedError, confirm, interval, race

GAINS = (0.6, 1.5, 0.9, 1.0, 1.1, 0.8, 1.2, 0.95, 1.05, 0.7, 1.15, 1.0)
BEST = 1
ITEMS = range(6)


class World:
    """Arms of known gain; a pull costs 1 second, is off by 15 % and in one of twenty cases by a factor of 4."""

    def __init__(self, gains: Sequence[float], seed: int, noise: float = 0.15) -> None:
        self.gains, self.noise, self.rng, self.pulls = gains, noise, np.random.default_rng(seed), 0
        self.of_item = np.exp(0.1 * self.rng.standard_normal((len(gains), len(ITEMS))))

    def pull(self, arm: int, item: int) -> float:
        self.pulls += 1
        outlier = 4.0 ** self.rng.choice([-1, 1]) if self.rng.random() < 0.05 else 1.0
        noise = np.exp(self.noise * self.rng.standard_normal()) * outlier
        return float(self.gains[arm] * self.of_item[arm, item] * noise)

    def elapsed(self) -> float:
        return float(self.pulls)

    def race(self, budget: float) -> Race:
        return race(len(self.gains), ITEMS, self.pull, elapsed=self.elapsed, budget=budget)


def found_best(worlds: int, budget: float) -> float:
    return float(np.mean([World(GAINS, seed).race(budget).order[0] == BEST for seed in range(worlds)]))


def test_the_best_arm_is_found() -> None:
    assert found_best(60, budget=200) >= 0.95


def test_halving_that_keeps_the_worse_half_does_not_find_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pull = World.pull
    monkeypatch.setattr(World, "pull", lambda *given: 1.0 / pull(*given))
    assert found_best(60, budget=200) <= 0.05


def test_one_look_at_each_arm_finds_it_less_often() -> None:
    worlds = [World(GAINS, seed) for seed in range(60)]
    once = np.mean([np.argmax([world.pull(arm, 0) for arm in range(len(GAINS))]) == BEST for world in worlds])
    assert once <= 0.7


def test_the_budget_is_kept_and_spent_on_the_better_arms() -> None:
    world = World(GAINS, 3)
    found = world.race(200)
    assert 170 <= world.pulls <= 215
    counts = [len(found.gains[arm]) for arm in found.order]
    assert counts == sorted(counts, reverse=True)
    assert sorted(found.order) == list(range(len(GAINS)))


def test_no_time_at_all_still_looks_at_the_first_arms() -> None:
    world = World(GAINS, 0)
    found = world.race(0)
    assert world.pulls == LEAST_ARMS
    assert sorted(found.order) == list(range(LEAST_ARMS))
    assert found.unseen == list(range(LEAST_ARMS, len(GAINS)))


@pytest.mark.parametrize("seconds", [1.0, 10.0, 40.0])
def test_slow_arms_do_not_pass_the_budget(seconds: float) -> None:
    world = World(GAINS, 0)
    found = race(len(GAINS), ITEMS, world.pull, elapsed=lambda: seconds * world.pulls, budget=100.0)
    assert seconds * world.pulls <= max(100.0, seconds * LEAST_ARMS) + seconds
    assert len(found.unseen) == {1.0: 0, 10.0: 7, 40.0: 9}[seconds]
    assert sorted([*found.order, *found.unseen]) == list(range(len(GAINS)))


def test_a_search_that_never_looks_at_the_clock_passes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "FIRST_LOOKS", float("inf"))
    world = World(GAINS, 0)
    race(len(GAINS), ITEMS, world.pull, elapsed=lambda: 10.0 * world.pulls, budget=100.0)
    assert 10.0 * world.pulls > 110.0


def test_a_rejected_arm_is_out_and_says_why() -> None:
    world = World(GAINS, 0)

    def pull(arm: int, item: int) -> float:
        if arm == BEST:
            raise RejectedError("outputs differ")
        return world.pull(arm, item)

    found = race(len(GAINS), ITEMS, pull, elapsed=world.elapsed, budget=100)
    assert found.rejected == {BEST: "outputs differ"}
    assert BEST not in found.order
    assert found.gains[BEST] == []


@pytest.mark.parametrize("after", [1, 7, 30, 61])
def test_an_interrupt_keeps_the_best_so_far(after: int) -> None:
    world = World(GAINS, 0, noise=0.0)

    def pull(arm: int, item: int) -> float:
        if world.pulls == after:
            raise KeyboardInterrupt
        return world.pull(arm, item)

    found = race(len(GAINS), ITEMS, pull, elapsed=world.elapsed, budget=200)
    assert found.interrupted
    assert sorted(found.order) == list(range(len(GAINS)))
    assert sum(map(len, found.gains)) == after
    if after >= 61:
        assert found.order[0] == BEST


def judged(seed: int, take: Callable[[World, Race], Sequence[Gain]]) -> Interval:
    """16 arms that gain nothing: what the best one is said to gain, by the measurements that `take` takes."""
    world = World((1.0,) * 16, seed)
    world.of_item[:] = 1.0
    found = world.race(120)
    return interval(take(world, found), seed=seed)


def fresh(world: World, found: Race) -> Sequence[Gain]:
    gains, _ = confirm(found.order[0], ITEMS, world.pull, elapsed=world.elapsed, budget=160)
    return gains


def test_where_nothing_gains_fresh_measurements_say_so() -> None:
    found = [judged(seed, fresh) for seed in range(60)]
    assert sum(one.low > 1.0 for one in found) <= 5
    assert abs(np.mean([one.median for one in found]) - 1.0) < 0.02


def test_the_searchs_own_measurements_flatter_the_winner() -> None:
    found = [judged(seed, lambda world, race: race.gains[race.order[0]]) for seed in range(60)]
    assert np.mean([one.median for one in found]) > 1.05


def test_the_interval_holds_the_true_gain() -> None:
    inside = 0
    for seed in range(100):
        world = World((1.3,), seed)
        world.of_item[:] = 1.0
        gains, _ = confirm(0, ITEMS, world.pull, elapsed=world.elapsed, budget=24)
        found = interval(gains, seed=seed)
        inside += found.low <= 1.3 <= found.high
        assert found.low <= found.median <= found.high
        assert (found.pairs, found.items) == (24, 6)
    assert inside >= 90


def test_confirming_measures_a_least_number_and_stops_at_an_interrupt() -> None:
    world = World((1.3,), 0)
    gains, interrupted = confirm(0, ITEMS, world.pull, elapsed=world.elapsed, budget=0)
    assert (len(gains), interrupted) == (MIN_PAIRS, False)

    def pull(arm: int, item: int) -> float:
        if world.pulls == MIN_PAIRS + 3:
            raise KeyboardInterrupt
        return world.pull(arm, item)

    gains, interrupted = confirm(0, ITEMS, pull, elapsed=world.elapsed, budget=100)
    assert (len(gains), interrupted) == (3, True)


def test_an_interval_of_nothing() -> None:
    with pytest.raises(ValueError, match="no measurements"):
        interval([])
