"""models/longrope.py: whatever way a text was fed, committed, forked or cut, its logits are those of one pass over the
whole.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from models import checkpoints
from models.checkpoints import reference

from paceline.errors import CapabilityError
from paceline.models import load_runner
from paceline.models.decoder import LongRopeRunner, NativeRunner
from paceline.tree import EMPTY_TREE, TokenTree

NAME, ORIGINAL = "phi3-longrope", 32
TEXT = torch.randint(3, 128, (60,), generator=torch.Generator().manual_seed(2)).tolist()
TREE = TokenTree.build([70, 71, 72, 73, 74, 75], [-1, 0, 1, 0, 3, 2])
PATHS = ([0, 1, 2, 5], [0, 3, 4])
TOLERANCE = 1e-4

Logits = Callable[[list[int]], torch.Tensor]


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> LongRopeRunner:
    loaded: Any = load_runner(checkpoints.write(NAME, "new", tmp_path_factory.mktemp("longrope")))
    assert isinstance(loaded, LongRopeRunner)
    assert loaded.original == ORIGINAL
    return loaded


@cache
def last(tokens: tuple[int, ...]) -> torch.Tensor:
    """(v,) logits after a text, in one pass of transformers."""
    return reference(NAME, list(tokens))[-1]


def close(logits: torch.Tensor, tokens: list[int]) -> bool:
    return bool((logits - last(tuple(tokens))).abs().max() < TOLERANCE)


def fed(runner: Any, tokens: list[int], chunk: int = 1000) -> Any:
    sequence = runner.open()
    for start in range(0, len(tokens), chunk):
        runner.extend([sequence], [tokens[start : start + chunk]])
    return sequence


def check_step(runner: Any, sequence: Any, text: list[int], root: int, tree: TokenTree = TREE) -> None:
    """Every row of a scored tree equals a pass over its own text."""
    logits = runner.score([sequence], [root], [tree]).logits
    for node in range(-1, len(tree)):
        path = [*text, root, *tree.tokens[list(tree.path(node))].tolist()]
        assert close(logits[node + 1], path), f"node {node} at length {len(path)}"


@pytest.mark.parametrize("chunk", [1, 7, 31, 32, 33, 50])
@pytest.mark.parametrize("length", [31, 32, 33, 50])
def test_prompts_in_chunks(runner: LongRopeRunner, chunk: int, length: int) -> None:
    sequence = fed(runner, TEXT[:length], chunk)
    check_step(runner, sequence, TEXT[:length], 9)


@pytest.mark.parametrize("length", range(26, 36))
def test_trees_over_the_border(runner: LongRopeRunner, length: int) -> None:
    for path in PATHS:
        sequence = fed(runner, TEXT[:length])
        check_step(runner, sequence, TEXT[:length], 9)
        runner.commit([sequence], [path])
        text = [*TEXT[:length], 9, *TREE.tokens[path].tolist()]
        assert sequence.length == len(text)
        check_step(runner, sequence, text, 8)
        runner.commit([sequence], [path[:1]])
        check_step(runner, sequence, [*text, 8, 70], 7)


def test_back_and_forth(runner: LongRopeRunner) -> None:
    sequence = fed(runner, TEXT[:40])
    for length in (38, 30, 33, 20, 20):
        if length <= sequence.length:
            runner.truncate(sequence, length)
        else:
            runner.extend([sequence], [TEXT[sequence.length : length]])
        check_step(runner, sequence, TEXT[:length], 9)


def test_forks_part(runner: LongRopeRunner) -> None:
    sequence = fed(runner, TEXT[:29])
    check_step(runner, sequence, TEXT[:29], 9)
    other = runner.fork(sequence)
    runner.extend([other], [TEXT[29:36]])
    check_step(runner, other, TEXT[:36], 9)
    check_step(runner, sequence, TEXT[:29], 9)
    runner.release(other)
    check_step(runner, sequence, TEXT[:29], 9)


def test_batches_and_computed_inputs(runner: LongRopeRunner) -> None:
    sequences = [fed(runner, TEXT[:length]) for length in (10, 30, 40)]
    small, whole = TokenTree.build([70, 71], [-1, 0]), TREE
    runner.score(sequences, [9] * 3, [small] * 3)
    scores = runner.score(sequences, [9] * 3, [whole] * 3, computed=[3] * 3, taps=[1])
    for i, length in enumerate((10, 30, 40)):
        rows = scores.of(i)
        for node in range(2, len(whole)):
            path = [*TEXT[:length], 9, *whole.tokens[list(whole.path(node))].tolist()]
            assert close(rows[node - 2], path)
    assert scores.taps[1].shape == (3 * (len(whole) - 2), 64)


def test_all_blocks_come_back(runner: LongRopeRunner) -> None:
    held = len(runner.arena.pool.counts) - runner.arena.pool.free
    sequence = fed(runner, TEXT[:29])
    check_step(runner, sequence, TEXT[:29], 9)
    runner.commit([sequence], [[0, 1, 2, 5]])
    check_step(runner, sequence, [*TEXT[:29], 9, 70, 71, 72, 75], 8)
    forked = runner.fork(sequence)
    runner.release(sequence)
    runner.release(forked)
    assert len(runner.arena.pool.counts) - runner.arena.pool.free == held


def test_embeddings_cannot_cross(runner: LongRopeRunner) -> None:
    sequence = runner.open()
    runner.extend_embeddings([sequence], [runner.embed(TEXT[:30])])
    with pytest.raises(CapabilityError, match="cannot cross 32 tokens"):
        runner.extend([sequence], [TEXT[30:40]])
    runner.truncate(sequence, 5)
    runner.extend([sequence], [TEXT[5:10]])
    runner.truncate(sequence, 5)
    with pytest.raises(CapabilityError, match="cannot cross 32 tokens"):
        runner.extend([sequence], [TEXT[5:40]])
    whole = runner.extend_embeddings([runner.open()], [runner.embed(TEXT[:40])])
    assert close(whole.logits[0], TEXT[:40])


def test_the_check_catches_a_cache_of_mixed_angles(runner: LongRopeRunner) -> None:
    sequence = fed(runner, TEXT[:20])
    NativeRunner.extend(runner, [sequence], [TEXT[20:40]])
    logits = NativeRunner.score(runner, [sequence], [9], [EMPTY_TREE]).logits
    assert not close(logits[0], [*TEXT[:40], 9])
