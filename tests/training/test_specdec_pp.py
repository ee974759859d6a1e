"""SpecDec++'s head learns which drafted tokens are accepted; the checks of its description."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from toys import ToyRunner

from paceline.training import training_config
from paceline.training.batches import Document, packed
from paceline.training.specdec_pp import ACCEPTED, AcceptanceView, SpecDecPPConfig, SpecDecPPTrainer, drafted

VOCAB, HIDDEN, LENGTH = 24, 16, 64
DRAFT = {"name": "small"}


def config_of(**settings: Any) -> SpecDecPPConfig:
    config = training_config("specdec_pp", data=(Path("x"),), draft_model="small", **settings)
    assert isinstance(config, SpecDecPPConfig)
    return config


class Embedded(ToyRunner):
    """A toy whose embeddings nobody looks at."""

    def embed(self, tokens: list[int]) -> torch.Tensor:
        return torch.zeros(len(tokens), self.info.hidden_size)


def models() -> tuple[ToyRunner, Embedded]:
    """A target and a draft model whose next token, and whose state, depend on the last token alone."""
    target = ToyRunner(VOCAB, order=1, sharpness=1.5, hidden_size=HIDDEN)
    return target, Embedded(VOCAB, order=1, sharpness=1.5, noise=1.5, hidden_size=HIDDEN)


def documents(target: ToyRunner, count: int, seed: int) -> list[Document]:
    """Texts that the target wrote."""
    generator, found = torch.Generator().manual_seed(seed), []
    for number in range(count):
        text = [number % VOCAB, (number * 7 + seed) % VOCAB]
        while len(text) < LENGTH:
            text.append(int(torch.multinomial(target.logits(text).softmax(0), 1, generator=generator)))
        found.append(Document(tuple(text), 2, str(number)))
    return found


def view_of(**settings: Any) -> tuple[AcceptanceView, ToyRunner, Embedded]:
    target, draft = models()
    return AcceptanceView(target, draft, config_of(**settings), keep_bytes=0), target, draft


def test_a_drafted_token_is_accepted_with_the_ratio_of_its_chances() -> None:
    """And in the mean with the mass that both models share. Negative control: the ratio turned round."""
    generator = torch.Generator().manual_seed(0)
    p, q = (torch.randn(1, 5, generator=generator).repeat(40_000, 1) for _ in range(2))
    tokens, chances = drafted(p, q, 0.7, generator)
    law_p, law_q = ((logits[0] / 0.7).softmax(0) for logits in (p, q))
    assert torch.allclose(chances, (law_p / law_q).clamp(max=1)[tokens], atol=1e-5)
    shares = torch.bincount(tokens, minlength=5) / len(tokens)
    assert torch.allclose(shares, law_q, atol=0.01)
    shared = float(torch.minimum(law_p, law_q).sum())
    assert float(chances.mean()) == pytest.approx(shared, abs=0.01)
    assert float((law_q / law_p).clamp(max=1)[tokens].mean()) != pytest.approx(shared, abs=0.1)


def test_greedily_it_is_accepted_where_both_models_take_it() -> None:
    p, q = torch.eye(4)[[0, 1, 2]], torch.eye(4)[[0, 2, 2]]
    tokens, chances = drafted(p, q, 0.0, torch.Generator())
    assert tokens.tolist() == [0, 2, 2]
    assert chances.tolist() == [1.0, 0.0, 1.0]


def aligned(view: AcceptanceView, target: ToyRunner, draft: Embedded, shift: int = 0) -> bool:
    """Whether, of greedy drafts without tokens of the target, each place has the state of the drafted token that comes
    there, and says whether it is the target's.
    """
    rows = packed(documents(target, 3, 0), 2 * LENGTH)
    batch = view.batch(rows, 2 * LENGTH)
    right = True
    for i, row in enumerate(rows):
        for number, document in enumerate(row):
            for place in range(2, LENGTH - 1):
                at, before = number * LENGTH + place, [document.tokens[place - 1 + shift]]
                token = int(draft.logits(before).argmax())
                right &= torch.equal(batch.final[i, at], draft.hidden(4, [token]))
                right &= int(batch.columns[i, at]) == int(token == int(target.logits(before).argmax()))
            assert batch.columns[i, number * LENGTH : number * LENGTH + 2].tolist() == [-1, -1]
    return right


def test_states_and_labels_are_those_of_the_token_that_was_drafted_there() -> None:
    """By brute force. Negative controls: one place further on, and one before."""
    view, target, draft = view_of(temperature=0.0, target_share=0.0)
    assert aligned(view, target, draft)
    assert not aligned(view, target, draft, 1)
    assert not aligned(view, target, draft, -1)


def test_a_share_of_the_tokens_that_are_read_is_the_targets_and_not_learned() -> None:
    for share in (0.0, 0.15, 0.6):
        view, target, _ = view_of(target_share=share)
        batch = view.batch(packed(documents(target, 30, 1), LENGTH), LENGTH)
        learned = (batch.columns >= 0)[:, 2:].float().mean()
        assert float(learned) == pytest.approx(1 - share, abs=0.03)
        assert torch.equal(batch.columns >= 0, batch.wanted)


def batch_of(view: AcceptanceView, target: ToyRunner, count: int, seed: int) -> Any:
    return view.batch(packed(documents(target, count, seed), LENGTH), LENGTH)


WEIGHT = 6.0


def trained(*, shifted: bool = False) -> tuple[SpecDecPPTrainer, Any]:
    """A head that has learned, and a batch that it has not seen; `shifted` labels are those of other tokens."""
    torch.manual_seed(0)
    view, target, _ = view_of(rejection_weight=WEIGHT)
    trainer = SpecDecPPTrainer(view.rows, view.config, DRAFT)
    batch, generator = batch_of(view, target, 40, 2), torch.Generator()
    if shifted:
        batch.chances[:] = batch.chances.roll(1, 0)
    optimizer = torch.optim.AdamW(trainer.parameters(), lr=1e-2)
    for _ in range(60):
        optimizer.zero_grad()
        trainer.loss(batch, generator).backward()
        optimizer.step()
    return trainer, batch_of(view, target, 40, 3)


@torch.no_grad()
def foretold(trainer: SpecDecPPTrainer, batch: Any, weight: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(m,) chances that the head foretells, a weight of rejections taken out, and (m,) what became of the tokens."""
    logits = trainer.model(batch.final[batch.columns >= 0])
    logits[:, ACCEPTED] += torch.tensor(weight).log()
    return logits.softmax(-1)[:, ACCEPTED], batch.columns[batch.columns >= 0].float()


def worst_bin(chances: torch.Tensor, stood: torch.Tensor) -> float:
    """Largest distance of foretold and true acceptance over eight bins, beyond three standard errors."""
    found = []
    for part in chances.argsort().chunk(8):
        share = stood[part].mean()
        found.append(float((chances[part].mean() - share).abs() - 3 * (share * (1 - share) / len(part)).sqrt()))
    return max(found)


def test_binned_predictions_equal_acceptance() -> None:
    """Negative controls: with the weight of rejections left in, and a head that learned labels of other tokens, which
    tells nothing apart.
    """
    trainer, batch = trained()
    chances, stood = foretold(trainer, batch, WEIGHT)
    assert worst_bin(chances, stood) < 0.03
    assert float(chances.std()) > 0.11
    assert worst_bin(foretold(trainer, batch, 1.0)[0], stood) > 0.1
    apart, _ = foretold(*trained(shifted=True), WEIGHT)
    assert float(apart.std()) < 0.07


def test_the_loss_is_the_weighted_cross_entropy_over_the_total_weight() -> None:
    """By hand. Blocks have weights of their own, unlike those of the authors' code."""
    torch.manual_seed(1)
    view, target, _ = view_of()
    trainer, batch = SpecDecPPTrainer(view.rows, view.config, DRAFT), batch_of(view, target, 2, 4)
    torch.nn.init.normal_(trainer.model[-1].weight)
    at, total, weights = 0, 0.0, 0.0
    head = trainer.head({})
    for state, column in zip(batch.final.flatten(0, 1), batch.columns.flatten().tolist(), strict=True):
        if column >= 0:
            said = head.logits(state[None]).log_softmax(-1)[0].tolist()
            rejected, accepted = batch.chances[at].tolist()
            total -= 6 * rejected * said[0] + accepted * said[1]
            weights += 6 * rejected + accepted
            at += 1
    assert at == len(batch.chances)
    assert trainer.loss(batch, torch.Generator()).item() == pytest.approx(total / weights, rel=1e-4)
    assert len(head.blocks) == 3
    assert not torch.equal(head.blocks[0][0], head.blocks[1][0])
