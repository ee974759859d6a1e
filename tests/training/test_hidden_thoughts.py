"""The two fine-tunings of HCoT on the bundled model: thoughts that tell each other apart, answers that need them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from paceline import LLM, SamplingParams
from paceline.errors import CheckpointError, ConfigError, PromptError
from paceline.training import Fitting, TrainConfig, Trained, train, training_config
from paceline.training.batches import Batch, documents_of, packed
from paceline.training.hidden_thoughts import ThinkerTrainer, ThoughtTrainer, thoughts_of
from paceline.training.next_token import text_loss

QUICK = Fitting(steps=14, batch_rows=2, row_tokens=56, eval_steps=14, warmup_steps=2, bf16=False, learning_rate=3e-3)
CODES = (" red", " blue", " green", " gold")


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(dtype="float32", speculative_config=None)


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Keys, whose codes nobody could know."""
    path = tmp_path_factory.mktemp("data") / "keys.jsonl"
    rows = [{"prompt": f"Key {i}:", "thought": 3 * CODES[i % 4], "answer": CODES[i % 4]} for i in range(24)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def config(method: str, questions: Path, **changes: Any) -> TrainConfig:
    shared = {"data": (questions,), "texts": True, "held_out_share": 0.13, "fitting": QUICK}
    return training_config(**shared | {"method": method} | changes)


@pytest.fixture(scope="module")
def thinker(llm: LLM, questions: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return train(llm, config("hcot_thinker", questions), tmp_path_factory.mktemp("thinker"))


@pytest.fixture(scope="module")
def trained(llm: LLM, questions: Path, thinker: Trained, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    wanted = config("hcot", questions, thinker=str(thinker.folder))
    return train(llm, wanted, tmp_path_factory.mktemp("hcot"))


def learned(trainer_class: Any, llm: LLM, wanted: TrainConfig, folder: Path) -> tuple[Any, Batch]:
    """A trainer with what a run has learned, and a batch of two questions for each code."""
    made, view = trainer_class.init(llm, wanted, torch.arange(llm.runner.info.vocab_size))
    made.load_state_dict(load_file(folder / "run" / "best.safetensors"), strict=False)
    every = documents_of(trainer_class.texts(llm, wanted), 56)
    made.prepare(view, every, 56, 0)
    return made, view.batch(packed(every[:8], 56), 56)


def test_thoughts_are_told_apart(llm: LLM, questions: Path, thinker: Trained) -> None:
    wanted = config("hcot_thinker", questions)
    made, batch = learned(ThinkerTrainer, llm, wanted, thinker.folder)
    count = int(made.slots(batch).sum())
    assert count == 8
    with torch.no_grad():
        states = made.states(batch)
        found = float(made.contrast(states, batch))
        at = made.slots(batch).nonzero()
        other = states.clone()
        other[at[:, 0], at[:, 1]] = states[at[:, 0], at[:, 1]].roll(1, 0)
        assert found < 0.8 * math.log(count)  # two of eight thoughts are the same
        assert float(made.contrast(other, batch)) > math.log(count), "the control: the thoughts of others"
    assert thinker.curve.best.acceptance[0] > thinker.curve.judged[0].acceptance[0] + 0.2


def test_answers_need_their_own_thoughts(llm: LLM, questions: Path, thinker: Trained, trained: Trained) -> None:
    wanted = config("hcot", questions, thinker=str(thinker.folder))
    made, batch = learned(ThoughtTrainer, llm, wanted, trained.folder)
    with torch.no_grad():
        thoughts, at = made.thoughts(batch), made.slots(batch).nonzero()
        others = thoughts.clone()
        others[at[:, 0], at[:, 1]] = thoughts[at[:, 0], at[:, 1]].roll(1, 0)
        own, other = (float(text_loss(made.behind(one, batch), made.rows, batch)) for one in (thoughts, others))
        made.projection.zero_()
        assert torch.equal(made.behind(thoughts, batch), made.behind(others, batch)), "without a map nothing enters"
    assert other > own + 0.3
    assert trained.curve.best.acceptance[0] > trained.curve.judged[0].acceptance[0] + 0.2


def test_answers_alone_are_written(llm: LLM, trained: Trained) -> None:
    said = {"method": "hcot", "path": str(trained.folder)}
    made = LLM(skipping=said, dtype="float32", speculative_config=None)
    greedy = SamplingParams(temperature=0, max_tokens=24)
    (out,), (plain,) = made.generate("Key 6:", greedy), llm.generate("Key 6:", greedy)
    assert out.prompt_token_ids == [*plain.prompt_token_ids, 0]
    assert out.outputs[0].text in CODES
    assert out.outputs[0].finish_reason == "stop"
    assert plain.outputs[0].text not in CODES, "the control"
    drafted = made.with_speculative_config("ngram").generate("Key 6:", greedy)[0]
    assert drafted.outputs[0].token_ids == out.outputs[0].token_ids
    assert "hcot leaves out a part of the passes" in str(made.exactness)


def test_what_is_no_question_is_refused(llm: LLM, questions: Path, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.jsonl"
    for line, why in (
        ("{", "line 1 is no JSON"),
        ('{"thought": "x", "answer": "y"}', "line 1 must be an object with a text `prompt`, or `messages`"),
        ('{"prompt": "x", "answer": "y"}', "line 1 must have a text `thought`"),
    ):
        wrong.write_text(line + "\n")
        with pytest.raises(PromptError, match=why):
            thoughts_of([wrong])
    with pytest.raises(ConfigError, match="slot must be one special token of the tokenizer"):
        train(llm, config("hcot_thinker", questions, slot="two words"), tmp_path / "none")
    with pytest.raises(ConfigError, match="thinker must be the folder of what hcot_thinker has made, got None"):
        train(llm, config("hcot", questions), tmp_path / "none")
    with pytest.raises(CheckpointError, match=r"no hcot\.safetensors in .*; `paceline train hcot_thinker` makes one"):
        train(llm, config("hcot", questions, thinker=str(tmp_path)), tmp_path / "none")
