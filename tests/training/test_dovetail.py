"""Dovetail in training: what is learned is what drafts, at every depth, and tokens count."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_llama import runner_of, tiny_llama

from paceline.drafters import Context
from paceline.drafters.common.draft_chain import ChainDraft
from paceline.drafters.heads.feature_drafts import FeatureDrafts, FeatureState
from paceline.drafters.heads.tapped_states import TappedStates
from paceline.errors import ConfigError
from paceline.models.runners import FeatureHead
from paceline.training import TargetView, training_config
from paceline.training.dovetail import DovetailConfig, DovetailTrainer
from tests.training.test_pard import PACKED

LENGTH = 48
VOCABULARY = torch.arange(0, 62, 2)
LAYER = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 40, "max_position_embeddings": 64}


class World:
    """A trainer of a tiny head, rows of texts for it, and the head as it drafts."""

    def __init__(self, layers: int = 3) -> None:
        self.runner: Any = runner_of(tiny_llama())
        given = training_config("dovetail", data=(Path("x"),), num_layers=layers)
        assert isinstance(given, DovetailConfig)
        own = DovetailTrainer.sized(DovetailTrainer.config_of(self.runner.info, LAYER, len(VOCABULARY), 3), given)
        assert (own.method, own.num_layers) == ("dovetail", layers)
        self.view = TargetView(self.runner, (), VOCABULARY, keep_bytes=0)
        torch.manual_seed(0)
        self.trainer = DovetailTrainer(own, self.view.rows, 3)
        self.batch = self.view.batch(PACKED, LENGTH)

    def head(self, folder: Path) -> FeatureHead:
        llm: Any = SimpleNamespace(runner=self.runner)
        self.trainer.write(folder, llm, self.view, {"target": {}})
        return FeatureHead.load(folder, self.runner, ("dovetail",))


@torch.no_grad()
def drafted(world: World, head: FeatureHead, text: list[int], count: int) -> list[int]:
    """Likeliest tokens behind a text, as they are drafted."""
    (tap,) = head.taps
    states = world.runner.extend([world.runner.open()], [text[:-1]], taps=(tap,)).taps[tap]
    context = Context("r", text, len(text))
    state = FeatureState(context, head.open(), TappedStates(0, states))
    (tree,) = FeatureDrafts(head, 64, 0).chains([state], [ChainDraft(context, count, lambda *_: True, False)])
    return [int(token) for token in tree.tokens]


@torch.no_grad()
def test_what_is_predicted_in_training_is_what_is_drafted(tmp_path: Path) -> None:
    """Where the tokens drafted before are the text's own, as training has them. Control: other layers behind the
    first.
    """
    world = World()
    for layer in world.trainer.layers[1:]:
        layer.self_attn["o_proj"].weight.normal_(0.0, 0.3)
        layer.mlp["down_proj"].weight.normal_(0.0, 0.3)

    def disagreements(head: FeatureHead) -> tuple[int, int]:
        seen = wrong = 0
        document = PACKED[0][0].tokens
        for depth, (at, columns) in enumerate(world.trainer.predict(world.batch)):
            for flat, column in zip(at.tolist(), columns.tolist(), strict=True):
                if flat + 2 > len(document):
                    continue
                text = list(document[: flat + 2])
                drafts = drafted(world, head, text[: len(text)], depth + 1)
                if drafts[:depth] == list(document[flat + 2 : flat + 2 + depth]):
                    seen += 1
                    wrong += drafts[depth] != int(VOCABULARY[column])
        return seen, wrong

    seen, wrong = disagreements(world.head(tmp_path / "head"))
    assert seen > 5
    assert wrong == 0
    other = World()
    other.trainer.load_state_dict(world.trainer.state_dict())
    for layer in other.trainer.layers[1:]:
        layer.self_attn["o_proj"].weight.neg_()
        layer.mlp["down_proj"].weight.neg_()
    assert disagreements(other.head(tmp_path / "other"))[1] > 0


def test_a_trained_head_that_ignores_tokens_is_right_less_often() -> None:
    """By the target's likeliest tokens on the texts that it has learned; every parameter learns."""
    world = World(layers=2)
    trainer, batch = world.trainer, world.batch
    before = {name: one.detach().clone() for name, one in trainer.named_parameters()}
    optimizer = torch.optim.AdamW(trainer.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(0)
    for _ in range(70):
        optimizer.zero_grad()
        trainer.loss(batch, generator).backward()
        optimizer.step()
    assert all(not torch.equal(one, before[name]) for name, one in trainer.named_parameters())

    def right() -> float:
        at, columns = next(trainer.predict(batch))
        said = trainer.logits(batch.final.flatten(0, 1)[at + 1]).argmax(-1)
        return float((said == columns).float().mean())

    whole = right()
    with torch.no_grad():
        trainer.fusion.token.weight.zero_()
    assert whole > right() + 0.1


def test_a_deeper_head_begins_as_a_shallow_one() -> None:
    """Its further layers add nothing before they have learned."""
    with torch.no_grad():
        shallow, deep = World(layers=1), World(layers=4)
        deep.trainer.load_state_dict(shallow.trainer.state_dict(), strict=False)
        one, other = (world.trainer.loss(world.batch, torch.Generator().manual_seed(0)) for world in (shallow, deep))
        deep.trainer.layers[1].self_attn["o_proj"].weight.normal_()
        control = deep.trainer.loss(deep.batch, torch.Generator().manual_seed(0))
    assert torch.allclose(one, other, atol=1e-5)
    assert not torch.allclose(one, control, atol=1e-3)


def test_a_head_has_a_layer_at_least() -> None:
    with pytest.raises(ConfigError, match="num_layers"):
        training_config("dovetail", data=(Path("x"),), num_layers=0)
