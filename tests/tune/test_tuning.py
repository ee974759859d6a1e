"""Tuning on the bundled pair, with a clock that counts passes of the models instead of seconds: all runs give the same
figures.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from credulous import believe_chains

from paceline import LLM, registry
from paceline.drafters.draft_model.drafter import DraftModelDrafter
from paceline.llm import BUNDLED
from paceline.models.runners import NativeRunner
from paceline.tune import Interval, Tuning, tune
from paceline.tune.candidates import MAX_CANDIDATES, Arm, find_candidates, thread_counts, with_request_drafters
from paceline.tune.search import LEAST_ARMS, MIN_PAIRS, Gain
from paceline.tune.tuning import FIXED_UP_TO, LEAST_TOKENS

TARGET, DRAFT = BUNDLED / "target", str(BUNDLED / "draft")
PROMPTS = [
    "One day, a little girl named Lily",
    "Q: What is 2 + 2?\nA: 4\nQ: What is 3 + 3?\nA:",
    "def add(a, b):\n    return",
]
ALL = {"trees", "taps", "fork", "truncate"}


class Passes:
    """A clock: a pass of the target takes 1, and `row` more for every row but the first; a drafted level takes
    `draft`.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, target: Any, *, row: float = 0.0, draft: float = 0.05) -> None:
        self.now, score, propose = 0.0, NativeRunner.score, DraftModelDrafter.propose

        def counted(runner: NativeRunner, caches: Any, roots: Any, trees: Sequence[Any], **more: Any) -> Any:
            rows = sum(1 + len(tree) for tree in trees)
            self.now += 1 + row * (rows - 1) if runner is target else 0.0
            return score(runner, caches, roots, trees, **more)

        def drafted(drafter: DraftModelDrafter, *arguments: Any) -> Any:
            trees = propose(drafter, *arguments)
            self.now += draft * max(tree.max_depth for tree in trees)
            return trees

        monkeypatch.setattr(NativeRunner, "score", counted)
        monkeypatch.setattr(DraftModelDrafter, "propose", drafted)

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six settings instead of many."""
    monkeypatch.setattr("paceline.tune.candidates.auto_configs", lambda drafts: [])
    monkeypatch.setattr("paceline.tune.search.MAX_PAIRS", 3 * MIN_PAIRS)
    monkeypatch.setattr("paceline.tune.search.FIRST_LOOKS", 1.0)
    monkeypatch.setattr("paceline.tune.candidates.OPTIONS", {})
    monkeypatch.setattr("paceline.tune.candidates.TOKENS", (5,))
    drafters = {name: registry.DRAFTERS[name] for name in ("ngram", "draft_model")}
    monkeypatch.setattr(registry, "FAMILIES", {**registry.FAMILIES, "drafters": drafters})


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(dtype="float32", speculative_config=None)


Run = Callable[..., Tuning]


@pytest.fixture
def run(llm: LLM, monkeypatch: pytest.MonkeyPatch, few: None) -> Run:
    def tuned(*, row: float = 0.0, draft: float = 0.05, **options: Any) -> Tuning:
        clock = Passes(monkeypatch, llm.runner, row=row, draft=draft)
        options = {"drafts": [DRAFT], "budget": 600.0, "max_tokens": 8, "cores": 0, **options}
        return tune(llm, TARGET, options.pop("prompts", PROMPTS), clock=options.pop("clock", clock), **options)

    return tuned


def test_cheap_drafts_are_chosen_and_the_profile_says_so(run: Run) -> None:
    found = run(budget=700.0)
    assert found.chosen == found.best
    assert found.gain is not None
    assert 1.0 < found.gain.low <= found.gain.median <= found.gain.high
    assert found.gain.pairs >= MIN_PAIRS
    assert found.profile is not None
    assert found.profile.measured["gain"]["median"] == found.gain.median
    assert "draft_model" in next(iter(found.settings))
    assert not found.rejected
    assert found.near_ties == 0
    assert found.compared >= MIN_PAIRS
    json.dumps(found.to_dict())


def test_where_every_row_costs_a_pass_no_drafting_is_chosen(run: Run) -> None:
    """Where nothing is drafted on a prompt, or on none, neither side is shown to be faster; else plain decoding."""
    found = run(row=1.0, draft=1.0, budget=900.0, max_tokens=12)
    assert found.gain is not None
    assert found.gain.low <= 1.0
    if found.gain.high >= 1.0:
        assert found.chosen is None
        assert found.profile is None
    else:
        assert found.profile is not None
        assert found.profile.speculative is None


def test_dear_drafts_lose_to_copying(run: Run) -> None:
    found = run(draft=3.0, budget=1400.0, prompts=["one two three one two three one two three one two"] * 2)
    assert found.settings["draft_model (draft), 5 tokens"][0] < 1.0 <= found.settings["ngram, 5 tokens"][0]


def test_wrong_outputs_are_rejected(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    believe_chains(monkeypatch)
    found = run(budget=700.0)
    fixed = {"ngram, 5 tokens", "draft_model (draft), 5 tokens", "ngram + draft_model (draft), 5 tokens"}
    assert fixed <= set(found.rejected)  # those with controller auto may have drafted nothing, which is right
    assert all("differs from plain decoding" in why for why in found.rejected.values())
    assert not set(found.rejected) & set(found.settings)
    assert found.best is None or found.best.words(found.threads) not in found.rejected


def test_a_draft_that_cannot_be_loaded_is_rejected_and_the_others_go_on(run: Run, tmp_path: Path) -> None:
    found = run(drafts=[DRAFT, str(tmp_path / "none")], budget=700.0)
    assert any("cannot run" in why for why in found.rejected.values())
    assert found.best is not None
    assert str(tmp_path) not in str(found.best.config)


@pytest.mark.parametrize(
    ("low", "high", "pairs", "chosen"),
    [
        (1.01, 1.3, MIN_PAIRS, "best"),
        (0.99, 1.3, MIN_PAIRS, None),
        (0.8, 0.99, MIN_PAIRS, "plain"),
        (1.01, 1.3, MIN_PAIRS - 1, None),
    ],
)
def test_a_choice_needs_an_interval_without_1_and_enough_runs(
    run: Run, monkeypatch: pytest.MonkeyPatch, low: float, high: float, pairs: int, chosen: str | None
) -> None:
    monkeypatch.setattr(
        "paceline.tune.tuning.interval", lambda measured: Interval(1.1, low, high, 0.9, len(measured), 4)
    )
    monkeypatch.setattr("paceline.tune.tuning.confirm", lambda *_, **__: ([Gain(0, 1.1) for _ in range(pairs)], False))
    found = run(budget=10.0)
    assert found.chosen == {"best": found.best, "plain": Arm(None, found.threads), None: None}[chosen]
    assert (found.profile is None) == (chosen is None)


class Interrupting:
    """A clock that is interrupted at its n-th look."""

    def __init__(self, at: int) -> None:
        self.at, self.looks = at, 0

    def __call__(self) -> float:
        self.looks += 1
        if self.looks == self.at:
            raise KeyboardInterrupt
        return float(self.looks)


def test_an_interrupt_in_the_search_with_too_few_runs_chooses_nothing(run: Run) -> None:
    found = run(clock=Interrupting(40), budget=100_000.0)
    assert found.interrupted
    assert found.in_search
    assert found.best is not None
    assert found.gain is not None
    assert found.gain.pairs < MIN_PAIRS
    assert found.chosen is None
    assert found.profile is None


def test_an_interrupt_in_the_confirmation_keeps_the_best(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def progress(what: str, seconds: float) -> None:
        seen.append(what)
        if sum(one.startswith("measuring") for one in seen) == MIN_PAIRS + 3:
            raise KeyboardInterrupt

    found = run(progress=progress, budget=700.0)
    assert found.interrupted
    assert not found.in_search
    assert found.gain is not None
    assert found.gain.pairs == MIN_PAIRS + 2
    assert found.chosen is not None
    assert found.profile is not None
    assert found.profile.measured["interrupted"] is True
    assert seen[0] == "warming up"
    assert any(what.startswith("searching, ") for what in seen)


def test_a_budget_is_kept_by_shorter_runs_and_an_early_end_of_the_search(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = ["One day, a little girl named Lily", "Once upon a time there was a"]  # texts of 96 tokens and more
    kept = run(budget=400.0, max_tokens=96, prompts=prompts)
    assert (kept.asked_tokens, kept.budget) == (96, 400.0)
    assert kept.max_tokens is not None
    assert LEAST_TOKENS <= kept.max_tokens < 40
    assert kept.seconds < 1.3 * 400
    for hook in ("shorten", "hurry"):
        monkeypatch.setattr(f"paceline.tune.tuning.TuningTrial.{hook}", lambda *_: None)
    late = run(budget=400.0, max_tokens=96, prompts=prompts)
    assert (late.max_tokens, late.seconds > 1.3 * 400) == (96, True)


def test_a_short_budget_tries_the_most_promising_only(run: Run) -> None:
    found = run(budget=10.0)
    assert len(found.settings) == LEAST_ARMS
    assert len(found.left_out) == 6 - LEAST_ARMS
    assert not set(found.left_out) & set(found.settings)
    assert found.beyond == []
    assert found.gain is not None
    assert found.gain.pairs == MIN_PAIRS


def test_a_fixed_number_is_for_small_batches(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    draft_model = {"draft_model": registry.DRAFTERS["draft_model"]}
    monkeypatch.setattr(registry, "FAMILIES", {**registry.FAMILIES, "drafters": draft_model})
    found = run(batch_size=2, draft=0.0)
    assert (found.batch_size, found.prompts) == (2, 2)
    assert found.profile is not None
    config = found.profile.speculative_config
    assert config is not None
    assert config.get("disable_by_batch_size") == (FIXED_UP_TO * 2 + 1 if "num_speculative_tokens" in config else None)


def test_threads_are_tried_and_given_back(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setattr("paceline.tune.tuning.set_threads", calls.append)
    monkeypatch.setattr("paceline.tune.tuning.thread_counts", lambda now, cores, device: [now, 7])
    found = run(budget=700.0, max_tokens=4)
    assert 7 in calls
    assert calls[-1] == found.threads == torch.get_num_threads()
    assert "off, 7 threads" in found.settings


def test_candidates_are_what_the_registry_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.tune.candidates.MAX_CANDIDATES", 1000)
    found = find_candidates(ALL, drafts=[DRAFT], threads=[2, 1])
    words = [setting.words(2) for setting in found.settings]
    assert words[:2] == ["auto (draft)", "ngram + draft_model (draft), controller auto"]
    assert "ngram, controller auto" in words
    assert "draft_model (draft), 5 tokens" in words
    assert "ngram (prompt_lookup_min 2, prompt_lookup_max 8), controller auto" in words
    assert "draft_model (draft, tree_width 4), controller auto" in words
    assert "off, 1 thread" in words
    assert len(set(words)) == len(words)
    assert found.skipped["prediction"].startswith("it follows what a request predicts")
    assert "no search can find a datastore made with the target's tokenizer" in found.skipped["rest"]
    assert {"method": "quantized_copy"} in [setting.config for setting in found.settings]
    assert {"method": "specmquant", "model": DRAFT} in [setting.config for setting in found.settings]
    assert not any("needs" in why for why in found.skipped.values())
    entry = registry.Entry("paceline.drafters.lookup.ngram:NgramDrafter", "table")
    more = {
        **registry.DRAFTERS,
        "another": entry,
        "tapping": registry.Entry(entry.target, "head", needs=("early_exit",)),
    }
    monkeypatch.setattr(registry, "FAMILIES", {**registry.FAMILIES, "drafters": more})
    found = find_candidates(ALL, drafts=[], threads=[2])
    assert {"method": "another"} in [setting.config for setting in found.settings]
    assert found.skipped["tapping"] == "this model's runner cannot do early_exit"
    assert found.settings[0].config == {"method": "auto"}
    assert found.skipped["draft_model"] == "it drafts with a second model; name one with --draft-model"


def test_a_search_starts_with_so_many_settings_and_names_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    few, entry = find_candidates(ALL, drafts=[DRAFT], threads=[2, 1]), registry.DRAFTERS["ngram"]
    more = {**registry.DRAFTERS, **{f"another{i}": entry for i in range(40)}}
    monkeypatch.setattr(registry, "FAMILIES", {**registry.FAMILIES, "drafters": more})
    many = find_candidates(ALL, drafts=[DRAFT], threads=[2, 1])
    assert len(few.settings) == len(many.settings) == MAX_CANDIDATES
    assert len(many.beyond) > len(few.beyond) > 0
    words = [setting.words(2) for setting in (*many.settings, *many.beyond)]
    assert len(words) == len(set(words))
    kept = words[:MAX_CANDIDATES]
    assert {"ngram, controller auto", "draft_model (draft), controller auto", "off, 1 thread"} <= set(kept)
    assert any(" + " in one for one in kept)
    assert any(one.endswith(", 5 tokens") for one in kept)


def test_a_profile_reads_predictions_and_constraints() -> None:
    both = [{"method": "ngram"}, {"method": "draft_model", "model": DRAFT}]
    for config, methods in (
        ({"method": "ngram", "prompt_lookup_max": 8, "num_speculative_tokens": 5}, ["prediction", "grammar", "ngram"]),
        ({"method": both}, ["prediction", "grammar", "ngram", "draft_model"]),
        ({"method": "prediction", "num_speculative_tokens": 5}, ["grammar", "prediction"]),
        ({"method": "auto", "model": DRAFT}, ["prediction", "grammar", "suffix", "draft_model"]),
    ):
        made = with_request_drafters(config)
        assert with_request_drafters(made) == made
        assert made.get("num_speculative_tokens") == config.get("num_speculative_tokens")
        found = LLM(dtype="float32", speculative_config=made)
        assert found.drafter_methods == methods
    assert with_request_drafters({"method": "ngram", "prompt_lookup_max": 8})["method"][2]["prompt_lookup_max"] == 8


def test_a_runner_of_chains_gets_no_trees() -> None:
    found = find_candidates({"truncate"}, drafts=[DRAFT], threads=[1])
    assert not any("tree_width" in str(setting.config) for setting in found.settings)


def test_every_candidate_is_a_configuration(llm: LLM) -> None:
    for setting in find_candidates(ALL, drafts=[DRAFT], threads=[1]).settings:
        llm.with_speculative_config(setting.config)


@pytest.mark.parametrize(
    ("now", "physical", "device", "expected"),
    [(8, 4, "cpu", [8, 4, 1]), (2, 2, "cpu", [2, 1]), (1, 4, "cpu", [1]), (2, 0, "cpu", [2, 1]), (8, 4, "cuda", [8])],
)
def test_thread_counts(now: int, physical: int, device: str, expected: list[int]) -> None:
    assert thread_counts(now, physical, device) == expected
