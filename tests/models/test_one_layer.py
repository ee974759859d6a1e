"""The fused one-layer step computes what the native decoder computes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from paceline.errors import CapabilityError
from paceline.models.load import load_runner
from paceline.models.one_layer import OneLayerRunner
from paceline.tree.token_tree import EMPTY_TREE, TokenTree

TEXT = [5, 9, 60, 44, 7, 3, 9, 21]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("one"))


def checkpoint(folder: Path, **changes: Any) -> Path:
    torch.manual_seed(0)
    config = {
        "vocab_size": 96,
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 40,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
    }
    model = LlamaForCausalLM(LlamaConfig(**config | changes))
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder)
    return folder


def pair(folder: Path) -> tuple[Any, Any]:
    fused = load_runner(folder, dtype="float32", draft=True)
    assert isinstance(fused, OneLayerRunner)
    return fused, load_runner(folder, dtype="float32")


def logits(runner: Any, script: Sequence[tuple[Any, ...]]) -> list[torch.Tensor]:
    """Play a life of two sequences and collect every row."""
    caches = [runner.open(), runner.open()]
    found = [runner.extend([caches[0]], [TEXT], all_logits=True).logits, runner.extend(caches, [[4], [8, 9, 10]]).logits]
    for verb, *arguments in script:
        if verb == "score":
            found.append(runner.score(caches, arguments[0], arguments[1]).logits)
        elif verb == "commit":
            runner.commit(caches, arguments[0])
        elif verb == "truncate":
            runner.truncate(caches[0], arguments[0])
        else:
            caches[1] = runner.fork(caches[0])
    return found


SCRIPT = [
    ("score", [1, 2], [TokenTree.build([4, 5, 6, 7, 8], [-1, -1, 0, 1, 3]), TokenTree.chain([3, 2])]),
    ("commit", [[1, 3, 4], [0]]),
    ("score", [11, 12], [EMPTY_TREE, TokenTree.build([4, 5], [-1, -1])]),
    ("commit", [[], [1]]),
    ("fork",),
    ("truncate", 6),
    ("score", [13, 14], [TokenTree.chain([1, 2, 3]), EMPTY_TREE]),
]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": True, "num_key_value_heads": 1},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0}},
    ],
)
def test_rows_equal_the_native_decoders(tmp_path: Path, changes: dict[str, Any]) -> None:
    fused, native = pair(checkpoint(tmp_path, **changes))
    for a, b in zip(logits(fused, SCRIPT), logits(native, SCRIPT), strict=True):
        assert torch.allclose(a, b, atol=1e-4)


def test_the_comparison_catches_a_path_that_was_not_compacted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fused, native = pair(folder)

    def sloppy(caches: Any, paths: Any) -> None:
        for cache, path in zip(caches, paths, strict=True):
            cache.length += 1 + len(path)

    monkeypatch.setattr(fused, "commit", sloppy)
    pairs = zip(logits(fused, SCRIPT), logits(native, SCRIPT), strict=True)
    assert not all(torch.allclose(a, b, atol=1e-4) for a, b in pairs)


def test_a_chain_equals_repeated_steps_and_stops_when_told(folder: Path) -> None:
    fused, native = pair(folder)
    a, b = fused.open(), native.open()
    tokens, chances = fused.draft_chains([a], [TEXT], [5], [lambda depth, reach: False])[0]
    feed, expected = TEXT, []
    for _ in range(5):
        row = native.extend([b], [feed]).logits[0]
        expected.append(int(row.argmax()))
        assert chances[len(expected) - 1] == pytest.approx(float(row.softmax(-1).max()), abs=1e-4)
        feed = expected[-1:]
    assert tokens == expected
    assert a.length == len(TEXT) + 4
    asked: list[int] = []
    fused.truncate(a, 0)
    (found,) = fused.draft_chains([a], [TEXT], [5], [lambda depth, reach: bool(asked.append(depth) or depth == 3)])
    assert len(found[0]) == 2
    assert asked == [2, 3]


def test_growing_trees_and_long_texts(folder: Path) -> None:
    fused, native = pair(folder)
    long = [(7 * i) % 96 for i in range(200)]
    tree, grown = TokenTree.build([4, 5], [-1, -1]), TokenTree.build([4, 5, 6, 7], [-1, -1, 1, 0])
    rows = []
    for runner in (fused, native):
        cache = runner.open()
        runner.extend([cache], [long])
        runner.score([cache], [1], [tree])
        rows.append(runner.score([cache], [1], [grown], computed=[3]).logits)
    assert rows[0].shape == (2, 96)
    assert torch.allclose(*rows, atol=1e-4)


def test_other_models_and_taps_are_left_to_the_native_runner(tmp_path: Path, folder: Path) -> None:
    assert not isinstance(load_runner(checkpoint(tmp_path, num_hidden_layers=2), draft=True), OneLayerRunner)
    fused, _ = pair(folder)
    with pytest.raises(CapabilityError, match="taps"):
        fused.extend([fused.open()], [[1]], taps=[0])
