"""An adapter learns answers as they are, in PEFT's format; SVDecode's strength comes from answers in closed form."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F

from paceline import LLM, SamplingParams
from paceline.cli.main import main
from paceline.errors import ConfigError
from paceline.sampling.steering import steering_vector
from paceline.training import (
    Fitting,
    TrainConfig,
    Trained,
    documents_of,
    svdecode_strength,
    texts_of,
    train,
    training_config,
)
from paceline.training.steering_strength import candidate_strengths

QUICK = Fitting(steps=24, batch_rows=2, row_tokens=96, eval_steps=24, warmup_steps=5, bf16=False, learning_rate=3e-3)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(dtype="float32", speculative_config=None)


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sums in a notation that no model knows."""
    path = tmp_path_factory.mktemp("data") / "sums.jsonl"
    rows = [(i, j) for i in range(8) for j in range(4)]
    path.write_text("".join(json.dumps({"messages": said(i, j)}) + "\n" for i, j in rows))
    return path


def said(i: int, j: int) -> list[dict[str, str]]:
    return [
        {"role": "user", "content": f"What is {i} and {j}?"},
        {"role": "assistant", "content": f"<<{i}|{j}>> == <<{i + j}>>"},
    ]


def config(answers: Path, **changes: Any) -> TrainConfig:
    return training_config(
        **{"method": "lora", "data": (answers,), "texts": True, "held_out_share": 0.1, "fitting": QUICK} | changes
    )


@pytest.fixture(scope="module")
def trained(llm: LLM, answers: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return train(llm, config(answers), tmp_path_factory.mktemp("adapter"))


def test_an_adapter_learns_answers(llm: LLM, trained: Trained) -> None:
    first, best = trained.curve.judged[0], trained.curve.best
    assert best.acceptance[0] > first.acceptance[0] + 0.2
    assert trained.speculative_config == {}
    assert trained.model is trained.speed is None
    report = (trained.folder / "report.html").read_text()
    assert f"<b>{trained.test.acceptance[0]:.1%}</b> are right" in report
    assert "a pass" not in report
    facts = json.loads((trained.folder / "report.json").read_text())
    assert facts["right"] == trained.test.acceptance[0]
    assert not {"tokens_per_pass", "acceptance"} & (facts.keys() | facts["before"].keys() | facts["curve"][0].keys())
    assert "drafts" not in report
    greedy = SamplingParams(temperature=0, max_tokens=12)
    asked = [{"prompt_token_ids": llm.chat_ids(said(9, 9)[:1])}]
    tuned = LLM(lora=trained.folder, dtype="float32", speculative_config=None)
    (out,), (plain,) = tuned.generate(asked, greedy), llm.generate(asked, greedy)
    assert out.outputs[0].text.lstrip().startswith("<<")
    assert not plain.outputs[0].text.lstrip().startswith("<<")


def test_the_adapter_is_in_pefts_format(trained: Trained) -> None:
    facts = json.loads((trained.folder / "adapter_config.json").read_text())
    assert (facts["peft_type"], facts["r"], facts["lora_alpha"]) == ("LORA", 16, 32.0)
    assert {"q_proj", "down_proj"} <= set(facts["target_modules"])
    tensors = load_file(trained.folder / "adapter_model.safetensors")
    a, b = (tensors[f"base_model.model.model.layers.0.self_attn.q_proj.lora_{side}.weight"] for side in "AB")
    assert a.shape[0] == b.shape[1] == 16
    assert all(one.abs().sum() > 0 for one in tensors.values())


def test_modules_and_rank_are_as_wanted(llm: LLM, answers: Path, tmp_path: Path) -> None:
    one = replace(QUICK, steps=1)
    wanted = config(answers, rank=3, alpha=5.0, target_modules=("q_proj", "v_proj"), fitting=one)
    found = load_file(train(llm, wanted, tmp_path / "few").folder / "adapter_model.safetensors")
    assert {name.split(".")[-3] for name in found} == {"q_proj", "v_proj"}
    assert {min(one.shape) for one in found.values()} == {3}
    with pytest.raises(ConfigError, match="target_modules must be among down_proj"):
        train(llm, replace(wanted, target_modules=("q_proj", "qq")), tmp_path / "none")
    with pytest.raises(ConfigError, match="texts must be true for lora"):
        config(answers, texts=False)


def test_strength_lowers_the_loss_of_others(llm: LLM, trained: Trained, answers: Path) -> None:
    tuned = LLM(lora=trained.folder, dtype="float32", speculative_config=None)
    examples = documents_of(texts_of(llm, [answers], most=None), 96)
    found = svdecode_strength(tuned.runner, tuned.models.base_of_target(), examples)
    assert found.mu > 0
    assert found.losses[found.mu] < found.losses[0.0]
    itself = svdecode_strength(llm.runner, llm.runner, examples)
    assert itself.mu == 0.0
    assert found.steering == {"method": "svdecode", "mu": found.mu}


def test_strength_is_the_minimum_on_a_model_of_five_tokens() -> None:
    """The closed forms, against the losses themselves."""
    generator = torch.Generator().manual_seed(0)
    q, p = (torch.randn(400, 5, generator=generator) for _ in range(2))
    delta = steering_vector(q, p)
    tokens = torch.distributions.Categorical(logits=q + 0.2 * delta).sample()

    def loss(mu: float) -> float:
        return float(F.cross_entropy(q + mu * delta, tokens))

    found = candidate_strengths([(q[:150], tokens[:150], delta[:150]), (q[150:], tokens[150:], delta[150:])])
    assert loss(found["least squares"]) < loss(0.0)
    assert loss(found["newton"]) < min(loss(found["newton"] * share) for share in (0.0, 0.5, 1.5))
    assert candidate_strengths([(q, tokens, torch.zeros(400, 5))]) == {"least squares": 0.0, "newton": 0.0}


def test_tune_finds_and_keeps_it(
    trained: Trained, answers: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "steering.json"
    flags = ["--lora", str(trained.folder), "--prompts", str(answers)]
    assert main(["tune", "--steering", "svdecode", *flags, "-o", str(kept)]) == 0
    steering = json.loads(kept.read_text())
    shown = capsys.readouterr().out
    assert f"--steering '{json.dumps(steering)}'" in shown
    assert steering["mu"] > 0
    (tmp_path / "other.json").write_text("{}")
    for wrong, why in [
        (["--steering", "dola", *flags], "finds mu of svdecode"),
        (["--steering", "svdecode"], "needs examples"),
        (["--steering", "svdecode", "--prompts", str(answers)], "model must name the base"),
        (["--steering", "svdecode", *flags, "-o", str(tmp_path / "other.json")], "is not a steering"),
        (["-o", str(kept)], "--output keeps what --steering or --search finds"),
    ]:
        assert main(["tune", *wrong]) == 2
        assert why in capsys.readouterr().err
