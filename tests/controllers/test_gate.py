"""The guard of drafting as a whole: it closes where steps with drafts bring less than plain ones, and tries again."""

from __future__ import annotations

from collections.abc import Callable
from statistics import fmean

import numpy as np
import pytest

from paceline.controllers import gate as gate_module
from paceline.controllers.gate import AGAIN, FIRST_PLAIN, IN_A_ROW, LEAST, MOST, NEW, PAID, SELDOM, SOON, Gate

PLAIN = 1.0
TABLE = [PLAIN] * 65
Brings = Callable[[int], tuple[int, float]]


def drive(gate: Gate, steps: int, brings: Brings, *, size: int = 4, asked: bool = True) -> tuple[float, int]:
    """Tokens per second over so many steps, and how many of them could draft; `brings(step)` is what those bring and take."""
    tokens, seconds, admitted = 0, 0.0, 0
    for step in range(steps):
        if gate.admits(new=False):
            made, took = brings(step)
            admitted += 1
            gate.record(size, made, took, admitted=True, asked=asked, table=TABLE)
        else:
            made, took = size, PLAIN
            gate.record(size, made, took, admitted=False, asked=False, table=TABLE)
        tokens, seconds = tokens + made, seconds + took
    return tokens / seconds, admitted


class NeverClosed(Gate):
    """Wrong: drafts whatever it costs."""

    def admits(self, *, new: bool) -> bool:
        return True


def losing(step: int) -> tuple[int, float]:
    return 5, 2.0


def test_what_loses_costs_little() -> None:
    rate, _ = drive(Gate(), 2000, losing)
    assert rate >= 0.95 * 4 / PLAIN


def test_a_gate_that_never_closes_fails_that_check() -> None:
    rate, _ = drive(NeverClosed(), 2000, losing)
    assert rate < 0.95 * 4 / PLAIN


def test_what_pays_goes_on_but_for_the_plain_steps_that_are_timed() -> None:
    _, admitted = drive(Gate(), 1000, lambda step: (8, 1.2))
    assert 1000 - FIRST_PLAIN - IN_A_ROW * (1000 // AGAIN + 1) <= admitted < 1000


def wavering(gain: float, seed: int) -> Brings:
    """Drafts of two tokens, half of which come: seven quarters of a token a step on the average."""
    rng = np.random.default_rng(seed)

    def brings(step: int) -> tuple[int, float]:
        first, second = rng.random(2) < 0.5
        return 1 + int(first) + int(first and second), 1.75 * PLAIN / (1.0 + gain)

    return brings


def shares(gain: float) -> list[float]:
    """Of 20,000 steps those that drafted, a few times."""
    return [drive(Gate(), 20_000, wavering(gain, seed), size=1)[1] / 20_000 for seed in range(4)]


@pytest.mark.parametrize("patient", [True, False])
def test_what_pays_a_little_goes_on_though_it_wavers(monkeypatch: pytest.MonkeyPatch, patient: bool) -> None:
    if not patient:
        for name, value in {"SHARE": 1e-9, "WAVER": 0.0, "_DECAY": 0.98}.items():
            monkeypatch.setattr(gate_module, name, value)
    assert (fmean(shares(0.06)) > 0.85) is patient


def test_what_loses_a_little_more_than_may_be_lost_ends() -> None:
    assert fmean(shares(-0.06)) < 0.35


def test_plain_steps_are_timed_less_often_while_drafting_is_far_ahead() -> None:
    ahead, level = (drive(Gate(), 2000, lambda step, made=made: (made, 1.2))[1] for made in (8, 5))
    assert ahead >= 2000 - FIRST_PLAIN - IN_A_ROW * (2000 // (SELDOM * AGAIN) + 2)
    assert level <= 2000 - FIRST_PLAIN - IN_A_ROW * (2000 // AGAIN - 1) < ahead


def test_it_opens_when_drafting_begins_to_pay() -> None:
    gate = Gate()
    drive(gate, 500, losing)
    _, admitted = drive(gate, 2 * MOST, lambda step: (8, 1.2))
    assert admitted > 2 * MOST - MOST - AGAIN


@pytest.mark.parametrize(("seconds", "longer"), [(1.06, False), (3.0, True)])
def test_the_dearer_a_try_the_longer_the_wait(seconds: float, longer: bool) -> None:
    gate, waits = Gate(), []
    for _ in range(400):
        if gate.admits(new=False):
            gate.record(4, 4, seconds, admitted=True, asked=False, table=TABLE)
            waits.append(gate.wait)
        else:
            gate.record(4, 4, PLAIN, admitted=False, asked=False, table=TABLE)
    assert (max(waits) > 3 * LEAST) == longer
    assert max(waits) <= 4 * MOST


@pytest.mark.parametrize(("tokens", "closes"), [(6, False), (3, True)])
def test_a_batch_that_shrinks_is_held_against_what_plain_steps_of_each_size_bring(tokens: int, closes: bool) -> None:
    gate, table = Gate(), [float(rows) for rows in range(65)]
    closed = 0
    for size, made in 20 * [*60 * [(4, 8)], *60 * [(3, tokens)]]:
        drafts = gate.admits(new=False)
        found = (made, 1.8 * size) if drafts else (size, float(size))
        gate.record(size, *found, admitted=drafts, asked=drafts, table=table)
        closed += gate.closed
    assert (closed > 0) == closes


def wait_of_a_new_sequence(gate: Gate) -> int:
    """After one more try that loses."""
    while not gate.wait or gate.on:
        drive(gate, 1, losing)
    assert not gate.admits(new=True)
    return gate.wait


@pytest.mark.parametrize("steps", [PAID - 40, PAID + 40])
def test_what_paid_for_long_is_tried_again_soon(steps: int) -> None:
    gate = Gate()
    drive(gate, steps, lambda step: (8, 1.2))
    drive(gate, 200, lambda step: (4, 40.0))  # then it loses much
    waited = 0
    while gate.closed and not gate.admits(new=False):
        waited += 1
    assert (waited <= SOON) is (steps > PAID)


def test_a_new_sequence_by_itself_waits_less_but_longer_after_every_try_that_lost() -> None:
    gate, waits = Gate(), []
    for _ in range(4):
        waits.append(wait_of_a_new_sequence(gate))
        drive(gate, gate.wait, losing)
    assert waits == [2 * NEW - 1, 4 * NEW - 1, 8 * NEW - 1, 16 * NEW - 1]


def test_a_try_that_paid_makes_new_sequences_wait_little_again() -> None:
    gate = Gate()
    for _ in range(4):
        wait_of_a_new_sequence(gate)
        drive(gate, gate.wait, losing)
    drive(gate, 400, lambda step: (8, 1.2))
    assert wait_of_a_new_sequence(gate) < 2 * NEW


def test_an_outlier_among_plain_steps_is_clipped() -> None:
    gate = Gate()
    drive(gate, 40, losing)
    gate.record(4, 4, 1000.0, admitted=False, asked=False, table=TABLE)
    assert gate._plain[4] < 1.2 * PLAIN


def closings_while_everything_slows_down(gate: Gate) -> int:
    """How often it closes, where drafting always gains 1.3 and the machine takes turns at being 1.6 times slower."""
    closings = 0
    for step in range(1200):
        slow = 1.6 if step // 300 % 2 else 1.0
        was_on = gate.on
        if gate.admits(new=False):
            gate.record(4, 8, slow * 2 * PLAIN / 1.3, admitted=True, asked=True, table=TABLE)
        else:
            gate.record(4, 4, slow * PLAIN, admitted=False, asked=False, table=TABLE)
        closings += was_on and not gate.on
    return closings


def test_it_does_not_close_because_everything_slows_down() -> None:
    assert closings_while_everything_slows_down(Gate()) == 0


def test_a_gate_that_trusts_old_timings_closes_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.controllers.gate.FRESH", 10_000)
    monkeypatch.setattr("paceline.controllers.gate.SELDOM", 1)  # else plain steps are due as soon as the lead shrinks
    assert closings_while_everything_slows_down(Gate()) > 0
