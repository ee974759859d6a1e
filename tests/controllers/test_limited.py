"""Speculation within a limit of memory: no plan takes more, nothing is left unused that would fit, and every call comes through."""

from __future__ import annotations

import logging
from itertools import pairwise
from typing import Any

import pytest

from paceline.controllers.base import Controller, Signal, StepTimes
from paceline.controllers.fixed import FixedController
from paceline.controllers.limited import MOST, Footprint, LimitedController
from paceline.tree.token_tree import EMPTY_TREE, TokenTree
from paceline.tree.types import NO_BUDGET, Verdict

FOOTPRINT = Footprint(slot=10, row=100, drawn=200, caches=lambda tokens: 3 * tokens)


def signals(*lengths: int, temperature: float = 0.0) -> list[Signal]:
    return [Signal(key, length, 500, temperature) for key, length in enumerate(lengths)]


def planned(limit: int, given: list[Signal], asked: int = 50, footprint: Footprint = FOOTPRINT) -> LimitedController:
    found = LimitedController(FixedController(asked), footprint, limit)
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
    assert nodes == MOST or not drafting or FOOTPRINT.batch(drafting, nodes + 1) > limit
    if len(drafting) < len(given):
        assert FOOTPRINT.batch(given[: len(drafting) + 1], 1) > limit
    for index, most in enumerate(found.nodes):
        budget = found.budget(index, 0, EMPTY_TREE)
        assert budget.nodes == min(50, most)
        assert most or budget is NO_BUDGET
        assert found.budget(index, 1, TokenTree.chain([1] * most)) is NO_BUDGET
    assert found.idle == (not drafting)


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
    for index in range(2):
        found.budget(index, 0, EMPTY_TREE)
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


def test_a_joined_tree_is_cut_to_what_fits() -> None:
    class Fusing(Controller):
        name = "fusing"

        def plan(self, signals: Any) -> None:
            """Everything goes."""

    found = LimitedController(Fusing(), FOOTPRINT, 500)
    found.plan(signals(20))
    (most,) = found.nodes
    assert 0 < most < 9
    assert len(found.select([TokenTree.chain([1] * 9)])[0]) == most
    assert found.budget(0, 0, EMPTY_TREE) == NO_BUDGET


class Spy(Controller):
    """Notes what it is asked."""

    name, max_nodes = "spy", 32

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.idle, self.listens, self.resting = True, (3,), 5

    def plan(self, signals: Any) -> None:
        self.calls.append(self.max_nodes)

    def observe(self, trees: Any, verdicts: Any, times: Any) -> None:
        self.calls.append("observe")

    def passed(self, score: float, rest: float) -> None:
        self.calls.append((score, rest))

    def hear(self, drafter: int, matched: int) -> None:
        self.calls.append((drafter, matched))

    def forget(self, key: int) -> None:
        self.calls.append(key)

    def explain(self, index: int) -> str:
        return "spying"


def test_everything_comes_through() -> None:
    spy = Spy()
    found = LimitedController(spy, FOOTPRINT, 700)
    found.plan(signals(20))
    assert spy.calls == [found.nodes[0]], "a planner plans with what fits"
    found.plan(signals(9000))
    assert spy.calls[1] == 1
    assert (found.idle, list(found.listens), found.resting, found.name) == (True, [3], 5, "spy")
    found.resting -= 1
    assert spy.resting == 4
    spy.idle = False
    assert found.idle, "nothing fits"
    assert list(found.listens) == []
    found.observe([], [Verdict((), (), 1)], StepTimes((), 1.0, 1.0, 1.0, 1))
    found.passed(1.0, 2.0)
    found.hear(1, 2)
    found.forget(7)
    assert spy.calls[2:] == ["observe", (1.0, 2.0), (1, 2), 7]
    assert found.explain(0) == "spying\nat most 0 nodes within 700 bytes of memory"
