"""Figures by task: whose seconds a batch's are."""

from __future__ import annotations

import pytest

from paceline.bench.run import BenchPrompt, BenchSetting, MeasuredCell, TimedRun
from paceline.bench.run.aggregate import figures_by_task, matrices
from paceline.bench.run.settings import BASELINE


def piece(name: str, task: str) -> BenchPrompt:
    return BenchPrompt("w", name, 0, task, (1, 2), 4, True)


def made(setting: BenchSetting, groups: list[list[BenchPrompt]], seconds: list[float]) -> MeasuredCell:
    """A cell whose groups took so long, once."""
    cell = MeasuredCell(setting, "w", 0.0, 2, "bit-equal", groups, [])
    for index, (group, spent) in enumerate(zip(groups, seconds, strict=True)):
        row = {"turn": 0, "error": None, "tokens": 4, "steps": 4, "accepted_tokens": 0}
        rows = [row | {"prompt": one.prompt} for one in group]
        cell.runs.append(TimedRun(index, 0, spent, rows, [[1, 2, 3, 4] for _ in group]))
    return cell


def test_batches_that_mix_tasks_count_for_none_of_them() -> None:
    groups = [[piece("a", "code"), piece("b", "code")], [piece("c", "code"), piece("d", "maths")]]
    base, fast = made(BASELINE, groups, [2.0, 2.0]), made(BenchSetting("x", {"method": "ngram"}), groups, [1.0, 0.1])
    code, maths = figures_by_task(base, fast, None)["tasks"]
    assert code["speedup"]["value"] == pytest.approx(2.0)  # not the 20 of the second batch
    assert (maths["prompts"], maths["speedup"], maths["tokens_per_second"]) == (1, None, None)
    (_, whole), _ = matrices(base, fast)
    assert whole.shape == (2, 1)
