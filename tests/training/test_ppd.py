"""Prompt tokens in training: what the target makes of them is what it makes of them when they draft."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_checkpoint import write

from paceline import LLM
from paceline.drafters import Context, DrafterArgs
from paceline.drafters.heads.ppd import PPDDrafter
from paceline.training import training_config
from paceline.training.batches import Batch, Document, TargetView
from paceline.training.masked_rows import MaskedRows
from paceline.training.ppd import PPDTrainer
from paceline.tree import EMPTY_TREE, Verdict

TEXTS = [tuple((5 * i + 7 * j) % 57 + 4 for i in range(12 + 3 * j)) for j in range(2)]
VISIBLE = MaskedRows.visible


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = write(tmp_path_factory.mktemp("target"), vocab_size=320)
    return LLM(folder, speculative_config=None, dtype="float32", threads=1, profile=False)


def trainer_of(llm: LLM, **settings: Any) -> tuple[PPDTrainer, TargetView, Batch]:
    torch.manual_seed(0)
    config = training_config("ppd", data=(Path("x"),), **settings)
    trainer, view = PPDTrainer.init(llm, config, torch.arange(llm.runner.info.vocab_size))
    return trainer, view, view.batch([[Document(text, 4) for text in TEXTS]], 48)


def marked(batch: Batch, *places: int) -> torch.Tensor:
    """(1, 48) bool anchors at places of the first text."""
    kept = torch.zeros(batch.tokens.shape, dtype=torch.bool)
    kept[0, batch.documents[0].tolist().index(0) + torch.tensor(places)] = True
    return kept


def sees_one_more(self: MaskedRows, documents: torch.Tensor) -> torch.Tensor:
    """Wrong: prompt tokens see the token behind their anchor."""
    late = dataclasses.replace(self, anchors=self.anchors + (self.depths > 0).long())
    tokens = VISIBLE(late, torch.nn.functional.pad(documents, (0, 1), value=-1))
    return torch.where((self.depths > 0)[:, None] & (self.depths == 0), tokens, VISIBLE(self, documents))


@torch.no_grad()
def test_a_prompt_token_of_training_says_what_it_says_when_it_drafts(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, view, batch = trainer_of(llm, virtual_tokens=2)
    trainer.write(tmp_path / "head", llm, view, {"target": {"name": "tiny"}})
    stored = load_file(tmp_path / "head" / "model.safetensors")
    assert {name: tuple(one.shape) for name, one in stored.items()} == {"prompts": (3, 2, llm.runner.info.hidden_size)}
    info, target = llm.runner.info, llm.runner
    args = DrafterArgs(vocab_size=info.vocab_size, index=0, max_context=info.max_context, target=target)
    drafter = PPDDrafter(args, model=str(tmp_path / "head"))
    places, guesses = (3, 5, 8), []
    for place in places:
        text = list(TEXTS[0][: place + 1])
        cache, (state,) = target.open(), drafter.begin([Context("a", text, 4)])
        target.extend([cache], [text[:-1]])
        added = drafter.added_rows([state], [EMPTY_TREE], [6])
        drafter.read_rows([state], [target.score_added([cache], text[-1:], [EMPTY_TREE], added)[1].of(0)])  # type: ignore[attr-defined]
        drafter.observe([state], [EMPTY_TREE], [Verdict((), (), 1)], None)
        guesses.append(state.guesses)

    def same() -> bool:
        found = trainer.states(batch, [marked(batch, *places)] * 3)
        logits = torch.stack([trainer.logits(states) for _, states in found], 1)
        return torch.allclose(logits, torch.stack(guesses), atol=1e-3)

    assert same()
    monkeypatch.setattr(MaskedRows, "visible", sees_one_more)
    assert not same()


@torch.no_grad()
def test_what_follows_the_anchor_changes_nothing(llm: LLM) -> None:
    trainer, _, batch = trainer_of(llm)
    before = trainer.states(batch, [marked(batch, 5)] * 3)
    for place, matters in ((6, False), (5, True), (2, True)):
        tokens = batch.tokens.clone()
        tokens[0, marked(batch, place)[0]] = 99
        after = trainer.states(dataclasses.replace(batch, tokens=tokens), [marked(batch, 5)] * 3)
        same = [torch.allclose(a[1], b[1], atol=1e-5) for a, b in zip(before, after, strict=True)]
        assert same == [not matters] * 3


def test_each_prompt_token_learns_the_targets_own_words_so_far_ahead(llm: LLM) -> None:
    """And nothing else learns: prompt tokens that say just that have the least loss there is."""
    trainer, _, batch = trainer_of(llm, depths=2, anchors=99)
    assert [name for name, _ in trainer.named_parameters()] == ["embeddings"]
    trainer.loss(batch, torch.Generator().manual_seed(0)).backward()  # type: ignore[no-untyped-call]
    grad = trainer.embeddings.grad
    assert grad is not None
    assert grad.flatten(1).any(1).all()

    def loss_of(shift: int) -> float:
        """Where prompt token g says what the target does of the token behind place a + g + `shift`."""
        final = batch.final.flatten(0, 1)
        trainer.states = lambda batch, kept: [  # type: ignore[method-assign]
            (at, final[at + depth + shift])
            for depth, at in enumerate((one.flatten().nonzero().squeeze(1) for one in kept), start=1)
        ]
        return float(trainer.loss(batch, torch.Generator().manual_seed(0)))

    assert loss_of(0) < min(loss_of(-1), loss_of(1)) - 0.1
