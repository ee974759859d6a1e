"""Steps at rest say what plain steps take: at once to the gate, seldom to the cost model."""

from __future__ import annotations

import pytest

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
