"""Speculation within a limit of memory: no plan takes more, nothing is left unused that would fit, and every call comes
through.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from paceline.controllers import Controller, Footprint, LimitedController, Outcome, Plan, Signal, StepTimes
from paceline.controllers.memory_limit import MAX_NODES
from paceline.controllers.policies import FixedController
from paceline.tree import NO_BUDGET, Budget, TokenTree, Verdict

FOOTPRINT = Footprint(slot=10, row=100, drawn=200, caches=lambda tokens: 3 * tokens)


def signals(*lengths: int, temperature: float = 0.0) -> list[Signal]:
    return [Signal(key, length, 500, temperature) for key, length in enumerate(lengths)]


def planned(limit: int, given: list[Signal], number: int = 50, footprint: Footprint = FOOTPRINT) -> LimitedController:
    found = LimitedController(FixedController(number), footprint, limit)
    found.plan(given)
    return found


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("lengths", [(20,), (20, 100), (5, 5, 5, 70)])
@pytest.mark.parametrize("limit", [400, 900, 2000, 5000, 100_000])
def test_the_largest_trees_that_fit(limit: int, lengths: tuple[int, ...], temperature: float) -> None:
    given = signals(*lengths, temperature=temperature)
    found = planned(limit, given)
    drafting = [signal for signal, nodes in zip(given, found.nodes, strict=True) if nodes]
    nodes = max(found.nodes)
    assert found.nodes == [nodes] * len(drafting) + [0] * (len(given) - len(drafting))
    assert FOOTPRINT.batch(drafting, nodes) <= limit
    assert nodes == MAX_NODES or not drafting or FOOTPRINT.batch(drafting, nodes + 1) > limit
    if len(drafting) < len(given):
        assert FOOTPRINT.batch(given[: len(drafting) + 1], 1) > limit
    plan = found.plan(given)
    for budgets, most in zip(plan.budgets, found.nodes, strict=True):
        assert [(budget.nodes, budget.depth) for budget in budgets] == ([(min(50, most),) * 2] if most else [])
    assert plan.drafts == bool(drafting)


def test_no_nodes_take_nothing_and_more_take_more() -> None:
    for grows in (
        [FOOTPRINT.sequence(30, count, 0.0) for count in range(6)],
        [FOOTPRINT.sequence(length, 4, 0.0) for length in (10, 20, 40)],
        [FOOTPRINT.batch(signals(*[10] * size), 4) for size in range(4)],
    ):
        assert all(a < b for a, b in pairwise(grows))
    assert FOOTPRINT.sequence(30, 0, 1.0) == 0
    assert FOOTPRINT.sequence(30, 4, 1.0) - FOOTPRINT.sequence(30, 4, 0.0) == 4 * 200


def test_caches_that_stay_count_until_the_sequence_ends(caplog: pytest.LogCaptureFixture) -> None:
    """As the texts grow the last one falls out; what its draft model holds stays, and the first has that much less."""
    found = planned(1000, signals(50, 50), 4)
    assert min(found.nodes) >= 1
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            found.plan(signals(150, 150))
    assert [nodes > 0 for nodes in found.nodes] == [True, False]
    assert [record.getMessage()[:31] for record in caplog.records] == ["speculative_memory_bytes=1000 h"]
    held = 3 * (49 + min(4, planned(1000, signals(50, 50)).nodes[0]))
    assert found.nodes[0] == (1000 - held - 3 * 149) // 113
    found.forget(1)
    found.plan(signals(150))
    assert found.nodes[0] == (1000 - 3 * 149) // 113


def test_drafts_ahead_are_in_the_caches_twice() -> None:
    ahead = Footprint(slot=10, row=100, drawn=0, caches=lambda tokens: 30 * tokens, ahead=2)
    assert planned(1000, signals(10), footprint=ahead).nodes == [(1000 - 270) // (110 + 60)]


def test_rows_beside_a_tree_take_room_too() -> None:
    beside = Footprint(slot=10, row=100, drawn=0, caches=lambda tokens: 0, beside=lambda inputs: 3 * inputs)
    assert planned(2000, signals(10), footprint=beside).nodes == [(2000 - 3 * 110) // (4 * 110)]


def test_a_joined_tree_is_cut_to_what_fits() -> None:
    def never(tree: TokenTree) -> bool:
        return False

    class Fusing(Controller):
        name = "fusing"

        def plan(self, signals: Any) -> Plan:
            return Plan([[Budget(9, 9, needed=never), NO_BUDGET]])

    found = LimitedController(Fusing(), FOOTPRINT, 500)
    plan = found.plan(signals(20))
    (most,) = found.nodes
    assert 0 < most < 9
    assert len(found.select([TokenTree.chain([1] * 9)])[0]) == most
    assert plan.budgets[0][0] == Budget(most, most, needed=never)
    assert not plan.budgets[0][1].nodes


def test_a_plan_within_a_limit_holds_for_one_step_for_texts_grow() -> None:
    class Steady(FixedController):
        def plan(self, signals: Any) -> Plan:
            return replace(super().plan(signals), steps=9)

    assert LimitedController(Steady(3), FOOTPRINT, 5000).plan(signals(20)).steps == 1


class Spy(Controller):
    """Notes what it is asked."""

    name, max_nodes = "spy", 32

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def plan(self, signals: Any) -> Plan:
        self.calls.append(self.max_nodes)
        return Plan.nothing(len(signals))

    def observe(self, outcome: Outcome) -> None:
        self.calls.append(outcome)

    def forget(self, key: int) -> None:
        self.calls.append(key)

    def explain(self, index: int | None = None) -> str:
        return "spying"


def test_everything_comes_through() -> None:
    spy = Spy()
    found = LimitedController(spy, FOOTPRINT, 700)
    found.drafters = 2
    found.plan(signals(20))
    assert spy.calls == [found.nodes[0]], "a planner plans with what fits"
    assert (found.name, spy.drafters) == ("spy", 2)
    found.plan(signals(9000))
    assert spy.calls[1] == 1
    told = Outcome(1, 1, 1.0, [], [], [Verdict((), (), 1)], StepTimes((), 1.0, 1.0, 1.0, 1))
    found.observe(told)
    found.forget(7)
    assert spy.calls[2:] == [told, 7]
    assert found.explain() == "spying\nspeculation within 700 bytes of memory"
    assert found.explain(0) == "spying\nat most 0 nodes within 700 bytes of memory"
