"""What drafters were worth is kept for the next process, and a file that makes no sense is not believed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.controllers.acceptance import Acceptance, Own
from paceline.controllers.cost_store import CostKey, CostStore
from paceline.controllers.memory import FIRST, KEPT, Latest, Memory, MemoryKey
from paceline.controllers.watch import Mode, Watch


def store(folder: Path, *, model: str = "a model", methods: str = "ngram") -> CostStore:
    costs = CostKey(fingerprint="shape", device="cpu", dtype="float32", threads=1, torch="2", paceline="0")
    return CostStore(MemoryKey(costs, model, methods), folder)


class Known:
    """Estimates of two drafters, and their memory."""

    def __init__(self, place: CostStore | None, drafters: int = 2) -> None:
        self.acceptance, self.yields = Acceptance(drafters), [1.0] * drafters
        self.latest: Latest = {}
        self.memory = Memory(place, self.acceptance.sources, self.yields, self.latest)

    @property
    def levels(self) -> list[list[float]]:
        return [source.level for source in self.acceptance.sources]


def taught(place: CostStore | None) -> Known:
    """One drafter is mostly right, the other mostly wrong and asleep."""
    known, own = Known(place), Own(2)
    known.acceptance.observe_chains(own, 0, [(4, 4, 90), (4, 1, 10)])
    known.acceptance.observe_chains(own, 1, [(4, 0, 80), (4, 1, 20)])
    known.yields[1] = 0.25
    good, bad = Watch(), Watch()
    for _ in range(60):
        good.record(0.5, Mode.ASK, 4, 4)
    bad.sleep()
    bad.after_trial(-0.5, 24)
    known.latest |= {(0, True): good, (1, True): bad}
    return known


def ended(known: Known) -> None:
    """As many sequences as it takes to be kept."""
    for _ in range(FIRST):
        known.memory.keep()


def test_the_next_process_begins_where_this_one_ended(tmp_path: Path) -> None:
    known = taught(store(tmp_path))
    ended(known)
    again, fresh = Known(store(tmp_path)), Known(None)
    for mine, learned, prior in zip(again.levels, known.levels, fresh.levels, strict=True):
        assert mine == pytest.approx(learned, abs=0.06)
        assert max(abs(a - b) for a, b in zip(prior, learned, strict=True)) > 0.2, "else nothing was learned"
    assert again.yields == known.yields
    assert not again.latest[0, True].for_new_sequence().asleep
    bad = again.latest[1, True].for_new_sequence()
    assert (bad.asleep, bad.wait) == (True, known.latest[1, True].interval)


def test_what_is_remembered_weighs_little(tmp_path: Path) -> None:
    known = taught(store(tmp_path))
    ended(known)
    again = Known(store(tmp_path))
    assert known.acceptance.sources[0].levels[1].tries > 1.5 * KEPT
    assert max(tally.tries for source in again.acceptance.sources for tally in source.levels) == KEPT


def test_it_is_written_at_every_doubling(tmp_path: Path) -> None:
    place = store(tmp_path)
    known = taught(place)
    for _ in range(FIRST - 1):
        known.memory.keep()
    assert place.load() is None
    known.memory.keep()
    known.yields[0] = 0.5
    for _ in range(FIRST - 1):
        known.memory.keep()
    assert Known(place).yields[0] == 1.0
    known.memory.keep()
    assert Known(place).yields[0] == 0.5


@pytest.mark.parametrize("other", [{"model": "another"}, {"methods": "suffix"}])
def test_another_model_or_other_drafters_remember_nothing_of_it(tmp_path: Path, other: dict[str, str]) -> None:
    ended(taught(store(tmp_path)))
    assert Known(store(tmp_path, **other)).levels == Known(None).levels


@pytest.mark.parametrize(
    "change",
    [
        {"sources": []},
        {"sources": [[[[2, 1]] * 9, [[0, 0]] * 54, [[0, 0]] * 7, 1.0]] * 2},
        {"sources": [[[[0, 0]] * 8, [[0, 0]] * 54, [[0, 0]] * 7, 1.0]] * 2},
        {"sources": [[[[0, float("nan")]] * 9, [[0, 0]] * 54, [[0, 0]] * 7, 1.0]] * 2},
        {"yields": ["much", 1]},
        {"yields": [1, 1e9]},
        {"watches": [[7, True, 0, 0, 64, 4, 0, 0, 0]]},
        {"watches": [[0, True, 0, 0, 0, 0, -1, 0, 0]]},
        {"watches": [[0, True]]},
        {"watches": [[float("inf"), True, 0, 0, 64, 4, 0, 0, 0]]},
        {"watches": 5},
    ],
    ids=str,
)
def test_a_file_that_makes_no_sense_is_left_alone_and_said(
    tmp_path: Path, change: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    place = store(tmp_path)
    ended(taught(place))
    kept = place.load()
    assert kept is not None
    place.save(kept | change)
    again = Known(place)
    assert (again.levels, again.yields, again.latest) == (Known(None).levels, [1.0, 1.0], {})
    assert "makes no sense" in caplog.text


def test_a_file_cut_short_is_left_alone(tmp_path: Path) -> None:
    place = store(tmp_path)
    ended(taught(place))
    place.path.write_text(place.path.read_text()[:-9])
    assert Known(place).levels == Known(None).levels
    assert json.dumps(place.key)


def test_auto_keeps_what_it_learned_when_a_sequence_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from paceline import LLM, SamplingParams

    monkeypatch.setenv("PACELINE_CACHE_DIR", str(tmp_path))
    plain = LLM(speculative_config=None, dtype="float32")
    llm = plain.with_speculative_config({"method": ["ngram"], "controller": "auto"})
    llm.generate("one two one two one two", SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True))
    assert not list(tmp_path.glob("acceptance/*"))
    llm.generate("one two one two one two", SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True))
    assert len(list(tmp_path.glob("acceptance/*.json"))) == 1
