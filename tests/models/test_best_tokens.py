"""Best tokens of compiled passes are those that the logits show, and scores that are kept hold the logits of their own
pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tiny_llama import CPU, runner_of, spec_of, tiny_llama, tokens, weights_of

from paceline.errors import ConfigError
from paceline.models import MappedRunner, RopeSpec
from paceline.models.passes import ScoringGraphs
from paceline.models.passes.compiled_decoder import CompiledDecoder
from paceline.models.passes.packing import ROWS
from paceline.models.runners import GroupedRunner, NativeRunner
from paceline.models.runners.fallback.runner import TransformersRunner
from paceline.models.runners.longrope import LongRopeRunner
from paceline.tree import EMPTY_TREE, Scores, TokenTree
from paceline.verifiers import GreedyVerifier

IDS = tokens(150)
TREE = TokenTree.build([5, 6, 7, 8, 9, 5], [-1, -1, 0, 1, 2, 3])
DTYPES = [torch.float32, torch.bfloat16]
TREES = [EMPTY_TREE, TokenTree.chain([1, 2, 3]), TREE, TokenTree.chain([9] * 8)]
ROOTS = [4, 5, 6, 7]


def compiled_runner(dtype=torch.float32, change: Callable[[dict[str, torch.Tensor]], object] = len):
    model = tiny_llama(hidden_size=64, head_dim=32, intermediate_size=96, vocab_size=72).to(dtype)
    weights = weights_of(model)
    change(weights)
    spec = spec_of(model.config)
    runner = NativeRunner(spec, weights, name="tiny", device=CPU, dtype=dtype, cache_slots=64)
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
    runner = compiled_runner(dtype, lambda weights: weights["head.weight"].zero_())
    cache = runner.open()
    assert runner.extend([cache], [IDS[:5]]).best == [0]
    assert runner.score([cache], [4], [TREE]).best == [0] * (1 + len(TREE))


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_that_holds_no_numbers_is_left_to_its_reader(dtype, value) -> None:
    runner = compiled_runner(dtype, lambda weights: weights["embed.weight"][9].fill_(value))
    caches = [runner.open() for _ in range(3)]
    runner.extend(caches, [IDS[5 * i : 5 * i + 5] for i in range(3)])
    scores = runner.score(caches, [4, 9, 5], [EMPTY_TREE] * 3)
    assert scores.best == [shown(scores)[0], -1, shown(scores)[2]]
    verdicts = GreedyVerifier().verify_scores([EMPTY_TREE] * 3, scores)
    assert [type(one).__name__ for one in verdicts] == ["Verdict", "NumericsError", "Verdict"]


BORDER = 30  # the second of the trees below crosses it
SHAPE = {"hidden_size": 64, "head_dim": 32, "intermediate_size": 96, "vocab_size": 72, "num_hidden_layers": 4}
LONG = {"short_factor": [1.0] * 16, "long_factor": [3.0] * 16, "original_max_position_embeddings": BORDER}
BY_LENGTH = {
    NativeRunner: RopeSpec(theta=1e4, dims=32, kind="dynamic", scaling={"factor": 2.0}, max_position=BORDER),
    LongRopeRunner: RopeSpec(theta=1e4, dims=32, kind="longrope", scaling=LONG, max_position=4 * BORDER),
}


def with_graphs(runner: NativeRunner) -> NativeRunner:
    runner.graphs = ScoringGraphs(runner.passes.decoder, runner.rotary, runner.arena, capture=False)
    return runner


def every_runner() -> Iterator[tuple[str, Any]]:
    """Every class of runners, in every kind of passes."""
    model = tiny_llama(**SHAPE)
    spec, more = spec_of(model.config), {"name": "tiny", "device": CPU, "dtype": torch.float32}
    yield "strict operators", runner_of(model, compiled=False, strict=True)
    yield "graphs", with_graphs(runner_of(model, compiled=False))
    yield "transformers", TransformersRunner(model, name="tiny")
    for compiled in (True, False):
        yield f"native, compiled={compiled}", runner_of(model, compiled=compiled)
        yield f"groups, compiled={compiled}", GroupedRunner(spec, weights_of(model), 2, compiled=compiled, **more)
        backwards = np.arange(72)[::-1].copy()
        yield (
            f"mapped, compiled={compiled}",
            MappedRunner(runner_of(model, compiled=compiled), backwards, None, backwards, 72),
        )
        for kind, rope in BY_LENGTH.items():
            made = kind(replace(spec, ropes={"default": rope}), weights_of(model), compiled=compiled, **more)
            yield f"{rope.kind}, compiled={compiled}", made


def test_no_runner_tells_other_best_tokens_than_its_logits_show() -> None:
    """Of trees across the border of rotary angles, of resumed passes, and of parts of a batch."""
    told = set()
    for name, runner in every_runner():
        trees = TREES if runner.capabilities.trees else [TokenTree.chain([1, 2, 3])] * len(TREES)
        caches = filled(runner)
        whole = runner.score(caches, ROOTS, trees, taps=[1])
        begun = runner.score(caches, ROOTS, [EMPTY_TREE] * len(TREES))
        resumed = runner.score(caches, ROOTS, trees, computed=[1 if len(tree) else 0 for tree in trees])
        for scores in (whole, begun, resumed, whole.pick([1, 3])):
            assert scores.best in (None, shown(scores)), name
        told |= {name} if whole.best is not None else set()
    assert told == {f"{kind}, compiled=True" for kind in ("native", "groups", "dynamic")}


def test_wrong_best_tokens_would_show() -> None:
    """Negative control: the verifier believes what the runner says, so the equalities above are needed."""
    runner = compiled_runner()
    scores = runner.score(filled(runner), ROOTS, TREES)
    wrong = Scores(scores.logits, scores.rows, best=[(token + 1) % 72 for token in scores.best])
    assert GreedyVerifier().verify_scores(TREES, wrong) != GreedyVerifier().verify_scores(TREES, scores)
    assert GreedyVerifier().verify_scores(TREES, scores) == GreedyVerifier().verify_stacked(
        TREES, scores.logits, scores.rows
    )
