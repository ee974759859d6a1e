"""PARD in training: a row sees what it will see when it drafts, and the masks before one that is kept are kept."""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_llama import runner_of, tiny_llama

from benchmarks.stand_ins import write_shuffled_draft
from paceline import LLM
from paceline.checkpoints import read_config
from paceline.drafters import Context
from paceline.drafters.common.draft_state import DraftState
from paceline.drafters.draft_model.pard import predicted
from paceline.errors import CapabilityError, ConfigError
from paceline.llm import BUNDLED
from paceline.models import load_runner
from paceline.training import training_config
from paceline.training.batches import Batch, Document, TargetView
from paceline.training.masked_rows import MaskedRows, anchors_of, retained
from paceline.training.pard import PardConfig, PardTrainer, tokens_in

MASK = 63
TEXTS = [tuple((5 * i + 7 * j) % 57 + 4 for i in range(14 + 3 * j)) for j in range(4)]
PACKED = [[Document(text, 4) for text in TEXTS[:2]], [Document(text, 2) for text in TEXTS[2:]]]


def trainer_of(**settings: Any) -> tuple[PardTrainer, Batch, Any]:
    """A trainer of a tiny model, rows of texts for it, and the model as it drafts."""
    model = tiny_llama(attn_implementation="eager")
    runner = runner_of(model)
    config = training_config("pard", data=(Path("x"),), draft_model="tiny", **settings)
    assert isinstance(config, PardConfig)
    view = TargetView(runner, None, torch.arange(64), keep_bytes=0)
    return PardTrainer(model, MASK, view.rows, config, {}), view.batch(PACKED, 48), runner


def kept_of(
    batch: Batch, depths: int, retention: float, least: float, seed: int = 1, **more: Any
) -> list[torch.Tensor]:
    """Anchors that are kept at each depth."""
    shares = {"retention": retention, "least_retention": least, **more}
    config = training_config("pard", data=(Path("x"),), draft_model="tiny", **shares)
    assert isinstance(config, PardConfig)
    return retained(batch, depths, config, torch.Generator().manual_seed(seed))


def drafted(runner: Any, text: list[int], count: int) -> torch.Tensor:
    """(count, v) logits of a text's next tokens, as they are drafted."""
    return predicted(runner, [DraftState(Context("r", text, len(text)), runner.open())], [count], MASK)[0]


def sees_one_more(self: MaskedRows, documents: torch.Tensor) -> torch.Tensor:
    """Wrong: masks see the token behind their anchor."""
    late = dataclasses.replace(self, anchors=self.anchors + (self.depths > 0).long())
    tokens = VISIBLE(late, torch.nn.functional.pad(documents, (0, 1), value=-1))
    return torch.where((self.depths > 0)[:, None] & (self.depths == 0), tokens, VISIBLE(self, documents))


def sees_other_masks(self: MaskedRows, documents: torch.Tensor) -> torch.Tensor:
    """Wrong: masks see those at the place before them, whatever their anchor."""
    place = self.anchors + self.depths
    return VISIBLE(self, documents) | ((self.depths > 0)[:, None] & (self.depths > 0) & (place == place[:, None] - 1))


VISIBLE = MaskedRows.visible


@torch.no_grad()
def test_a_row_of_training_says_what_it_says_when_it_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """With all masks and with some dropped. Negative controls: rows that see a token or a mask too many."""

    def differs(share: float) -> bool:
        trainer, batch, runner = trainer_of(depths=4)
        kept, wrong, seen = kept_of(batch, 4, share, 0.0), False, 0
        for i, documents in enumerate(PACKED):
            rows = MaskedRows.of(tokens_in(batch, i), [one[i] for one in kept])
            logits = trainer.logits_of(batch, i, rows, torch.arange(len(rows.anchors)))
            starts = [0, len(documents[0].tokens)]
            for anchor, depth, row in zip(rows.anchors.tolist(), rows.depths.tolist(), logits, strict=True):
                number = int(anchor >= starts[1])
                text = list(documents[number].tokens[: anchor - starts[number] + 1])
                wrong |= not torch.allclose(row, drafted(runner, text, depth + 1)[depth], atol=1e-4)
                seen += depth > 0
        assert seen > 20
        return wrong

    assert not differs(1.0)
    assert not differs(0.7)
    for mutation in (sees_one_more, sees_other_masks):
        monkeypatch.setattr(MaskedRows, "visible", mutation)
        assert differs(1.0)


def closed(kept: list[torch.Tensor]) -> bool:
    """Whether each mask's predecessor is kept."""
    return all(not bool((after & ~before).any()) for before, after in pairwise(kept))


def test_what_is_kept_has_its_predecessors_and_the_wanted_share() -> None:
    """Negative control: depths that are drawn each for itself."""
    _, batch, _ = trainer_of()
    draws = [kept_of(batch, 6, 0.6, 0.2, seed) for seed in range(8)]
    for kept in draws:
        assert closed(kept)
        before = anchors_of(batch, 0)
        for depth, one in enumerate(kept, start=1):
            possible = before & anchors_of(batch, depth)
            most = (anchors_of(batch, depth).sum(1) * max(0.6**depth, 0.2)).long()
            assert one.sum(1).tolist() == torch.minimum(most, possible.sum(1)).tolist()
            before = one
    assert not torch.equal(draws[0][0], draws[1][0])
    assert not any(closed([one[depth] for depth, one in enumerate(draws[i : i + 5])]) for i in range(4))
    whole = kept_of(batch, 4, 1.0, 0.0)
    assert [one.tolist() for one in whole] == [anchors_of(batch, depth).tolist() for depth in (1, 2, 3)]
    few = kept_of(batch, 4, 1.0, 0.0, max_anchors=3)
    assert closed(few)
    assert 0 < int(few[0].sum(1).max()) <= 3 < int(whole[0].sum(1).min())


@torch.no_grad()
def test_it_is_judged_by_what_it_drafts() -> None:
    trainer, batch, runner = trainer_of(depths=3)
    for depth, (places, tokens) in enumerate(trainer.predict(batch)):
        assert len(places) == len(tokens) > 10
        for place, token in list(zip(places.tolist(), tokens.tolist(), strict=True))[::5]:
            row, at = divmod(place, 48)
            first = len(PACKED[row][0].tokens)
            document, start = (PACKED[row][0], 0) if at < first else (PACKED[row][1], first)
            logits = drafted(runner, list(document.tokens[: at - start + 2]), depth + 1)[depth]
            assert token == int(logits[:MASK].argmax())


def test_the_loss_is_the_cross_entropy_of_all_rows_that_predict() -> None:
    """By brute force over the drafts of each text; without masks that of the next tokens alone."""
    for depths in (1, 3):
        trainer, batch, runner = trainer_of(depths=depths, retention=1.0)
        losses = []
        for document in (document for row in PACKED for document in row):
            text = document.tokens
            for anchor in range(document.first - 1, len(text) - 1):
                rows = drafted(runner, list(text[: anchor + 1]), depths).log_softmax(-1)
                losses += [-row[token] for row, token in zip(rows, text[anchor + 1 :], strict=False)]
        loss = trainer.loss(batch, torch.Generator())
        assert loss.item() == pytest.approx(float(torch.stack(losses).mean()), rel=1e-4)
        loss.backward()
        embedding = trainer.model.get_input_embeddings().weight  # type: ignore[operator]
        assert bool(embedding.grad[MASK].any()) == (depths > 1)


@pytest.mark.parametrize("name", ["draft", "target"])
def test_a_model_without_a_spare_row_gets_one(tmp_path: Path, name: str) -> None:
    """Also one whose head is its embedding, as the target's."""
    llm = LLM(dtype="float32", speculative_config=None)
    with pytest.raises(ConfigError, match="draft_model must be the folder or hub id"):
        PardTrainer.check(llm.runner.info, training_config("pard", data=(Path("x"),)))
    config = training_config("pard", data=(Path("x"),), draft_model=str(BUNDLED / name))
    trainer, view = PardTrainer.init(llm, config, torch.arange(8))
    tokens = llm.tokenizer.vocab_size
    embedding = trainer.model.get_input_embeddings().weight  # type: ignore[operator]
    assert trainer.mask == tokens == len(embedding) - 1
    assert torch.allclose(embedding[tokens], embedding[:tokens].mean(0))
    original = load_runner(str(BUNDLED / name), dtype="float32")
    text = [5, 60, 700, 41]
    with torch.no_grad():
        says = trainer.model(input_ids=torch.tensor([text])).logits[0, -1, :tokens]
    assert torch.allclose(says, original.extend([original.open()], [text]).logits[0], atol=1e-3)
    trainer.write(tmp_path, llm, view, {})
    stored = read_config(tmp_path)
    assert {key: stored[key] for key in ("pard_token", "spd_type", "vocab_size")} == {
        "pard_token": tokens, "spd_type": "pard", "vocab_size": tokens + 1,
    }  # fmt: skip
    again, _ = PardTrainer.init(llm, dataclasses.replace(config, draft_model=str(tmp_path)), torch.arange(8))
    kept = again.model.get_input_embeddings().weight  # type: ignore[operator]
    assert again.mask == tokens
    assert torch.allclose(kept, embedding, atol=1e-2)
    (drafter,) = llm.with_speculative_config(
        {"method": "pard", "model": str(tmp_path)}
    ).engine.parts.drafter_set.drafters
    assert drafter.mask == tokens  # type: ignore[attr-defined]


def test_what_cannot_become_parallel_is_rejected(tmp_path: Path) -> None:
    llm = LLM(dtype="float32", speculative_config=None)
    shuffled = str(write_shuffled_draft(tmp_path / "shuffled"))
    config = training_config("pard", data=(Path("x"),), draft_model=shuffled)
    with pytest.raises(ConfigError, match="draft_model must have the model's tokenizer"):
        PardTrainer.init(llm, config, torch.arange(8))
    with pytest.raises(CapabilityError, match="no causal model of transformers"):
        PardTrainer.init(llm, dataclasses.replace(config, draft_model=str(BUNDLED / "diffusion")), torch.arange(8))
