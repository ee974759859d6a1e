"""Best tokens of compiled passes are those that the logits show, and scores that are kept hold the logits of their own
pass.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny_llama import runner_of, tiny_llama, tokens

from paceline.errors import ConfigError
from paceline.models.cpu import ROWS, CompiledDecoder
from paceline.tree import EMPTY_TREE, Scores, TokenTree
from paceline.verifiers import GreedyVerifier

IDS = tokens(150)
TREE = TokenTree.build([5, 6, 7, 8, 9, 5], [-1, -1, 0, 1, 2, 3])
DTYPES = [torch.float32, torch.bfloat16]
TREES = [EMPTY_TREE, TokenTree.chain([1, 2, 3]), TREE, TokenTree.chain([9] * 8)]
ROOTS = [4, 5, 6, 7]


def compiled_runner(dtype=torch.float32):
    shape = {"hidden_size": 64, "head_dim": 32, "intermediate_size": 96, "vocab_size": 72}
    runner = runner_of(tiny_llama(**shape).to(dtype), cache_slots=64)
    assert isinstance(runner.passes, CompiledDecoder)
    return runner


def shown(scores: Scores) -> list[int]:
    return scores.logits.float().numpy().argmax(-1).tolist()


def filled(runner):
    caches = [runner.open() for _ in TREES]
    for i, cache in enumerate(caches):
        runner.extend([cache], [IDS[: 20 + 7 * i]])
    return caches


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("threads", [1, 2])
def test_best_tokens_are_those_of_the_logits(dtype, threads) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        runner = compiled_runner(dtype)
        scores = runner.score(filled(runner), ROOTS, TREES)
    finally:
        torch.set_num_threads(before)
    assert scores.rows == (0, 1, 5, 12, 21)
    assert scores.best == shown(scores)


def test_of_more_rows_than_a_pass_has_all_best_tokens_are_told() -> None:
    runner = compiled_runner()
    cache = runner.open()
    runner.extend([cache], [IDS[:20]])
    scores = runner.score([cache], [1], [TokenTree.chain([1] * ROWS)])
    assert scores.best == shown(scores)
    runner.release(cache)
    with pytest.raises(ConfigError, match="released"):
        runner.score([cache], [1], [EMPTY_TREE])


def test_scores_outlive_later_passes_and_a_growing_cache() -> None:
    runner = compiled_runner()
    caches = filled(runner)
    first = runner.score(caches, ROOTS, TREES)
    kept = first.logits.clone()
    for cache in [runner.open() for _ in range(12)]:  # more than the 64 slots that there were
        runner.extend([cache], [IDS[:40]])
        assert torch.equal(runner.score(caches, ROOTS, TREES).logits, kept)
    assert runner.arena.version > 0
    other = runner.score(caches, [root + 1 for root in ROOTS], TREES)
    assert torch.equal(first.logits, kept)
    assert not torch.equal(other.logits, kept)


def test_what_a_pass_does_not_see_need_not_be_a_number() -> None:
    runner = compiled_runner()
    cache = runner.open()
    runner.extend([cache], [IDS[:20]])
    assert not runner.arena.masked
    expected = runner.score([cache], [5], [TREE]).logits
    seen = torch.zeros(runner.arena.slots, dtype=torch.bool)
    seen[torch.from_numpy(cache.slot_index(0, 20))] = True
    with torch.inference_mode():
        runner.arena.kv[:, ~seen] = float("nan")
    assert torch.equal(runner.score([cache], [5], [TREE]).logits, expected)
    with torch.inference_mode():
        runner.arena.kv[:, cache.base + 3] = float("nan")
    assert runner.score([cache], [5], [TREE]).logits.isnan().any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_logits_give_the_lowest_id(dtype) -> None:
    runner = compiled_runner(dtype)
    runner.passes.head(torch.zeros(3, runner.info.hidden_size))
    assert runner.passes.best == [0, 0, 0]


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_that_holds_no_numbers_is_left_to_its_reader(dtype, value) -> None:
    runner = compiled_runner(dtype)
    hidden = torch.randn(3, runner.info.hidden_size, generator=torch.Generator().manual_seed(0))
    hidden[1, 5] = value
    logits = runner.passes.head(hidden, norm=False)
    best = runner.passes.best
    assert best[1] == -1
    assert [best[0], best[2]] == logits[[0, 2]].float().argmax(-1).tolist()
    scores = Scores(logits, (0, 1, 2, 3), best=best)
    verdicts = GreedyVerifier().verify_scores([EMPTY_TREE] * 3, scores)
    assert [type(one).__name__ for one in verdicts] == ["Verdict", "NumericsError", "Verdict"]


def test_wrong_best_tokens_would_show() -> None:
    """Negative control: the verifier believes what the runner says, so the equalities above are needed."""
    runner = compiled_runner()
    scores = runner.score(filled(runner), ROOTS, TREES)
    wrong = Scores(scores.logits, scores.rows, best=[(token + 1) % 72 for token in scores.best])
    assert GreedyVerifier().verify_scores(TREES, wrong) != GreedyVerifier().verify_scores(TREES, scores)
    assert GreedyVerifier().verify_scores(TREES, scores) == GreedyVerifier().verify_stacked(
        TREES, scores.logits, scores.rows
    )
