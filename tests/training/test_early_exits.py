"""What is trained for early exits begins as the target's own exits, and layers are left out as often as said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny_checkpoint
import torch

from paceline import LLM
from paceline.errors import ConfigError
from paceline.training import Document, trainer, training_config

TEXTS = [Document(tuple(range(5, 27)), 4), Document(tuple(range(90, 60, -2)), 3)]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = tiny_checkpoint.write(tmp_path_factory.mktemp("target"), num_hidden_layers=4)
    return LLM(str(folder), speculative_config=None, dtype="float32")


def untrained(llm: LLM, method: str, **changes: Any) -> tuple[Any, Any]:
    config = training_config(method, data=(Path("x"),), **changes)
    trainer(method).check(llm.runner.info, config)
    head, view = trainer(method).init(llm, config, torch.arange(100))
    return head.eval(), view.batch([TEXTS], 40)


def logits_of_exit(llm: LLM, layer: int) -> torch.Tensor:
    """Of every token of the texts, one after the other."""
    caches = [llm.runner.open() for _ in TEXTS]
    taps = llm.runner.extend(caches, [one.tokens for one in TEXTS], taps=(layer,)).taps  # type: ignore[attr-defined]
    return llm.runner.head(taps[layer], norm=layer < llm.runner.info.num_layers)  # type: ignore[attr-defined, no-any-return]


@pytest.mark.parametrize("method", ["kangaroo", "layer_skip"])
def test_it_begins_as_the_plain_exit(llm: LLM, method: str) -> None:
    head, batch = untrained(llm, method, exit_layer=2)
    with torch.no_grad():
        found = head.logits(head.states(batch).flatten(0, 1))[batch.documents.flatten() >= 0]
    assert torch.allclose(found, logits_of_exit(llm, 1), atol=1e-3)
    assert not torch.allclose(found, logits_of_exit(llm, 2), atol=1e-1)


def test_the_last_exit_is_the_target_and_its_loss_the_least(llm: LLM) -> None:
    head, batch = untrained(llm, "layer_skip")
    with torch.no_grad():
        last = head.logits(head.model.norm(head.behind_layers(batch)[-1]).flatten(0, 1))
        targets = head.soft_targets(batch)
    at = (targets.row >= 0).nonzero().squeeze(1) - 1
    assert torch.allclose(last[at].softmax(-1), targets.chances, atol=1e-4)
    assert not torch.allclose(head.logits(head.states(batch).flatten(0, 1))[at].softmax(-1), targets.chances, atol=1e-2)


def test_layers_are_left_out_as_often_as_said(llm: LLM) -> None:
    head, _ = untrained(llm, "layer_skip")
    rates = head.rates.tolist()
    assert rates[0] == 0.0
    assert rates[-1] == pytest.approx(0.1)
    assert rates == sorted(rates)
    view = trainer("layer_skip").init(llm, training_config("layer_skip", data=(Path("x"),)), torch.arange(9))[1]
    batch = view.batch([[TEXTS[0]], [TEXTS[1]]], 24)
    stay = torch.ones(4, 2, dtype=torch.bool)
    stay[2, 1] = False
    behind = head.behind_layers(batch, stay)
    assert torch.equal(behind[2][1], behind[1][1])
    assert not torch.equal(behind[2][0], behind[1][0])
    assert not torch.equal(behind[3][1], behind[2][1])


def test_an_exit_behind_the_last_layer_is_rejected(llm: LLM) -> None:
    for method in ("kangaroo", "layer_skip"):
        with pytest.raises(ConfigError, match="exit_layer"):
            untrained(llm, method, exit_layer=4)
    with pytest.raises(ConfigError, match="exit_layer"):
        training_config("eagle", data=(Path("x"),), exit_layer=1)
    with pytest.raises(ConfigError, match="hidden_size"):
        training_config("draft_model", data=(Path("x"),), hidden_size=100)
    with pytest.raises(ConfigError, match="hidden_size"):
        untrained(llm, "draft_model", hidden_size=64)
