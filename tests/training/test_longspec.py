"""LongSpec in training: a row sees what it will see when it drafts, and texts are moved on as long ones go on."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lacking import without
from tiny_llama import runner_of, tiny_llama

from paceline.drafters import Context, DrafterArgs
from paceline.drafters.heads.longspec import LongSpecDrafter
from paceline.errors import CapabilityError
from paceline.models import RopeSpec
from paceline.training import training_config
from paceline.training.batches import Batch
from paceline.training.longspec import KeysView, LongSpecConfig, LongSpecLayer, LongSpecTrainer
from paceline.training.state_shards import StateShards
from tests.training.test_pard import PACKED

LENGTH, WINDOW = 48, 5
VOCABULARY = torch.arange(0, 62, 2)
LAYER = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 40,
         "max_position_embeddings": 64}  # fmt: skip


class World:
    """A trainer of a tiny head, rows of texts for it, and the drafter with what it has written."""

    def __init__(self, folder: Path, *, runner: Any = None, **settings: Any) -> None:
        self.runner = runner or runner_of(tiny_llama())
        config = training_config("longspec", data=(Path("x"),), **{"longest_position": 20_000, **settings})
        assert isinstance(config, LongSpecConfig)
        self.view = KeysView(self.runner, VOCABULARY, keep_bytes=0)
        own = LongSpecTrainer.config_of(self.runner.info, LAYER, len(VOCABULARY), 1)
        torch.manual_seed(0)
        own = dataclasses.replace(own, sliding_window=WINDOW)
        self.trainer = LongSpecTrainer(own, self.view.rows, self.view.keys, config)
        with torch.no_grad():  # so that single keys count
            for parameter in self.trainer.parameters():
                parameter.mul_(3.0)
        self.batch = self.view.batch(PACKED, LENGTH)
        self.still = torch.zeros_like(self.batch.positions)
        llm: Any = SimpleNamespace(runner=self.runner)
        self.trainer.write(folder, llm, self.view, {"target": {}})
        info = self.runner.info
        args = DrafterArgs(vocab_size=info.vocab_size, index=0, max_context=info.max_context, target=self.runner)
        self.drafter = LongSpecDrafter(args, model=str(folder))

    def drafted(self, text: list[int], after: list[int]) -> torch.Tensor:
        """(1 + after, n) logits behind a text and behind what is drafted after it."""
        cache = self.runner.open()
        if text[:-1]:
            self.runner.extend([cache], [text[:-1]])
        states = self.drafter.begin([Context("r", text, len(text), cache=lambda: cache)])
        (inputs,) = self.drafter.opened(states)
        for i, token in enumerate(after):
            inputs.feed(token, i)
        return self.drafter.head.step([inputs])

    @torch.no_grad()
    def logits(self, shift: int, moved: torch.Tensor | None = None) -> torch.Tensor:
        """(b, t, n) of all rows."""
        return self.trainer.logits(self.trainer.states(self.batch, shift, self.still if moved is None else moved))


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_a_row_of_training_says_what_it_says_when_it_drafts(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """At depth k the target's newest key lies k + 1 tokens back. Negative controls: keys that come a token too early,
    so that what is judged is never drafted, and a window of one token more.
    """

    def different() -> int:
        count, rows = 0, [world.logits(shift) for shift in (1, 2, 3)]
        for i, documents in enumerate(PACKED):
            start = 0
            for document in documents:
                for end in range(1, len(document.tokens) - 2, 3):
                    text, after = list(document.tokens[:end]), list(document.tokens[end : end + 2])
                    drafts = world.drafted(text, after)
                    for depth in range(3):
                        row = rows[depth][i, start + end - 1 + depth]
                        count += not torch.allclose(row, drafts[depth], atol=1e-3)
                start += len(document.tokens)
        return count

    assert not different()
    states = LongSpecTrainer.states
    monkeypatch.setattr(
        LongSpecTrainer, "states", lambda self, batch, shift, moved: states(self, batch, shift - 1, moved)
    )
    assert different() > 20
    monkeypatch.setattr(LongSpecTrainer, "states", states)
    world.trainer.config = dataclasses.replace(world.trainer.config, sliding_window=WINDOW + 1)
    assert different() > 20


def test_a_head_that_reads_its_own_tokens_key_is_not_taken_for_good(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The target's newest value tells the token that follows: what reads it is always right, and never when it drafts,
    where that key is not there. It is judged as it drafts. Negative control: keys that are not shifted.
    """
    batch = told(world)

    def cross(
        self: Any, x: Any, keys: Any, positions: Any, source: torch.Tensor, visible: torch.Tensor
    ) -> torch.Tensor:
        newest = (visible * torch.arange(visible.shape[-1])).amax(-1, keepdim=True)
        values = source[:, :, 2:].flatten(2)
        return values.gather(1, newest.expand(-1, -1, values.shape[-1])) * visible.any(-1, keepdim=True)

    monkeypatch.setattr(LongSpecLayer, "cross", cross)
    monkeypatch.setattr(LongSpecLayer, "finish", lambda self, x, attended: attended)
    assert accepted(world, batch) == 0.0
    states = LongSpecTrainer.states
    monkeypatch.setattr(LongSpecTrainer, "states", lambda self, batch, shift, moved: states(self, batch, 0, moved))
    assert accepted(world, batch) == 1.0


def told(world: World) -> Batch:
    """The batch with values that are the head's row of the token that follows."""
    batch, rows = world.batch, torch.nn.functional.normalize(world.trainer.rows)
    world.trainer.rows = rows
    follows = torch.cat((batch.columns[:, 1:], batch.columns[:, :1]), 1)
    values = torch.where(follows[..., None] >= 0, rows[follows], 0.0)
    return dataclasses.replace(batch, taps=torch.cat((torch.zeros_like(values), values), -1))


def accepted(world: World, batch: Batch) -> float:
    """How often the first draft is right, as training judges it."""
    (at, drafts), (_, columns) = next(world.trainer.predict(batch)), batch.learned(2)
    assert len(at) == len(columns) > 10
    return float((drafts == columns)[columns >= 0].float().mean())


@torch.no_grad()
def test_texts_are_moved_behind_their_sinks(world: World) -> None:
    """The first few positions of a document stay, the others move on by one number; not beyond the longest position,
    over all of which they are spread.
    """
    generator, reached, sinks = torch.Generator().manual_seed(0), [], set()
    for _ in range(50):
        moved = world.trainer.moved(world.batch, generator)
        for i, documents in enumerate(PACKED):
            for number in range(len(documents)):
                own = moved[i][world.batch.documents[i] == number]
                staying = int((own == 0).sum())
                assert own[:staying].eq(0).all()
                assert len(set(own[staying:].tolist())) == 1
                reached.append(int(own[-1]) + len(own))
                sinks.add(staying)
    assert sinks == {0, 1, 2, 3, 4}
    assert 15_000 < max(reached) <= 20_000
    assert min(reached) < 5_000
    world.trainer.settings = dataclasses.replace(world.trainer.settings, longest_position=0)
    assert not world.trainer.moved(world.batch, generator).any()


@torch.no_grad()
@pytest.mark.parametrize("scaling", [{}, {"kind": "yarn", "scaling": {"factor": 8.0, "attention_factor": 1.3}}])
def test_a_text_that_is_moved_as_a_whole_says_the_same(tmp_path: Path, scaling: dict[str, Any]) -> None:
    """Keys are rotated on with the tokens, a scaled target's as well. Negative controls: keys that stay, and sinks that
    stay behind, as in training.
    """
    rope = RopeSpec(theta=10_000.0, dims=16, max_position=64, **scaling)
    world = World(tmp_path, runner=runner_of(tiny_llama(), spec_changes={"ropes": {"default": rope}}))
    near, far = world.logits(2), torch.full_like(world.still, 20_000)

    def off(moved: torch.Tensor) -> float:
        return float((world.logits(2, moved) - near).abs().max() / near.std())

    assert off(far) < 0.02
    assert off(torch.where(world.batch.positions >= 4, far, 0)) > 1
    source = LongSpecTrainer.source(world.trainer, world.batch, world.still)
    world.trainer.source = lambda batch, moved: source  # type: ignore[method-assign]
    assert off(far) > 1


@torch.no_grad()
def test_moved_keys_are_those_that_the_target_would_cache_there(tmp_path: Path) -> None:
    """Of a target of one layer, whose keys depend on a token and its position alone; of a scaled rotation."""
    rope = RopeSpec(theta=500.0, dims=16, kind="yarn", scaling={"factor": 8.0}, max_position=64)
    runner = runner_of(tiny_llama(num_hidden_layers=1), spec_changes={"ropes": {"default": rope}})
    world = World(tmp_path, runner=runner)
    text = PACKED[0][0].tokens
    cache = runner.open()
    runner.extend([cache], [(9,) * 100 + text])
    there = runner.last_keys.read(cache)[100:]
    found = world.trainer.source(world.batch, world.still + 100)[0, : len(text)]
    assert torch.allclose(found, there, atol=1e-4)
    assert not torch.allclose(world.trainer.source(world.batch, world.still)[0, : len(text)], there, atol=1e-2)


def test_the_loss_is_of_rows_that_see_a_key_and_its_gradient_reaches_all(world: World) -> None:
    """The shift is drawn from 1 to the most; a step depends on its generator alone."""
    shifts, states = set[int](), world.trainer.states

    def noted(batch: Batch, shift: int, moved: torch.Tensor) -> torch.Tensor:
        shifts.add(shift)
        return states(batch, shift, moved)

    world.trainer.states = noted  # type: ignore[method-assign]
    losses = [world.trainer.loss(world.batch, torch.Generator().manual_seed(seed)) for seed in range(12)]
    assert shifts == {1, 2, 3, 4}
    assert torch.equal(world.trainer.loss(world.batch, torch.Generator().manual_seed(3)), losses[3])
    sum(losses).backward()  # type: ignore[union-attr]
    for name, parameter in world.trainer.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().max() > 0, name


def test_keys_and_values_are_kept_on_disk_as_read(world: World, tmp_path: Path) -> None:
    """And a target that does not show them is named."""
    shards = StateShards(tmp_path / "states", 1 << 20, world.view.parts)
    documents = [document for row in PACKED for document in row]
    world.view.keep(documents, shards)
    again = KeysView(without(world.runner, "extend", "open"), VOCABULARY, keep_bytes=0)
    again.shards = StateShards(tmp_path / "states", 1 << 20, again.parts)
    assert torch.equal(again.batch(PACKED, LENGTH).taps, world.batch.taps)
    with pytest.raises(CapabilityError, match="training longspec needs the keys and values of the model's last layer"):
        KeysView(without(world.runner, "last_keys"), VOCABULARY, keep_bytes=0)
