"""A head learns from what the target says; a run that was killed ends in the weights of one that was not."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path
from shutil import copyfile
from typing import Any

import pytest
import torch
from forked import Forked
from safetensors.torch import load_file

from paceline import LLM, SamplingParams, registry
from paceline.bench import bundled_prompts
from paceline.errors import ConfigError, PromptError
from paceline.llm import BUNDLED
from paceline.training import (
    Fitting,
    TrainConfig,
    Trainer,
    answered,
    documents_of,
    texts_of,
    train,
    trainer,
    training_config,
)
from paceline.training.answers import TrainingText
from paceline.training.batches import packed

QUICK = Fitting(steps=40, batch_rows=4, row_tokens=128, eval_steps=20, warmup_steps=5, bf16=False)

LIFT = {
    "eagle3": 0.15,
    "eagle": 0.15,
    "fspad": 0.05,
    "mtp": 0.1,
    "dflash": 0.05,
    "dspark": 0.05,
    "medusa": 0.05,
    "medusa2": 0.05,
    "hydra": 0.1,
    "hydra++": 0.1,
    "clover": 0.1,
    "chimera": 0.1,
    "mlp_speculator": 0.05,
    "ppd": 0.05,
    "lud": 0.05,
    "hidden_transfer": 0.05,
    "draft_model": 0.1,
    "dovetail": 0.1,
    "p_eagle": 0.1,
    "falcon": 0.1,
    "longspec": 0.1,
    "pard": 0.1,
    "kangaroo": 0.1,
    "m2r2": 0.1,
    "layer_skip": 0.1,
    "s2d": 0.1,
    "small_llama": 0.05,
}
"""Tokens a pass that so little training must bring."""

SHORT = replace(QUICK, steps=28, eval_steps=14, batch_rows=2)

WANTED: dict[str, dict[str, Any]] = {
    "small_llama": {"method": "draft_model", "hidden_size": 64},
    "kangaroo": {"exit_layer": 1, "fitting": SHORT},
    "m2r2": {"stream_rate": 2, "fitting": SHORT},
    "eagle3": {"fitting": replace(SHORT, batch_rows=4)},
    **{name: {"fitting": SHORT} for name in ("hydra", "hydra++", "chimera", "draft_model", "fspad", "mtp", "longspec")},
    "clover": {"fitting": replace(SHORT, learning_rate=2e-3)},
    "dflash": {"fitting": replace(SHORT, learning_rate=3e-3), "max_anchors": 24},
    "dspark": {"fitting": replace(SHORT, steps=60, learning_rate=3e-3), "max_anchors": 24, "markov_rank": 16},
    "ppd": {"anchors": 16, "depths": 2, "fitting": replace(SHORT, steps=16, eval_steps=16)},
    "lud": {
        "anchors": 32,
        "depths": 2,
        "unit_threshold": 0.3,
        "fitting": replace(SHORT, steps=40, eval_steps=20, learning_rate=2e-3),
    },
    "hidden_transfer": {
        "anchors": 16,
        "depths": 2,
        "fitting": replace(SHORT, steps=16, eval_steps=16, learning_rate=1e-2),
    },
    "dovetail": {"num_layers": 2, "fitting": SHORT},
    "p_eagle": {"num_layers": 1, "fitting": SHORT},
    "falcon": {"fitting": replace(SHORT, learning_rate=3e-3)},
    "pard": {"draft_model": str(BUNDLED / "draft"), "fitting": replace(SHORT, learning_rate=1e-3)},
    "medusa2": {"fitting": replace(SHORT, learning_rate=1e-3)},
    "s2d": {"fitting": replace(SHORT, learning_rate=1e-3)},
    "layer_skip": {"exit_layer": 1, "fitting": replace(SHORT, learning_rate=1e-3)},
}
"""Changes to `config`; the methods that learn the whole vocabulary take their time."""


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(dtype="float32")


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": one.prompt[:150]}) + "\n" for one in bundled_prompts()))
    return path


def config(prompts: Path, **changes: Any) -> TrainConfig:
    shared = {"method": "eagle3", "data": (prompts,), "max_tokens": 40, "draft_vocab_size": 512, "depths": 3}
    return training_config(**shared | {"held_out_share": 0.16, "fitting": QUICK} | changes)


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the target said to the prompts: the first method asks, the others go on with it."""
    return tmp_path_factory.mktemp("said") / "answers.jsonl"


TEXT_ALONE = [one for one in registry.TRAINERS if trainer(one).drafts and not trainer(one).reads_sources]


@pytest.mark.parametrize("name", [*TEXT_ALONE, "small_llama"])
def test_a_trained_head_is_right_more_often_and_drafts(
    llm: LLM, prompts: Path, said: Path, tmp_path: Path, name: str
) -> None:
    assert name in LIFT, f"LIFT lacks a line for {name!r}"
    answers = tmp_path / "head" / "run" / "answers.jsonl"
    answers.parent.mkdir(parents=True)
    if said.exists():
        copyfile(said, answers)
    wanted = config(prompts, **{"method": name} | WANTED.get(name, {}))
    found = train(llm, wanted, tmp_path / "head", speed_prompts=1)
    copyfile(answers, said)
    assert found.test.length > found.before.length + LIFT[name], (found.before, found.test)
    report = json.loads((found.folder / "report.json").read_text())
    assert report["tokens_per_pass"] == found.test.length
    assert found.speed is not None
    assert report["speed"]["chain"] == found.speed["chain"]
    assert found.speed["chain"]["equal"] == found.speed["auto"]["equal"] == 1
    assert "over plain" in (found.folder / "report.html").read_text()
    assert "Learning curves" in (found.folder / "report.html").read_text()
    assert found.speculative_config["method"] in registry.DRAFTERS
    fixed = {"num_speculative_tokens": 3, "controller": "fixed"}
    target = llm if found.model is None else LLM(str(found.model), dtype="float32")
    assert found.model == (found.folder if trainer(wanted.method).replaces_target else None)
    drafting = target.with_speculative_config({**found.speculative_config, **fixed})
    (out,) = drafting.generate(bundled_prompts()[3].prompt, SamplingParams(temperature=0, max_tokens=8))
    assert out.metrics.num_draft_tokens > 0
    assert found.speed["chain"]["tokens_per_pass"] > 1 or name not in ("eagle", "eagle3")  # after so little training


SCRIPT = """
import sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from paceline import LLM, SamplingParams
from paceline.training import Fitting, TrainConfig, train
fitting = Fitting(steps=16, batch_rows=2, row_tokens=96, eval_steps=4, bf16=False, seed=int(sys.argv[3]))
config = TrainConfig(method="eagle3", data=(Path(sys.argv[1]),), max_tokens=24, draft_vocab_size=256, depths=2,
                     most_prompts=16, held_out_share=0.2, fitting=fitting)
train(LLM(dtype="float32"), config, sys.argv[2], speed_prompts=0)
"""


def run(monkeypatch: pytest.MonkeyPatch, prompts: Path, folder: Path, seed: int) -> None:
    """The script, in this process."""
    with monkeypatch.context() as patched:
        patched.setattr(sys, "argv", ["", str(prompts), str(folder), str(seed)])
        exec(SCRIPT, {})


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def test_a_killed_run_goes_on_to_the_same_weights(
    monkeypatch: pytest.MonkeyPatch, prompts: Path, tmp_path: Path
) -> None:
    calm, killed, other = tmp_path / "calm", tmp_path / "killed", tmp_path / "other"
    run(monkeypatch, prompts, calm, 0)
    for folder in (killed, other):  # which need not ask again
        (folder / "run").mkdir(parents=True)
        copyfile(calm / "run" / "answers.jsonl", folder / "run" / "answers.jsonl")
    process = Forked([prompts, killed, 0], program=SCRIPT)
    curve = killed / "run" / "curve.json"
    end = time.monotonic() + 120
    while not (curve.exists() and len(json.loads(curve.read_text())["judged"]) >= 3):
        assert process.poll() is None, "it ended before it could be killed"
        assert time.monotonic() < end
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert not (killed / "model.safetensors").exists()
    run(monkeypatch, prompts, killed, 0)
    run(monkeypatch, prompts, other, 1)
    same = [torch.equal(one, weights(killed)[name]) for name, one in weights(calm).items()]
    assert all(same)
    assert not all(torch.equal(one, weights(other)[name]) for name, one in weights(calm).items())


@pytest.mark.parametrize(("key", "value"), [("method", "medusa"), ("processes", 2)])
def test_a_folder_of_another_run_is_rejected(llm: LLM, prompts: Path, tmp_path: Path, key: str, value: Any) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "training.json").write_text(json.dumps({key: value}))
    with pytest.raises(ConfigError, match=f"another {key}"):
        train(llm, config(prompts), tmp_path)


def test_other_data_of_the_same_name_is_another_run(llm: LLM, prompts: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "training.json").write_text(json.dumps({"sha256": ["0"], "fitting": {"minutes": 1.0}}))
    with pytest.raises(ConfigError, match=r"another minutes \(1.0, now 20.0\), content of data"):
        train(llm, config(prompts), tmp_path)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_what_no_run_has_made_is_not_written_over(llm: LLM, prompts: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("mine")
    with pytest.raises(ConfigError, match=r"no run/training\.json to go on with"):
        train(llm, config(prompts), tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="output must be a folder"):
        train(llm, config(prompts), tmp_path / "file")
    assert (tmp_path / name).read_text() == "mine"
    assert not (tmp_path / "run").exists()


def test_a_run_that_could_not_begin_leaves_its_folder_free(llm: LLM, prompts: Path, tmp_path: Path) -> None:
    one = tmp_path / "one.jsonl"
    one.write_text(json.dumps({"prompt": "Once upon a time"}) + "\n")
    refused = {
        "cannot": replace(config(prompts), data=(tmp_path / "missing.jsonl",)),
        "3 prompts or more": config(one),
        "layers must be below": config(prompts, method="draft_model", layers=(0, 99)),
        "exit_layer": config(prompts, method="kangaroo", exit_layer=99),
        "config must be a LoraConfig": replace(config(prompts), method="lora"),
        "3 texts or more": replace(config(one), texts=True),
    }
    for words, wanted in refused.items():
        with pytest.raises((ConfigError, PromptError), match=words):
            train(llm, wanted, tmp_path / "head")
        assert not (tmp_path / "head" / "run").exists(), words


@pytest.mark.parametrize(
    ("name", "value"), [("learning_rate", -1.0), ("minutes", 0.0), ("steps", 0), ("eval_steps", 0), ("patience", 0)]
)
def test_fitting_outside_its_range_is_rejected(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=name):
        Fitting(**{name: value})


def test_settings_of_another_method_are_rejected(prompts: Path) -> None:
    with pytest.raises(ConfigError, match="training of eagle3 does not know 'rank'"):
        config(prompts, rank=3)
    assert vars(config(prompts, method="lora", texts=True, rank=3))["rank"] == 3


def test_every_trainer_is_registered_under_its_name() -> None:
    for name in registry.TRAINERS:
        assert trainer(name).name == name
        assert name in LIFT or name not in TEXT_ALONE, f"LIFT lacks a line for {name!r}"
        assert isinstance(training_config(name, data=(Path("x"),)), trainer(name).config_class)
    with pytest.raises(ConfigError, match=r"unknown trainer 'egle3'; did you mean eagle3 or eagle\?"):
        trainer("egle3")
    with pytest.raises(ConfigError, match="is not a trainer class"):
        trainer("paceline.training:Fitting")


class OwnTrainer(Trainer):
    """Of another package."""

    name = "own"


def test_entry_points_add_trainers(monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("own", f"{__name__}:OwnTrainer", "paceline.trainers")
    monkeypatch.setattr(registry, "installed", lambda family: [point] if family == "trainers" else [])
    assert trainer("own").__name__ == "OwnTrainer"
    assert "own" not in registry.table("drafters")


def test_answers_are_gone_on_with_behind_a_torn_line(llm: LLM, tmp_path: Path) -> None:
    file, asked = tmp_path / "answers.jsonl", {"00": [5, 6, 7], "ff": [8, 9, 10, 11]}
    whole = answered(llm, asked, file, max_tokens=6)
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(lines[0] + lines[1][:-9])
    assert answered(llm, asked, file, max_tokens=6) == whole
    assert file.read_bytes() == b"".join(lines)
    file.write_text("[]\n")
    with pytest.raises(PromptError, match="something else than answers"):
        answered(llm, asked, file, max_tokens=6)


def test_of_conversations_that_end_with_an_answer_only_that_is_learned(llm: LLM, tmp_path: Path) -> None:
    file = tmp_path / "said.jsonl"
    turns = [{"role": "user", "content": "Once upon a time"}, {"role": "assistant", "content": " there was a cat."}]
    rows = [{"messages": turns}, {"text": "Once upon a time there was a cat."}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    said, text = texts_of(llm, [file], most=None)
    assert said.prompt == llm.chat_ids(turns[:1])
    assert llm.tokenizer.decode(text.answer) == "Once upon a time there was a cat."
    assert said.answer[-1] == llm.tokenizer.eos_id
    assert llm.tokenizer.decode(said.answer[:-1]) == " there was a cat."
    assert text.prompt == []


def test_rows_hold_every_document_once_and_none_is_cut() -> None:
    answers = [TrainingText(str(n), list(range(3 + n % 5)), list(range(10 + n))) for n in range(20)]
    documents = documents_of(answers, 24)
    rows = packed(documents, 24)
    assert sum(len(row) for row in rows) == len(documents)
    assert all(sum(len(one.tokens) for one in row) <= 24 for row in rows)
    assert {one for row in rows for one in row} == set(documents)
    assert documents_of([TrainingText("x", list(range(30)), [1, 2])], 24) == []


@pytest.mark.parametrize(
    ("change", "match"), [({"method": "nothing"}, "unknown trainer"), ({"depths": 0}, "depths"), ({"data": ()}, "data")]
)
def test_values_out_of_range_are_rejected(prompts: Path, change: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        replace(config(prompts), **change)
