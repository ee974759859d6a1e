"""models/replay.py: a dynamic model's prompt counts as one pass however it is fed; decoding goes on as in
transformers.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import checkpoints
from models.checkpoints import fresh

from paceline.errors import CapabilityError
from paceline.models import load_runner
from paceline.models.decoder import NativeRunner, ReplayRunner
from paceline.tree import EMPTY_TREE, TokenTree

NAME, LIMIT = "llama-dynamic", 32
TEXT = torch.randint(3, 128, (60,), generator=torch.Generator().manual_seed(2)).tolist()
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> ReplayRunner:
    loaded: Any = load_runner(checkpoints.write(NAME, "new", tmp_path_factory.mktemp("dynamic")))
    assert type(loaded) is ReplayRunner
    return loaded


def oracle(prompt: list[int], steps: list[int]) -> torch.Tensor:
    """transformers' logits of `steps`, fed one by one after a prompt in one pass."""
    model, rows = fresh(NAME), []
    with torch.no_grad():
        out = model(torch.tensor([prompt]), use_cache=True)
        key = next(key for key in ("cache", "past_key_values") if key in out)
        for token in steps:
            out = model(torch.tensor([[token]]), use_cache=True, **{key: out[key]})
            rows.append(out.logits[0, -1])
    return torch.stack(rows)


def fed(runner: Any, tokens: list[int], chunk: int) -> Any:
    sequence = runner.open()
    for start in range(0, len(tokens), chunk):
        runner.extend([sequence], [tokens[start : start + chunk]])
    return sequence


def decode(runner: Any, sequence: Any, tokens: list[int]) -> torch.Tensor:
    rows = []
    for token in tokens:
        rows.append(runner.score([sequence], [token], [EMPTY_TREE]).logits)
        runner.commit([sequence], [()])
    return torch.cat(rows)


@pytest.mark.parametrize("chunk", [1, 10, 32, 33, 50])
@pytest.mark.parametrize("length", [30, 33, 45])
def test_prompts_in_chunks(runner: ReplayRunner, chunk: int, length: int) -> None:
    sequence = fed(runner, TEXT[:length], chunk)
    assert sequence.tokens == TEXT[:length]
    logits = decode(runner, sequence, TEXT[length : length + 5])
    assert float((logits - oracle(TEXT[:length], TEXT[length : length + 5])).abs().max()) < TOLERANCE


def test_trees_and_later_chunks_leave_the_cache_as_it_is(runner: ReplayRunner) -> None:
    sequence = fed(runner, TEXT[:40], 13)
    tree = TokenTree.build([TEXT[41], 7, TEXT[42], TEXT[43]], [-1, -1, 0, 2])
    logits = runner.score([sequence], [TEXT[40]], [tree]).logits
    assert float((logits[[0, 1, 3, 4]] - oracle(TEXT[:40], TEXT[40:44])).abs().max()) < TOLERANCE
    runner.commit([sequence], [[0, 2, 3]])
    for token in TEXT[44:48]:
        runner.extend([sequence], [[token]])
    other = runner.fork(sequence)
    for one in (sequence, other):
        logits = runner.score([one], [TEXT[48]], [EMPTY_TREE]).logits
        assert float((logits - oracle(TEXT[:40], TEXT[40:49])[-1]).abs().max()) < TOLERANCE


def test_embeddings_cannot_be_run_again(runner: ReplayRunner) -> None:
    sequence = runner.open()
    runner.extend_embeddings([sequence], [runner.embed(TEXT[:20])])
    with pytest.raises(CapabilityError, match="cannot cross 32 tokens"):
        runner.extend([sequence], [TEXT[20:40]])


def test_the_check_catches_chunks_with_angles_of_their_own(runner: ReplayRunner) -> None:
    sequence = fed(runner, TEXT[:10], 10)
    NativeRunner.extend(runner, [sequence], [TEXT[10:45]])
    logits = NativeRunner.score(runner, [sequence], [TEXT[45]], [EMPTY_TREE]).logits
    assert float((logits - oracle(TEXT[:45], TEXT[45:46])).abs().max()) > 10 * TOLERANCE
