"""LUD in training: units are those that the target was sure of, and placeholders say what they say when they draft."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_checkpoint import write

from paceline import LLM
from paceline.drafters import Context, DrafterArgs
from paceline.drafters.heads.lud import LudDrafter
from paceline.errors import ConfigError
from paceline.training import training_config
from paceline.training.batches import Batch, Document, TargetView
from paceline.training.lud import LudTrainer, units_of
from paceline.training.masked_rows import MaskedRows
from paceline.training.row_guesses import learned
from paceline.tree import EMPTY_TREE, Verdict
from tests.training.test_ppd import marked, sees_one_more

TEXTS: list[tuple[int, ...]] = []
"""The target's own, but for some tokens."""
SURE = 0.13


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = write(tmp_path_factory.mktemp("target"), vocab_size=320, initializer_range=0.4)
    found = LLM(folder, speculative_config=None, dtype="float32", threads=1, profile=False)
    for i, length in enumerate((14, 17)):
        text = [(7 * i + 5 * j) % 57 + 4 for j in range(4)]
        while len(text) < length:
            said = found.runner.extend([found.runner.open()], [text]).logits[0]
            text.append(int(said.argmax()) if len(text) % 5 else 50 + len(text))
        TEXTS.append(tuple(text))
    return found


def trainer_of(llm: LLM, *, changed: bool = False, **settings: Any) -> tuple[LudTrainer, TargetView, Batch]:
    """A trainer, and a row of two texts; `changed`: as if it had learned something."""
    torch.manual_seed(0)
    given = {"placeholder_token_id": 7, "rank": 2, "unit_threshold": SURE, **settings}
    config = training_config("lud", data=(Path("x"),), **given)
    trainer, view = LudTrainer.init(llm, config, torch.arange(llm.runner.info.vocab_size))
    if changed:
        with torch.no_grad():
            for b in trainer.b:
                b.normal_(std=0.05)
    return trainer, view, view.batch([[Document(text, 4) for text in TEXTS]], 48)


def runs(llm: LLM, text: tuple[int, ...], first: int, longest: int, sure_from: float) -> list[tuple[int, int]]:
    """Begin and length of each lexical unit of a text, by the target's own probabilities."""
    said = llm.runner.extend([llm.runner.open()], [text], all_logits=True).logits.softmax(-1)
    sure = [bool(said[i - 1, text[i]] >= sure_from) for i in range(first, len(text))]
    found: list[list[int]] = []
    for i, one in enumerate(sure):
        if one and i and sure[i - 1] and found[-1][1] < longest:
            found[-1][1] += 1
        else:
            found.append([first + i, 1])
    return [(begin, length) for begin, length in found]


def test_a_unit_is_a_run_of_tokens_that_the_target_was_sure_of(llm: LLM) -> None:
    """In each text for itself, no longer than a pass predicts. Negative control: another threshold."""
    for longest in (3, 2):
        trainer, _, batch = trainer_of(llm, depths=longest - 1)
        places = trainer.units(batch)[0].tolist()
        start, found, wrong = 0, list[tuple[int, int]](), 0
        for text in TEXTS:
            own = places[start : start + len(text)]
            assert own[:4] == [-1] * 4, "of the prompt"
            begins = [i for i, place in enumerate(own) if place == 0]
            units = [(i, j - i) for i, j in zip(begins, [*begins[1:], len(text)], strict=True)]
            assert units == runs(llm, text, 4, longest, SURE)
            wrong += units != runs(llm, text, 4, longest, 0.2)
            found, start = found + units, start + len(text)
        assert {length for _, length in found} >= set(range(1, longest + 1))
        assert wrong
        assert set(places[start:]) == {-1}


def test_units_of_given_tokens() -> None:
    sure = torch.tensor([[1, 1, 0, 1, 1, 1, 1, 1, 0, 1]]).bool()
    documents, among = torch.tensor([[0, 0, 0, 0, 0, 0, 0, 1, 1, 1]]), torch.ones(1, 10).bool()
    assert units_of(sure, among, documents, 9).tolist() == [[0, 1, 0, 0, 1, 2, 3, 0, 0, 0]]
    assert units_of(sure, among, documents, 2).tolist() == [[0, 1, 0, 0, 1, 0, 1, 0, 0, 0]]
    among[0, 4] = False
    assert units_of(sure, among, documents, 9).tolist() == [[0, 1, 0, 0, -1, 0, 1, 0, 0, 0]]


@torch.no_grad()
def test_a_placeholder_of_training_says_what_it_says_when_it_drafts(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the model that is written, and in the target with the adapter that is. Negative controls: placeholders that
    see a token too many, the target itself.
    """
    trainer, view, batch = trainer_of(llm, changed=True)
    trainer.write(tmp_path / "tuned", llm, view, {"target": {"name": "tiny"}})
    kept = json.loads((tmp_path / "tuned" / "head" / "config.json").read_text())["paceline_head"]
    assert (kept["num_heads"], kept["mask_token_id"], kept["target"]) == (3, 7, {"name": "tuned"})
    given: dict[str, Any] = {"speculative_config": None, "dtype": "float32", "threads": 1, "profile": False}
    tuned = LLM(tmp_path / "tuned", **given)
    adapted = LLM(llm.folder, lora=tmp_path / "tuned" / "adapter", **given)
    places = (3, 5, 8)

    def guessed(target: Any) -> torch.Tensor:
        info, found = target.info, list[torch.Tensor]()
        args = DrafterArgs(vocab_size=info.vocab_size, index=0, max_context=info.max_context, target=target)
        drafter = LudDrafter(args, model=str(tmp_path / "tuned" / "head"))
        for place in places:
            text = list(TEXTS[0][: place + 1])
            cache, (state,) = target.open(), drafter.begin([Context("a", text, 4)])
            target.extend([cache], [text[:-1]])
            added = drafter.added_rows([state], [EMPTY_TREE], [6])
            drafter.read_rows([state], [target.score_added([cache], text[-1:], [EMPTY_TREE], added)[1].of(0)])
            drafter.observe([state], [EMPTY_TREE], [Verdict((), (), 1)], None)
            found.append(state.guesses)
        return torch.stack(found)

    def said() -> torch.Tensor:
        found = trainer.states(batch, [marked(batch, *places)] * 3)
        return torch.stack([trainer.logits(states) for _, states in found], 1)

    expected = guessed(tuned.runner)
    assert torch.allclose(said(), expected, atol=1e-3)
    assert torch.allclose(guessed(adapted.runner), expected, atol=1e-3)
    assert not torch.allclose(guessed(llm.runner), expected, atol=1e-1)
    monkeypatch.setattr(MaskedRows, "visible", sees_one_more)
    assert not torch.allclose(said(), expected, atol=1e-1)


def test_the_loss_is_that_of_all_tokens_and_of_the_rest_of_each_unit(llm: LLM) -> None:
    """By brute force, in passes of their own; another threshold has another loss."""
    trainer, _, batch = trainer_of(llm, anchors=99)
    runner: Any = llm.runner
    placeholders = runner.embed([7] * 3)
    losses = []
    with torch.inference_mode():
        for text in TEXTS:
            said = runner.extend([runner.open()], [text], all_logits=True).logits.log_softmax(-1)
            losses += [-float(said[i - 1, text[i]]) for i in range(4, len(text))]
            for begin, length in runs(llm, text, 4, 4, SURE):
                fed = torch.cat((runner.embed(text[:begin]), placeholders))
                rows = runner.extend_embeddings([runner.open()], [fed], all_logits=True).logits.log_softmax(-1)[begin:]
                losses += [-float(rows[i - 1, text[begin + i]]) for i in range(1, length)]
    assert len(losses) > sum(len(text) - 4 for text in TEXTS) + 4
    found = trainer.loss(batch, torch.Generator().manual_seed(0))
    assert found.item() == pytest.approx(sum(losses) / len(losses), rel=1e-4)
    other, _, _ = trainer_of(llm, anchors=99, unit_threshold=0.2)
    assert abs(other.loss(batch, torch.Generator()).item() - found.item()) > 1e-2
    found.backward()  # type: ignore[no-untyped-call]
    assert {name.split(".")[0] for name, _ in trainer.named_parameters()} == {"a", "b"}
    assert all(bool(b.grad.any()) for b in trainer.b if b.grad is not None)
    assert all(b.grad is not None for b in trainer.b)


def test_as_many_units_have_placeholders_as_were_asked_for(llm: LLM) -> None:
    """Others in each step, with all of their tokens."""
    trainer, _, batch = trainer_of(llm, anchors=2)
    units = trainer.units(batch)
    chosen = [trainer.chosen(units, torch.Generator().manual_seed(seed)) for seed in range(6)]
    for first, *later in chosen:
        assert int(first.sum()) == 2
        assert all(bool((first | ~one).all()) for one in later)
    assert len({tuple(first.flatten().tolist()) for first, *_ in chosen}) > 2


@torch.no_grad()
def test_a_draft_is_right_where_the_model_still_says_so(llm: LLM) -> None:
    """By depth, of the text's own tokens."""
    trainer, _, batch = trainer_of(llm, changed=True)
    kept = [learned(batch, depth) for depth in (1, 2, 3)]
    rows = trainer.rows_of(batch, 0, kept)
    said = trainer.logits(trainer.ran(batch, 0, rows))[: rows.tokens].argmax(-1)
    right = 0
    for depth, ((at, columns), (_, states)) in enumerate(
        zip(trainer.predict(batch), trainer.states(batch, kept), strict=True)
    ):
        drafted = trainer.logits(states).argmax(-1)
        same = drafted == said[at + depth + 1]
        assert torch.equal(at, batch.learned(depth + 2)[0])
        assert torch.equal(columns, torch.where(same, drafted, -2))
        right += int(same.sum())
    assert 0 < right < sum(int(one.sum()) for one in kept)


def test_a_placeholder_is_of_the_models_vocabulary(llm: LLM) -> None:
    trainer, *_ = trainer_of(llm, placeholder_token_id=None)
    assert trainer.placeholder == 319
    info = dataclasses.replace(llm.runner.info)
    with pytest.raises(ConfigError, match=r"placeholder_token_id must be an integer in 0\.\.319, got 320"):
        LudTrainer.check(info, training_config("lud", data=(Path("x"),), placeholder_token_id=320))
