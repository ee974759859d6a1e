"""What trains passes that leave out layers computes in one pass what decoding computes token by token, and learns."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline import LLM, SamplingParams
from paceline.errors import ConfigError
from paceline.training import Document, Fitting, TargetView, train, training_config
from paceline.training.batches import Batch
from paceline.training.layer_skipping import LayerSkippingTrainer, LoraDropTrainer
from paceline.tree import EMPTY_TREE

QUICK = Fitting(steps=16, batch_rows=2, row_tokens=80, eval_steps=16, warmup_steps=3, bf16=False, learning_rate=3e-3)
DOCUMENTS = [Document(tuple(range(50, 62)), 4), Document(tuple(range(300, 317)), 7)]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return loaded()


def loaded(**options: Any) -> LLM:
    return LLM(dtype="float32", speculative_config=None, **options)


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "sums.jsonl"
    rows = [
        [
            {"role": "user", "content": f"What is {i} and {j}?"},
            {"role": "assistant", "content": f"<<{i}|{j}>> == <<{i + j}>>"},
        ]
        for i in range(8)
        for j in range(4)
    ]
    path.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    return path


def shaken(trainer: Any) -> None:
    """Give an adapter that has learned nothing changes that count."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for b in trainer.b:
            b.copy_(torch.randn(b.shape, generator=generator) / 20)


@torch.inference_mode()
def step_by_step(runner: Any, document: Document) -> torch.Tensor:
    """(tokens - first + 1, v) logits behind the prompt's last token and those that follow."""
    cache, rows = runner.open(document.first), []
    runner.extend([cache], [document.tokens[: document.first - 1]])
    for token in document.tokens[document.first - 1 :]:
        rows.append(runner.score([cache], [token], [EMPTY_TREE]).logits)
        runner.commit([cache], [()])
    return torch.cat(rows)


@torch.inference_mode()
def departure(trainer: Any, batch: Batch, runner: Any) -> float:
    """How far the trainer's logits are from those of decoding."""
    logits = trainer.states(batch)[0] @ trainer.rows.T
    found, start = [], 0
    for document in sorted(DOCUMENTS, key=lambda one: -len(one.tokens)):
        stop = start + len(document.tokens)
        found.append((logits[start + document.first - 1 : stop] - step_by_step(runner, document)).abs().max())
        start = stop
    return float(max(found))


def test_training_computes_what_decoding_computes(llm: LLM, tmp_path: Path) -> None:
    view = TargetView(llm.runner, None, torch.arange(llm.runner.info.vocab_size), keep_bytes=0)
    batch = view.batch([sorted(DOCUMENTS, key=lambda one: -len(one.tokens))], 40)
    shared: dict[str, Any] = {"rank": 2, "alpha": 4.0}
    skips = LayerSkippingTrainer(llm.folder, 6, view.rows, kept=[0, 3, 5], speedup=2.0, modules=None, **shared)
    drops = LoraDropTrainer(llm.folder, 6, view.rows, left_out=[1, 2, 4], reuse=2, **shared)
    for trainer in (skips, drops):
        shaken(trainer)
        folder = tmp_path / trainer.name
        folder.mkdir()
        trainer.write(folder, llm, view, {})
    lora, speedups = tmp_path / skips.name, (2, 3)
    exact, other = (
        loaded(lora=lora, skipping={"method": "unified_layer_skipping", "speedup": one}).runner for one in speedups
    )
    assert departure(skips, batch, exact) < 0.02
    assert departure(skips, batch, other) > 0.5, "the control: other layers"
    dropped: dict[str, Any] = {"method": "lora_drop", "adapter": str(tmp_path / drops.name)}
    exact, other = (loaded(skipping=dropped | more).runner for more in ({}, {"reuse": 3}))
    assert departure(drops, batch, exact) < 0.02
    assert departure(drops, batch, other) > 0.5, "the control: another phase"


@pytest.mark.parametrize(
    ("method", "options"), [("unified_layer_skipping", {"speedup": 1.5}), ("lora_drop", {"drop": 0.3, "reuse": 1})]
)
def test_a_short_training_brings_answers_back(
    llm: LLM, answers: Path, tmp_path: Path, method: str, options: dict[str, Any]
) -> None:
    config = training_config(
        **{"method": method, "data": (answers,), "texts": True, "held_out_share": 0.1, "fitting": QUICK} | options
    )
    found = train(llm, config, tmp_path / "made")
    assert found.curve.best.acceptance[0] > found.curve.judged[0].acceptance[0] + 0.2
    said = {"method": method, "adapter": str(tmp_path / "made")}
    given: dict[str, Any] = {"skipping": said}
    if method == "unified_layer_skipping":
        given = {"skipping": json.loads((tmp_path / "made" / "skipping.json").read_text()), "lora": tmp_path / "made"}
    learned = loaded(**given)
    asked = {"prompt_token_ids": llm.chat_ids([{"role": "user", "content": "What is 9 and 9?"}])}
    (out,) = learned.generate(asked, SamplingParams(temperature=0, max_tokens=12))
    if (
        method == "unified_layer_skipping"
    ):  # the first token of an answer is that of all layers, which corrections leave
        assert out.outputs[0].text.lstrip().startswith("<<")
    assert "leaves out a part of the passes" in str(learned.exactness)


def test_what_a_model_cannot_leave_out_is_refused(llm: LLM, answers: Path, tmp_path: Path) -> None:
    shared: dict[str, Any] = {"data": (answers,), "texts": True, "fitting": replace(QUICK, steps=1)}
    for method, options, why in (
        ("unified_layer_skipping", {"speedup": 5.0}, r"speedup must be in 1\.\.3 for 6 layers, got 5"),
        ("lora_drop", {"drop": 0.01}, r"drop must drop a layer of the model, got 0\.01"),
    ):
        with pytest.raises(ConfigError, match=why):
            train(llm, training_config(method=method, **shared, **options), tmp_path / method)
