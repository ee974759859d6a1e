"""Measured costs: the curve of passes, the line of drafts, and what is kept on disk."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.controllers import StepTimes
from paceline.controllers.auto import GRID, CostKey, Costs, CostStore, Curve, Line

KEY = CostKey(fingerprint="f", device="cpu", dtype="float32", passes="compiled", threads=2, torch="2", paceline="0")


def step(rows: int, score: float, *, draft: tuple[float, ...] = (), other: float = 0.0) -> StepTimes:
    return StepTimes(draft, score, 0.0, other, rows)


def test_beyond_the_last_point_its_slope_goes_on() -> None:
    curve = Curve({1: 10.0, 8: 17.0, 16: 33.0})
    assert curve.at(4) == pytest.approx(13.0)
    assert curve.at(20) == pytest.approx(41.0)
    assert curve.table(20)[20] == pytest.approx(41.0)


def test_a_curve_never_falls() -> None:
    table = Curve({1: 10.0, 8: 9.0, 16: 33.0}).table(32)
    assert table == sorted(table)


def test_passes_beyond_the_grid_say_nothing_of_its_points() -> None:
    """A flat curve of 10 ms that saw a pass of thousands of rows once said 4.7 ms for 1."""
    curve = Curve({1: 0.01, GRID[-1]: 0.01})
    for _ in range(200):
        curve.observe(4 * GRID[-1], 0.001)
    assert curve.at(1) == pytest.approx(0.01)


def test_real_steps_make_new_points_and_one_slow_one_does_not() -> None:
    curve = Curve({1: 0.01})
    curve.observe(32, 5.0)
    assert curve.measured == 1
    for _ in range(3):
        curve.observe(32, 0.02)
    assert curve.measured == 32
    assert curve.at(32) == pytest.approx(0.02, rel=0.3)


def test_the_curve_follows_the_machine() -> None:
    """Twice as slow: points that were not seen lately follow those that were."""
    curve = Curve({1: 0.01, 8: 0.012, 32: 0.02})
    for _ in range(60):
        curve.observe(1, 0.02)
    assert curve.at(1) == pytest.approx(0.02, rel=0.05)
    assert curve.at(32) > 0.025


def test_what_a_busy_hour_raised_falls_again_at_points_that_nobody_visits() -> None:
    """Else passes that a plan avoids would look dearer after each of them, and never be tried again."""
    curve = Curve({1: 0.01, 8: 0.012, 32: 0.02})
    for _ in range(20):
        for _ in range(100):
            curve.observe(1, 1.0)
        assert curve.at(32) > 0.05
        curve.observe(1, 0.01)
        curve.observe(1, 0.01)
        assert curve.at(1) == pytest.approx(0.01, rel=0.05)
    assert curve.at(32) == pytest.approx(0.02, rel=0.3)


@pytest.mark.parametrize(("fixed", "level"), [(1e-4, 1e-3), (0.0, 2e-3), (1e-3, 0.0)])
def test_a_line_finds_both_its_parts(fixed: float, level: float) -> None:
    line = Line()
    line.observe(4, 1.0)  # the first call compiles
    for i in range(60):
        levels = 1 + i % 5
        line.observe(levels, fixed + level * levels)
    assert line.at(3) == pytest.approx(fixed + 3 * level, rel=0.05)
    assert line.at(8) == pytest.approx(fixed + 8 * level, rel=0.1)


def test_the_point_past_the_plan_is_what_is_measured() -> None:
    requested: list[int] = []

    def probe(counts: list[int], context: int) -> list[float]:
        requested.extend(counts)
        return [0.01] * len(counts)

    costs = Costs(probe=probe)  # type: ignore[arg-type]  # lists are sequences
    costs.observe(1, 10, step(1, 0.01), (), ())
    point = costs.unmeasured(1, 10, 5)
    assert point == 6
    costs.measure(1, 10, point)
    assert requested[-1] == 6
    assert costs.unmeasured(1, 10, 5) is None
    assert costs.unmeasured(1, 10, 6) == 8
    assert Costs().unmeasured(1, 10, 5) is None, "nothing can be measured without a probe"


def test_a_probe_that_fails_is_not_asked_again(caplog: pytest.LogCaptureFixture) -> None:
    calls: list[int] = []

    def probe(counts: object, context: int) -> list[float]:
        calls.append(context)
        raise RuntimeError("no room")

    costs = Costs(probe=probe)
    for _ in range(3):
        if (point := costs.unmeasured(1, 10, 5)) is not None:
            costs.measure(1, 10, point)
    assert calls == [10]
    assert "costs are learned from real steps instead" in caplog.text


def test_costs_survive_a_process(tmp_path: Path) -> None:
    costs = Costs(CostStore(KEY, tmp_path))
    for i in range(64):
        costs.observe(1, 10, step(1 + i % 3, 0.01 + 0.002 * (i % 3), draft=(1e-3,), other=1e-4), ("draft",), (2,))
    again = Costs(CostStore(KEY, tmp_path))
    assert again.table(1, 10, 4) == pytest.approx(costs.table(1, 10, 4))
    assert again.line("draft").count == 0, (
        "the model's file says nothing of drafters, which another process may not have"
    )
    again.restore_drafts(json.loads(json.dumps(costs.drafts())))
    assert again.line("draft").at(2) == pytest.approx(costs.line("draft").at(2))
    assert not Costs(CostStore(KEY, tmp_path / "elsewhere")).knows(1, 10)


@pytest.mark.parametrize(
    "broken",
    [
        {},
        {"curves": [[0, 0, [[1, -1.0]]]], "others": []},
        {"curves": [[0, 0, [[7, 1.0]]]], "others": []},
        {"curves": [], "others": [[0, True, 1e300]]},
    ],
)
def test_a_file_that_makes_no_sense_is_ignored_with_one_line(
    tmp_path: Path, broken: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    store = CostStore(KEY, tmp_path)
    store.save(broken)
    assert not Costs(store).knows(1, 10)
    assert caplog.text.count("are not valid") == 1


def test_prices_of_drafts_that_make_no_sense_are_rejected_and_hardly_timed_ones_not_kept() -> None:
    costs = Costs()
    costs.observe(1, 10, step(2, 0.01, draft=(1e-3,), other=1e-4), ("draft",), (2,))
    assert costs.drafts() == []
    for broken in ([["draft", 0, "x", 1]], [["draft", 0, -1.0, 1.0]], [["draft"]], 3):
        with pytest.raises((TypeError, ValueError)):
            costs.restore_drafts(broken)


def test_a_file_of_an_older_format_is_ignored(tmp_path: Path) -> None:
    store = CostStore(KEY, tmp_path)
    store.save({"curves": [[0, 0, [[1, 1.0]]]], "others": []})
    assert Costs(store).knows(1, 10)
    kept = json.loads(store.path.read_text())
    store.path.write_text(json.dumps(kept | {"format": kept["format"] - 1}))
    assert not Costs(store).knows(1, 10)
