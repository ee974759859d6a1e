"""P-EAGLE in training: a row sees what it will see when it drafts, and is judged and learned by that."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_llama import runner_of, tiny_llama

from paceline import LLM
from paceline.drafters import Context
from paceline.drafters.heads.feature_drafts import FeatureState
from paceline.drafters.heads.parallel_drafts import ParallelDrafts
from paceline.drafters.heads.tapped_states import TappedStates
from paceline.errors import ConfigError
from paceline.models.runners import FeatureHead
from paceline.models.runners.feature_head import Mask
from paceline.training import TargetView, p_eagle, training_config
from paceline.training.divergences import DIVERGENCES
from paceline.training.masked_rows import MaskedRows
from paceline.training.p_eagle import PEagleConfig, PEagleTrainer, anchors_of, unused_token, with_state
from tests.training.test_pard import PACKED, sees_one_more, sees_other_masks

MASK, LENGTH = 63, 48
VOCABULARY = torch.arange(0, 62, 2)
TAPS = (-1, 0, 2)


class World:
    """A trainer of a tiny head of two layers, rows of texts for it, and the head as it drafts."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.runner = runner_of(tiny_llama())
        given = {"num_layers": 2, "mask_token_id": MASK, "depths": 4, "retention": 1.0, **settings}
        config = training_config("p_eagle", data=(Path("x"),), **given)
        assert isinstance(config, PEagleConfig)
        layer = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 40}
        own = PEagleTrainer.config_of(self.runner.info, layer | {"max_position_embeddings": 64}, len(VOCABULARY), 4)
        own = dataclasses.replace(own, num_layers=2, mask_token_id=MASK, taps=TAPS)
        view = TargetView(self.runner, TAPS, VOCABULARY, keep_bytes=0)
        torch.manual_seed(0)
        self.trainer = PEagleTrainer(own, view.rows, config)
        self.trainer.init_from(view)
        with torch.no_grad():
            self.trainer.mask_hidden.normal_()
        self.batch = view.batch(PACKED, LENGTH)
        llm: Any = SimpleNamespace(runner=self.runner)
        self.trainer.write(folder, llm, view, {"target": {}})
        self.head = FeatureHead.load(folder, self.runner, ("p_eagle",))

    def drafted(self, text: list[int], count: int) -> torch.Tensor:
        """(count, n) logits of a text's next tokens, as they are drafted."""
        found = self.runner.extend([self.runner.open()], [text[:-1]], taps=TAPS).taps
        known = TappedStates(0, torch.cat([found[tap] for tap in TAPS], 1))
        state = FeatureState(Context("r", text, len(text)), self.head.open(), known)
        return ParallelDrafts(self.head, 64, 0).predicted([state], [count])[0]

    def trained(self, i: int) -> tuple[MaskedRows, torch.Tensor]:
        """All rows of a pass over packed row i, and their logits (r, n)."""
        kept = [anchors_of(self.batch, depth)[i] for depth in range(1, 4)]
        rows = MaskedRows.of(with_state(self.batch, i), kept)
        states = self.trainer.states_of(self.batch, i, rows, torch.arange(len(rows.anchors)))
        return rows, self.trainer.logits(self.trainer.norm(states))


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


@torch.no_grad()
def test_a_row_of_training_says_what_it_says_when_it_drafts(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative controls: rows that see a token or a mask too many, and other states in the place of unknown ones."""

    def differs() -> bool:
        wrong, seen = False, 0
        for i, documents in enumerate(PACKED):
            rows, logits = world.trained(i)
            starts = [0, len(documents[0].tokens)]
            drafts: dict[int, torch.Tensor] = {}
            for anchor, depth, row in zip(rows.anchors.tolist(), rows.depths.tolist(), logits, strict=True):
                number = int(anchor >= starts[1])
                text = list(documents[number].tokens[: anchor - starts[number] + 1])
                if anchor not in drafts:
                    drafts[anchor] = world.drafted(text, 4)
                wrong |= not torch.allclose(row, drafts[anchor][depth], atol=1e-4)
                seen += depth > 0
        assert seen > 80
        return wrong

    assert not differs()
    true, hidden = world.head.mask, world.trainer.mask_hidden.view(1, -1)
    assert true is not None
    for state in (world.head.joined(torch.zeros_like(hidden)), hidden[:, : true.state.shape[1]]):
        world.head.mask = Mask(true.token, state)
        assert differs()
    world.head.mask = true
    for mutation in (sees_one_more, sees_other_masks):
        monkeypatch.setattr(MaskedRows, "visible", mutation)
        assert differs()


@torch.no_grad()
def test_what_follows_the_anchor_changes_nothing(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: rows that see the token behind their anchor."""

    def changed() -> bool:
        rows, before = world.trained(0)
        kept, place = world.batch, 8
        tokens, taps = kept.tokens.clone(), kept.taps.clone()
        tokens[:, place + 1 :], taps[:, place:] = 5, 1.0  # the state of the anchor itself comes with what follows it
        world.batch = dataclasses.replace(kept, tokens=tokens, taps=taps)
        _, after = world.trained(0)
        world.batch = kept
        own = rows.anchors == place
        assert rows.depths[own].tolist() == [0, 1, 2, 3]
        assert not torch.allclose(after[rows.anchors > place], before[rows.anchors > place], atol=1e-4)
        return not torch.allclose(after[own], before[own], atol=1e-5)

    assert not changed()
    monkeypatch.setattr(MaskedRows, "visible", sees_one_more)
    assert changed()


@torch.no_grad()
def test_it_is_judged_by_what_it_drafts(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many anchors share a pass."""
    found = [(at.tolist(), columns.tolist()) for at, columns in world.trainer.predict(world.batch)]
    monkeypatch.setattr(p_eagle, "AT_ONCE", 3)
    assert [(at.tolist(), columns.tolist()) for at, columns in world.trainer.predict(world.batch)] == found
    for depth, (places, columns) in enumerate(found):
        assert len(places) == len(columns) > 10
        for place, column in list(zip(places, columns, strict=True))[::5]:
            row, at = divmod(place, LENGTH)
            first = len(PACKED[row][0].tokens)
            document, start = (PACKED[row][0], 0) if at < first else (PACKED[row][1], first)
            assert column == int(world.drafted(list(document.tokens[: at - start + 2]), depth + 1)[depth].argmax())


@pytest.mark.parametrize("loss_fn", ["kl_div", "tv"])
def test_the_loss_is_the_divergence_of_all_rows_that_predict(tmp_path: Path, loss_fn: str) -> None:
    """By brute force over the drafts of each text; all that is said to be learned has a gradient."""
    world = World(tmp_path, loss_fn=loss_fn)
    losses = []
    for document in (document for row in PACKED for document in row):
        text = list(document.tokens)
        said = world.runner.extend([world.runner.open()], [text], all_logits=True).logits[:, VOCABULARY].softmax(-1)
        for anchor in range(document.first - 1, len(text) - 1):
            rows = world.drafted(text[: anchor + 1], 4)
            for depth in range(min(4, len(text) - 1 - anchor)):
                if text[anchor + depth + 1] in VOCABULARY:
                    p, q = said[anchor + depth], rows[depth].softmax(-1)
                    losses.append(-(p * q.log()).sum() if loss_fn == "kl_div" else 1 - torch.minimum(p, q).sum())
    loss = world.trainer.loss(world.batch, torch.Generator())
    assert loss.item() == pytest.approx(float(torch.stack(losses).mean()), rel=1e-3)
    loss.backward()
    for name, parameter in world.trainer.named_parameters():
        assert parameter.grad is not None
        assert bool(parameter.grad.any()), name
    assert bool(world.trainer.embed.weight.grad[MASK].any())  # type: ignore[index]


def test_divergences_are_their_formulas() -> None:
    """On random distributions; all but the cross-entropy are 0 where draft and target are one."""
    torch.manual_seed(0)
    logits, p = torch.randn(5, 7), torch.randn(5, 7).softmax(-1)
    q, m = logits.softmax(-1), (p + logits.softmax(-1)) / 2
    a = torch.minimum(p, q).sum(-1)
    share = (-3 * a).exp()
    formulas: dict[str, torch.Tensor] = {
        "kl_div": (p * (p / q).log()).sum(-1), "rkl": (q * (q / p).log()).sum(-1),
        "jsd": ((p * (p / m).log()).sum(-1) + (q * (q / m).log()).sum(-1)) / 2,
        "ce": -q.gather(1, p.argmax(-1, keepdim=True)).log()[:, 0], "tv": (p - q).abs().sum(-1) / 2, "nla": -a.log(),
        "lk_hybrid": share * (p * (p / q).log()).sum(-1) + (1 - share) * (1 - a),
    }  # fmt: skip
    assert formulas.keys() == DIVERGENCES.keys()
    for name, one in DIVERGENCES.items():
        assert torch.allclose(one(logits, p), formulas[name], atol=1e-5), name
        at_home, away = float(one(p.log(), p).max()), float(one(logits, p).min())
        assert (abs(at_home) < 1e-5) == (name != "ce"), name
        assert away > 1e-3
        sparse = torch.nn.functional.one_hot(torch.tensor([2] * 5), 7).float()
        assert bool(one(logits, sparse).isfinite().all()), name


def test_the_mask_token_is_of_the_models_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(dtype="float32", speculative_config=None)
    size = llm.runner.info.vocab_size
    assert unused_token(llm) == size - 1
    known: Callable[[], Any] = lambda: [token for token in range(size) if token not in (7, 9)]  # noqa: E731
    monkeypatch.setattr(llm.tokenizer, "tokens", known)
    assert unused_token(llm) == 7
    with pytest.raises(ConfigError, match=rf"mask_token_id must be an integer in 0\.\.{size - 1}, got {size}"):
        PEagleTrainer.check(llm.runner.info, training_config("p_eagle", data=(Path("x"),), mask_token_id=size))
    with pytest.raises(ConfigError, match="loss_fn must be one of kl_div, rkl"):
        training_config("p_eagle", data=(Path("x"),), loss_fn="l2")
