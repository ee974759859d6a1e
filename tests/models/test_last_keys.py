"""The keys and values of a model's last layer are those that its attention reads, whatever became of the sequence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_hybrid import hybrid
from tiny_llama import runner_of, tiny_llama, tokens

from benchmarks.stand_ins import written_head
from paceline.models import RopeSpec, ShowsLastKeys
from paceline.models.heads import HeadConfig
from paceline.models.runners import LongSpecHead, NativeRunner
from paceline.tree import TokenTree

SIZES: dict[str, Any] = {"hidden_size": 64, "head_dim": 32, "intermediate_size": 64}


def fresh(runner: Any, text: list[int]) -> torch.Tensor:
    """Those of a sequence that has read nothing but this text."""
    cache = runner.open()
    runner.extend([cache], [text])
    found: torch.Tensor = runner.last_keys.read(cache).clone()
    return found


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a, b, atol=1e-4)


@pytest.mark.parametrize("kind", ["compiled", "operators", "hybrid"])
def test_they_follow_commits_copies_and_what_is_taken_back(kind: str) -> None:
    """A branch of a tree is kept; copies part where their blocks are no longer adjacent. Negative control: another
    branch.
    """
    runner: Any = hybrid() if kind == "hybrid" else runner_of(
        tiny_llama(**SIZES), compiled=kind == "compiled", copy_limit=16
    )  # fmt: skip
    text, cache, keys = tokens(40), runner.open(), runner.last_keys
    assert len(keys.read(cache)) == 0
    runner.extend([cache], [text])
    tree = TokenTree.build([7, 8, 9, 10], [-1, -1, 1, 2])
    runner.score([cache], [5], [tree])
    runner.commit([cache], [(1, 2)])
    text += [5, 8, 9]
    assert same(keys.read(cache), fresh(runner, text))
    assert not same(keys.read(cache), fresh(runner, [*text[:-2], 7, 9]))
    other = runner.fork(cache)
    for own, more in ((cache, [11, 12]), (other, [13])):
        runner.extend([own], [more])
        assert same(keys.read(own), fresh(runner, text + more))
    if kind != "hybrid":
        assert not (cache.in_order(None) and other.in_order(None))
        runner.truncate(other, 30)
        assert same(keys.read(other), fresh(runner, text[:30]))


@pytest.mark.parametrize("windows", [(), (8, None)])
def test_compiled_passes_attend_to_them_as_operators_do(windows: tuple[int | None, ...]) -> None:
    """Of the last layer that keeps the whole text's. Negative control: those of the sequence before its last token."""
    model = tiny_llama(**SIZES)
    layer = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 40}
    path = written_head(HeadConfig(
        method="longspec", hidden_size=64, vocab_size=64, draft_vocab_size=64, sliding_window=20,
        layer=layer | {"max_position_embeddings": 64},
    ))  # fmt: skip

    def logits(runner: NativeRunner, text: list[int]) -> torch.Tensor:
        """Behind a text, and behind a tree of what is drafted there."""
        head, cache = LongSpecHead.load(path, runner), runner.open()
        assert head.passes == runner.info.passes
        assert runner.last_keys.layer == (1 if windows else 2)
        runner.extend([cache], [text[:-1]])
        (window,) = head.known([text[-21:-1]], [len(text) - 21])
        inputs = head.opened(len(text) - 1, window, cache)
        root = inputs.feed(text[-1])
        first = head.step([inputs])
        inputs.feed(5, root)
        inputs.feed(9, root)
        return torch.cat((first, head.step([inputs])))

    compiled, operators = (runner_of(model, windows=windows, compiled=which) for which in (True, False))
    text = tokens(60)
    assert torch.allclose(found := logits(compiled, text), logits(operators, text), atol=1e-3)
    assert not torch.allclose(found, logits(operators, [*text[:-2], 3, text[-1]]), atol=1e-2)


def test_where_there_are_none_they_are_not_shown() -> None:
    """Windows in all layers, or angles that depend on the length of the text."""
    assert isinstance(runner_of(tiny_llama()), ShowsLastKeys)
    assert not isinstance(runner_of(tiny_llama(), windows=(8,)), ShowsLastKeys)
    dynamic = RopeSpec(theta=10_000.0, dims=16, kind="dynamic", scaling={"factor": 2.0}, max_position=64)
    assert not isinstance(runner_of(tiny_llama(), spec_changes={"ropes": {"default": dynamic}}), ShowsLastKeys)
