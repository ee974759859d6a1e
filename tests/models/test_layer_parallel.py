"""Layers at once: exact passes have the bits of the plain runner, fuzzy ones are what the paper defines, and nobody races."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from time import sleep
from typing import Any

import pytest
import torch
from tiny_llama import CPU, close, runner_of, spec_of, tiny_llama, tokens, weights_of

from paceline.errors import CapabilityError, ConfigError, UnsupportedModelError
from paceline.models.layer_parallel import LayerGroups, LayerParallelRunner, groups_of
from paceline.models.layer_workers import Worker
from paceline.models.spec import RopeSpec
from paceline.tree.token_tree import EMPTY_TREE, TokenTree

LAYERS = 6
TWO = ("cpu", "cpu")


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_llama(num_hidden_layers=LAYERS)


def parallel(model: Any, size: int = 4, devices: tuple[str, ...] = TWO, **changes: Any) -> LayerParallelRunner:
    spec = replace(spec_of(model.config), **changes)
    return LayerParallelRunner(spec, weights_of(model), LayerGroups(size, devices), name="tiny", dtype=torch.float32)


def test_groups_leave_out_the_first_and_the_last_layer() -> None:
    assert [list(block) for block in groups_of(8, 4)] == [[0], [1, 2, 3, 4], [5, 6], [7]]
    assert [list(block) for block in groups_of(4, 1)] == [[0], [1], [2], [3]]
    assert [list(block) for block in groups_of(2, 4)] == [[0], [1]]


def test_layers_of_a_group_go_to_workers_in_turn(model: Any) -> None:
    assert parallel(model, 4).owners == [0, 0, 1, 0, 1, 0]
    assert len(parallel(model, 2, ("cpu",) * 5).workers) == 2, "no worker without a layer"
    assert len(parallel(model, 1).workers) == 1


def test_exact_passes_have_the_bits_of_the_plain_runner(model: Any) -> None:
    """Prompt chunks, ragged batches, trees, commits of their paths, forks, truncation."""
    one, two = runner_of(model, compiled=False), parallel(model)
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
    assert all(worker.arena.pool.free == len(worker.arena.pool.counts) - 1 for worker in two.workers)


@torch.inference_mode()
def by_the_paper(model: Any, text: Sequence[int], token: int, blocks: Sequence[Sequence[int]]) -> torch.Tensor:
    """(v,) logits of a token behind an exact prefix, its groups at once: from the layers of transformers, without a cache."""
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
            out = layer.self_attn(layer.input_layernorm(rows), position_embeddings=angles, attention_mask=mask)[0][:, -1:]
            h = h + out
            h = h + layer.mlp(layer.post_attention_layernorm(h))
    return model.lm_head(inner.norm(h))[0, 0]


def fuzzy_row(runner: LayerParallelRunner, text: Sequence[int], token: int) -> torch.Tensor:
    """The text by an exact pass, then one token behind it."""
    runner.fuzzy = True
    cache = runner.open()
    chain = TokenTree.chain([*text[1:], token])
    runner.score([cache], [text[0]], [TokenTree.chain(text[1:])])
    return runner.score([cache], [text[0]], [chain], computed=[len(text)]).logits[0]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_a_fuzzy_pass_is_the_papers(model: Any, size: int) -> None:
    text, token = tokens(20), 17
    blocks = groups_of(LAYERS, size)
    row = fuzzy_row(parallel(model, size), text, token)
    assert close(row, by_the_paper(model, text, token, blocks))
    exact = by_the_paper(model, text, token, [[k] for k in range(LAYERS)])
    assert close(row, exact) == (size == 1), "negative control: with groups it is another function"
    wrong = [[0, 1], *([k] for k in range(2, LAYERS))]
    assert not close(row, by_the_paper(model, text, token, wrong))


def test_workers_change_no_bit(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many there are, and whichever is slower."""
    text = tokens(20)
    alone = fuzzy_row(parallel(model, 4, ("cpu",)), text, 3)
    assert torch.equal(fuzzy_row(parallel(model, 4, ("cpu",) * 3), text, 3), alone)
    work = Worker._work

    def late(self: Worker, *given: Any) -> Any:
        sleep(0.002 * len(self._places))
        return work(self, *given)

    monkeypatch.setattr(Worker, "_work", late)
    assert torch.equal(fuzzy_row(parallel(model), text, 3), alone)


def test_a_worker_that_fails_is_heard_when_all_are_done(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    runner, done = parallel(model), []
    work = Worker._work

    def failing(self: Worker, *given: Any) -> Any:
        if self is runner.workers[0]:
            raise RuntimeError("out of luck")
        sleep(0.01)
        done.append(work(self, *given))
        return done[-1]

    monkeypatch.setattr(Worker, "_work", failing)
    with pytest.raises(RuntimeError, match="out of luck"):
        fuzzy_row(runner, tokens(5), 3)
    assert len(done) == 1, "the first group, and the other worker was waited for"


def test_workers_share_the_threads_and_leave_the_callers_alone(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = set()
    work = Worker._work

    def watched(self: Worker, *given: Any) -> Any:
        found = work(self, *given)
        seen.add(torch.get_num_threads())
        return found

    monkeypatch.setattr(Worker, "_work", watched)
    torch.set_num_threads(4)
    try:
        fuzzy_row(parallel(model), tokens(5), 3)
        assert torch.get_num_threads() == 4
    finally:
        torch.set_num_threads(1)
    assert seen == {2}


def test_what_cannot_be_is_refused(model: Any) -> None:
    with pytest.raises(ConfigError, match="must have 4 layers or more, tiny has 3"):
        parallel(tiny_llama())
    ropes = {"default": RopeSpec(theta=1e4, dims=16, kind="dynamic")}
    with pytest.raises(UnsupportedModelError, match="angles depend on the text's length"):
        parallel(model, ropes=ropes)
    runner = parallel(model)
    with pytest.raises(CapabilityError, match="no taps"):
        runner.extend([runner.open()], [[1]], taps=(0,))
    with pytest.raises(ConfigError, match="computed must lie"):
        runner.score([runner.open()], [1], [TokenTree.chain([2])], computed=[1])


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_on_two_gpus(model: Any) -> None:
    text = tokens(20)
    weights = {name: weight.cuda() for name, weight in weights_of(model).items()}
    groups = LayerGroups(4, ("cuda:0", "cuda:1"))
    runner = LayerParallelRunner(spec_of(model.config), weights, groups, name="tiny", dtype=torch.float32)
    assert {worker.arena.kv.device.index for worker in runner.workers} == {0, 1}
    assert close(fuzzy_row(runner, text, 3).to(CPU), by_the_paper(model, text, 3, groups_of(LAYERS, 4)))
