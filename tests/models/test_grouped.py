"""Layers in groups: exact passes have the bits of the plain runner, fuzzy ones are what the paper defines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny_llama import CPU, close, runner_of, spec_of, tiny_llama, tokens, weights_of

from paceline.errors import ConfigError, UnsupportedModelError
from paceline.models import RopeSpec
from paceline.models.runners import GroupedRunner
from paceline.models.runners.grouped import groups_of
from paceline.tree import EMPTY_TREE, TokenTree

LAYERS = 6


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_llama(num_hidden_layers=LAYERS)


def grouped(model: Any, size: int = 4, *, compiled: bool = True, **changes: Any) -> GroupedRunner:
    spec = replace(spec_of(model.config), **changes)
    return GroupedRunner(spec, weights_of(model), size, name="tiny", device=CPU, dtype=torch.float32, compiled=compiled)


def test_groups_leave_out_the_first_and_the_last_layer() -> None:
    assert [list(block) for block in groups_of(8, 4)] == [[0], [1, 2, 3, 4], [5, 6], [7]]
    assert [list(block) for block in groups_of(4, 1)] == [[0], [1], [2], [3]]
    assert [list(block) for block in groups_of(2, 4)] == [[0], [1]]


@pytest.mark.parametrize("compiled", [True, False])
def test_exact_passes_have_the_bits_of_the_plain_runner(model: Any, compiled: bool) -> None:
    """Prompt chunks, ragged batches, trees, commits of their paths, forks, truncation."""
    one, two = runner_of(model, compiled=compiled), grouped(model, compiled=compiled)
    two.fuzzy = True
    texts = [tokens(40), tokens(7, 1)]
    tree = TokenTree.build([3, 4, 5, 6], [-1, -1, 0, 2])
    found = []
    for runner in (one, two):
        caches: Any = [runner.open(), runner.open()]
        seen = [runner.extend(caches, [text[:5] for text in texts]).logits]
        seen.append(runner.extend(caches, [text[5:] for text in texts], all_logits=True).logits)
        seen.append(runner.score(caches, [9, 8], [tree, EMPTY_TREE]).logits)
        runner.commit(caches, [(0, 2, 3), ()])
        caches.append(runner.fork(caches[0]))
        runner.truncate(caches[0], 11)
        seen.append(runner.score(caches, [1, 2, 3], [EMPTY_TREE, tree, TokenTree.chain([2, 2])]).logits)
        assert [cache.length for cache in caches] == [11, 8, 44]
        for cache in caches:
            runner.release(cache)
        found.append(seen)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert two.native.arena.pool.free == len(two.native.arena.pool.counts) - 1


@torch.inference_mode()
def by_the_paper(model: Any, text: Sequence[int], token: int, blocks: Sequence[Sequence[int]]) -> torch.Tensor:
    """(v,) logits of a token behind an exact prefix, its groups at once: from the layers of transformers, without a
    cache.
    """
    inner = model.model
    exact = model(torch.tensor([text]), output_hidden_states=True).hidden_states
    h = inner.embed_tokens(torch.tensor([[token]]))
    positions = torch.arange(len(text) + 1)[None]
    angles = inner.rotary_emb(h, positions)
    mask = torch.full((1, 1, len(text) + 1, len(text) + 1), -torch.inf).triu_(1)
    for block in blocks:
        first = h
        for k in block:
            layer, rows = inner.layers[k], torch.cat((exact[k], first), 1)
            out = layer.self_attn(layer.input_layernorm(rows), position_embeddings=angles, attention_mask=mask)[0][
                :, -1:
            ]
            h = h + out
            h = h + layer.mlp(layer.post_attention_layernorm(h))
    return model.lm_head(inner.norm(h))[0, 0]


def fuzzy_row(runner: GroupedRunner, text: Sequence[int], token: int) -> torch.Tensor:
    """The text by an exact pass, then one token behind it."""
    runner.fuzzy = True
    cache = runner.open()
    chain = TokenTree.chain([*text[1:], token])
    runner.score([cache], [text[0]], [TokenTree.chain(text[1:])])
    return runner.score([cache], [text[0]], [chain], computed=[len(text)]).logits[0]


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_a_fuzzy_pass_is_the_papers(model: Any, size: int, compiled: bool) -> None:
    text, token = tokens(20), 17
    blocks = groups_of(LAYERS, size)
    row = fuzzy_row(grouped(model, size, compiled=compiled), text, token)
    assert close(row, by_the_paper(model, text, token, blocks))
    exact = by_the_paper(model, text, token, [[k] for k in range(LAYERS)])
    assert close(row, exact) == (size == 1), "negative control: with groups it is another function"
    wrong = [[0, 1], *([k] for k in range(2, LAYERS))]
    assert not close(row, by_the_paper(model, text, token, wrong))


def test_what_cannot_be_is_rejected(model: Any) -> None:
    with pytest.raises(ConfigError, match="must have 4 layers or more, tiny has 3"):
        grouped(tiny_llama())
    ropes = {"default": RopeSpec(theta=1e4, dims=16, kind="dynamic")}
    with pytest.raises(UnsupportedModelError, match="angles depend on the text's length"):
        grouped(model, ropes=ropes)
    runner = grouped(model)
    with pytest.raises(ConfigError, match=r"computed\[0\] must lie"):
        runner.score([runner.open()], [1], [TokenTree.chain([2])], computed=[1])
