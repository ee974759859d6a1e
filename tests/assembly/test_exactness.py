"""What is said of a loaded model's exactness, what strict mode refuses, and that the finding is kept on disk."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny_checkpoint

from paceline import LLM, ConfigError
from paceline.assembly import Exactness, exactness, find_exactness
from paceline.controllers.auto import CostStore
from paceline.llm import BUNDLED
from paceline.models import load_runner
from paceline.models.decoder import StrictPasses, native, strict_unavailable


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PACELINE_CACHE_DIR", str(tmp_path / "cache"))
    return tiny_checkpoint.write(tmp_path / "tiny")


@pytest.fixture(scope="module")
def target():
    return load_runner(BUNDLED / "target", dtype="bfloat16")


def test_the_bundled_target_is_proven_and_the_finding_is_kept(target, tmp_path, monkeypatch):
    monkeypatch.setenv("PACELINE_CACHE_DIR", str(tmp_path))
    assert str(find_exactness(target, "auto")) == "strict, proven by self-test"
    assert len(list((tmp_path / "exactness").glob("*.json"))) == 1
    monkeypatch.setattr(exactness, "what_varies", lambda runner: pytest.fail("the finding is on disk"))
    assert find_exactness(target, "strict").proven


def test_a_finding_belongs_to_the_sources_and_the_form_of_the_passes(target, monkeypatch):
    key = exactness.passes_key(target)
    monkeypatch.setattr(exactness, "sources", lambda: 1)
    assert exactness.passes_key(target) != key
    monkeypatch.undo()
    assert exactness.passes_key(target) == key
    monkeypatch.setattr(target, "passes", object())
    assert exactness.passes_key(target) != key


def test_a_slow_self_test_is_announced_once(folder, monkeypatch, caplog):
    runner = load_runner(folder, dtype="float16", exactness="strict")
    monkeypatch.setattr(runner.passes, "row_invariant", True)
    monkeypatch.setattr(exactness, "what_varies", lambda runner: None)
    assert find_exactness(runner, "strict").proven
    assert find_exactness(runner, "strict").proven
    told = [record.getMessage() for record in caplog.records if "exactness='strict'" in record.getMessage()]
    assert len(told) == 1
    assert told[0].startswith(f"{runner.info.name}: testing")


def test_a_failed_self_test_is_said_and_strict_is_rejected(target, tmp_path, monkeypatch):
    monkeypatch.setenv("PACELINE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(exactness, "what_varies", lambda runner: "a chain of 3 rows")
    found = find_exactness(target, "auto")
    assert not found.proven
    assert str(found) == "up to near ties (the self-test found other bits in a chain of 3 rows)"
    with pytest.raises(
        ConfigError, match=r"exactness='strict' is not available for .*chain of 3 rows; use exactness='auto'"
    ):
        find_exactness(target, "strict")


def test_a_broken_file_is_measured_again(target, tmp_path, monkeypatch):
    monkeypatch.setenv("PACELINE_CACHE_DIR", str(tmp_path))
    CostStore(exactness.passes_key(target), tmp_path / "exactness").save({"other": 1})
    monkeypatch.setattr(exactness, "what_varies", lambda runner: "logits")
    assert not find_exactness(target, "auto").proven


def test_operators_are_strict_where_it_is_asked_for(folder, monkeypatch):
    monkeypatch.setattr(native, "fits", lambda *_, **__: False)
    fast = LLM(folder)
    assert "exactness='strict' takes another one" in str(fast.exactness)
    llm = LLM(folder, exactness="strict")
    assert isinstance(llm.runner.passes, StrictPasses)
    assert llm.exactness == Exactness()
    monkeypatch.setattr(llm.runner.passes, "row_invariant", False)
    assert "matrix products on this CPU" in str(find_exactness(llm.runner, "auto"))


def test_a_model_that_runs_in_transformers_is_rejected(folder):
    runner = load_runner(folder, native=False)
    assert "it runs in transformers" in str(find_exactness(runner, "auto"))
    with pytest.raises(ConfigError, match=r"not available for .*: it runs in transformers"):
        load_runner(folder, native=False, exactness="strict")
    with pytest.raises(ConfigError, match="it runs in transformers"):
        find_exactness(runner, "strict")


def test_angles_that_depend_on_the_length_are_rejected(tmp_path, monkeypatch):
    monkeypatch.setenv("PACELINE_CACHE_DIR", str(tmp_path))
    scaling = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    folder = tiny_checkpoint.write(tmp_path / "dynamic", rope_parameters=scaling)
    assert "dynamic rotary embedding" in str(LLM(folder).exactness)
    with pytest.raises(ConfigError, match="dynamic rotary embedding"):
        LLM(folder, exactness="strict")


def test_a_wrong_value_is_rejected():
    with pytest.raises(ConfigError, match="exactness must be one of auto, strict, got 'exact'"):
        LLM(exactness="exact")
    assert "use exactness='auto'" in str(strict_unavailable("m", "why"))
