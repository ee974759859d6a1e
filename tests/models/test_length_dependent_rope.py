"""Rotary kinds whose angles depend on the length: every way of feeding a text ends as one pass over it would."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from models import checkpoints
from models.checkpoints import fresh, reference

from paceline.errors import CapabilityError
from paceline.models import load_runner, memory_of
from paceline.models.runners import NativeRunner
from paceline.models.runners.longrope import LongRopeRunner
from paceline.tree import EMPTY_TREE, TokenTree

NAME, LIMIT = "llama-dynamic", 32
TEXT = torch.randint(3, 128, (60,), generator=torch.Generator().manual_seed(2)).tolist()
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.write(NAME, "new", tmp_path_factory.mktemp("dynamic"))


@pytest.fixture(scope="module")
def runner(folder: Path) -> NativeRunner:
    loaded: Any = load_runner(folder)
    assert type(loaded) is NativeRunner
    assert memory_of(loaded) is None
    assert loaded.info.rope_border == LIMIT
    return loaded


def oracle(prompt: list[int], steps: list[int]) -> torch.Tensor:
    """transformers' logits behind a prompt in one pass, and behind each of `steps`, fed one by one."""
    model, rows = fresh(NAME), []
    with torch.no_grad():
        out = model(torch.tensor([prompt]), use_cache=True)
        rows.append(out.logits[0, -1])
        key = next(key for key in ("cache", "past_key_values") if key in out)
        for token in steps:
            out = model(torch.tensor([[token]]), use_cache=True, **{key: out[key]})
            rows.append(out.logits[0, -1])
    return torch.stack(rows)


def fed(runner: Any, prompt: list[int], chunk: int, announced: int | None = None) -> Any:
    """All of a prompt but its last token, in chunks."""
    sequence = runner.open(len(prompt) if announced is None else announced)
    for start in range(0, len(prompt) - 1, chunk):
        runner.extend([sequence], [prompt[start : min(start + chunk, len(prompt) - 1)]])
    return sequence


def decode(runner: Any, sequence: Any, tokens: list[int]) -> torch.Tensor:
    rows = []
    for token in tokens:
        rows.append(runner.score([sequence], [token], [EMPTY_TREE]).logits)
        runner.commit([sequence], [()])
    return torch.cat(rows)


@pytest.mark.parametrize("chunk", [1, 10, 32, 33, 50])
@pytest.mark.parametrize("length", [30, 33, 45])
def test_a_prompt_is_one_pass_whatever_its_chunks(runner: NativeRunner, chunk: int, length: int) -> None:
    sequence = fed(runner, TEXT[:length], chunk)
    logits = decode(runner, sequence, TEXT[length - 1 : length + 5])
    assert float((logits - oracle(TEXT[:length], TEXT[length : length + 5])).abs().max()) < TOLERANCE


@pytest.mark.parametrize("chunk", [7, 50])
def test_logits_of_a_prompt_are_those_of_one_pass(runner: NativeRunner, chunk: int) -> None:
    sequence, rows = runner.open(45), []
    for start in range(0, 45, chunk):
        part = TEXT[start : min(start + chunk, 45)]
        rows.append(runner.extend([sequence], [part], all_logits=True).logits)
    with torch.no_grad():
        expected = fresh(NAME)(torch.tensor([TEXT[:45]])).logits[0]
    assert float((torch.cat(rows) - expected).abs().max()) < TOLERANCE


def test_trees_forks_and_later_chunks_count_token_by_token(runner: NativeRunner) -> None:
    sequence = fed(runner, TEXT[:41], 13)
    tree = TokenTree.build([TEXT[41], 7, TEXT[42], TEXT[43]], [-1, -1, 0, 2])
    logits = runner.score([sequence], [TEXT[40]], [tree]).logits
    assert float((logits[[0, 1, 3, 4]] - oracle(TEXT[:41], TEXT[41:44])).abs().max()) < TOLERANCE
    runner.commit([sequence], [[0, 2, 3]])
    runner.extend([sequence], [TEXT[44:48]])
    other = runner.fork(sequence)
    again = runner.open(41)  # as a sequence whose cache was given up is filled again
    runner.extend([again], [TEXT[:48]])
    for one in (sequence, other, again):
        logits = runner.score([one], [TEXT[48]], [EMPTY_TREE]).logits
        assert float((logits - oracle(TEXT[:41], TEXT[41:49])[-1]).abs().max()) < TOLERANCE


@pytest.mark.parametrize("announced", [0, 44])
def test_the_check_catches_a_prompt_of_another_length(runner: NativeRunner, announced: int) -> None:
    sequence = fed(runner, TEXT[:45], 44, announced)
    logits = runner.score([sequence], [TEXT[44]], [EMPTY_TREE]).logits
    assert float((logits - oracle(TEXT[:45], [])).abs().max()) > 10 * TOLERANCE


LONGROPE, ORIGINAL = "phi3-longrope", 32
LONG_TEXT = torch.randint(3, 128, (60,), generator=torch.Generator().manual_seed(2)).tolist()
TREE = TokenTree.build([70, 71, 72, 73, 74, 75], [-1, 0, 1, 0, 3, 2])
PATHS = ([0, 1, 2, 5], [0, 3, 4])
LONG_TOLERANCE = 1e-4

Logits = Callable[[list[int]], torch.Tensor]


@pytest.fixture(scope="module")
def longrope(tmp_path_factory: pytest.TempPathFactory) -> LongRopeRunner:
    loaded: Any = load_runner(checkpoints.write(LONGROPE, "new", tmp_path_factory.mktemp("longrope")))
    assert isinstance(loaded, LongRopeRunner)
    assert loaded.original == ORIGINAL
    assert memory_of(loaded) is None
    return loaded


@cache
def last(tokens: tuple[int, ...]) -> torch.Tensor:
    """(v,) logits after a text, in one pass of transformers."""
    return reference(LONGROPE, list(tokens))[-1]


def close(logits: torch.Tensor, tokens: list[int]) -> bool:
    return bool((logits - last(tuple(tokens))).abs().max() < LONG_TOLERANCE)


def fed_in_chunks(longrope: Any, tokens: list[int], chunk: int = 1000, announced: int = 0) -> Any:
    sequence = longrope.open(announced)
    for start in range(0, len(tokens), chunk):
        longrope.extend([sequence], [tokens[start : start + chunk]])
    return sequence


def check_step(longrope: Any, sequence: Any, text: list[int], root: int, tree: TokenTree = TREE) -> None:
    """Every row of a scored tree equals a pass over its own text."""
    logits = longrope.score([sequence], [root], [tree]).logits
    for node in range(-1, len(tree)):
        path = [*text, root, *tree.tokens[list(tree.path(node))].tolist()]
        assert close(logits[node + 1], path), f"node {node} at length {len(path)}"


@pytest.mark.parametrize("announced", [True, False])
@pytest.mark.parametrize("chunk", [1, 7, 31, 32, 33, 50])
@pytest.mark.parametrize("length", [31, 32, 33, 50])
def test_longrope_prompts_in_chunks(longrope: LongRopeRunner, chunk: int, length: int, announced: bool) -> None:
    sequence = fed_in_chunks(longrope, LONG_TEXT[:length], chunk, length + 1 if announced else 0)
    check_step(longrope, sequence, LONG_TEXT[:length], 9)


def test_logits_of_an_announced_prompt_are_those_of_one_pass(longrope: LongRopeRunner) -> None:
    expected = reference(LONGROPE, LONG_TEXT[:40])
    for announced, close_all in ((40, True), (0, False)):
        sequence = longrope.open(announced)
        parts = [LONG_TEXT[start : start + 8] for start in range(0, 40, 8)]
        rows = torch.cat([longrope.extend([sequence], [part], all_logits=True).logits for part in parts])
        assert bool((rows - expected).abs().max() < LONG_TOLERANCE) is close_all


@pytest.mark.parametrize("length", range(26, 36))
def test_trees_over_the_border(longrope: LongRopeRunner, length: int) -> None:
    for path in PATHS:
        sequence = fed_in_chunks(longrope, LONG_TEXT[:length])
        check_step(longrope, sequence, LONG_TEXT[:length], 9)
        longrope.commit([sequence], [path])
        text = [*LONG_TEXT[:length], 9, *TREE.tokens[path].tolist()]
        assert sequence.length == len(text)
        check_step(longrope, sequence, text, 8)
        longrope.commit([sequence], [path[:1]])
        check_step(longrope, sequence, [*text, 8, 70], 7)


def test_back_and_forth(longrope: LongRopeRunner) -> None:
    sequence = fed_in_chunks(longrope, LONG_TEXT[:40])
    for length in (38, 30, 33, 20, 20):
        if length <= sequence.length:
            longrope.truncate(sequence, length)
        else:
            longrope.extend([sequence], [LONG_TEXT[sequence.length : length]])
        check_step(longrope, sequence, LONG_TEXT[:length], 9)


def test_forks_part(longrope: LongRopeRunner) -> None:
    sequence = fed_in_chunks(longrope, LONG_TEXT[:29])
    check_step(longrope, sequence, LONG_TEXT[:29], 9)
    other = longrope.fork(sequence)
    longrope.extend([other], [LONG_TEXT[29:36]])
    check_step(longrope, other, LONG_TEXT[:36], 9)
    check_step(longrope, sequence, LONG_TEXT[:29], 9)
    longrope.release(other)
    check_step(longrope, sequence, LONG_TEXT[:29], 9)


def test_batches_and_computed_inputs(longrope: LongRopeRunner) -> None:
    sequences = [fed_in_chunks(longrope, LONG_TEXT[:length]) for length in (10, 30, 40)]
    small, whole = TokenTree.build([70, 71], [-1, 0]), TREE
    longrope.score(sequences, [9] * 3, [small] * 3)
    scores = longrope.score(sequences, [9] * 3, [whole] * 3, computed=[3] * 3, taps=[1])
    for i, length in enumerate((10, 30, 40)):
        rows = scores.of(i)
        for node in range(2, len(whole)):
            path = [*LONG_TEXT[:length], 9, *whole.tokens[list(whole.path(node))].tolist()]
            assert close(rows[node - 2], path)
    assert scores.taps[1].shape == (3 * (len(whole) - 2), 64)


def test_all_blocks_come_back(longrope: LongRopeRunner) -> None:
    held = len(longrope.arena.pool.counts) - longrope.arena.pool.free
    sequence = fed_in_chunks(longrope, LONG_TEXT[:29])
    check_step(longrope, sequence, LONG_TEXT[:29], 9)
    longrope.commit([sequence], [[0, 1, 2, 5]])
    check_step(longrope, sequence, [*LONG_TEXT[:29], 9, 70, 71, 72, 75], 8)
    forked = longrope.fork(sequence)
    longrope.release(sequence)
    longrope.release(forked)
    assert len(longrope.arena.pool.counts) - longrope.arena.pool.free == held


def test_embeddings_cannot_cross(longrope: LongRopeRunner) -> None:
    sequence = longrope.open()
    longrope.extend_embeddings([sequence], [longrope.embed(LONG_TEXT[:30])])
    with pytest.raises(CapabilityError, match="cannot cross 32 tokens"):
        longrope.extend([sequence], [LONG_TEXT[30:40]])
    longrope.truncate(sequence, 5)
    longrope.extend([sequence], [LONG_TEXT[5:10]])
    longrope.truncate(sequence, 5)
    with pytest.raises(CapabilityError, match="cannot cross 32 tokens"):
        longrope.extend([sequence], [LONG_TEXT[5:40]])
    whole = longrope.extend_embeddings([longrope.open()], [longrope.embed(LONG_TEXT[:40])])
    assert close(whole.logits[0], LONG_TEXT[:40])


def test_the_check_catches_a_cache_of_mixed_angles(longrope: LongRopeRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    sequence = fed_in_chunks(longrope, LONG_TEXT[:20])
    monkeypatch.setattr(LongRopeRunner, "enter", lambda *args: None)
    monkeypatch.setattr(LongRopeRunner, "with_long_rows", lambda self, scores, *args: scores)
    longrope.extend([sequence], [LONG_TEXT[20:40]])
    logits = longrope.score([sequence], [9], [EMPTY_TREE]).logits
    assert not close(logits[0], [*LONG_TEXT[:40], 9])
