"""Sorted fine-tuning: every exit learns in every batch, thresholds are the best of their grid, and a draft keeps those
of several targets.
"""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import tiny_checkpoint
import torch
from safetensors.torch import load_file

from paceline import LLM
from paceline.checkpoints import read_config
from paceline.errors import CapabilityError, CheckpointError, ConfigError
from paceline.models.heads import DraftExits
from paceline.training import Document, Fitting, train, trainer, training_config
from paceline.training.s2d import GRID, S2dTrainer, best_thresholds, promised, served_by

TEXTS = [Document(tuple(range(5, 27)), 4), Document(tuple(range(90, 60, -2)), 3)]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = tiny_checkpoint.write(tmp_path_factory.mktemp("target"), num_hidden_layers=4)
    return LLM(str(folder), speculative_config=None, dtype="float32")


def untrained(llm: LLM, **changes: Any) -> tuple[S2dTrainer, Any]:
    config = training_config("s2d", data=(Path("x"),), **changes)
    trainer("s2d").check(llm.runner.info, config)
    made, view = S2dTrainer.init(llm, config, torch.arange(100))
    return made.eval(), view.batch([TEXTS], 40)


def exit_logits(llm: LLM, layer: int) -> torch.Tensor:
    """Behind so many layers, of every token of the texts, one after the other."""
    caches = [llm.runner.open() for _ in TEXTS]
    taps = llm.runner.extend(caches, [one.tokens for one in TEXTS], taps=(layer - 1,)).taps
    return llm.runner.head(taps[layer - 1])  # type: ignore[attr-defined, no-any-return]


@torch.no_grad()
def test_each_exit_is_the_model_that_ends_there(llm: LLM) -> None:
    """Of a cut of the target, and of a draft model that is there: the target itself, whose last exit is unchanged."""
    for changes, layers in (({"num_layers": 3, "exits": (1, 2)}, 3), ({"draft_model": str(llm.folder)}, 4)):
        made, batch = untrained(llm, **changes)
        filled = batch.documents.flatten() >= 0
        exits = (*made.exits.layers, layers)
        for layer, states in zip(exits, made.at_exits(batch), strict=True):
            found = states[filled] @ made.head.T
            assert torch.allclose(found, exit_logits(llm, layer), atol=1e-3)
            assert not torch.allclose(found, exit_logits(llm, layer % 4 + 1), atol=1e-1)


def test_a_draft_model_that_does_not_count_its_layers_is_named(llm: LLM, tmp_path: Path) -> None:
    """As a part of a larger model, whose own config.json says it further down."""
    folder = tiny_checkpoint.write(tmp_path / "draft")
    assert untrained(llm, draft_model=str(folder))[0].made_of == (0, 1), "the control"
    tiny_checkpoint.edit_json(folder / "config.json", num_hidden_layers=None)
    with pytest.raises(CapabilityError, match="a 'llama' model has no num_hidden_layers at its top"):
        untrained(llm, draft_model=str(folder))


def test_the_loss_is_the_sum_over_the_exits_of_one_batch(llm: LLM) -> None:
    """By hand. Negative controls: one exit alone, as is usual, has another loss, and leaves the layers of no other exit
    without a gradient of theirs.
    """
    made, batch = untrained(llm, num_layers=3, exits=(1, 2))
    wanted = (batch.columns.flatten() >= 0).nonzero().squeeze(1)
    final = batch.final.flatten(0, 1)[wanted - 1]
    chances = (final @ made.rows.T).softmax(-1)
    each = []
    for states in made.at_exits(batch):
        each.append(-(chances * (states[wanted - 1] @ made.head.T).log_softmax(-1)).sum(-1).mean())
    loss = made.loss(batch, torch.Generator())
    assert loss.item() == pytest.approx(sum(one.item() for one in each), rel=1e-4)
    assert loss.item() != pytest.approx(each[-1].item(), rel=0.2)
    gradients = []
    for one in (loss, made.loss(batch, torch.Generator()) - sum(each[:-1], torch.zeros(()))):
        made.zero_grad()
        one.backward(retain_graph=True)
        gradients.append(made.model.layers[0].mlp.up_proj.weight.grad.clone())  # type: ignore[union-attr, index]
    assert not torch.allclose(*gradients, atol=1e-4)


COSTS = torch.tensor([0.05, 0.1, 0.3])


def figures(seed: int = 0, count: int = 600) -> tuple[torch.Tensor, torch.Tensor]:
    """Chances of two exits that are as often right as they say, and whether three are right."""
    generator = torch.Generator().manual_seed(seed)
    chances = torch.rand(count, 2, generator=generator) ** 0.5
    right = torch.rand(count, 3, generator=generator) < torch.cat((chances, torch.full((count, 1), 0.9)), 1)
    return chances, right


def test_thresholds_are_the_best_of_the_grid() -> None:
    """Negative controls: without costs, none pays but the whole model where that is right most often; and an exit that
    is never right, or always, is never taken, or by all.
    """
    chances, right = figures()
    best = best_thresholds(chances, right, COSTS)
    assert best.gain == max(promised(chances, right, COSTS, each).gain for each in product(GRID, repeat=2))
    assert 0.0 < best.thresholds[0] < 1.0
    assert best_thresholds(chances, right, torch.zeros(3)).acceptance > best.acceptance
    never, always = right.clone(), right.clone()
    never[:, :2], always[:, 0] = False, True
    assert best_thresholds(chances, never, COSTS).thresholds == (2.0, 2.0)
    assert best_thresholds(chances, always, COSTS).thresholds[0] == 0.0
    assert promised(chances, always, COSTS, (0.0, 0.0)).cost == pytest.approx(0.05)


def test_a_token_takes_the_first_exit_that_is_sure_enough() -> None:
    chances = torch.tensor([[0.5, 0.9], [0.7, 0.9], [0.1, 0.2], [0.1, 0.8]])
    assert served_by(chances, (0.6, 0.8)).tolist() == [1, 0, 2, 1]
    assert served_by(chances, (0.0, 0.0)).tolist() == [0] * 4
    assert served_by(chances, (2.0, 2.0)).tolist() == [2] * 4


def test_a_draft_serves_several_targets_each_by_thresholds_of_its_own(llm: LLM, tmp_path: Path) -> None:
    texts, sorted_draft, both = tmp_path / "texts.jsonl", tmp_path / "draft", tmp_path / "both"
    rows = ({"text": f"There are {i} of these, and {i + 1} more of those here."} for i in range(9))
    texts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    fitting = Fitting(steps=2, batch_rows=1, row_tokens=32, eval_steps=2, bf16=False)
    shared: dict[str, Any] = {"data": (texts,), "texts": True, "fitting": fitting}
    made = train(llm, training_config("s2d", **shared, num_layers=3), sorted_draft, speed_prompts=0)
    assert made.speculative_config == {"method": "s2d", "model": str(sorted_draft)}
    stored = DraftExits.of(read_config(sorted_draft), "draft")
    assert stored is not None
    assert stored.layers == (1, 2)
    other = tiny_checkpoint.write(tmp_path / "other", 1, hidden_size=48, num_hidden_layers=3)
    second = LLM(str(other), speculative_config=None, dtype="float32")
    config = training_config("s2d", **shared, draft_model=str(sorted_draft), thresholds_only=True)
    train(second, config, both, speed_prompts=0)
    before, after = (load_file(folder / "model.safetensors") for folder in (sorted_draft, both))
    assert all(torch.equal(one, after[name]) for name, one in before.items())
    exits = DraftExits.of(read_config(both), "both")
    assert exits is not None
    own, added = (one.runner.info.fingerprint for one in (llm, second))
    assert exits.thresholds_for(own) == stored.thresholds_for(own) is not None
    assert exits.thresholds_for(added) is not None
    assert stored.thresholds_for(added) is None
    again = training_config("s2d", **shared, draft_model=str(both))
    train(second, again, tmp_path / "again", speed_prompts=0)
    learned = DraftExits.of(read_config(tmp_path / "again"), "again")
    assert learned is not None
    assert learned.thresholds_for(own) is None, "its weights are others now"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"exits": (3,), "num_layers": 3}, r"exits must be layers in 1\.\.2"),
        ({"exits": (1, 2, 3, 4, 5)}, "exits must be 4 at most"),
        ({"num_layers": 5}, r"num_layers must be an integer in 2\.\.4"),
        ({"thresholds_only": True}, "thresholds_only must come with draft_model"),
        ({"draft_model": "x", "num_layers": 2}, "num_layers must be left out with draft_model"),
    ],
)
def test_what_a_draft_does_not_have_is_rejected(llm: LLM, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        untrained(llm, **changes)


@pytest.mark.parametrize(
    "stored",
    [
        3,
        {"layers": [1]},
        {"layers": [1], "thresholds": [{"target": {}}]},
        {"layers": [1], "thresholds": [{"target": {}, "thresholds": [0.5, 0.5]}]},
    ],
)
def test_exits_that_are_none_are_named(stored: Any) -> None:
    with pytest.raises(CheckpointError, match=r"small: paceline_exits in config\.json must hold layers"):
        DraftExits.of({"paceline_exits": stored}, "small")
