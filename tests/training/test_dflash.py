"""DFlash and DSpark in training: a row sees and says what it does when it drafts, each place learns its own token."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import dflash_reference as reference
import pytest
import torch
from tiny_llama import runner_of, tiny_llama
from torch import Tensor
from torch.nn import functional as F

from benchmarks.stand_ins import written_head
from paceline.models.heads import HeadConfig
from paceline.models.runners import BlockHead
from paceline.training import training_config
from paceline.training.batches import Batch, Document, TargetView
from paceline.training.block_network import Blocks
from paceline.training.dflash import DFlashConfig, DFlashTrainer, chosen, learned_drafts, mask_of
from paceline.training.dspark import DSparkTrainer, MarkovHead

TEXTS = [tuple((5 * i + 7 * j) % 57 + 4 for i in range(14 + 3 * j)) for j in range(4)]
PACKED = [[Document(text, 4) for text in TEXTS[:2]], [Document(text, 2) for text in TEXTS[2:]]]
LENGTH, VOCAB = 48, 64
LAYER = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 24,
         "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 10000.0}  # fmt: skip
KINDS = ("dflash", "vanilla", "gated", "rnn")


def config_of(kind: str, **more: Any) -> HeadConfig:
    own: dict[str, Any] = {"hidden_size": 32, "vocab_size": VOCAB, "draft_vocab_size": VOCAB, "num_layers": 2}
    own |= {"taps": (0, 2), "layer": LAYER, "block_size": 4, "mask_token_id": 63}
    if kind != "dflash":
        own |= {"markov_rank": 5, "markov_head_type": kind, "sample_from_anchor": True}
        own |= {"enable_confidence_head": True, "confidence_head_with_markov": True}
    return HeadConfig(method="dflash" if kind == "dflash" else "dspark", **own | more)


def settings(**more: Any) -> DFlashConfig:
    config = training_config("dflash", data=(Path("x"),), **more)
    assert isinstance(config, DFlashConfig)
    return config


def trainer_of(kind: str, **more: Any) -> tuple[DFlashTrainer, Batch, Any]:
    """A trainer of random weights, rows of texts for it, and their target."""
    torch.manual_seed(0)
    runner, own = runner_of(tiny_llama()), config_of(kind, **more)
    view = TargetView(runner, own.taps, torch.arange(VOCAB), keep_bytes=0)
    trainer = (DFlashTrainer if kind == "dflash" else DSparkTrainer)(own, view.rows, settings())
    trainer.init_from(view)
    with torch.no_grad():
        for parameter in trainer.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return trainer, view.batch(PACKED, LENGTH), runner


def anchors(batch: Batch) -> list[Tensor]:
    """Of each row, all of them."""
    return list(chosen(learned_drafts(batch, 1)[:, 0], batch, 10**6, None))


# ------------------------------------------------------------------------------------------------ rows


def sees_its_own_place(self: Blocks) -> Tensor:
    """Wrong: a block sees the target's state of its anchor."""
    same = self.documents == self.documents[self.anchors][:, None]
    return same & (torch.arange(len(self.positions)) <= self.anchors[:, None])


def sees_other_texts(self: Blocks) -> Tensor:
    """Wrong: a block sees texts before its own."""
    return torch.arange(len(self.positions)) < self.anchors[:, None]


def reads_its_own_token(self: MarkovHead, before: Tensor, states: Tensor) -> Tensor:
    """Wrong: the correction is by the drafted token itself."""
    return FORWARD(self, before.roll(-1, 1), states)


FORWARD = MarkovHead.forward


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_of_training_says_what_it_says_when_it_drafts(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through files, in the drafter's network, step by step. Negative controls: rows that see a state or a text too
    many, and a correction by the wrong token.
    """
    trainer, batch, runner = trainer_of(kind)
    head = BlockHead.load(
        written_head(trainer.config, {name: one.detach() for name, one in trainer.named_parameters()}), runner,
        trainer.config.method,
    )  # fmt: skip

    def drafted(text: Sequence[int], following: Sequence[int]) -> Tensor:
        """(depths, v) logits behind a text, with these tokens before each place."""
        cache, own = runner.open(), head.open()
        taps = runner.extend([cache], [text[:-1]], taps=trainer.config.taps).taps
        head.inject([own], [len(text) - 1], torch.cat([taps[layer] for layer in trainer.config.taps], 1))
        rows = head.run([own], [text[-1]], head.depths)
        memory, found = head.heads.begin(rows.states[:, 0]), []
        for k, token in enumerate((text[-1], *following)):
            logits = rows.logits[:, k]
            if head.heads.present:
                step = head.heads.step(torch.tensor([token]), rows.states[:, k], memory)
                assert step.bias is not None
                logits, memory = logits + step.bias, step.memory
            found.append(logits[0])
        return torch.stack(found)

    def differs() -> bool:
        wrong = False
        for row, at in enumerate(anchors(batch)):
            logits = trainer.logits_of(batch, at)
            for place, found in list(zip((at % LENGTH).tolist(), logits, strict=True))[::3]:
                number = int(batch.documents[row, place])
                text = PACKED[row][number].tokens
                first = place - int(batch.positions[row, place])
                following = text[place - first + 1 :][: head.depths - 1]
                count = len(following) + 1
                expected = drafted(text[: place - first + 1], following)
                wrong |= not torch.allclose(found[:count], expected, atol=1e-4)
        return wrong

    assert not differs()
    mutations: list[tuple[Any, str, Any]] = [
        (Blocks, "visible", sees_its_own_place),
        (Blocks, "visible", sees_other_texts),
    ]
    if kind != "dflash":
        mutations.append((MarkovHead, "forward", reads_its_own_token))
    for place, name, mutation in mutations:
        with monkeypatch.context() as patched:
            patched.setattr(place, name, mutation)
            assert differs(), mutation.__doc__


@torch.no_grad()
def test_no_row_changes_with_what_is_at_its_anchor_or_behind_it() -> None:
    """The target's states there. Control: those before it do change it."""
    trainer, batch, _ = trainer_of("dflash")
    for at in anchors(batch):
        middle = at[len(at) // 2 : len(at) // 2 + 1]
        row, place = divmod(int(middle), LENGTH)
        found = trainer.logits_of(batch, middle)
        for span, same in ((slice(place, None), True), (slice(place - 1, place), False)):
            taps = batch.taps.clone()
            taps[row, span] += 1.0
            assert torch.allclose(trainer.logits_of(replace(batch, taps=taps), middle), found) == same


# ------------------------------------------------------------------------------------------------ places and losses


def test_weights_fall_with_the_place_from_the_first_draft_on() -> None:
    """Slot 0 of DFlash, the anchor, drafts nothing and has no weight; DSpark's does."""
    for kind, count in (("dflash", 3), ("vanilla", 4)):
        trainer, _, _ = trainer_of(kind)
        assert trainer.weights() == pytest.approx([1.0, 0.7788, 0.6065, 0.4724][:count], abs=1e-4)


def test_anchors_are_drawn_anew_and_no_more_than_wanted() -> None:
    _, batch, _ = trainer_of("dflash")
    possible = learned_drafts(batch, 1)[:, 0]
    draws = [list(chosen(possible, batch, 5, torch.Generator().manual_seed(seed))) for seed in range(2)]
    for at, every in zip(draws[0], anchors(batch), strict=True):
        assert len(at) == 5 < len(every)
        assert set(at.tolist()) < set(every.tolist())
    assert [at.tolist() for at in draws[0]] != [at.tolist() for at in draws[1]]
    assert all(bool(batch.wanted.flatten()[at + 1].all()) for at in draws[0])


def by_hand(trainer: DFlashTrainer, batch: Batch, at: Tensor) -> float:
    """The loss of a row's blocks, one place after the other."""
    law = trainer.logits(batch.final.flatten(0, 1)).softmax(-1)
    total = weights = 0.0
    spark = isinstance(trainer, DSparkTrainer)
    logits, confidence = trainer.drafted(batch, at) if spark else (trainer.logits_of(batch, at), None)
    for block, place in enumerate(at.tolist()):
        for k in range(trainer.depths):
            token = place + 1 + k
            if token >= LENGTH * 2 or batch.documents.flatten()[token] != batch.documents.flatten()[place]:
                break
            p, weight, row = law[token - 1], math.exp(-k / 4), logits[block, k]
            loss = -(p * row.log_softmax(-1)).sum()
            if confidence is not None:
                apart = (p - row.softmax(-1)).abs().sum()
                chance = confidence[block, k].sigmoid()
                ce, accepted = -row.log_softmax(-1)[batch.tokens.flatten()[token]], 1 - apart / 2
                bce = -(accepted * chance.log() + (1 - accepted) * (1 - chance).log())
                loss = 0.1 * ce + 0.9 * apart + bce
            total, weights = total + weight * float(loss), weights + weight
    return total / weights


@torch.no_grad()
@pytest.mark.parametrize("kind", ["dflash", "rnn"])
def test_the_loss_is_that_of_its_formula(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: weights that do not fall make another one."""
    trainer, batch, _ = trainer_of(kind)
    one = Batch(*(getattr(batch, name)[:1] for name in Batch.__slots__))
    (at,) = anchors(one)
    monkeypatch.setattr(trainer, "most", 10**6)
    found = float(trainer.loss(one, torch.Generator()))
    assert found == pytest.approx(by_hand(trainer, batch, at), rel=1e-4)
    monkeypatch.setattr(trainer, "gamma", 1e9)
    assert float(trainer.loss(one, torch.Generator())) != pytest.approx(found, rel=1e-3)


def fitted(kind: str, shift: int = 0, **more: Any) -> tuple[DFlashTrainer, Batch]:
    """A trainer that has learned of a target whose token is a function of its position alone.

    Args:
        shift: wrong: by so many places the tokens are given too late.
    """
    trainer, _, runner = trainer_of(kind, num_layers=1, **more)
    texts = [tuple((11 * i) % 50 + 4 for i in range(40))]
    view = TargetView(runner, trainer.config.taps, torch.arange(VOCAB), keep_bytes=0)
    batch = view.batch([[Document(texts[0], 4)]], 40)
    columns = batch.tokens.roll(shift, 1)
    final = 60.0 * F.normalize(view.rows, dim=1)[columns.roll(-1, 1)]
    batch = replace(batch, final=final, columns=torch.where(batch.columns >= 0, columns, -1))
    optimizer, generator = torch.optim.Adam(trainer.parameters(), 1e-2), torch.Generator().manual_seed(0)
    for _ in range(60):
        loss = trainer.loss(batch, generator)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return trainer, batch


@pytest.mark.parametrize("kind", ["dflash", "vanilla"])
def test_each_place_learns_its_own_token(kind: str) -> None:
    """Place k of a block the token 1 + k behind its anchor. Negative control: tokens that were given one too late."""
    for shift in (0, 1):
        trainer, batch = fitted(kind, shift)
        with torch.no_grad():
            right = [
                float((found == batch.tokens.flatten()[at + k + 2]).float().mean())
                for k, (at, found) in enumerate(trainer.predict(batch))
            ]
        assert len(right) == trainer.depths
        assert min(right) > 0.9 if not shift else max(right) < 0.2, right


def test_confidence_is_the_chance_to_be_accepted() -> None:
    """Its mean over places of like confidence is that of the sums of min(p, q). Control: it was not so before."""

    def off(trainer: DFlashTrainer, batch: Batch) -> float:
        """Largest difference of the means in three parts of the places, by confidence."""
        assert isinstance(trainer, DSparkTrainer)
        at = torch.cat(anchors(batch))
        logits, confidence = trainer.drafted(batch, at)
        block, k = learned_drafts(batch, trainer.depths)[at].nonzero().unbind(1)
        p = trainer.soft_targets(batch)
        law = p.chances[p.row[at[block] + 1 + k]]
        accepted = torch.minimum(law, logits[block, k].softmax(-1)).sum(-1)
        said = confidence[block, k].sigmoid()
        parts = said.argsort().tensor_split(3)
        return max(float((said[part].mean() - accepted[part].mean()).abs()) for part in parts)

    before, batch, _ = trainer_of("vanilla")
    with torch.no_grad():
        assert off(before, batch) > 0.15
    trainer, batch = fitted("vanilla")
    with torch.no_grad():
        assert off(trainer, batch) < 0.05


@torch.no_grad()
def test_it_is_judged_by_what_it_drafts() -> None:
    """At every place where a draft is learned, in the order in which they are counted."""
    trainer, batch, _ = trainer_of("gated")
    every = [(at, trainer.logits_of(batch, at).argmax(-1)) for at in anchors(batch)]
    likeliest = {place: row for at, rows in every for place, row in zip(at.tolist(), rows.tolist(), strict=True)}
    for k, (at, found) in enumerate(trainer.predict(batch)):
        assert at.tolist() == batch.learned(k + 2)[0].tolist()
        assert [likeliest[place + 1][k] for place in at.tolist()] == found.tolist()


def test_the_mask_is_an_id_that_is_no_token() -> None:
    class Known:
        eos_id = 2

        def __init__(self, count: int) -> None:
            self.count = count

        def tokens(self) -> dict[int, str]:
            return dict.fromkeys(range(self.count), "x")

    assert mask_of(Known(60), 64) == 60  # type: ignore[arg-type]
    assert mask_of(Known(64), 64) == 2  # type: ignore[arg-type]


def test_reference_and_training_agree_on_what_is_read() -> None:
    """The plain forward pass of the drafter's tests, on the weights of a trainer."""
    trainer, batch, _ = trainer_of("dflash")
    (at, *_), weights = anchors(batch), {name: one.detach() for name, one in trainer.named_parameters()}
    place = int(at[3])
    first = torch.cat((batch.embedded[0, place : place + 1], trainer.mask.expand(3, -1)))
    start = place - int(batch.positions[0, place])
    states = reference.block_states(trainer.config, weights, first, batch.taps[0, start:place])
    with torch.no_grad():
        assert torch.allclose(trainer.states(batch, at[3:4])[0], states[1:], atol=1e-4)
