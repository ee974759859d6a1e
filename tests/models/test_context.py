"""Every runner takes a text that fills the context, rejects one token more with one line, and is then as it was
before.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import checkpoints
from models.test_fallback import tiny
from tiny_llama import runner_of, tiny_llama, tokens

from paceline.errors import ConfigError
from paceline.models import load_runner
from paceline.models.passes.compiled_decoder import CompiledDecoder
from paceline.models.runners.fallback.runner import TransformersRunner
from paceline.tree import EMPTY_TREE, TokenTree

MOST = 40
TEXT = tokens(MOST + 1)
WIDE = {"hidden_size": 64, "head_dim": 32, "intermediate_size": 96, "vocab_size": 72}


def compiled(folder: Path) -> Any:
    runner = runner_of(tiny_llama(**WIDE), max_context=MOST)
    assert isinstance(runner.passes, CompiledDecoder)
    return runner


RUNNERS: dict[str, Callable[[Path], Any]] = {
    "operators": lambda folder: runner_of(tiny_llama(), compiled=False, max_context=MOST),
    "compiled": compiled,
    "dynamic": lambda folder: load_runner(checkpoints.write("llama-dynamic", "new", folder), max_context=MOST),
    "longrope": lambda folder: load_runner(checkpoints.write("phi3-longrope", "new", folder), max_context=MOST),
    "transformers": lambda folder: TransformersRunner(tiny("gpt2"), name="tiny", max_context=MOST),
    "recurrent": lambda folder: TransformersRunner(tiny("mamba"), name="tiny", max_context=MOST),
}


@pytest.mark.parametrize("name", RUNNERS)
def test_one_token_more_than_the_context_is_rejected(name: str, tmp_path: Path) -> None:
    runner = RUNNERS[name](tmp_path)
    assert runner.info.max_context == MOST
    full, cache = runner.open(), runner.open()
    with pytest.raises(ConfigError, match=f"^0 \\+ {MOST + 1} tokens exceed the context of {MOST} tokens"):
        runner.extend([full], [TEXT])
    assert full.length == 0
    runner.extend([full], [TEXT[:MOST]])
    with pytest.raises(ConfigError, match=f"^{MOST} \\+ 1 tokens exceed"):
        runner.extend([cache, full], [[1], [1]])
    with pytest.raises(ConfigError, match=f"^{MOST} \\+ 1 tokens exceed"):
        runner.score([cache, full], [1, 1], [EMPTY_TREE, EMPTY_TREE])
    assert (cache.length, full.length) == (0, MOST)

    runner.extend([cache], [TEXT[: MOST - 2]])
    row = runner.score([cache], [TEXT[-3]], [TokenTree.chain(TEXT[-2:-1])]).logits
    with pytest.raises(ConfigError, match=f"^{MOST - 2} \\+ 3 tokens exceed"):
        runner.score([cache], [TEXT[-3]], [TokenTree.chain(TEXT[-2:])])
    if runner.capabilities.trees:  # what counts is the longest path
        assert len(runner.score([cache], [TEXT[-3]], [TokenTree.build([1, 2, 3, 4], [-1] * 4)]).logits) == 5
    again = runner.score([cache], [TEXT[-3]], [TokenTree.chain(TEXT[-2:-1])]).logits
    assert torch.allclose(again, row, atol=1e-4)
    runner.commit([cache], [[0]])
    assert cache.length == MOST


def test_embeddings_count_as_tokens_do() -> None:
    runner = runner_of(tiny_llama(), max_context=MOST)
    cache = runner.open()
    with pytest.raises(ConfigError, match=f"^0 \\+ {MOST + 1} tokens exceed"):
        runner.extend_embeddings([cache], [runner.embed(TEXT)])
    runner.extend_embeddings([cache], [runner.embed(TEXT[:MOST])])
    assert cache.length == MOST
