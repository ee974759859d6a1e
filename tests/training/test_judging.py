"""Figures are of texts that nothing else has seen, say of how many, and have an interval from six on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_checkpoint
import torch
from torch import Tensor

from paceline import LLM, SamplingParams
from paceline.errors import ConfigError
from paceline.training import Document, Fitting, figures, interval_words, trainer, training_config
from paceline.training.answers import TrainingText
from paceline.training.batches import Batch
from paceline.training.judging import Evaluated, counted
from paceline.training.loop import fit
from paceline.training.splits import TextSplit, split

QUICK = Fitting(steps=12, batch_rows=2, row_tokens=32, eval_steps=4, bf16=False, warmup_steps=1, learning_rate=2e-2)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return LLM(str(tiny_checkpoint.write(tmp_path_factory.mktemp("target"))), speculative_config=None, dtype="float32")


def answers(count: int, hot: int = 0) -> list[TrainingText]:
    return [TrainingText(f"{(i * 37) % 101:02}", [1, 2, i], [3, 4, i], 0.8 if i < hot else 0.0) for i in range(count)]


@pytest.mark.parametrize(
    ("count", "share", "apart"),
    [(3, 0.05, 1), (16, 0.05, 2), (48, 0.05, 6), (100, 0.05, 6), (100, 0.2, 20), (4, 0.4, 1)],
)
def test_every_text_is_on_one_of_three_sides(count: int, share: float, apart: int) -> None:
    found = split(answers(count), share, 16)
    sides = [{one.tokens for one in side} for side in (found.training, found.validation, found.test)]
    assert [len(side) for side in sides] == [count - 2 * apart, apart, apart]
    assert len(set.union(*sides)) == count
    again = split(answers(count)[::-1], share, 16)
    assert (again.validation, again.test) == (found.validation, found.test)
    assert {name: size.texts for name, size in found.sizes().items()} == {
        "training": count - 2 * apart, "validation": apart, "test": apart,
    }  # fmt: skip
    assert found.sizes()["test"].tokens == 3 * apart


def test_only_greedy_texts_are_kept_apart() -> None:
    hot = {one.prompt[2] for one in answers(40, hot=30) if one.temperature}
    found = split(answers(40, hot=30), 0.2, 16)
    assert len(found.test) == len(found.validation) == 5
    assert not hot & {one.tokens[2] for one in (*found.test, *found.validation)}


def test_too_few_texts_are_refused_and_few_are_said(caplog: pytest.LogCaptureFixture) -> None:
    for few, why in (
        (answers(2), "3 texts or more .*, got 2"),
        (answers(9, hot=8), "two answers or more greedy.* got 1"),
    ):
        with pytest.raises(ConfigError, match=why):
            split(few, 0.05, 16)
    split(answers(47), 0.05, 16)
    assert "of 47 texts 37 are learned, 5 choose the best state and 5 test it" in caplog.text
    assert "6 prompts or more are needed for an interval; give 48 texts or more" in caplog.text
    caplog.clear()
    split(answers(48), 0.05, 16)
    assert not caplog.text


def turning(first: int, count: int) -> list[Document]:
    """Texts that repeat two tokens."""
    return [Document((first, first + 1) * (9 + i), 4) for i in range(count)]


def fitted(llm: LLM, folder: Path, texts: TextSplit) -> tuple[list[Tensor], Any]:
    """Weights and curve of an adapter."""
    config = training_config("lora", data=(Path("x"),), texts=True, fitting=QUICK)
    torch.manual_seed(0)
    head, view = trainer("lora").init(llm, config, torch.arange(300))
    folder.mkdir()
    curve = fit(head, view, texts, QUICK, folder)
    return [one.detach().clone() for one in head.parameters()], curve


def test_neither_weights_nor_the_best_state_follow_from_test_texts(llm: LLM, tmp_path: Path) -> None:
    texts = TextSplit(turning(20, 6), turning(20, 3), turning(90, 6))
    weights, curve = fitted(llm, tmp_path / "one", texts)
    same, other = fitted(llm, tmp_path / "two", replace(texts, test=turning(20, 2)))
    assert all(torch.equal(a, b) for a, b in zip(weights, same, strict=True))
    assert other.judged == curve.judged
    assert [(one.texts, one.tokens) for one in curve.tests] == [(6, 6 * 14 + 30)] * 2
    assert curve.best.acceptance == other.tests[-1].acceptance == [1.0]
    assert curve.tests[-1].acceptance[0] < 0.5
    greedy = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    (said,) = llm.generate([{"prompt_token_ids": [90, 91, 90, 91]}], greedy)
    own = Document((90, 91, 90, 91, *said.outputs[0].token_ids), 4)  # what training makes it forget
    changed, chosen = fitted(llm, tmp_path / "three", replace(texts, validation=[own]))
    assert chosen.best.step < curve.best.step
    assert not all(torch.equal(a, b) for a, b in zip(weights, changed, strict=True))


class Half:
    """Drafts every token right but those of texts that begin with 9, of which it drafts the first right alone."""

    depths = 2
    rows = torch.zeros(1)

    def predict(self, batch: Batch) -> Iterator[tuple[Tensor, Tensor]]:
        for depth in range(self.depths):
            at, columns = batch.learned(depth + 2)
            bad = batch.tokens.flatten()[at - batch.positions.flatten()[at]] == 9
            yield at, torch.where(bad & (depth > 0), columns + 1, columns)


def batch_of(rows: list[list[list[int]]], length: int) -> Batch:
    shape = (len(rows), length)
    tokens, documents, positions = torch.zeros(shape, dtype=torch.int64), torch.full(shape, -1), torch.zeros(shape)
    wanted = torch.zeros(shape, dtype=torch.bool)
    for i, row in enumerate(rows):
        start = 0
        for number, text in enumerate(row):
            at = slice(start, start + len(text))
            tokens[i, at], documents[i, at] = torch.tensor(text), number
            positions[i, at], wanted[i, start + 2 : at.stop] = torch.arange(len(text)).float(), True
            start = at.stop
    nothing = torch.zeros(*shape, 0)
    columns = torch.where(wanted, tokens, -1)
    return Batch(tokens, documents, positions.long(), columns, wanted, nothing, nothing, nothing)


def test_right_drafts_are_counted_for_each_text() -> None:
    """A text of n tokens has n - 2 first drafts, behind its prompt of two, and n - 3 second ones."""
    found = counted(Half(), batch_of([[[1, 2, 3, 4, 5], [9, 2, 3, 4]], [[9, 1, 1], [7] * 8]], 12))  # type: ignore[arg-type]
    assert found.tolist() == [[[3, 2, 1, 6], [2, 0, 0, 5]], [[3, 2, 1, 6], [2, 1, 0, 5]]]
    tested = Evaluated.of(found, 12)
    assert (tested.acceptance, tested.drafts) == ([1.0, 7 / 8], [12, 8])
    assert tested.length == 1 + 1 + 7 / 8


def test_an_interval_is_of_six_texts_or_more() -> None:
    right = torch.tensor([[[4.0, 1.0, 2.0, 3.0, 0.0, 2.0]], [[4.0] * 6]])
    few, enough, equal = (Evaluated.of(one, 24) for one in (right[..., :5], right, torch.full((2, 1, 6), 4.0)))
    assert few.interval is None
    assert enough.interval is not None
    low, high = enough.interval
    assert 1.1 < low < enough.length == 1.5 < high < 1.9
    assert equal.interval == [2.0, 2.0]
    why = "6 prompts or more are needed for an interval"
    assert interval_words(figures(few, drafts=True)) == f" ({why})"
    assert interval_words(figures(enough, drafts=True)) == f" (95 % interval {low:.2f} to {high:.2f})"
    of_tokens = figures(enough, drafts=False)
    assert interval_words(of_tokens, share=True) == f" (95 % interval {low - 1:.1%} to {high - 1:.1%})"
    assert of_tokens["right"] == 0.5
    assert not {"tokens_per_pass", "acceptance"} & of_tokens.keys()
