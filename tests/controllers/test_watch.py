"""The guard of one drafter."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from paceline.controllers.watch import FIRST_INTERVAL, NEW_SEQUENCE_INTERVAL, SHARE, Mode, Watch


def feed(watch: Watch, mean: float, steps: int, seed: int = 0) -> list[Mode]:
    """Let the plan always want the drafter, whose measured net gain has this mean."""
    rng, modes = np.random.default_rng(seed), []
    for _ in range(steps):
        modes.append(watch.mode(True, False, False))
        if modes[-1] is not Mode.SKIP:
            watch.record(mean + 0.5 * float(rng.standard_normal()), modes[-1], 4, 1)
    return modes


def test_a_drafter_that_pays_stays() -> None:
    assert set(feed(Watch(), 0.5, 300)) == {Mode.ASK}


def test_a_drafter_whose_measured_gain_is_negative_sleeps_whatever_the_plan_says() -> None:
    modes = feed(Watch(), -1.0, 1000)
    assert modes[:5] == [Mode.ASK] * 5
    assert Mode.ASK not in modes[30:]
    assert modes[200:].count(Mode.EXPLORE) < 30


def test_tries_come_at_growing_intervals() -> None:
    modes = feed(Watch(), -2.0, 1000)
    tries = [step for step, mode in enumerate(modes) if mode is Mode.EXPLORE]
    gaps = np.diff(tries)
    assert gaps[0] <= 2 * FIRST_INTERVAL
    assert all(later >= earlier for earlier, later in pairwise(gaps))
    assert gaps[-1] == 64


def test_it_wakes_when_tries_pay_again() -> None:
    watch = Watch()
    feed(watch, -2.0, 500)
    assert watch.asleep
    modes = feed(watch, 2.0, 100)
    assert modes[-1] is Mode.ASK
    assert modes.index(Mode.ASK) <= 70


def test_the_plan_alone_puts_it_to_sleep_and_wakes_it() -> None:
    watch = Watch()
    assert watch.mode(False, False, False) is Mode.SKIP
    assert watch.asleep
    assert watch.mode(True, False, False) is Mode.ASK


def test_a_special_step_does_not_put_it_to_sleep() -> None:
    watch = Watch()
    assert watch.mode(False, False, True) is Mode.SKIP
    assert not watch.asleep


def test_what_costs_nothing_is_asked_while_it_sleeps() -> None:
    assert Watch().mode(False, True, False) is Mode.LISTEN


def test_a_new_sequence_inherits_the_finding_but_looks_soon() -> None:
    watch = Watch()
    feed(watch, -2.0, 1000)
    other = watch.for_new_sequence()
    assert other.asleep
    assert other.wait == NEW_SEQUENCE_INTERVAL


def test_trials_that_lose_much_take_no_more_than_their_share() -> None:
    watch = Watch()
    watch.sleep()
    for _ in range(12):
        watch.after_trial(-1.0, 28)
    assert 28 / (28 + watch.interval) <= SHARE
