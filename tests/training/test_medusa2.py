"""Medusa-2: the heads learn alone at first, the model learns from them then, and what is written is both."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from paceline import LLM
from paceline.bench import bundled_prompts
from paceline.training import Fitting, TrainConfig, Trainer, documents_of, trainer
from paceline.training.answers import TrainingText
from paceline.training.batches import Batch

ALONE = 2


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(dtype="float32")


@pytest.fixture(scope="module")
def untrained(llm: LLM) -> tuple[Any, Any, Batch]:
    texts = [llm.tokenizer.encode(one.prompt)[:40] for one in bundled_prompts()[:4]]
    documents = documents_of([TrainingText(str(i), ids[:2], ids[2:], 0.0) for i, ids in enumerate(texts)], 40)
    config = TrainConfig(method="medusa2", data=(Path("x"),), depths=2, fitting=Fitting(warmup_steps=ALONE))
    torch.manual_seed(0)
    head, view = trainer("medusa2").init(llm, config, torch.arange(512))
    return head, view, view.batch([[one] for one in documents], 40)


def learned(head: Trainer, batch: Batch) -> dict[str, float]:
    """Size of the gradients of layers and heads."""
    head.zero_grad()
    head.loss(batch, torch.Generator()).backward()
    sizes = {"model": 0.0, "heads": 0.0}
    for name, one in head.named_parameters():
        if one.grad is not None:
            sizes[name.split(".")[0]] += float(one.grad.abs().sum())
    return sizes


def test_heads_learn_alone_and_then_with_the_layers(untrained: tuple[Any, Any, Batch]) -> None:
    """Before anything was learned, the model says what it said, so that only heads can move it."""
    head, _, batch = untrained
    steps = [learned(head, batch) for _ in range(ALONE + 1)]
    assert all(one["heads"] > 1.0 for one in steps)
    assert all(one["model"] < 0.01 * steps[-1]["model"] for one in steps[:-1])


def test_the_model_and_its_heads_are_written(llm: LLM, untrained: tuple[Any, Any, Batch], tmp_path: Path) -> None:
    head, view, _ = untrained
    with torch.no_grad():
        for one in head.heads.parameters():
            one.normal_(std=0.1)
        head.model.norm.weight.mul_(1.5)
    target = {"name": "target", "fingerprint": llm.runner.info.fingerprint, "tokenizer": llm.tokenizer.fingerprint()}
    head.write(tmp_path, llm, view, {"target": target})
    wrote, was = load_file(tmp_path / "model.safetensors"), load_file(llm.folder / "model.safetensors")
    assert wrote.keys() == was.keys()
    changed = {name for name in was if not torch.equal(wrote[name], was[name].float())}
    assert changed == {"model.norm.weight"}
    states = torch.randn(3, llm.runner.info.hidden_size)
    found = load_file(tmp_path / "head" / "model.safetensors")
    for depth in range(2):
        weight, bias = (found[f"heads.{depth}.blocks.0.{part}"] for part in ("weight", "bias"))
        x = states + torch.nn.functional.silu(states @ weight.T + bias)
        assert torch.allclose(head.ahead(depth, states), x, atol=1e-5)
        assert not torch.allclose(head.ahead(1 - depth, states), x, atol=1e-2)
    own = LLM(str(tmp_path), dtype="float32")
    config = head.speculative_config(tmp_path)
    assert own.with_speculative_config(config).drafter_methods == ["medusa"]
    assert (
        json.loads((tmp_path / "head" / "config.json").read_text())["paceline_head"]["target"]["name"] == tmp_path.name
    )
