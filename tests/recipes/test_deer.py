"""DEER's two stages: where is cut, what is masked, how slots are weighed, and both stages for a few steps."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from paceline import training
from recipes.bundled_diffusion import deer, model
from tests.recipes.test_denoisers import corpus, net_of

MASK = 19


def batch_of(*rows: tuple[int, int]) -> Any:
    """Random lessons of 6 prompt and 5 answer tokens, each with its cut and its slots."""
    rng = np.random.default_rng(0)
    lessons = [deer.Lesson(rng.integers(4, MASK, 6).tolist(), rng.integers(4, MASK, 5).tolist()) for _ in rows]
    return deer.batch_of([deer.continuation(one, *row) for one, row in zip(lessons, rows, strict=True)])


class Watched:
    """A net that keeps what it was given; logits of its choice."""

    def __init__(self, likely: float = 0.0) -> None:
        self.spec, self.likely = SimpleNamespace(mask_token_id=MASK), likely
        self.seen: list[torch.Tensor] = []

    def __call__(
        self, ids: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor, rows: torch.Tensor
    ) -> torch.Tensor:
        self.seen.append(ids)
        logits = torch.zeros(int(rows.sum()), MASK + 1)
        logits[:, 3] = self.likely  # the end token
        return logits


def test_a_cut_puts_the_separator_before_what_follows() -> None:
    lesson = deer.Lesson([10, 11], [12, 13, 14, 15])
    batch = deer.batch_of([deer.continuation(lesson, cut, slots) for cut, slots in ((1, 2), (3, 4), (0, 1))])
    sep, end = deer.SEPARATOR, model.EOS
    rows = [row[: int(length)].tolist() for row, length in zip(batch.ids, batch.length, strict=True)]
    assert rows == [[10, 11, 12, sep, 13, 14], [10, 11, 12, 13, 14, sep, 15, end, end, end], [10, 11, sep, 12]]
    assert batch.start.tolist() == [4, 6, 3]


def test_weights_fall_from_the_text_on() -> None:
    weights = deer.suffix_weights(batch_of((2, 4), (0, 2), (4, 1)), 1.5)
    assert weights[0, 9:13].tolist() == pytest.approx([1.5**3, 1.5**2, 1.5, 1.0])
    assert weights[1, 7:9].tolist() == pytest.approx([1.5, 1.0])
    assert weights[2, 11].item() == 1.0
    assert int((weights > 0).sum()) == 7


@pytest.mark.parametrize("stage", ["one", "two"])
def test_the_text_and_the_separator_are_never_masked(stage: str) -> None:
    batch, net = batch_of((2, 4), (0, 6), (4, 1)), Watched()
    if stage == "one":
        deer.continuation_loss(net, batch, torch.Generator().manual_seed(0))
    else:
        deer.refinement_loss(net, batch)
    masked = net.seen[0] == MASK
    assert not (masked & ~batch.answer).any()
    assert masked.any(1).all()
    assert stage == "one" or torch.equal(masked, batch.answer)


@pytest.mark.parametrize("base", [1.0, 1.01, 2.0])
def test_the_loss_of_a_uniform_model_is_log_v(base: float) -> None:
    """In both stages, whatever is masked and however it is weighed."""
    batch = batch_of((2, 4), (0, 6), (4, 1), (1, 7))
    assert deer.refinement_loss(Watched(), batch, base).item() == pytest.approx(np.log(20), rel=1e-5)
    for seed in range(3):
        value = deer.continuation_loss(Watched(), batch, torch.Generator().manual_seed(seed))
        assert value.item() == pytest.approx(np.log(20), rel=1e-5)


def test_the_refinement_is_the_weighed_mean_worked_out_by_hand() -> None:
    """A model that sees ends everywhere pays for the answer's tokens, which stand first and weigh most."""
    batch = batch_of((2, 5))  # three tokens of the answer, two ends
    miss, hit = np.log(19 + np.e**2), np.log(19 + np.e**2) - 2
    for base in (1.0, 1.3):
        w = base ** np.arange(4, -1, -1)
        wanted = (w[:3].sum() * miss + w[3:].sum() * hit) / w.sum()
        assert deer.refinement_loss(Watched(2.0), batch, base).item() == pytest.approx(wanted, rel=1e-5)
    turned = (w[:2].sum() * hit + w[2:].sum() * miss) / w.sum()
    assert abs(turned - wanted) > 1e-2  # negative control: weights in the other order


def test_lengths_and_cuts_are_spread() -> None:
    lessons = [deer.Lesson([10] * 4, [11] * 8)]
    made = deer.batches(lessons, size=400, most=6, seed=0)
    batch = next(made)
    slots, cuts = batch.length - batch.start, batch.start - 5
    assert set(slots.tolist()) == set(range(1, 7))
    assert set(cuts.tolist()) == set(range(8))
    assert all(abs(int((slots == k).sum()) - 400 / 6) < 40 for k in range(1, 7))


def test_both_stages_learn_the_targets_answers(tmp_path: Path) -> None:
    """A few steps on one answer: what follows its beginning becomes likely; the state is one that `read_state`
    takes.
    """
    net, state = net_of("plain", width=16, vocab_size=24), tmp_path / "state.safetensors"
    training.keep(state, net, torch.optim.AdamW(net.parameters()), training.Progress())
    (tmp_path / "answers.jsonl").write_text(json.dumps({"prompt": [5, 6], "answer": [7, 8, 9, 10, 3]}) + "\n")
    given = [
        "train",
        str(state),
        "--answers",
        str(tmp_path / "answers.jsonl"),
        "--out",
        str(tmp_path / "out"),
        "--rate",
        "0.01",
    ]
    deer.main([*given, "--first-steps", "25", "--second-steps", "25", "--slots", "6", "--batch", "8"])
    after = model.read_state(tmp_path / "out" / "state.safetensors")
    batch = next(deer.batches([deer.Lesson([5, 6], [7, 8, 9, 10, 3])], size=32, most=6, seed=9))
    with torch.no_grad():
        before, now = (deer.refinement_loss(one, batch).item() for one in (net, after))
    assert now < 0.6 * before


def test_the_target_answers(tmp_path: Path) -> None:
    texts, out = corpus(tmp_path / "corpus"), tmp_path / "answers.jsonl"
    deer.main(["answers", "--corpus", str(texts), "--out", str(out), "--count", "2", "--tokens", "5"])
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(rows) == 2
    assert all(row["prompt"][-1] == deer.ASSISTANT and 1 <= len(row["answer"]) <= 6 for row in rows)
    assert len(deer.read_answers(out, 96)) == 2
    with pytest.raises(SystemExit, match=r"no answers in .* run `python -m recipes\.bundled_diffusion\.deer answers"):
        deer.read_answers(tmp_path / "none", 96)
