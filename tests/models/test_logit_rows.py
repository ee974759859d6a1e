"""Logits that stay in one buffer until somebody looks: they are those of their own pass, however long they are kept."""

from __future__ import annotations

import gc
from dataclasses import FrozenInstanceError, replace

import pytest
import torch
from tiny_llama import runner_of, tiny_llama, tokens

from paceline.models.kernels.logit_rows import LogitRows
from paceline.models.native import NativeRunner
from paceline.tree.token_tree import EMPTY_TREE, TokenTree

IDS = tokens(60)
CHAIN = TokenTree.chain([1, 2, 3])


def compiled_runner(vocab: int = 72) -> NativeRunner:
    shape = {"hidden_size": 64, "head_dim": 32, "intermediate_size": 96, "vocab_size": vocab}
    runner = runner_of(tiny_llama(**shape), cache_slots=64)
    assert runner.quick is not None
    return runner


@pytest.mark.parametrize("vocab", [72, 96])  # 96 fills whole lanes, so that the buffer itself can be given away
def test_scores_that_are_kept_hold_the_logits_of_their_own_pass(vocab: int) -> None:
    runner = compiled_runner(vocab)
    cache = runner.open()
    runner.extend([cache], [IDS[:20]])
    steps = [(5, CHAIN), (6, EMPTY_TREE), (7, CHAIN), (8, EMPTY_TREE), (9, EMPTY_TREE)]
    expected = [runner._score([cache], [root], [tree], (), None).logits for root, tree in steps]
    kept = [runner.score([cache], [root], [tree]) for root, tree in steps]
    for scores, logits in zip(kept, expected, strict=True):
        assert torch.equal(scores.logits, logits)
        assert scores.logits is scores.logits
        assert scores.best == logits.argmax(-1).tolist()
    assert not torch.equal(expected[0], expected[2])


def test_logits_that_were_taken_outlive_their_scores() -> None:
    runner = compiled_runner()
    cache = runner.open()
    runner.extend([cache], [IDS[:20]])
    logits = runner.score([cache], [5], [CHAIN]).logits
    before = logits.clone()
    gc.collect()
    runner.score([cache], [6], [CHAIN])
    assert torch.equal(logits, before)


def test_a_copy_with_other_logits_holds_those() -> None:
    runner = compiled_runner()
    cache = runner.open()
    runner.extend([cache], [IDS[:20]])
    scores = runner.score([cache], [5], [CHAIN])
    spoilt = replace(scores, logits=torch.zeros_like(scores.logits), best=None)
    assert not spoilt.logits.any()
    assert scores.logits.any()
    with pytest.raises(FrozenInstanceError):
        scores.logits = spoilt.logits  # type: ignore[misc]


def test_a_buffer_is_used_again_only_where_nobody_looks() -> None:
    rows = LogitRows(16, torch.float32)
    first = rows.aim(3)
    rows.scores((0, 3), [1, 2, 3])
    assert rows.aim(2) == first
    kept = rows.scores((0, 2), [1, 2])
    assert kept.logits.shape == (2, 16)
    assert kept.logits.data_ptr() != first
    assert rows.aim(3) == first
    whole = rows.scores((0, 3), [1, 2, 3])
    assert whole.logits.data_ptr() == first
    assert rows.aim(3) != first


def test_without_settling_the_next_pass_would_overwrite_what_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control of the first test."""
    runner = compiled_runner()
    cache = runner.open()
    runner.extend([cache], [IDS[:20]])
    expected = runner._score([cache], [5], [CHAIN], (), None).logits
    monkeypatch.setattr("paceline.models.kernels.logit_rows._LateScores.settle", lambda scores: None)
    kept = runner.score([cache], [5], [CHAIN])
    runner.score([cache], [7], [CHAIN])
    monkeypatch.undo()
    assert not torch.equal(kept.logits, expected)


def test_what_a_pass_does_not_see_need_not_be_a_number() -> None:
    runner = compiled_runner()
    cache = runner.open()
    runner.extend([cache], [IDS[:20]])
    assert not runner.arena.masked
    expected = runner.score([cache], [5], [CHAIN]).logits
    seen = torch.zeros(runner.arena.slots, dtype=torch.bool)
    seen[torch.from_numpy(cache.slot_index(0, 20))] = True
    with torch.inference_mode():
        runner.arena.kv[:, ~seen] = float("nan")
    assert torch.equal(runner.score([cache], [5], [CHAIN]).logits, expected)
    with torch.inference_mode():
        runner.arena.kv[:, cache.base + 3] = float("nan")
    assert runner.score([cache], [5], [CHAIN]).logits.isnan().any()
