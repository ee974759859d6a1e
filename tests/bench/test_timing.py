"""The timing loop: turns in an order drawn anew, seconds where they belong, and outputs that differ are not timed."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.bench import DifferentOutputError, time_in_turn, turns


def test_every_setting_has_one_turn_on_every_item_of_every_repeat() -> None:
    made = list(turns(3, 4, 5))
    assert [(repeat, item) for repeat, item, _ in made] == [(r, i) for r in range(5) for i in range(4)]
    assert all(sorted(order) == [0, 1, 2] for *_, order in made)
    assert len({tuple(order) for *_, order in made}) > 3, "the order is drawn anew"


def slower_by(now: list[float], step: float) -> Any:
    """A setting whose n-th item takes n steps."""

    def run(item: int) -> str:
        now[0] += step * item
        return f"text {item}"

    return run


def test_seconds_stand_by_item_and_repeat() -> None:
    now, told = [0.0], list[tuple[int, int]]()
    runs = {"one": slower_by(now, 1.0), "two": slower_by(now, 2.0)}
    found = time_in_turn(runs, [1, 5], 3, progress=lambda *done: told.append(done), clock=lambda: now[0])
    assert found["one"].tolist() == [[1.0] * 3, [5.0] * 3]
    assert found["two"].tolist() == [[2.0] * 3, [10.0] * 3]
    assert told == [(number, 6) for number in range(1, 7)]


@pytest.mark.parametrize("wrong", [False, True])
def test_outputs_that_differ_are_not_timed(wrong: bool) -> None:
    def differs(item: int, base: str, other: str) -> str | None:
        return None if base == other else f"{other!r} on {item}"

    runs = {"plain": str, "fast": lambda item: "9" if wrong and item == 2 else str(item)}
    if not wrong:
        assert time_in_turn(runs, [1, 2], 2, differs=differs)["fast"].shape == (2, 2)
        return
    with pytest.raises(DifferentOutputError, match="fast differs from plain, nothing is timed: '9' on 2"):
        time_in_turn(runs, [1, 2], 2, differs=differs)
