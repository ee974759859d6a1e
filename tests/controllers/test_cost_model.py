"""The cost model: lazy measuring, what it keeps on disk and what it refuses to read."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from paceline.controllers import cost_model
from paceline.controllers.base import StepTimes
from paceline.controllers.buckets import batch_bucket, context_bucket
from paceline.controllers.cost_model import CostModel
from paceline.controllers.cost_store import CostKey, CostStore
from paceline.controllers.curve import GRID
from paceline.controllers.doubts import SHARE
from paceline.errors import ConfigError
from paceline.user_cache import user_cache

KEY = CostKey(fingerprint="llama-6x256", device="cpu", dtype="float32", threads=2, torch="2.13", paceline="0.1")


class Probe:
    """Counts what it is asked."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def __call__(self, counts: Sequence[int], context: int) -> Iterator[float]:
        for rows in counts:
            self.asked.append(rows)
            yield self.seconds(rows)

    def seconds(self, rows: int) -> float:
        return 0.010 + 0.001 * rows


def test_only_what_is_needed_is_measured_and_only_once() -> None:
    probe = Probe()
    cost = CostModel(probe=probe)
    assert probe.asked == []
    cost.prepare(5)
    assert probe.asked == [1, 2, 3, 4, 6]
    cost.prepare(6)
    assert probe.asked == [1, 2, 3, 4, 6]
    cost.prepare(7)
    assert probe.asked == [1, 2, 3, 4, 6, 6, 8], "the last known one once more, to tell how fast the machine is now"
    cost.prepare(10_000)
    assert set(probe.asked) == set(GRID)
    assert cost.verify(3) == pytest.approx(0.013)


class Quick(Probe):
    """A model of short passes, beside which something else runs at first; then as fast as it is, but for one number of rows."""

    def seconds(self, rows: int) -> float:
        busy = self.asked.count(rows) == 1 or rows == 4
        return (1e-4 + 2e-5 * rows) * (5.0 if busy else 1.0)


def test_a_quick_model_is_measured_repeatedly_and_no_fewer_rows_cost_more() -> None:
    probe = Quick()
    cost = CostModel(probe=probe)
    cost.prepare(2)
    assert probe.asked == [1, 2, *(2 * [1, 2, 3, 4, 6, 8, 12, 16])], "more than was asked for, since that takes no time"
    assert [cost.verify(rows) for rows in (1, 2, 6, 16)] == pytest.approx([1.2e-4, 1.4e-4, 2.2e-4, 4.2e-4])
    assert cost.verify(4) == cost.verify(6), "what was spoilt costs as much as more rows do"


def test_points_measured_on_a_slower_machine_fit_those_from_before() -> None:
    probe = Probe()
    cost = CostModel(probe=lambda counts, context: (slow * seconds for seconds in probe(counts, context)))
    slow = 1.0
    cost.prepare(8)
    slow = 1.7
    cost.prepare(24)
    assert cost.verify(24) == pytest.approx(0.034), "as it was then: steps tell how fast it is now"


def test_a_quick_model_is_measured_anew_in_every_process(tmp_path: Path) -> None:
    CostModel(KEY, probe=Quick(), directory=tmp_path).prepare(8)
    probe = Quick()
    CostModel(KEY, probe=probe, directory=tmp_path).prepare(8)
    assert probe.asked.count(8) >= 2


def test_before_the_first_measurement_the_guess_is_optimistic() -> None:
    cost = CostModel()
    assert cost.verify(8) < 1.2 * cost.verify(1)
    assert cost.draft("any", 4) < 0.2 * cost.verify(1)
    assert "nothing measured" in cost.describe()


def test_without_a_probe_real_steps_teach() -> None:
    cost = CostModel()
    for step in range(60):
        rows = 1 + step % 8
        cost.observe(1, 50, StepTimes((0.002,), 0.01 * (1 + 0.1 * rows), 0.0, 0.001, rows), ["draft"], [rows - 1])
    assert cost.verify(8) == pytest.approx(0.018, rel=0.1)
    assert cost.table(1, 50, 8)[8] == pytest.approx(0.019, rel=0.1)
    assert cost.draft("draft", 4) == pytest.approx(0.002, rel=0.3)
    assert "draft by draft" in cost.describe()


def test_other_batches_and_contexts_begin_as_the_nearest_known_and_then_differ() -> None:
    cost = CostModel(probe=Probe())
    cost.prepare(8, 100)
    assert cost.verify(8, batch=4, context=5000) == cost.verify(8)
    for _ in range(60):
        cost.observe(4, 5000, StepTimes((), 0.050, 0.0, 0.0, 8))
    assert cost.verify(8, batch=4, context=5000) == pytest.approx(0.050, rel=0.1)
    assert cost.verify(8) == pytest.approx(0.018)


def test_buckets() -> None:
    assert [batch_bucket(n) for n in (1, 2, 3, 4, 5, 8, 9, 16)] == [0, 1, 2, 2, 3, 3, 4, 4]
    assert context_bucket(10) == context_bucket(255) == 0
    assert context_bucket(600) == context_bucket(2000) < context_bucket(4000)


def test_a_step_that_probed_does_not_count_the_probe_as_overhead() -> None:
    cost = CostModel(probe=Probe())
    cost.prepare(8)
    cost.observe(1, 50, StepTimes((), 0.011, 0.0, 3.0, 1))
    cost.observe(1, 50, StepTimes((), 0.011, 0.0, 0.001, 1))
    assert cost.table(1, 50, 1)[1] < 0.02


def test_a_failing_probe_is_said_and_not_asked_again(caplog: pytest.LogCaptureFixture) -> None:
    asked = []

    def probe(counts: Sequence[int], context: int) -> Iterator[float]:
        for rows in counts:
            asked.append(rows)
            if rows > 2:
                raise RuntimeError("no memory")
            yield 0.010 + 0.001 * rows

    cost = CostModel(probe=probe)
    with caplog.at_level(logging.INFO, "paceline.controllers"):
        cost.prepare(8)
        cost.prepare(8)
    assert asked == [1, 2, 3]
    assert "no memory" in caplog.text
    assert cost.verify(2) == pytest.approx(0.012), "what could be measured is known"


def test_what_was_measured_is_there_in_the_next_process(tmp_path: Path) -> None:
    first = CostModel(KEY, probe=Probe(), directory=tmp_path)
    first.prepare(8)
    first.observe(1, 50, StepTimes((0.002,), 0.014, 0.0, 0.001, 4), ["draft"], [3])
    first.save()
    probe = Probe()
    second = CostModel(KEY, probe=probe, directory=tmp_path)
    second.prepare(8)
    assert probe.asked == [1]  # one look whether it is still true
    assert second.verify(4) == pytest.approx(first.verify(4))
    assert second.draft("draft", 3) == pytest.approx(first.draft("draft", 3))
    assert [path.suffix for path in tmp_path.iterdir()] == [".json"]


class Busy(Probe):
    """A machine on which passes took `factor` times as long, or only those of several rows."""

    def __init__(self, factor: float, first: int = 1) -> None:
        super().__init__()
        self.factor, self.first = factor, first

    def seconds(self, rows: int) -> float:
        return super().seconds(rows) * (self.factor if rows >= self.first else 1.0)


def test_costs_measured_on_a_busy_machine_are_measured_again(tmp_path: Path) -> None:
    CostModel(KEY, probe=Busy(20.0), directory=tmp_path).prepare(8)
    quiet, fresh = CostModel(KEY, probe=Probe(), directory=tmp_path), CostModel(probe=Probe())
    quiet.prepare(8)
    fresh.prepare(8)
    assert [quiet.verify(rows) for rows in (1, 2, 8)] == [fresh.verify(rows) for rows in (1, 2, 8)]


class Clock(Probe):
    """Tells the time; measuring one number of rows takes `spent` seconds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, spent: float) -> None:
        super().__init__()
        self.now, self.spent = 1000.0, spent
        monkeypatch.setattr(cost_model, "perf_counter", lambda: self.now)

    def seconds(self, rows: int) -> float:
        self.now += self.spent
        return super().seconds(rows)


def implausible(cost: CostModel) -> None:
    for _ in range(128):
        cost.observe(1, 50, StepTimes((), cost.verify(1), 0.0, 0.0, 1))


def contradicted(cost: CostModel) -> None:
    for _ in range(2):
        cost.observe_beside(1, 50, {2: (100, 100 * cost.verify(2), 0.0), 3: (10, 10 * 1.5 * cost.verify(3), 0.0)}, 2)


@pytest.mark.parametrize("doubt", [implausible, contradicted])
@pytest.mark.parametrize(("decoded", "idle", "again"), [(0.9, 0.0, False), (0.0, 1e6, False), (1.1, 0.0, True)])
def test_costs_that_steps_contradict_are_measured_again_where_that_takes_little_of_decoding(
    monkeypatch: pytest.MonkeyPatch, doubt: Callable[[CostModel], None], decoded: float, idle: float, again: bool
) -> None:
    """Time in which nothing is decoded earns nothing."""
    clock = Clock(monkeypatch, spent := 4.0)
    cost = CostModel(probe=clock if doubt is contradicted else Busy(50.0, first=2))
    cost.prepare(8)
    cost.probe, measuring = clock, 6 * spent
    assert cost.implausible is (doubt is implausible)
    if doubt is implausible:
        cost._doubts.spend(measuring)
    for _ in range(10):
        cost.observe(1, 50, StepTimes((), cost.verify(1), 0.0, decoded * measuring / SHARE / 10 - cost.verify(1), 1))
    clock.now += idle
    doubt(cost)
    assert cost.stale is again
    cost.prepare(8)
    assert cost.verify(8) == pytest.approx(0.018) or not again
    cost.stale = False
    doubt(cost)
    assert not cost.stale, "not twice in a row"


def test_one_contradiction_or_two_apart_are_no_reason_to_measure_again(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, 0.0)
    cost = CostModel(probe=clock)
    cost.prepare(8)
    for factor in (1.5, 1.0, 1.5):
        usual = cost.verify(2)
        cost.observe_beside(1, 50, {2: (100, 100 * usual, 0.0), 3: (10, 10 * factor * cost.verify(3), 0.0)}, 2)
        cost.observe_beside(1, 50, {2: (100, 100 * usual, 0.0)}, 2)  # says nothing of others
        assert not cost.stale


def test_another_key_is_another_file(tmp_path: Path) -> None:
    CostModel(KEY, probe=Probe(), directory=tmp_path).prepare(8)
    probe = Probe()
    other = CostKey(fingerprint="llama-6x256", device="cpu", dtype="bfloat16", threads=2, torch="2.13", paceline="0.1")
    CostModel(other, probe=probe, directory=tmp_path).prepare(2)
    assert probe.asked == [1, 2]


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "[]",
        lambda text: json.dumps({**json.loads(text), "key": {"fingerprint": "somebody else's"}}),
        lambda text: json.dumps({**json.loads(text), "format": 99}),
        lambda text: text.replace("0.011", "-5"),
        lambda text: text.replace('"curves"', '"curve"'),
        lambda text: text.replace("[[1, ", "[[5, "),
        lambda text: text.replace("[[1, ", "[[1e999, "),
        lambda text: text.replace("[[1, 0.011]", "[[1, 0.0]"),
        lambda text: "[" * 100_000,
    ],
    ids=["cut", "list", "foreign", "format", "negative", "missing", "off-grid", "endless", "nothing", "deep"],
)
def test_a_broken_or_foreign_file_is_measured_again_with_a_log_line(
    damage: object, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    CostModel(KEY, probe=Probe(), directory=tmp_path).prepare(8)
    path = CostStore(KEY, tmp_path).path
    path.write_text(damage(path.read_text()))  # type: ignore[operator]
    probe = Probe()
    with caplog.at_level(logging.INFO, "paceline.controllers"):
        CostModel(KEY, probe=probe, directory=tmp_path).prepare(8)
    assert probe.asked == [1, 2, 3, 4, 6, 8]
    assert "measuring again" in caplog.text


def test_a_folder_that_cannot_be_written_is_said_and_harmless(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("in the way")
    with caplog.at_level(logging.INFO, "paceline.controllers"):
        CostModel(KEY, probe=Probe(), directory=tmp_path / "file").prepare(8)
    assert "cannot be kept" in caplog.text


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.delenv("PACELINE_CACHE_DIR", raising=False)
    assert user_cache("costs") == tmp_path / "xdg" / "paceline" / "costs"
    monkeypatch.setenv("PACELINE_CACHE_DIR", str(tmp_path / "own"))
    assert user_cache("costs") == tmp_path / "own" / "costs"
    monkeypatch.setenv("PACELINE_CACHE_DIR", "~nobody-of-that-name/x")
    with pytest.raises(ConfigError, match="PACELINE_CACHE_DIR is '~nobody"):
        user_cache("costs")
    monkeypatch.delenv("PACELINE_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "rel/dir")
    assert user_cache("costs") == Path.home() / ".cache" / "paceline" / "costs"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert user_cache("costs") == Path.home() / ".cache" / "paceline" / "costs"
