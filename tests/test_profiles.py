"""Profiles: kept on disk, found again where they fit, ignored with one line where they do not."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_checkpoint import edit_json, edit_weights, write

from paceline import LLM, ConfigError, SamplingParams
from paceline.checkpoints import digest_of
from paceline.controllers.auto import Costs
from paceline.controllers.auto.costs import DraftLine
from paceline.llm import BUNDLED
from paceline.profiles import DEFAULT, SWITCH, Conditions, Profile, adopt, find, profile_dir, switched_on

HERE = Conditions(
    model="m" * 16,
    device="cpu AVX512",
    dtype="float32",
    passes="compiled",
    threads=2,
    machine="x",
    versions={"torch": "2", "paceline": "1"},
)
NGRAM = {"method": "ngram", "num_speculative_tokens": 3}


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("PACELINE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv(SWITCH, raising=False)
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def stored(config: dict[str, Any] | None = NGRAM, threads: int = 2, here: Conditions = HERE, **more: Any) -> Profile:
    profile = Profile(conditions=here, speculative_config=config, threads=threads, **more)
    profile.save()
    return profile


def test_a_profile_is_found_again() -> None:
    profile = stored(measured={"gain": {"median": 1.5}})
    assert find(HERE) == profile
    document = json.loads(profile.path.read_text())
    assert document["schema"] == 3
    assert document["conditions"]["dtype"] == "float32"
    assert profile.path.parent == profile_dir()


def test_a_later_one_replaces_it() -> None:
    stored()
    profile = stored(None)
    assert find(HERE) == profile
    assert profile.speculative is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"device": "cuda H100"}, "measured for device"),
        ({"dtype": "bfloat16"}, "measured for dtype"),
        ({"passes": "operators"}, "measured for passes 'compiled', here 'operators'"),
        ({"threads": 7}, "measured for 2 threads, here 7"),
        ({"machine": "y"}, "measured for machine"),
        ({"versions": {"torch": "3", "paceline": "1"}}, "measured with torch 2, now 3"),
        ({"versions": {"torch": "2", "paceline": "2"}}, "measured with paceline 1, now 2"),
    ],
)
def test_elsewhere_it_is_ignored_with_one_line(
    change: dict[str, Any], words: str, caplog: pytest.LogCaptureFixture
) -> None:
    stored()
    with caplog.at_level(logging.INFO, "paceline"):
        assert find(replace(HERE, **change)) is None
    (line,) = [record.getMessage() for record in caplog.records]
    assert words in line
    assert "paceline tune" in line


def test_another_model_is_not_even_mentioned(caplog: pytest.LogCaptureFixture) -> None:
    stored()
    with caplog.at_level(logging.INFO, "paceline"):
        assert find(replace(HERE, model="n" * 16)) is None
    assert not caplog.records


def test_the_chosen_number_of_threads_fits_too_but_not_against_the_users_word(caplog: pytest.LogCaptureFixture) -> None:
    profile = stored(threads=1)
    assert find(replace(HERE, threads=1)) == profile
    assert find(HERE, threads=1) == profile
    with caplog.at_level(logging.INFO, "paceline"):
        assert find(HERE, threads=2) is None
    assert "made for 1 threads, 2 are set" in caplog.text


@pytest.mark.parametrize(
    "text",
    ["", "[]", '{"schema": 2}', '{"schema": 3}', "{broken", "half", "twice"],
)
def test_a_broken_file_is_ignored_with_one_line(text: str, caplog: pytest.LogCaptureFixture) -> None:
    path = stored().path
    whole = path.read_text()
    path.write_text({"half": whole[:40], "twice": whole.replace("{", '{"threads": 1, ', 1)}.get(text, text))
    assert find(HERE) is None
    assert len(caplog.records) == 1
    assert "cannot be read" in caplog.text
    assert ("each key once, and 'threads' occurs 2 times" in caplog.text) is (text == "twice")


@pytest.mark.parametrize(
    "wrong",
    [
        {"speculative_config": {"num_speculative_tokens": -1}},
        {"threads": 0},
        {"threads": "2"},
        {"drafts": []},
        {"extra": 1},
    ],
)
def test_wrong_values_are_ignored_with_one_line(wrong: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    edit_json(stored().path, **wrong)
    assert find(HERE) is None
    assert len(caplog.records) == 1


def test_a_draft_model_that_is_gone_or_changed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    draft = write(tmp_path / "draft")
    config = {"method": "draft_model", "model": str(draft)}
    profile = stored(config, drafts={str(draft): digest_of(draft)})
    assert find(HERE) == profile
    edit_weights(draft, lambda weights: weights.update({"lm_head.weight": weights["lm_head.weight"] + 1}))
    assert find(HERE) is None
    assert "has changed" in caplog.text
    for file in draft.iterdir():
        file.unlink()
    draft.rmdir()
    assert find(HERE) is None
    assert "cannot be opened" in caplog.text


def test_a_method_that_is_gone(caplog: pytest.LogCaptureFixture) -> None:
    stored({"method": [{"method": "ngram"}, {"method": "of_a_plugin"}]})
    assert find(HERE) is None
    assert "unknown drafter 'of_a_plugin'" in caplog.text


def test_a_digest_tells_weights_of_one_shape_apart(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a", seed=0), write(tmp_path / "b", seed=1)
    assert digest_of(a, "shape") == digest_of(write(tmp_path / "c", seed=0), "shape")
    assert digest_of(a, "shape") != digest_of(b, "shape")
    assert digest_of(a, "shape") != digest_of(a, "other")


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PACELINE_CACHE_DIR", str(tmp_path / "file" / "sub"))
    with pytest.raises(ConfigError, match="PACELINE_CACHE_DIR"):
        stored()


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(dtype="float32", speculative_config=None)


@pytest.mark.parametrize("off", ["0", "off", "No", "FALSE"])
def test_the_environment_switches_profiles_off(llm: LLM, monkeypatch: pytest.MonkeyPatch, off: str) -> None:
    folder = BUNDLED / "target"
    profile = stored(here=Conditions.of(llm.runner.info, folder), threads=torch.get_num_threads())
    assert adopt(llm.runner.info, folder) == profile
    monkeypatch.setenv(SWITCH, off)
    assert adopt(llm.runner.info, folder) is None


@pytest.mark.parametrize(("word", "fine"), [("1", True), ("on", True), ("", True), ("flase", False), ("2", False)])
def test_the_switch_is_off_or_on(monkeypatch: pytest.MonkeyPatch, word: str, fine: bool) -> None:
    monkeypatch.setenv(SWITCH, word)
    if fine:
        assert switched_on()
    else:
        with pytest.raises(ConfigError, match=f"{SWITCH} must be 0 .profiles off. or 1 .*, got '{word}'"):
            switched_on()


def test_adopting_sets_the_threads(llm: LLM) -> None:
    folder = BUNDLED / "target"
    torch.set_num_threads(2)
    stored(here=Conditions.of(llm.runner.info, folder), threads=1)
    assert adopt(llm.runner.info, folder) is not None
    assert torch.get_num_threads() == 1
    assert adopt(llm.runner.info, folder) is not None


class TestPickUp:
    """What `LLM` does with a profile."""

    @pytest.fixture(autouse=True)
    def profile(self, llm: LLM) -> Profile:
        return stored(here=Conditions.of(llm.runner.info, BUNDLED / "target"), threads=torch.get_num_threads())

    def test_the_default_takes_it(self, profile: Profile) -> None:
        tuned = LLM(dtype="float32")
        assert tuned.profile == profile
        assert tuned.drafter_methods == ["ngram"]
        assert tuned.speculative == profile.speculative

    def test_off_is_a_choice(self, llm: LLM) -> None:
        stored(None, here=Conditions.of(llm.runner.info, BUNDLED / "target"), threads=torch.get_num_threads())
        tuned = LLM(dtype="float32")
        assert tuned.speculative is None
        assert tuned.drafter_methods == []

    @pytest.mark.parametrize("config", [None, {"method": "ngram", "num_speculative_tokens": 4}])
    def test_a_prediction_is_drafted_from_although_the_choice_reads_none(
        self, llm: LLM, config: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(
            Costs, "table", lambda self, batch, context, rows: [1e-3 + 1e-7 * row for row in range(rows + 1)]
        )
        monkeypatch.setattr(Costs, "line", lambda self, drafter, batch=1: DraftLine(1e-7, 1e-7, 9))
        stored(config, here=Conditions.of(llm.runner.info, BUNDLED / "target"), threads=torch.get_num_threads())
        tuned, params = LLM(dtype="float32"), SamplingParams(temperature=0, max_tokens=24)
        expected = tuned.generate("def f(x):", params)[0]
        prompt = {"prompt": "def f(x):", "prediction": expected.outputs[0].token_ids}
        assert "prediction" not in expected.metrics.drafters
        for found in (tuned.generate(["x", prompt], params)[1], list(tuned.stream(prompt, params))[-1].output):
            assert found.outputs[0].token_ids == expected.outputs[0].token_ids
            assert found.metrics.drafters["prediction"].num_accepted_tokens > 0
        assert "prediction" not in tuned.generate("def f(x):", params)[0].metrics.drafters

    @pytest.mark.parametrize("method", ["ngram", "prediction", "auto"])
    def test_a_prediction_that_the_users_methods_do_not_read_is_named(
        self, llm: LLM, caplog: pytest.LogCaptureFixture, method: str
    ) -> None:
        chosen = llm.with_speculative_config({"method": method})
        prompt, params = {"prompt": "x", "prediction": "y"}, SamplingParams(temperature=0, max_tokens=2)
        found, _ = (chosen.generate(prompt, params)[0] for _ in range(2))
        assert "prediction" not in found.metrics.drafters or method != "ngram"
        warned = [one.getMessage() for one in caplog.records if "a prediction is ignored" in one.getMessage()]
        assert len(warned) == (method == "ngram")
        assert all("['ngram'] uses it" in line for line in warned)

    def test_a_prediction_where_nothing_is_drafted_is_named_once(
        self, llm: LLM, caplog: pytest.LogCaptureFixture
    ) -> None:
        plain, params = llm.with_speculative_config(None), SamplingParams(temperature=0, max_tokens=2)
        for _ in range(2):
            plain.generate({"prompt": "x", "prediction": "y"}, params)
            plain.generate("x", params)
        assert caplog.text.count("a prediction is ignored, since nothing is drafted") == 1

    @pytest.mark.parametrize("given", [{"method": "auto"}, '{"method": "auto"}', dict(DEFAULT), None])
    def test_what_the_user_writes_wins(self, given: Any) -> None:
        found = LLM(dtype="float32", speculative_config=given)
        assert found.profile is None
        assert found.drafter_methods == ([] if given is None else ["prediction", "grammar", "suffix", "draft_model"])

    def test_an_argument_switches_it_off(self) -> None:
        assert LLM(dtype="float32", profile=False).drafter_methods == ["prediction", "grammar", "suffix", "draft_model"]

    def test_another_dtype_does_not_fit(self) -> None:
        assert LLM(dtype="bfloat16").profile is None

    def test_another_engine_on_the_same_weights_says_what_it_wants(self) -> None:
        other = LLM(dtype="float32").with_speculative_config({"method": "auto"})
        assert other.drafter_methods == ["prediction", "grammar", "suffix", "draft_model"]
        assert other.profile is None
