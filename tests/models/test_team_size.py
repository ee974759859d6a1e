"""Passes run on fewer threads while other programs hold the cores, and on all again afterwards."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from paceline.models.cpu import threads

Seconds = Callable[[int], float]


class Machine:
    """Runs passes of so many seconds by threads, with some noise."""

    def __init__(self, count: int) -> None:
        self.time, self.random = 0.0, random.Random(0)
        self.size = threads.TeamSize(count, clock=lambda: self.time)

    def run(self, passes: int, seconds: Seconds) -> list[int]:
        """On how many threads each of them ran."""
        used = []
        for i in range(passes):
            used.append(self.size.now)
            took = seconds(self.size.now) * self.random.uniform(0.95, 1.1) * (1 + i % 3)
            self.time += took
            self.size.took((1 + i % 3, "rows"), took)
        return used


def quiet(threads: int) -> float:
    return 0.02 / threads


def busy(threads: int) -> float:
    """All threads wait for the one that has lost its core."""
    return 0.03 if threads == 1 else 0.08


def a_little_busy(threads: int) -> float:
    return 0.018 if threads == 2 else 0.03


def test_a_quiet_machine_uses_all_threads() -> None:
    machine = Machine(2)
    assert set(machine.run(2000, quiet)) == {2}


def test_a_busy_machine_uses_one_thread_and_a_quiet_one_all_again() -> None:
    machine = Machine(2)
    machine.run(50, quiet)
    begun, used = machine.run(20, busy), machine.run(1000, busy)
    assert begun[-1] == 1
    assert used.count(1) > 0.97 * len(used)
    machine.run(20, quiet)
    assert set(machine.run(500, quiet)) == {2}


def test_fewer_threads_are_left_again_where_they_are_slower() -> None:
    machine = Machine(2)
    machine.run(50, quiet)
    used = machine.run(1000, a_little_busy)
    assert used.count(2) > 0.97 * len(used)
    assert 1 in used


@pytest.mark.parametrize("best", [4, 2, 1])
def test_the_number_is_halved_as_far_as_it_helps(best: int) -> None:
    machine = Machine(8)
    machine.run(50, quiet)

    def crowded(threads: int) -> float:
        return 0.04 / threads if threads <= best else 0.03 * threads

    machine.run(500, crowded)
    used = machine.run(2000, crowded)
    assert used.count(best) > 0.9 * len(used)


def test_one_slow_pass_changes_nothing() -> None:
    machine = Machine(2)
    machine.run(50, quiet)
    machine.size.took((1, "rows"), 3.0)
    assert set(machine.run(200, quiet)) == {2}
