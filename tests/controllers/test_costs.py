"""Measured costs: the curve of passes, the line of drafts, and what is kept on disk."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from paceline.checkpoints import BUNDLED_FOLDER
from paceline.controllers import StepTimes
from paceline.controllers.auto import CostKey, Costs, CostStore
from paceline.controllers.auto.choice import Beside, Forecast, choose
from paceline.controllers.auto.costs import GRID, Curve, DraftLine
from paceline.models import load_runner
from paceline.models.cpu import source_number

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


TILES = {1: 40.0, 2: 45.0, 3: 51.0, 4: 57.0, 5: 94.0, 6: 100.0, 7: 108.0, 8: 118.0}
"""Milliseconds of a kernel that works in tiles of four rows."""


def test_steps_between_measured_points_become_points() -> None:
    """A line from 1 row to 8 says 85 ms for the last row of a tile, which takes 57."""
    curve = Curve({1: TILES[1], 8: TILES[8]})
    assert curve.at(4) > 70.0
    for rows in (3, 4, 5) * 3:
        curve.observe(rows, TILES[rows])
    assert [curve.at(rows) for rows in (3, 4, 5)] == pytest.approx([TILES[rows] for rows in (3, 4, 5)], rel=0.02)
    for _ in range(2):
        curve.observe(6, TILES[6])
    assert 6 not in curve.points, "two steps may both have been held up"


def test_hope_reaches_from_a_measured_point_to_the_next() -> None:
    curve = Curve({1: 40.0, 4: 57.0, 8: 118.0})
    assert curve.table(8, hopeful=True)[1:] == pytest.approx([40.0, 40.0, 40.0, 57.0, 57.0, 57.0, 57.0, 118.0])
    assert curve.table(8)[6] == pytest.approx((57.0 + 118.0) / 2)
    assert curve.table(20, hopeful=True)[20] == curve.table(20)[20], "beyond the last point, a slope"
    measured = Curve(TILES)
    assert measured.table(8, hopeful=True) == measured.table(8), "nor where all is known"


def test_one_dear_row_does_not_make_all_beyond_it_dear() -> None:
    """The fifth row begins a tile, whose further rows are nearly free; its own step is no slope."""
    curve = Curve({rows: TILES[rows] for rows in range(1, 6)})
    assert curve.at(8) < 94.0 + 3 * (94.0 - 57.0) * 0.6
    assert curve.at(8) == pytest.approx(94.0 + 3 * (94.0 - 45.0) / 3)


def test_a_drafter_that_seldom_finds_anything_is_charged_for_whole_drafts() -> None:
    """With 4 levels half of the steps score 5 rows, at 94 ms, half 1 at 40: 67 on average, and 3 rows, which is their
    mean number, take 51. Three levels fill the tile.
    """
    table = Curve(TILES).table(8)
    forecast = Forecast(0, [0.0, 1.0, 2.0, 3.0, 4.0], [0.0] * 5, [0.0] * 5, 0.5, 1.0, Beside())
    found = choose([forecast], table, 1)
    assert found.picks[0].levels == 3
    assert found.seconds == pytest.approx((TILES[1] + TILES[4]) / 2)
    assert (1.0 + 0.5 * 4.0) / table[3] > (1.0 + 0.5 * 3.0) / table[2], "by the mean number of rows 4 levels win"
    several = choose([forecast], table, 2)
    assert several.picks[0].levels == 2
    assert several.seconds == pytest.approx(table[2 + 2]), "of a batch some find something in every step"


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
    line = DraftLine()
    line.observe(4, 1.0)  # the first call compiles
    for i in range(60):
        levels = 1 + i % 5
        line.observe(levels, fixed + level * levels)
    assert line.at(3) == pytest.approx(fixed + 3 * level, rel=0.05)
    assert line.at(8) == pytest.approx(fixed + 8 * level, rel=0.1)


@pytest.mark.parametrize("held_up", [2, 3])
def test_a_draft_that_was_held_up_is_not_believed(held_up: int) -> None:
    """Else a drafter that seems twenty times as dear is never asked again."""
    line = DraftLine()
    for count in (1, 2, 3):
        line.observe(4, 4e-3 * (20 if count == held_up else 1))
    assert line.at(4) < 2.6 * 4e-3
    again = DraftLine()
    for seconds in (1.0, 4e-3, 4e-3):
        again.observe(4, seconds)
    assert again.at(4) == pytest.approx(4e-3)


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


def test_rows_that_a_drafter_adds_are_probed_too() -> None:
    """A root and four nodes have 15 rows beside them: a pass of 20, past which 24 are next. Plain decoding has none."""
    measured = [
        Costs(probe=lambda counts, context: map(float, counts), beside=beside) for beside in (None, lambda n: 3 * n)
    ]
    for costs in measured:
        costs.measure(1, 10, 12)
    assert [costs.unmeasured(1, 10, 5) for costs in measured] == [None, 24]
    assert [costs.unmeasured(1, 10, 1) for costs in measured] == [None, None]


def test_a_probe_that_fails_is_not_asked_again(caplog: pytest.LogCaptureFixture) -> None:
    calls: list[int] = []

    def probe(counts: object, context: int) -> list[float]:
        calls.append(context)
        raise RuntimeError("no room")

    costs = Costs(probe=probe)
    for _ in range(3):
        if (point := costs.unmeasured(1, 10, 5)) is not None:
            costs.measure(1, 10, point)
    assert calls == [8], "8 tokens of context are enough"
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
    assert not Costs(CostStore(replace(KEY, kernels=7), tmp_path)).knows(1, 10), "other kernels, other prices"


def test_prices_belong_to_the_kernels_that_were_timed() -> None:
    info = load_runner(BUNDLED_FOLDER / "draft").info
    assert CostKey.of(info).kernels == source_number() != 0
    assert CostKey.of(replace(info, device=torch.device("meta"))).kernels == 0


@pytest.mark.parametrize(
    "broken",
    [
        {},
        {"curves": [[0, 0, [[1, -1.0]]]], "others": []},
        {"curves": [[0, 0, [[7000, 1.0]]]], "others": []},
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
