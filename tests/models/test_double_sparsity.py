"""Selection by label channels: whole where the text is short, the true best tokens where all channels score, a planted
key found, compiled passes as PyTorch's operators; and the channels that texts give.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_llama import CPU, close, runner_of, stepwise, tiny_llama, tokens
from torch.nn import functional as F
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from paceline.assembly import memory_use
from paceline.errors import CheckpointError, ConfigError, UnsupportedModelError
from paceline.models import ChannelStatistics, LatentSpec
from paceline.models.attention import double_sparsity
from paceline.models.attention.double_sparsity import DoubleSparsity, DoubleSparsityStep, Labels
from paceline.models.attention.segments import Segment
from paceline.models.attention.tree_attention import Masks
from paceline.models.runners import NativeRunner
from paceline.models.spec import AttentionShape
from paceline.models.state.arena import Arena
from paceline.models.state.cache import NativeCache
from paceline.tree import EMPTY_TREE, TokenTree

TEXT = tokens(120, seed=3)
FORMS = pytest.mark.parametrize("compiled", [False, True], ids=["operators", "compiled"])


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return tiny_llama(hidden_size=64, intermediate_size=64, head_dim=32)


@pytest.fixture(scope="module")
def channels(model: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> str:
    statistics = ChannelStatistics()
    runner = runner_of(model, selection=statistics)
    runner.extend([runner.open()], [TEXT])
    path = tmp_path_factory.mktemp("channels") / "tiny.safetensors"
    statistics.save(path, name="tiny")
    return str(path)


def selecting(model: LlamaForCausalLM, channels: str, compiled: bool, **options: Any) -> NativeRunner:
    options = {"tokens": 24, "dense_layers": 1, "sinks": 2, "recent": 4} | options
    runner = runner_of(model, selection=DoubleSparsity(channels=channels, **options), compiled=compiled)
    assert runner.info.passes == ("compiled" if compiled else "operators")
    return runner


def decoded(runner: NativeRunner, width: int = 1) -> torch.Tensor:
    """(30, v) logits behind a prompt of 90 tokens that was read at once, in chains of `width`."""
    cache, rows = runner.open(), []
    runner.extend([cache], [TEXT[:90]])
    for at in range(90, 120, width):
        part = TEXT[at : at + width]
        rows.append(runner.score([cache], part[:1], [TokenTree.chain(part[1:]) if width > 1 else EMPTY_TREE]).logits)
        runner.commit([cache], [range(len(part) - 1)])
    return torch.cat(rows)


@FORMS
def test_labels_are_counted_and_go_with_their_text(model: LlamaForCausalLM, channels: str, compiled: bool) -> None:
    runner = selecting(model, channels, compiled)
    assert runner.selection is not None
    most = runner.selection.held_bytes(len(TEXT), runner.info.dtype.itemsize)
    cache = runner.open()
    runner.extend([cache], [TEXT[:90]])
    assert runner.selection.held == 0, "a prompt is read with full attention"
    runner.score([cache], TEXT[90:91], [EMPTY_TREE])
    assert most / 4 < runner.selection.held <= most
    plain, counted = (memory_use(one, (), [len(TEXT)], 0) for one in (runner_of(model, compiled=compiled), runner))
    assert counted.caches == plain.caches + most
    del cache
    gc.collect()
    assert runner.selection.held == 0


@FORMS
def test_a_text_that_is_no_longer_is_attended_to_whole(model: LlamaForCausalLM, channels: str, compiled: bool) -> None:
    whole = decoded(runner_of(model, compiled=compiled))
    assert torch.equal(decoded(selecting(model, channels, compiled, tokens=120)), whole)
    assert not close(decoded(selecting(model, channels, compiled, tokens=24)), whole, 0.1), "the control"


@torch.inference_mode()
def best_tokens(model: LlamaForCausalLM, ids: list[int], most: int, dense: int, sinks: int, recent: int) -> Any:
    """(v,) logits of the last token, whose heads attend to the tokens with the largest q k, by transformers' parts."""
    past = model(torch.tensor([ids[:-1]]), use_cache=True).past_key_values
    inner, place = model.model, torch.tensor([[len(ids) - 1]])
    x = inner.embed_tokens(torch.tensor([ids[-1:]]))
    turn = inner.rotary_emb(x, place)
    for index, layer in enumerate(inner.layers):
        normed, own = layer.input_layernorm(x), layer.self_attn
        q, k, v = (part(normed).view(1, 1, -1, 32).transpose(1, 2) for part in (own.q_proj, own.k_proj, own.v_proj))
        q, k = apply_rotary_pos_emb(q, k, *turn)
        keys, values = torch.cat((past.layers[index].keys, k), 2)[0], torch.cat((past.layers[index].values, v), 2)[0]
        keys, values = keys.repeat_interleave(2, 0), values.repeat_interleave(2, 0)
        scores = torch.einsum("hd,htd->ht", q[0, :, 0], keys) * 32**-0.5
        ranks = scores.clone()
        ranks[:, :sinks] = ranks[:, -recent:] = torch.inf
        left = ranks < ranks.topk(most if index >= dense else len(ids)).values[:, -1:]
        mixed = torch.einsum("ht,htd->hd", scores.masked_fill(left, -torch.inf).softmax(-1), values)
        x = x + own.o_proj(mixed.reshape(1, 1, -1))
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    return model.lm_head(inner.norm(x))[0]


@FORMS
def test_all_channels_give_the_true_best_tokens(model: LlamaForCausalLM, channels: str, compiled: bool) -> None:
    true = best_tokens(model, TEXT, 24, 1, 2, 4)

    def last(**options: Any) -> torch.Tensor:
        runner = selecting(model, channels, compiled, **options)
        cache = runner.open()
        runner.extend([cache], [TEXT[:-1]])
        return runner.score([cache], TEXT[-1:], [EMPTY_TREE]).logits

    assert close(last(label_channels=32), true)
    assert not close(last(label_channels=2), true), "the control"


@FORMS
def test_chains_and_batches_choose_as_tokens_one_by_one(model: LlamaForCausalLM, channels: str, compiled: bool) -> None:
    one_by_one = decoded(selecting(model, channels, compiled))
    assert close(decoded(selecting(model, channels, compiled), width=6), one_by_one)  # deeper than what is always read
    runner = selecting(model, channels, compiled)
    caches = [runner.open(), runner.open()]
    runner.extend(caches, [TEXT[:90], TEXT[:10]])
    both = runner.score(caches, [TEXT[90], TEXT[10]], [EMPTY_TREE, EMPTY_TREE]).logits
    assert close(both[:1], one_by_one[:1])
    short = stepwise(runner_of(model, compiled=compiled), TEXT[:11])
    assert close(both[1:], short[-1:])


def test_compiled_passes_choose_as_operators_do(model: LlamaForCausalLM, channels: str) -> None:
    for options in ({}, {"tokens": 7, "label_channels": 5}, {"tokens": 60, "sinks": 0, "dense_layers": 0}):
        operators, compiled = (decoded(selecting(model, channels, form, **options)) for form in (False, True))
        assert close(operators, compiled), options


def branched(runner: NativeRunner, fresh: bool) -> torch.Tensor:
    """(2, v) logits behind a branch that was moved into its place, and behind a truncation after it.

    Args:
        fresh: labels are read anew there, of a fork.
    """
    cache, found = runner.open(), []
    runner.extend([cache], [TEXT[:60]])
    tree = TokenTree.build([5, 6, 7, 8], [-1, -1, 1, 2])
    runner.score([cache], [TEXT[60]], [tree])
    runner.commit([cache], [[1, 2, 3]])
    for length in (74, 70):
        runner.truncate(cache, min(cache.length, 66))
        while cache.length < length:
            runner.score([cache], [TEXT[length]], [EMPTY_TREE])
            runner.commit([cache], [()])
        last = runner.fork(cache) if fresh else cache
        found.append(runner.score([last], [3], [EMPTY_TREE]).logits)
    return torch.cat(found)


@FORMS
def test_labels_follow_what_is_accepted_and_taken_back(
    model: LlamaForCausalLM, channels: str, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_anew = branched(selecting(model, channels, compiled), fresh=True)
    assert close(branched(selecting(model, channels, compiled), fresh=False), read_anew)

    def stale(self: Labels, segment: Segment) -> None:
        valid = self.valid
        follow(self, segment)
        self.valid = max(valid, segment.cache.length + segment.slots)  # as if nothing were ever taken back

    follow = Labels.follow
    monkeypatch.setattr(double_sparsity.Labels, "follow", stale)
    assert not close(branched(selecting(model, channels, compiled), fresh=False), read_anew), "the control"


@FORMS
def test_labels_are_read_anew_where_other_tokens_were_read_as_a_prompt(
    model: LlamaForCausalLM, channels: str, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a search goes back and on; passes over a prompt look at no labels. Negative control: nobody forgets."""

    def behind_other_tokens(fresh: bool) -> torch.Tensor:
        runner = selecting(model, channels, compiled, dense_layers=0)
        cache = runner.open()
        runner.extend([cache], [TEXT[:90]])
        runner.score([cache], [TEXT[90]], [EMPTY_TREE])
        runner.truncate(cache, 40)
        runner.extend([cache], [TEXT[70:110]])
        return runner.score([runner.fork(cache) if fresh else cache], [3], [EMPTY_TREE]).logits

    read_anew = behind_other_tokens(fresh=True)
    assert close(behind_other_tokens(fresh=False), read_anew)
    monkeypatch.setattr(DoubleSparsity, "forget", lambda self, segment: None)
    assert not close(behind_other_tokens(fresh=False), read_anew, 0.1), "the control"


@FORMS
def test_a_model_without_layers_that_choose_is_read_whole(
    model: LlamaForCausalLM, channels: str, compiled: bool
) -> None:
    whole = decoded(runner_of(model, compiled=compiled))
    assert torch.equal(decoded(selecting(model, channels, compiled, dense_layers=9)), whole)


def planted(ranking: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """What two heads attend to of 100 tokens, the 40th of which has a key like the query and values of 1."""
    shape = AttentionShape(1, 2, 32, 32**-0.5, None, (None,), (0,))
    arena, generator = Arena(1, 2, 32, dtype=torch.float32, device=CPU), torch.Generator().manual_seed(0)
    cache = NativeCache(arena)
    cache.reserve(101)
    cache.length, cache.scratch = 100, 1
    kept = arena.layers[0][cache.base : cache.base + 100]
    kept.copy_(torch.randn(kept.shape, generator=generator))
    kept[:, 2:] = 0
    query = torch.zeros(2, 32)
    query[0, [3, 17]], query[1, [8, 30]] = 6.0, 6.0
    kept[40, :2], kept[40, 2:] = 2 * query, 1.0
    method = DoubleSparsity(channels="", tokens=12, label_channels=2, dense_layers=0, sinks=2, recent=4)
    method.channels = {0: ranking(query.abs())[:, :2]}
    step = DoubleSparsityStep(method, shape, Masks(torch.float32, CPU), Segment(cache, 1), Labels(method.channels))
    qkv = torch.cat((query, torch.zeros(4, 32))).unsqueeze(0)
    return step.attend(0, qkv)


def test_a_planted_key_is_found_and_by_wrong_channels_it_is_not() -> None:
    found = planted(lambda sizes: sizes.argsort(-1, descending=True))
    assert torch.allclose(found, torch.ones_like(found), atol=1e-3)
    assert planted(lambda sizes: sizes.argsort(-1)).max() < 0.1, "the control"


@torch.inference_mode()
def test_channels_are_ranked_by_the_mean_of_products(model: LlamaForCausalLM, channels: str) -> None:
    inner = model.model
    x = inner.embed_tokens(torch.tensor([TEXT]))
    normed, own = inner.layers[0].input_layernorm(x), inner.layers[0].self_attn
    q, k = (part(normed).view(1, len(TEXT), -1, 32).transpose(1, 2) for part in (own.q_proj, own.k_proj))
    q, k = apply_rotary_pos_emb(q, k, *inner.rotary_emb(x, torch.arange(len(TEXT))[None]))
    products = (q.view(2, 2, -1, 32) * k.view(2, 1, -1, 32)).abs().mean((1, 2))
    found = double_sparsity.read_channels(Path(channels), runner_of(model).spec, name="tiny")[0]
    ranked = products.gather(1, found)
    assert bool((ranked.diff(dim=1) <= 1e-6).all())
    assert not bool((F.normalize(k, dim=-1).abs().mean((0, 2)).gather(1, found).diff(dim=1) <= 1e-6).all())


def test_what_cannot_be_chosen_by_is_refused(model: LlamaForCausalLM, channels: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokens must be at least sinks \+ recent = 20, got 19"):
        DoubleSparsity(channels=channels, tokens=19)
    with pytest.raises(ConfigError, match=r"label_channels must be an integer in 1\.\.32, got 33"):
        selecting(model, channels, False, label_channels=33)
    with pytest.raises(CheckpointError, match=r"no channels at .*; `paceline analyze channels` makes one"):
        selecting(model, str(tmp_path / "none"), False)
    (tmp_path / "text").write_text("text")
    with pytest.raises(CheckpointError, match="holds no channels"):
        selecting(model, str(tmp_path / "text"), False)
    with pytest.raises(CheckpointError, match="holds the channels of another model than tiny"):
        selecting(tiny_llama(hidden_size=64, num_hidden_layers=2, head_dim=32), channels, False)
    latent = LatentSpec(rank=64, nope=32, rope=32, value=64)
    with pytest.raises(UnsupportedModelError, match="tiny has latent attention, for which kv_selection="):
        DoubleSparsity(channels=channels).prepare(replace(runner_of(model).spec, latent=latent), CPU, name="tiny")
