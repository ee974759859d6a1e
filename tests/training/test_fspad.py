"""FSPAD's training: EAGLE's, from which sampling and decoupling take it away."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from tiny_llama import runner_of, tiny_llama
from torch import Tensor

from paceline.drafters.heads.feature_drafts import chain
from paceline.models.heads import HeadConfig
from paceline.models.runners import FeatureHead
from paceline.training import TargetView
from paceline.training.batches import Batch
from paceline.training.eagle import EagleTrainer
from paceline.training.fspad import FspadTrainer
from tests.training.test_pard import PACKED

LAYER = {"num_attention_heads": 2, "intermediate_size": 16, "max_position_embeddings": 64}
SIZES: dict[str, Any] = {"hidden_size": 16, "vocab_size": 30, "draft_vocab_size": 30, "layer": LAYER}


def batch() -> Batch:
    """One text of ten tokens."""
    generator = torch.Generator().manual_seed(0)
    text, here = torch.arange(10)[None], torch.zeros(1, 10, dtype=torch.int64)
    embedded, final = (torch.randn(1, 10, 16, generator=generator) for _ in range(2))
    return Batch(text, here, text, text, torch.ones(1, 10, dtype=torch.bool), embedded, torch.zeros(1, 10, 0), final)


def trained(kind: type[EagleTrainer], **more: Any) -> EagleTrainer:
    """A trainer of random weights, the same in both methods but for what FSPAD adds."""
    rows = torch.randn(30, 16, generator=torch.Generator().manual_seed(1))
    made = kind(HeadConfig(method=kind.name, **SIZES, **more), rows, depths=2)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(2)
    own = dict(made.named_parameters())
    for name in sorted(own, key=lambda name: (name.startswith(("sampler", "feature_proj")), name)):
        own[name].data = 0.3 * torch.randn(own[name].shape, generator=generator)
    return made


def learned(trainer: EagleTrainer) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss, and the gradient of each parameter that EAGLE has."""
    loss = trainer.loss(batch(), torch.Generator().manual_seed(3))
    loss.backward()  # type: ignore[no-untyped-call]
    return loss, {
        name: one.grad
        for name, one in trainer.named_parameters()
        if one.grad is not None and not name.startswith(("sampler", "feature_proj"))
    }


@pytest.mark.parametrize("kept", ["nothing", "sampler.down", "feature_proj"])
def test_without_sampler_and_decoupling_it_is_trained_as_eagle(kept: str) -> None:
    own, eagle = trained(FspadTrainer, inner_size=12), trained(EagleTrainer)
    for name in {"sampler.down", "feature_proj"} - {kept}:
        own.get_parameter(f"{name}.weight").data.zero_()
    (loss, slopes), (other, others) = learned(own), learned(eagle)
    assert slopes.keys() == others.keys()
    same = torch.allclose(loss, other) and all(torch.allclose(slopes[name], others[name], atol=1e-6) for name in slopes)
    assert same is (kept == "nothing")


def test_each_loss_reaches_its_own_output(monkeypatch: pytest.MonkeyPatch) -> None:
    """The projection learns from the states alone, and the layer from both."""
    slopes = {}
    for weight in (0.0, 1.0):
        own = trained(FspadTrainer, inner_size=12)
        monkeypatch.setattr("paceline.training.eagle.TOKENS", weight)
        _, layer = learned(own)
        assert own.feature_proj.weight.grad is not None
        slopes[weight] = own.feature_proj.weight.grad, layer["fc.weight"]
    assert slopes[0.0][0].any()
    assert torch.allclose(slopes[0.0][0], slopes[1.0][0])
    assert not torch.allclose(slopes[0.0][1], slopes[1.0][1])


@torch.no_grad()
@pytest.mark.parametrize("aligned", [True, False])
def test_it_is_judged_by_what_it_drafts(tmp_path: Path, aligned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: a trainer that goes on from the state that the head reads."""
    runner: Any = runner_of(tiny_llama())
    layer = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 40, "max_position_embeddings": 64}
    view = TargetView(runner, (), torch.arange(64), keep_bytes=0)
    torch.manual_seed(0)
    made = FspadTrainer(FspadTrainer.config_of(runner.info, layer, 64, 2), view.rows, depths=2)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    made.write(tmp_path, cast(Any, SimpleNamespace(runner=runner)), view, {"target": {}})
    if not aligned:
        monkeypatch.setattr(made, "features", lambda states: states)
    head, text = FeatureHead.load(tmp_path, runner, ("fspad",)), list(PACKED[0][0].tokens)
    (_, _), (at, columns) = made.predict(view.batch([[PACKED[0][0]]], len(text)))
    drafted = [second_draft(head, runner, text, place) for place in at.tolist()]
    assert len(drafted) > 8
    assert (drafted == columns.tolist()) is aligned


def second_draft(head: FeatureHead, runner: Any, text: list[int], place: int) -> int:
    """The token behind the text's own at place + 2, which goes with the head's state."""
    states = runner.extend([runner.open()], [text[: place + 1]], taps=(3,)).taps[3]
    cache, inputs = head.open(), place + 1
    first = head.step([cache], [chain(inputs)], [0], tokens=text[1 : place + 2], states=states, picked=[place])
    behind, token = first.states[-1:], [text[place + 2]]
    second = head.step([cache], [chain(inputs + 1)], [inputs], tokens=token, states=behind, picked=[0])
    return int(second.logits.argmax())


def test_it_begins_as_eagle() -> None:
    """What FSPAD adds does nothing before it has learned."""
    own = FspadTrainer(HeadConfig(method="fspad", inner_size=12, **SIZES), torch.randn(30, 16))
    states, embedded = torch.randn(3, 16), torch.randn(3, 16)
    assert torch.equal(own.fused(embedded, states), EagleTrainer.fused(own, embedded, states))
    assert torch.equal(own.features(states), states)
