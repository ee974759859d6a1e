"""Guesses that come true while nothing is drafted call for a try; single hits and dear drafters do not."""

from __future__ import annotations

from paceline.controllers.cost_model import CostModel
from paceline.controllers.curve import Line
from paceline.controllers.ear import TOKENS, Ear, cheap_ones

TABLE = [1.0, 1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7]
QUICK, DEAR = Line(0.05, 0.0, 9), Line(4.0, 0.5, 9)


def test_two_good_guesses_in_a_row_call_for_a_try() -> None:
    ear = Ear()
    assert not ear.hear(TOKENS, QUICK, TABLE, lost=0)
    assert ear.hear(TOKENS, QUICK, TABLE, lost=0)
    assert not ear.hear(TOKENS, QUICK, TABLE, lost=0), "it begins to count again"


def test_a_guess_that_fails_between_them_starts_over() -> None:
    ear = Ear()
    assert not any(ear.hear(matched, QUICK, TABLE, lost=0) for matched in (TOKENS, 0, TOKENS, 1, TOKENS))


def test_after_a_try_that_lost_more_is_asked_for() -> None:
    ear = Ear()
    assert [ear.hear(TOKENS, QUICK, TABLE, lost=2) for _ in range(3)] == [False, False, True]


def test_a_dear_drafter_is_no_use_however_right_it_is() -> None:
    ear = Ear()
    assert not any(ear.hear(TOKENS, DEAR, TABLE, lost=0) for _ in range(9))


def test_only_cheap_drafters_that_were_timed_are_asked() -> None:
    cost = CostModel()
    cost.lines = {("quick", 0): QUICK, ("dear", 0): DEAR}
    names, lines = ("quick", "dear", "new"), [QUICK, DEAR, QUICK]
    assert cheap_ones(cost, names, lines, TABLE) == [0]
