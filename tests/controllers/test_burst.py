"""Guesses follow each other as long as they hold, and grow rare where they do not."""

from __future__ import annotations

from statistics import fmean

import numpy as np
import pytest
from controllers.worlds import Guesser, World

from paceline.controllers.acceptance import Acceptance, Own
from paceline.controllers.auto import AutoController
from paceline.controllers.base import StepTimes
from paceline.controllers.burst import LEAST, MOST, NEW, Burst
from paceline.controllers.curve import Line
from paceline.controllers.fixed import FixedController
from paceline.controllers.gate import Gate
from paceline.controllers.guesses import USUAL, Guesses
from paceline.tree.token_tree import EMPTY_TREE, TokenTree
from paceline.tree.types import Verdict

PAID, LOST = 2.0, -1.5
PLAIN = 2e-4


def waits(nets: list[float]) -> list[int]:
    burst = Burst()
    found = []
    for net in nets:
        burst.after(net)
        found.append(burst.wait)
    return found


def test_a_guess_that_paid_is_followed_by_another() -> None:
    assert waits([PAID] * 5) == [0] * 5


def test_guesses_that_lose_grow_rare_up_to_a_bound() -> None:
    found = waits([LOST] * 40)
    assert found == sorted(found)
    assert found[0] > 0
    assert found[-1] < MOST
    assert waits([10 * LOST] * 40)[-1] == MOST - 1


def test_one_that_fails_among_many_that_paid_costs_little() -> None:
    assert waits([PAID] * 9 + [LOST])[-1] < LEAST[1]
    assert waits([PAID] * 9 + [LOST, PAID])[-1] == 0


def test_a_new_sequence_is_soon_guessed_for() -> None:
    burst = Burst().of(1)
    for _ in range(20):
        burst.after(LOST)
    assert burst.wait > NEW[1]
    assert burst.of(1).wait > NEW[1]
    assert burst.of(2).wait <= NEW[1]


def test_waits_grow_faster_after_each_sequence_of_which_no_guess_held() -> None:
    burst, guesses = Burst(), []
    for sequence in range(1, 7):
        burst.of(sequence)
        guesses.append(0)
        while burst.wait < NEW[1] * 4:
            burst.after(LOST)
            guesses[-1] += 1
    assert guesses[1:] == sorted(guesses[1:], reverse=True)
    assert guesses[1] > guesses[-1] > 0
    burst.after(LOST, true=True)
    burst.of(10).after(LOST)
    slow = burst.wait
    for sequence in (11, 12):
        burst.of(sequence).after(LOST)
    assert burst.wait > slow


def test_what_was_not_waited_for_is_given_back() -> None:
    burst = Burst().of(1)
    burst.after(10 * LOST)
    before = burst.wait
    assert burst.pause(10) == min(10, before)
    burst.give_back(4)
    assert burst.wait == before - min(10, before) + 4
    burst.give_back(4)
    assert burst.wait == before - min(10, before) + 4, "given back once"


def stretches(step: int, rng: np.random.Generator) -> tuple[float, float]:
    """Text that repeats itself for 60 steps in 240, and of which nothing can be foreseen in between."""
    return (0.95, 0.9) if step % 240 < 60 else (0.0, 0.9)


class Deaf(AutoController):
    """The negative control: no table guesses while nothing is drafted."""

    def _pause(self, signals: object, most: int) -> int:
        self.listens = []
        return most


def world() -> World:
    guesser = Guesser("table", stretches, fixed=0.15 * PLAIN, sequential=False)
    return World([guesser], lambda rows: PLAIN * (0.75 + 0.25 * rows))


def test_stretches_are_found_in_time() -> None:
    def rate(kind: type[AutoController]) -> float:
        found = []
        for first in range(470, 542, 6):
            there = world()
            controller = kind(there.costs(), there.names)
            there.run(controller, first)
            found.append(there.run(controller, 2400, start=first))
        return fmean(found)

    assert rate(AutoController) > 1.07 * world().run(FixedController(0), 10)
    assert rate(Deaf) < 1.03 * world().run(FixedController(0), 10)


class Trusting(Burst):
    """The negative control: a guess that held is always followed by another."""

    def after(self, net: float, *, true: bool | None = None) -> None:
        self._again = [0.0, 0.0]
        super().after(net, true=true)


def lost(burst: Burst) -> float:
    """Share of the time that guesses cost where each is right by chance, whatever the one before it was."""
    rng, nets, steps = np.random.default_rng(0), 0.0, 0
    while steps < 20_000:
        right = int(rng.geometric(0.5)) - 1
        nets += (net := min(right, 8) - 1.7)
        burst.after(net, true=right > 0)
        steps += 1 + burst.wait
    return -nets / steps


def test_where_what_held_says_nothing_of_what_comes_guesses_grow_rare() -> None:
    assert lost(Burst()) < 0.03
    assert lost(Trusting()) > 0.05


def test_a_new_sequence_does_not_inherit_that_the_last_guess_came() -> None:
    guesses, tree, known = Guesses(), TokenTree.chain([5, 6]), (Acceptance(1), Own(1))
    guesses.begin(1)
    assert not len(guesses.select(tree, EMPTY_TREE))
    guesses.learn(EMPTY_TREE, Verdict((), (), 5), StepTimes((0.0,), PLAIN, 0.0, 0.0, 1), known)
    assert guesses.begin(1).wait == 0
    assert len(guesses.select(tree, EMPTY_TREE)) == 1
    guesses.begin(2)
    assert not len(guesses.select(tree, EMPTY_TREE))


def test_steps_of_a_plan_that_has_ended_do_not_shut_an_open_gate() -> None:
    there = world()
    controller = AutoController(there.costs(), there.names)
    there.run(controller, 480)
    gate, controller.cruise.left = controller._gates[0], 0
    gate.wait = 0
    controller._take(-20)
    assert gate.wait == 0
    gate.wait = 30
    controller._take(-20)
    assert gate.wait == 50


def drafting_behind_a_closed_gate(seed: int) -> int:
    """Steps that draft as a plan said while the gate waits, or in which it waits and counts as open, so that nobody guesses; of a
    table that pays in stretches and in between loses."""
    there, found = world(), 0
    controller, rng = AutoController(there.costs(), there.names), np.random.default_rng(seed)
    for step in range(2000):
        there.step(controller, step, rng)
        gate = controller._gates[0]
        found += gate.wait > LEAST[1] and (gate.on or (controller.cruising and not controller.idle))
    return found


def test_nothing_goes_on_as_planned_behind_a_gate_that_has_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not any(map(drafting_behind_a_closed_gate, range(6)))
    monkeypatch.setattr(Gate, "closed", False)
    assert any(map(drafting_behind_a_closed_gate, range(6)))


@pytest.mark.parametrize(("length", "came", "depth"), [(8, 8, 16), (16, 16, 16), (16, 15, 8), (8, 7, 8), (1, 1, 6), (0, 0, 4)])
def test_behind_a_guess_that_held_as_a_whole_the_next_may_be_longer(length: int, came: int, depth: int) -> None:
    guesses, tree = Guesses(), TokenTree.chain([5] * length) if length else EMPTY_TREE
    assert guesses.depth == USUAL == 8
    times, verdict = StepTimes((0.0,), PLAIN, 0.0, 0.0, 1 + length), Verdict(tuple(range(came)), (5,) * came, 5)
    guesses.learn(tree, verdict, times, (Acceptance(1), Own(1)))
    assert guesses.depth == depth


def test_a_table_whose_tokens_take_time_is_asked_for_few() -> None:
    guesses = Guesses()
    guesses.plain = PLAIN
    assert guesses.most(Line(0.1 * PLAIN, 0.0)) == guesses.most(Line(0.1 * PLAIN, 0.01 * PLAIN)) == USUAL
    assert guesses.most(Line(0.1 * PLAIN, 0.05 * PLAIN)) == 5
    assert guesses.most(Line(0.1 * PLAIN, PLAIN)) == 2
