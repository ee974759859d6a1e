"""Chains in compiled code are the chains of the NumPy steps, up to the rounding of their dtype."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from paceline.errors import ConfigError, DrafterError
from paceline.models import one_layer
from paceline.models.kernels import draft_tiles
from paceline.models.kernels.program import ROWS
from paceline.models.load import load_runner
from paceline.models.one_layer_chain import Chains
from paceline.models.one_layer_tables import MOST_STEPS

VOCAB, CONTEXT = 150, 640
TEXTS = [[5, 9, 60, 44, 7, 3, 9, 21], [1], [(7 * i) % VOCAB for i in range(100)], [2, 149, 0]]
CLOSE = {"float32": 1e-4, "bfloat16": 0.1}
"""How far a chance may lie from the oracle's, as a share of it."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("chain"))


def checkpoint(path: Path) -> Path:
    """A random model of one layer."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=64, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
        intermediate_size=96, max_position_embeddings=CONTEXT, tie_word_embeddings=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(path)
    return path


def load(folder: Path, dtype: str, in_bytes: bool | None = None) -> Any:
    """The runner; `in_bytes` False: weights of its own dtype wherever the test runs."""
    with patch.object(draft_tiles, "fits", draft_tiles.fits if in_bytes is not False else lambda *inputs: False):
        runner: Any = load_runner(folder, dtype=dtype, draft=True)
    if runner.chains is None:
        pytest.skip("this machine runs no compiled passes")
    if in_bytes and not draft_tiles.has_bytes():
        pytest.skip("no instructions for 8-bit products")
    assert in_bytes is None or runner.chains.tables.in_bytes == in_bytes
    return runner


def without_end(depth: int, reach: float) -> bool:
    return False


def faults(runner: Any, text: Sequence[int], tokens: Sequence[int], chances: Sequence[float], close: float) -> list[str]:
    """Where a chain is not the oracle's: a token that the oracle finds less likely than its best, or another chance."""
    rows = runner.extend([runner.open()], [[*text, *tokens[:-1]]], all_logits=True).logits[len(text) - 1 :].softmax(-1)
    found = []
    for row, token, chance in zip(rows, tokens, chances, strict=True):
        best = float(row.max())
        if float(row[token]) < best * (1 - close):
            found.append(f"token {token} has {float(row[token]):.4f}, the best has {best:.4f}")
        if abs(chance - float(row[token])) > close * float(row[token]):
            found.append(f"chance {chance:.4f} is {float(row[token]):.4f}")
    return found


@pytest.mark.parametrize(("dtype", "in_bytes"), [("float32", None), ("bfloat16", True), ("bfloat16", False)])
def test_tokens_and_chances_are_the_numpy_steps(folder: Path, dtype: str, in_bytes: bool | None) -> None:
    runner = load(folder, dtype, in_bytes)
    for text in TEXTS:
        ((tokens, chances),) = runner.draft_chains([runner.open()], [text], [12], [without_end])
        assert len(tokens) == 12
        assert not faults(runner, text, tokens, chances, CLOSE[dtype])


def test_the_comparison_catches_wrong_weights_and_a_wrong_place(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative controls: scales of the head that belong to other tokens, and rotations of the position before."""
    runner = load(folder, "bfloat16", True)
    scales = runner.chains.tables.strips[1]
    kept = scales.clone()
    scales[:, 1] = scales[:, 1].flip(1)
    ((tokens, chances),) = runner.draft_chains([runner.open()], [TEXTS[0]], [12], [without_end])
    assert faults(runner, TEXTS[0], tokens, chances, CLOSE["bfloat16"])
    scales.copy_(kept)
    for matrix in (2, 4, 6):
        weights = runner.chains.tables.strips[matrix]
        kept = weights.clone()
        weights.copy_(kept.flip(1))
        ((tokens, chances),) = runner.draft_chains([runner.open()], [TEXTS[0]], [12], [without_end])
        assert faults(runner, TEXTS[0], tokens, chances, CLOSE["bfloat16"]), f"matrix {matrix}"
        weights.copy_(kept)
    runner = load(folder, "float32")
    runner.chains.tables.arrays[3] = np.roll(runner.cos, 1, 0)
    runner.chains.tables.fill()
    ((tokens, chances),) = runner.draft_chains([runner.open()], [TEXTS[0]], [12], [without_end])
    assert faults(runner, TEXTS[0], tokens, chances, CLOSE["float32"])


def test_a_batch_is_its_sequences_one_by_one(folder: Path) -> None:
    runner = load(folder, "bfloat16")
    texts = [[(i * j) % VOCAB for j in range(1, 3 + i % 9)] for i in range(ROWS + 3)]
    steps = [1 + i % 5 for i in range(len(texts))]
    caches = [runner.open() for _ in texts]
    together = runner.draft_chains(caches, texts, steps, [without_end] * len(texts))
    for text, count, cache, (tokens, chances) in zip(texts, steps, caches, together, strict=True):
        ((alone, expected),) = runner.draft_chains([runner.open()], [text], [count], [without_end])
        assert (tokens, chances) == (alone, expected)
        assert len(tokens) == count
        assert cache.length == len(text) + count - 1


def test_caches_hold_what_the_numpy_steps_write_and_drafts_go_on_from_them(folder: Path) -> None:
    runner = load(folder, "float32")
    mine, other = runner.open(), runner.open()
    ((tokens, _),) = runner.draft_chains([mine], [TEXTS[2]], [4], [without_end])
    runner.extend([other], [[*TEXTS[2], *tokens[:-1]]])
    assert mine.length == other.length == len(TEXTS[2]) + 3
    for a, b in ((mine.keys, other.keys), (mine.values, other.values)):
        assert np.allclose(a[:, : mine.length], b[:, : mine.length], atol=1e-5)
    runner.truncate(mine, len(TEXTS[2]))
    ((again, _),) = runner.draft_chains([mine], [[3, 4]], [4], [without_end])
    ((whole, _),) = runner.draft_chains([runner.open()], [[*TEXTS[2], 3, 4]], [4], [without_end])
    assert again == whole


@pytest.mark.parametrize("last", [2, 3, 9, MOST_STEPS + 4])
def test_stop_is_asked_once_a_level_with_the_chance_so_far(folder: Path, last: int) -> None:
    runner = load(folder, "float32")
    asked: list[tuple[int, float]] = []

    def stop(depth: int, reach: float) -> bool:
        asked.append((depth, reach))
        return depth == last

    cache = runner.open()
    ((tokens, chances),) = runner.draft_chains([cache], [TEXTS[0]], [MOST_STEPS + 8], [stop])
    assert [depth for depth, _ in asked] == list(range(2, last + 1))
    assert [reach for _, reach in asked] == pytest.approx(np.cumprod(chances).tolist())
    assert len(tokens) == last - 1
    assert cache.length == len(TEXTS[0]) + last - 2


def test_no_stop_drafts_to_the_end_of_the_context_and_not_past_it(folder: Path) -> None:
    runner = load(folder, "float32")
    text = [(3 * i) % VOCAB for i in range(CONTEXT - 40)]
    cache = runner.open()
    runner.extend([cache], [text])
    ((tokens, _),) = runner.draft_chains([cache], [[1]], [40], [None])
    assert len(tokens) == 40
    with pytest.raises(ConfigError, match="outside the context of 640"):
        runner.draft_chains([cache], [[1]], [3], [None])


def test_nan_is_an_error(folder: Path) -> None:
    runner = load(folder, "float32")
    runner.table[7] = np.nan
    for chains in (runner.chains, None):
        runner.chains, runner.grown = chains, None
        with pytest.raises(DrafterError, match="NaN"):
            runner.draft_chains([runner.open()], [[1, 7]], [3], [None])


@pytest.fixture
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
def test_any_number_of_threads_gives_the_same_drafts(folder: Path) -> None:
    runner = load(folder, "bfloat16")
    found = []
    for threads in (2, 1, 3):
        torch.set_num_threads(threads)
        found.append(runner.draft_chains([runner.open() for _ in TEXTS], TEXTS, [6] * 4, [None] * 4))
    for other in found[1:]:
        for (tokens, chances), (expected, sure) in zip(other, found[0], strict=True):
            assert tokens == expected
            assert chances == pytest.approx(sure, rel=1e-4)


def test_where_nothing_is_compiled_numpy_drafts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quick = load(folder, "float32")
    monkeypatch.setattr(one_layer, "kernels_fit", lambda *args: False)
    slow: Any = load_runner(folder, dtype="float32", draft=True)
    assert slow.chains is None
    assert isinstance(quick.chains, Chains)
    found = [runner.draft_chains([runner.open() for _ in TEXTS], TEXTS, [5] * 4, [None] * 4) for runner in (quick, slow)]
    for (tokens, chances), (expected, sure) in zip(*found, strict=True):
        assert tokens == expected
        assert chances == pytest.approx(sure, rel=1e-4)
