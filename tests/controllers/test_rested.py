"""Steps at rest say what plain steps take: at once to the gate, seldom to the cost model."""

from __future__ import annotations

import pytest

from paceline.controllers.cost_model import CostModel
from paceline.controllers.gate import Gate
from paceline.controllers.rested import ENOUGH, EVERY, RECENT, Rested

TABLE = [1.0] * 9


def rest(
    rested: Rested, steps: int, seconds: float = 1.0, gate: Gate | None = None, *, quick: bool = True
) -> tuple[float, float] | None:
    for _ in range(steps):
        rested.add(0.75 * seconds, 0.25 * seconds)
    return rested.end(gate, 1, quick=quick)


def test_of_quick_steps_enough_in_a_row_teach_and_seldom() -> None:
    rested = Rested()
    assert rest(rested, ENOUGH - 1) is None
    assert rest(rested, ENOUGH) == pytest.approx((0.75, 0.25))
    told = [rest(rested, ENOUGH) is not None for _ in range(20)]
    assert told.count(True) == 20 * ENOUGH // EVERY
    assert rest(Rested(), 1, quick=False) == pytest.approx((0.75, 0.25)), "a slow one is worth a word"
    assert rest(Rested(), 0, quick=False) is None


def test_the_gate_hears_of_the_last_ones_every_time() -> None:
    gate, rested = Gate(), Rested()
    rest(rested, 1, 2.0, gate)
    assert gate.plain_seconds(1, TABLE) == pytest.approx(2.0)
    for _ in range(8):
        for _ in range(50):
            rested.add(9.0, 9.0)
        rest(rested, RECENT, 1.0, gate)
    assert gate.plain_seconds(1, TABLE) == pytest.approx(1.0, rel=0.02), "what came before the last ones is old"
    assert rest(rested, EVERY, 1.0, None) is not None, "where there is no gate nobody is told"


@pytest.mark.parametrize(
    ("beside", "learned"),
    [((1, 5, 2e-4), True), (None, False), ((2, 5, 2e-4), False), ((1, 1, 2e-4), False)],
    ids=["", "nothing before", "another batch", "no drafts before"],
)
def test_a_few_plain_steps_between_drafts_teach_what_they_take_beside_those(
    beside: tuple[int, int, float] | None, learned: bool
) -> None:
    """The machine is twice as slow as when costs were measured: a pass over one row takes half of what one over five takes."""
    cost, rested = CostModel(probe=lambda counts, context: [8e-5 if rows < 2 else 1e-4 for rows in counts]), Rested()
    cost.prepare(6)
    for _ in range(30):
        rested.beside = beside
        for seconds in (9e-4, 9e-4, 1e-4, 1e-4, 1e-4):  # the first ones find cold caches
            rested.add(seconds, 0.0)
        rested.teach(None, cost, (1, 10), quick=True)
        assert rested.beside is None
    assert cost.verify(1) / cost.verify(5) == pytest.approx(0.5 if learned else 0.8, rel=0.1)


def test_what_came_before_waits_for_the_plain_steps() -> None:
    rested = Rested()
    rested.beside = (1, 5, 2e-4)
    rested.teach(None, CostModel(), (1, 10), quick=True)
    assert rested.beside is not None
