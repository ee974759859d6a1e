"""Chimera in training: what it learns from at a place is what it drafts from there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_llama import runner_of, tiny_llama

from paceline.models.runners import ChimeraHead, trigram
from paceline.training import TargetView
from paceline.training.batches import Batch
from paceline.training.chimera import ChimeraTrainer
from paceline.tree import TokenTree
from tests.training.test_pard import PACKED

LENGTH, DEPTHS = 48, 3


class World:
    """A trainer of random weights, rows of texts for it, and the heads as they draft."""

    def __init__(self, folder: Path) -> None:
        self.runner = runner_of(tiny_llama())
        layer = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 40}
        own = ChimeraTrainer.config_of(self.runner.info, layer | {"max_position_embeddings": 64}, 64, DEPTHS)
        view = TargetView(self.runner, (), torch.arange(64), keep_bytes=0)
        torch.manual_seed(0)
        self.trainer = ChimeraTrainer(own, view.rows)
        for parameter in self.trainer.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        self.batch = view.batch(PACKED, LENGTH)
        llm: Any = SimpleNamespace(runner=self.runner)
        self.trainer.write(folder, llm, view, {"target": {}})
        self.head = ChimeraHead(folder, self.runner)

    def drafted(self, text: list[int], place: int, depth: int) -> torch.Tensor:
        """(v,) logits of the token behind the text's own, as if those behind the root, token place + 1, were drafts."""
        cache = self.runner.open()
        states = self.runner.extend([cache], [text[: place + 1]], taps=(3,)).taps[3]
        grams = [trigram(text[: place + 2 + k]) for k in range(depth + 1)]
        inputs = torch.cat((states, self.head.features(grams)))
        encoded = self.head.encode([self.head.open()], [TokenTree.chain([0] * (len(inputs) - 1))], [0], inputs)
        return self.head.logits(states[-1:], encoded[-1:], [depth])[0]

    def differs(self) -> bool:
        """Whether training says anything else than drafting, at any place and depth."""
        wrong, seen = False, 0
        starts = {(row, number): start for row, own in enumerate(PACKED) for number, start in enumerate(begun(own))}
        for depth, (at, _, states) in enumerate(self.trainer.head_states(self.batch)):
            for place, logits in list(zip(at.tolist(), self.trainer.logits(states), strict=True))[::7]:
                row, column = divmod(place, LENGTH)
                number = int(column >= starts[row, 1])
                text = list(PACKED[row][number].tokens)
                drafts = self.drafted(text, column - starts[row, number], depth)
                wrong |= not torch.allclose(logits, drafts, atol=1e-3, rtol=1e-3)
                seen += depth > 0
        assert seen > 10
        return wrong


def begun(documents: Any) -> list[int]:
    """Where the two documents of a row begin."""
    return [0, len(documents[0].tokens)]


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


@torch.no_grad()
def test_it_is_trained_on_what_it_drafts_from(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative controls: states that lie a place too late, and documents whose first trigrams see the one before."""
    assert not world.differs()
    own, visible = world.batch, Batch.visible
    monkeypatch.setattr(Batch, "visible", lambda self: visible(self).roll(1, 1))
    assert world.differs()
    monkeypatch.undo()
    world.batch = replace(own, positions=own.positions + 2)
    assert world.differs()


def test_the_encoder_is_aligned_with_the_state_of_the_token_it_reads(world: World) -> None:
    """Where the encoder's outputs are these states, only the heads' cross-entropies are left of the loss."""
    trainer, batch, generator = world.trainer, world.batch, torch.Generator()
    unrolled, true = trainer.unrolled, batch.final.flatten(0, 1)

    def with_states(shift: int) -> float:
        def given(own: Batch) -> Any:
            for depth, (at, columns, _, states) in enumerate(unrolled(own)):
                yield at, columns, true[at + depth + shift], states

        trainer.unrolled = given  # type: ignore[method-assign]
        return float(trainer.loss(batch, generator).detach())

    plain = float(super(ChimeraTrainer, trainer).loss(batch, generator).detach())
    assert with_states(1) == pytest.approx(plain, abs=1e-5)
    assert with_states(0) > plain + 0.1
