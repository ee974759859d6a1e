"""The timing loop: turns in an order drawn anew, seconds where they belong, and outputs that differ are not timed."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.utils import DifferentOutputError, in_turn, repeated, time_in_turn, timed


def test_every_setting_has_one_turn_on_every_item_of_every_repeat() -> None:
    ran: list[tuple[str, str, int]] = []
    runs = {name: lambda item, repeat, name=name: ran.append((name, item, repeat)) for name in "abc"}
    made = list(in_turn(runs, "wxyz", 5))
    assert [(turn.repeat, turn.item) for turn in made] == [(r, i) for r in range(5) for i in range(4)]
    orders = []
    for number, turn in enumerate(made):
        names, items, repeats = zip(*ran[3 * number : 3 * number + 3], strict=True)
        assert (set(items), set(repeats)) == ({"wxyz"[turn.item]}, {turn.repeat})
        orders.append(names)
    assert all(sorted(order) == ["a", "b", "c"] for order in orders)
    assert len(set(orders)) > 3, "the order is drawn anew"


def test_turns_end_where_the_user_has_enough() -> None:
    ran: list[int] = []
    for turn in in_turn({"one": lambda item, _: ran.append(item)}, range(10), 3):
        if turn.item == 2:
            break
    assert ran == [0, 1, 2]


def test_a_call_and_its_repeats() -> None:
    now, calls = [0.0], list[int]()
    assert timed(lambda: now.__setitem__(0, 2.5) or "text", lambda: now[0]) == ("text", 2.5)
    assert len(repeated(lambda: calls.append(1), 3, warm_up=2)) == 3
    assert len(calls) == 5


def slower_by(now: list[float], step: float) -> Any:
    """A setting whose n-th item takes n steps."""

    def run(item: int, repeat: int) -> str:
        now[0] += step * item
        return f"text {item}"

    return run


def test_seconds_stand_by_item_and_repeat() -> None:
    now = [0.0]
    runs = {"one": slower_by(now, 1.0), "two": slower_by(now, 2.0)}
    for turn in in_turn(runs, [1, 5], 3, clock=lambda: now[0]):
        assert turn.seconds == {"one": (1.0, 5.0)[turn.item], "two": (2.0, 10.0)[turn.item]}
        assert turn.outputs == dict.fromkeys(runs, f"text {(1, 5)[turn.item]}")


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
