"""`paceline tune`: words, object, profile, exit code. What is chosen depends on the machine; only the form is tested
here.
"""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
from command import ENDS, Command, arrive

from paceline.cli.tune import words
from paceline.llm import BUNDLED
from paceline.tune import Interval, Tuning
from paceline.tune.candidates import Arm

FAST = ("--budget", "1", "--max-tokens", "3", "--dtype", "float32", "--threads", "1")
DRAFT = {"method": [{"method": "ngram"}, {"method": "draft_model", "model": str(BUNDLED / "draft")}]}


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "80")


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.txt"
    file.write_text("Once upon a time\nThe sum of two and two is\n")
    return file


@pytest.fixture
def gain(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is measured shows a gain, whatever this machine does."""
    shown = Interval(1.5, 1.4, 1.62, 0.9995, 40, 12)
    monkeypatch.setattr("paceline.tune.tuning.interval", lambda measured: shown)


@pytest.mark.usefixtures("gain")
def test_the_choice_is_said_and_kept_and_used(run: Command, prompts: Path, tmp_path: Path) -> None:
    found = run("tune", "--prompts", prompts, *FAST)
    assert (found.code, found.err) == (0, "")
    assert "Chosen: " in found.out
    assert "95 % interval" in " ".join(found.out.split())
    assert "in the search" in found.out
    assert max(len(line) for line in found.out.splitlines() if str(tmp_path) not in line) <= 80
    (path,) = (tmp_path / "cache" / "profiles").glob("*.json")
    assert f"Profile: {path}" in found.out.splitlines()
    used = run("generate", "Once upon a time", "--log-level", "info", *FAST[2:])
    assert used.code == 0
    assert str(path) in used.err
    explicit = run("generate", "Once upon a time", "-s", '{"method": "auto"}', "--log-level", "info", *FAST[2:])
    assert str(path) not in explicit.err


def test_without_evidence_nothing_is_kept(
    run: Command, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unclear = Interval(1.2, 0.99, 1.5, 0.96, 40, 12)
    monkeypatch.setattr("paceline.tune.tuning.interval", lambda measured: unclear)
    found = run("tune", "--prompts", prompts, *FAST)
    assert found.code == 0
    assert "Undecided, auto remains the default" in found.out
    assert "Chosen" not in found.out
    assert not (tmp_path / "cache" / "profiles").exists()


@pytest.mark.usefixtures("gain")
def test_json(run: Command, prompts: Path) -> None:
    made = json.loads(run("tune", "--prompts", prompts, "--chat", "--json", *FAST).out)
    assert made["gain"]["low"] <= made["gain"]["median"] <= made["gain"]["high"]
    assert made["profile"]["conditions"]["dtype"] == "float32"
    assert Path(made["path"]).exists()
    assert made["chosen"] == made["best"]


def test_a_dry_run_keeps_nothing(run: Command, prompts: Path, tmp_path: Path) -> None:
    found = run("tune", "--prompts", prompts, "--dry-run", *FAST)
    assert found.code == 0
    assert "No profile was written." in found.out
    assert not (tmp_path / "cache" / "profiles").exists()


def test_bad_input_is_rejected_before_the_model_is_loaded(run: Command, tmp_path: Path) -> None:
    found = run("tune", "--prompts", tmp_path / "none.txt", "--model", "/no/such/model")
    assert (found.code, "none.txt" in found.line) == (2, True)
    found = run("tune", "-s", "null", "--model", "/no/such/model")
    assert (found.code, "--speculative-config" in found.line) == (2, True)
    assert run("tune", "--budget", "0").code == 2


@pytest.mark.parametrize(("number", "code", "words"), ENDS)
def test_a_signal_before_anything_was_measured(
    run: Command, prompts: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, code: int, words: str
) -> None:
    def interrupt(*arguments: Any) -> float:
        arrive(number)
        return 0.0

    monkeypatch.setattr("paceline.tune.tuning.TuningTrial.warm_up", interrupt)
    found = run("tune", "--prompts", prompts, *FAST)
    assert (found.code, found.line) == (code, words)
    assert "Interrupted" in found.out
    assert "No profile was written." in found.out


def tuning(**changes: Any) -> Tuning:
    best = Arm(DRAFT, 1)
    fine: dict[str, Any] = {
        "best": best,
        "chosen": best,
        "gain": Interval(1.5, 1.4, 1.62, 0.9995, 40, 12),
        "seconds": 61.0,
    }
    return Tuning("/models/target", "bfloat16", "cpu", 2, 24, 1, **{**fine, **changes})


def test_words_of_a_gain() -> None:
    shown = words(tuning(settings={"ngram, controller auto": (1.2, 5)}), Path("/p.json"))
    assert "target (bfloat16 on cpu, 2 threads), 24 prompts, temperature 0, 61 s" in shown
    flat = " ".join(shown.split())
    assert (
        "Chosen: ngram + draft_model (draft), controller auto, 1 thread. It decodes at 1.50 times plain decoding"
        in flat
    )
    assert "(95 % interval 1.40 to 1.62, 40 paired runs on 12 prompts)" in flat
    assert "with a confidence of more than 99.9 %" in flat
    assert "Profile: /p.json" in flat


@pytest.mark.parametrize(("batch", "units"), [(1, "prompts"), (4, "batches")])
def test_few_prompts_have_no_interval(batch: int, units: str) -> None:
    """Five all lie on one side by chance in one of sixteen cases; six are the control."""
    for items in (5, 6):
        found = tuning(gain=Interval(1.5, 1.4, 1.62, 0.9995, 40, items))
        found.batch_size = batch
        shown = " ".join(words(found, Path("/p.json")).split())
        why = f"6 {units} or more are needed for an interval"
        ends = why if items == 5 else "95 % interval 1.40 to 1.62"
        assert f"1.50 times plain decoding ({ends}, 40 paired runs on {items} {units})" in shown
        assert ("confidence" in shown) == ("95 %" in shown) == (items == 6)


def test_words_of_no_gain() -> None:
    shown = " ".join(words(tuning(chosen=None, gain=Interval(1.02, 0.97, 1.1, 0.8, 40, 12)), None).split())
    assert (
        "Undecided, auto remains the default: the search preferred ngram + draft_model (draft), controller auto"
        in shown
    )
    assert "no setting is shown to be faster than plain decoding" in shown
    assert "No profile was written." in shown
    assert "scatter" not in shown
    assert "scatter" in words(tuning(chosen=None, gain=Interval(1.02, 0.7, 1.9, 0.8, 40, 12)), None)


def test_words_of_a_loss() -> None:
    slower = tuning(chosen=Arm(None, 2), gain=Interval(0.8, 0.75, 0.85, 0.0, 40, 12))
    shown = " ".join(words(slower, Path("/p.json")).split())
    assert "Chosen: plain decoding (off)." in shown
    assert "controller auto, 1 thread) is slower: 0.80 times plain decoding" in shown


def test_words_of_an_interrupt() -> None:
    shown = " ".join(words(tuning(chosen=None, interrupted=True, in_search=True), None).split())
    assert "Interrupted; what follows rests on the measurements so far." in shown
    assert "Undecided, auto remains the default: the search preferred ngram + draft_model" in shown
    assert "the same runs chose it, so that they flatter it" in shown
    shown = " ".join(words(tuning(chosen=None, interrupted=True), None).split())
    assert "too few runs" in shown


def test_rejections_and_what_was_left_out_are_said() -> None:
    shown = words(
        tuning(
            rejected={"x, 5 tokens": "output differs"},
            skipped={
                "medusa": "no head",
                "eagle": "no head",
                "rest": "no search can find a datastore; `paceline bench -s` measures with yours",
                "tli": "no search can find another model; `paceline bench -s` measures with yours",
            },
            left_out=["y"],
            beyond=list("abcdefgh"),
        ),
        None,
    )
    shown = " ".join(shown.split())
    assert "failed: x, 5 tokens: output differs" in shown
    assert "not tried: medusa, eagle: no head" in shown
    assert "since each needs a model or a file that you name" in shown
    assert "measures them): rest, tli" in shown
    assert "not tried: 1 setting for which the budget is too short; give more --budget: y" in shown
    assert (
        "not tried: 8 settings less promising than those that the search starts with: a; b; c; d; e; f, and 2 more"
        in shown
    )
    assert "less promising" not in words(tuning(), None)


def test_what_the_budget_did_not_allow_is_said() -> None:
    shown = " ".join(words(tuning(asked_tokens=128, max_tokens=40, budget=10.0, seconds=14.0), None).split())
    assert "Prompts were decoded to 40 tokens instead of 128" in shown
    assert "It took 14 s instead of 10" in shown
    shown = words(tuning(asked_tokens=128, max_tokens=128, budget=10.0, seconds=11.0), None)
    assert "instead of" not in shown


def test_a_draft_model_that_is_not_there_is_named_at_once(run: Command, tmp_path: Path) -> None:
    found = run("tune", "--draft-model", tmp_path / "none", "--budget", "1")
    assert (found.code, found.out) == (2, "")
    assert "none" in found.line


def test_a_budget_of_memory_is_kept_to_and_said(run: Command, prompts: Path) -> None:
    found = run("tune", "--prompts", prompts, *FAST, "--memory", "1GB", "--json", "--dry-run")
    assert found.code == 0, found.err
    told = json.loads(found.out)["memory"]
    assert told["budget"] == 10**9
    assert 10**7 < told["plain"]["total"] < 10**8
    assert told["settings"]
    assert all(one["held"] <= 10**9 for one in told["settings"].values())
    held = {"budget": 10**9, "plain": {"total": 10**7}, "settings": {"off": {"held": 2 * 10**7, "nodes": 4}}}
    held["settings"]["off"]["speculative_memory_bytes"] = 55  # type: ignore[index]
    shown = " ".join(words(tuning(memory=held, best=Arm(None, 2)), None).split())
    assert "Of 1.00 GB, plain decoding takes 10.0 MB, the best setting has held 20.0 MB" in shown
    assert "later runs keep to it with --speculative-memory-bytes 55" in shown
    for given, why in (("2", "--memory must be a size as 2GB"), ("1MB", "--memory must be at least ")):
        found = run("tune", "--prompts", prompts, *FAST, "--memory", given)
        assert (found.code, why in found.err) == (2, True), found.err
