"""The native runner against transformers, prefix by prefix; each check has a variant that must fail it."""

from __future__ import annotations

from contextlib import nullcontext
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from tiny_llama import close, oracle, runner_of, spec_of, tiny_llama, tokens, weights_of

from paceline.errors import ConfigError
from paceline.models import Capabilities, LayerPlan, abilities_of
from paceline.models.attention.segments import Segment
from paceline.models.layers.linear import can_pack
from paceline.models.passes import ScoringGraphs
from paceline.models.passes.graphs import bucket_for
from paceline.models.runners import NativeRunner
from paceline.registry import ABILITIES
from paceline.tree import EMPTY_TREE, TokenTree

TREE = TokenTree.build([5, 6, 7, 8, 9, 5], [-1, -1, 0, 1, 2, 3])
IDS = tokens(41)


@pytest.fixture(scope="module")
def model():
    return tiny_llama()


@pytest.fixture
def runner(model) -> NativeRunner:
    return runner_of(model, cache_slots=64)


def prefilled(runner, ids=IDS):
    cache = runner.open()
    runner.extend([cache], [ids[:-1]])
    return cache


def by_path(model, ids, tree: TokenTree) -> torch.Tensor:
    """Row for the root and every node: each from a sequence of its own, from scratch."""
    paths = [[], *([int(tree.tokens[i]) for i in tree.path(node)] for node in range(len(tree)))]
    return torch.stack([oracle(model, [*ids, *path])[-1] for path in paths])


def test_declares_everything(runner):
    assert runner.capabilities == Capabilities(trees=True, taps=True, fork=True)
    assert abilities_of(runner) == set(ABILITIES)
    assert (runner.info.vocab_size, runner.info.num_layers, runner.info.max_context) == (64, 3, 512)
    assert runner.info.weight_bytes == sum(p.numel() * 4 for p in tiny_llama().parameters()) - 64 * 32 * 4


@pytest.mark.parametrize("chunks", [(40,), (1, 15, 16, 8), (7, 33)])
def test_prefill_in_chunks(model, runner, chunks):
    cache, at, rows = runner.open(), 0, []
    for size in chunks:
        rows.append(runner.extend([cache], [IDS[at : at + size]], all_logits=True).logits)
        at += size
    assert cache.length == 40
    assert close(torch.cat(rows), oracle(model, IDS[:40]))
    assert not close(torch.cat(rows), oracle(model, [IDS[1], *IDS[1:40]]))


def test_extend_returns_the_last_row_of_each_sequence(model, runner):
    caches = [runner.open() for _ in range(3)]
    chunks = [IDS[:3], IDS[5:21], IDS[9:10]]
    scores = runner.extend(caches, chunks)
    assert scores.rows == (0, 1, 2, 3)
    assert close(scores.logits, torch.stack([oracle(model, chunk)[-1] for chunk in chunks]))


def test_stepwise_decoding(model, runner):
    cache, rows = runner.open(), []
    for token in IDS:
        rows.append(runner.score([cache], [token], [EMPTY_TREE]).logits)
        runner.commit([cache], [()])
    assert close(torch.cat(rows), oracle(model, IDS))


@pytest.mark.parametrize("tree", [TREE, TokenTree.chain([3, 4, 5, 6]), TokenTree.build([1, 2, 3], [-1, -1, -1])])
def test_a_tree_equals_node_by_node_decoding(model, runner, tree):
    scores = runner.score([prefilled(runner)], IDS[-1:], [tree])
    assert scores.rows == (0, 1 + len(tree))
    assert close(scores.logits, by_path(model, IDS, tree))


def test_a_large_tree_takes_the_unfolded_path(model, runner):
    parents = [-1, -1, *(i // 2 for i in range(44))]
    tree = TokenTree.build([i % 2 for i in range(46)], parents)
    scores = runner.score([prefilled(runner)], IDS[-1:], [tree])
    assert close(scores.logits, by_path(model, IDS, tree))


def test_a_causal_mask_in_place_of_the_tree_mask_is_caught(model, runner, monkeypatch):
    monkeypatch.setattr(Segment, "sees", property(lambda self: np.tri(self.slots, dtype=bool)))
    scores = runner.score([prefilled(runner)], IDS[-1:], [TREE])
    assert not close(scores.logits, by_path(model, IDS, TREE))


@pytest.mark.parametrize("path", [(), (0,), (1, 3), (0, 2, 4), (1, 3, 5)])
def test_commit_equals_a_forward_from_scratch(model, runner, path):
    cache = prefilled(runner)
    runner.score([cache], IDS[-1:], [TREE])
    runner.commit([cache], [path])
    kept = [*IDS, *(int(TREE.tokens[i]) for i in path)]
    assert cache.length == len(kept)
    rows = runner.score([cache], [11], [TREE]).logits
    assert close(rows, by_path(model, [*kept, 11], TREE))
    wrong = [*kept[:-1], (kept[-1] + 1) % 64]
    assert not close(rows, by_path(model, [*wrong, 11], TREE))


def test_commit_without_compaction_is_caught(model, runner, monkeypatch):
    monkeypatch.setattr(type(runner.arena), "move", lambda *args: None)
    cache = prefilled(runner)
    runner.score([cache], IDS[-1:], [TREE])
    runner.commit([cache], [(1, 3)])
    assert not close(runner.score([cache], [11], [EMPTY_TREE]).logits, oracle(model, [*IDS, 6, 8, 11])[-1:])


def test_rollback(model, runner):
    cache = prefilled(runner)
    runner.score([cache], IDS[-1:], [TREE])
    runner.truncate(cache, 17)
    assert close(runner.score([cache], [3], [EMPTY_TREE]).logits, oracle(model, [*IDS[:17], 3])[-1:])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_neighbours_in_a_batch_do_not_matter(dtype):
    runner = runner_of(tiny_llama().to(dtype), cache_slots=64)
    trees, lengths = [TREE, EMPTY_TREE, TokenTree.chain([1, 2, 3])], [40, 5, 17]
    alone = []
    for length, tree in zip(lengths, trees, strict=True):
        alone.append(runner.score([prefilled(runner, IDS[: length + 1])], [IDS[length]], [tree]).logits)
    caches = [prefilled(runner, IDS[: length + 1]) for length in lengths]
    scores = runner.score(caches, [IDS[length] for length in lengths], trees)
    assert scores.rows == (0, 7, 8, 12)
    for i, rows in enumerate(alone):
        if dtype is torch.bfloat16 and can_pack(rows.device, dtype):
            assert torch.equal(scores.of(i), rows)
        assert close(scores.of(i), rows, 1e-5 if dtype is torch.float32 else 0.1)
    assert not close(scores.of(1), alone[2][:1], 0.1)


@pytest.mark.skipif(not can_pack(torch.device("cpu"), torch.bfloat16), reason="claimed for CPUs with packed bfloat16")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_drafted_rows_have_the_bits_of_plain_decoding(dtype):
    runner = runner_of(tiny_llama(head_dim=32).to(dtype))
    ids, plain = tokens(120, seed=5), []
    cache = runner.open()
    for token in ids:
        plain.append(runner.score([cache], [token], [EMPTY_TREE]).logits)
        runner.commit([cache], [()])
    for width in (2, 5, 8):
        cache, rows = runner.open(), []
        for at in range(0, 120, width):
            chunk = ids[at : at + width]
            rows.append(runner.score([cache], chunk[:1], [TokenTree.chain(chunk[1:])]).logits)
            runner.commit([cache], [range(len(chunk) - 1)])
        assert torch.equal(torch.cat(rows), torch.cat(plain))
    assert not torch.equal(torch.cat(rows)[1:], torch.cat(plain)[:-1])


def test_ragged_batch_in_float32(model, runner):
    caches = [runner.open() for _ in range(3)]
    runner.extend(caches, [IDS[:40], IDS[:5], IDS[:17]])
    scores = runner.score(caches, [1, 2, 3], [TREE, EMPTY_TREE, TokenTree.chain([1, 2, 3])])
    for i, (length, root, tree) in enumerate([(40, 1, TREE), (5, 2, EMPTY_TREE), (17, 3, TokenTree.chain([1, 2, 3]))]):
        assert close(scores.of(i), by_path(model, [*IDS[:length], root], tree))
    runner.commit(caches, [(0, 2), (), (0,)])
    scores = runner.score(caches, [9, 9, 9], [EMPTY_TREE] * 3)
    for i, kept in enumerate([[*IDS[:40], 1, 5, 7], [*IDS[:5], 2], [*IDS[:17], 3, 1]]):
        assert close(scores.of(i), oracle(model, [*kept, 9])[-1:])


def test_a_growing_tree_feeds_only_what_is_new(model, runner):
    cache = prefilled(runner)
    first = TokenTree.build([5, 6], [-1, -1])
    grown = TokenTree.build([5, 6, 7, 8, 9], [-1, -1, 0, 1, 2])
    rows = [runner.score([cache], IDS[-1:], [first]).logits]
    scores = runner.score([cache], IDS[-1:], [grown], computed=[3])
    assert scores.rows == (0, 3)
    assert close(torch.cat([*rows, scores.logits]), by_path(model, IDS, grown))
    runner.commit([cache], [(0, 2, 4)])
    assert close(runner.score([cache], [1], [EMPTY_TREE]).logits, oracle(model, [*IDS, 5, 7, 9, 1])[-1:])


def test_a_growing_chain(model, runner):
    cache, chain = prefilled(runner), []
    rows = [runner.score([cache], IDS[-1:], [EMPTY_TREE]).logits]
    for done, token in enumerate([4, 9, 2], start=1):
        chain.append(token)
        rows.append(runner.score([cache], IDS[-1:], [TokenTree.chain(chain)], computed=[done]).logits)
    assert close(torch.cat(rows), by_path(model, IDS, TokenTree.chain(chain)))


@pytest.mark.parametrize("copy_limit", [0, 1024])
def test_forks_share_and_part(model, copy_limit):
    runner = runner_of(model, cache_slots=64, copy_limit=copy_limit)
    cache = prefilled(runner)
    forks = [cache, runner.fork(cache), runner.fork(cache)]
    for step, tree in enumerate([TREE, TokenTree.chain([1, 2]), EMPTY_TREE]):
        scores = runner.score(forks, [step, step + 1, step + 2], [tree, EMPTY_TREE, tree])
        assert close(scores.of(1), oracle(model, [*IDS[:40], *range(1, step + 2)])[-1:])
        runner.commit(forks, [()] * 3)
    assert close(runner.score(forks[2:], [7], [TREE]).logits, by_path(model, [*IDS[:40], 2, 3, 4, 7], TREE))
    assert (forks[1].base < 0) == (copy_limit == 0)
    for each in forks:
        runner.release(each)
    assert runner.arena.pool.free == len(runner.arena.pool.counts) - 1


def test_growth_over_several_doublings(model):
    runner = runner_of(model, cache_slots=32)
    one, two = runner.open(), runner.open()
    ids = tokens(400, seed=3)
    for at in range(0, 400, 50):
        rows = runner.extend([one, two], [ids[at : at + 50], ids[at : at + 20]]).logits
    assert runner.arena.version >= 3
    assert close(rows[:1], oracle(model, ids)[-1:])
    assert close(rows[1:], oracle(model, [t for at in range(0, 400, 50) for t in ids[at : at + 20]])[-1:])


@pytest.mark.parametrize("windows", [(8,), (8, None), (24, 8)])
@pytest.mark.parametrize("chunks", [(40,), (1, 15, 24)])
def test_sliding_windows(windows, chunks):
    model = tiny_llama()
    runner, plain = runner_of(model, windows=windows), runner_of(model)
    cache, at, rows = runner.open(), 0, []
    for size in chunks:
        rows.append(runner.extend([cache], [IDS[at : at + size]], all_logits=True).logits)
        at += size
    truth = windowed(model, IDS[:40], windows)
    assert close(torch.cat(rows), truth)
    assert not close(plain.extend([plain.open()], [IDS[:40]], all_logits=True).logits, truth)
    tree_rows = runner.score([cache], IDS[40:], [TREE]).logits
    for node in range(len(TREE)):
        path = [int(TREE.tokens[i]) for i in TREE.path(node)]
        assert close(tree_rows[1 + node], windowed(model, [*IDS, *path], windows)[-1])


@torch.inference_mode()
def windowed(model, ids, windows):
    """transformers' layers run one by one, each under its own window mask."""
    n, base = len(ids), model.model
    distance = torch.arange(n)[:, None] - torch.arange(n)
    x = base.embed_tokens(torch.tensor([ids]))
    rope = base.rotary_emb(x, torch.arange(n)[None])
    for i, layer in enumerate(base.layers):
        window = windows[i % len(windows)] or n
        mask = torch.zeros(n, n).masked_fill_((distance < 0) | (distance >= window), -torch.inf)[None, None]
        out = layer(x, attention_mask=mask, position_embeddings=rope)
        x = out if isinstance(out, torch.Tensor) else out[0]
    return model.lm_head(base.norm(x))[0]


@torch.inference_mode()
def hidden_states(model, ids):
    return [h[0] for h in model(torch.tensor([ids]), output_hidden_states=True).hidden_states]


def test_taps_cover_every_prompt_token_and_every_node(model, runner):
    cache, want = runner.open(), hidden_states(model, IDS)
    chunks = [runner.extend([cache], [part], taps=(-1, 0, 1, 3)).taps for part in (IDS[:25], IDS[25:40])]
    for layer, theirs in ((-1, want[0]), (0, want[1]), (1, want[2]), (3, want[3])):
        assert close(torch.cat([taps[layer] for taps in chunks]), theirs[:40])
        assert not close(torch.cat([taps[layer] for taps in chunks]), want[(layer + 2) % 4][:40])
    scores = runner.score([cache], IDS[-1:], [TREE], taps=(1,))
    assert scores.taps[1].shape == (7, 32)
    assert close(scores.taps[1][:1], want[2][-1:])


def test_early_exit_head_and_resumption(model, runner):
    cache, want = prefilled(runner), hidden_states(model, IDS)
    hidden = runner.run_layers([cache], IDS[-1:], [TREE], plan=LayerPlan(stop=1)).states
    assert close(hidden[:1], want[1][-1:])
    early = runner.head(hidden)
    with torch.inference_mode():
        assert close(early[0], model.lm_head(model.model.norm(want[1][-1])))
        assert close(runner.head(hidden, norm=False)[0], model.lm_head(want[1][-1]))
    resumed = runner.run_layers([cache], IDS[-1:], [TREE], plan=LayerPlan(first=1), hidden=hidden).states
    assert close(runner.head(resumed), by_path(model, IDS, TREE))
    assert not close(early, by_path(model, IDS, TREE))
    runner.commit([cache], [(1, 3)])
    assert close(runner.score([cache], [2], [EMPTY_TREE]).logits, oracle(model, [*IDS, 6, 8, 2])[-1:])


def test_subsets_of_layers_and_of_sub_layers(model, runner):
    cache = prefilled(runner)
    whole = runner.run_layers([cache], IDS[-1:], [EMPTY_TREE]).states
    assert close(runner.head(whole), oracle(model, IDS)[-1:])
    for skip_attention, skip_mlp in (((1,), (1,)), ((0, 2), ()), ((), (1,))):
        plan = LayerPlan(skip_attention=skip_attention, skip_mlp=skip_mlp)
        rows = runner.run_layers([cache], IDS[-1:], [EMPTY_TREE], plan=plan).states
        assert close(rows, skipping(model, IDS, skip_attention, skip_mlp))
        assert not close(rows, whole)


@torch.inference_mode()
def skipping(model, ids, skip_attention, skip_mlp):
    """The last token alone skips; the tokens before it keep the keys and values of the whole model."""
    full = hidden_states(model, ids)
    base, n = model.model, len(ids)
    rope = base.rotary_emb(full[0][None], torch.arange(n)[None])
    x = full[0][-1:]
    for i, layer in enumerate(base.layers):
        if i not in skip_attention:
            normed = layer.input_layernorm(torch.cat([full[i][:-1], x])[None])
            mask = torch.zeros(n, n).masked_fill_(torch.ones(n, n).triu(1).bool(), -torch.inf)[None, None]
            x = x + layer.self_attn(hidden_states=normed, position_embeddings=rope, attention_mask=mask)[0][0, -1:]
        if i not in skip_mlp:
            x = x + layer.mlp(layer.post_attention_layernorm(x))
    return x


def test_input_embeddings(model, runner):
    want = oracle(model, IDS)
    cache = runner.open()
    assert close(runner.extend_embeddings([cache], [runner.embed(IDS[:40])], all_logits=True).logits, want[:40])
    hidden = runner.run_layers([cache], [0], [EMPTY_TREE], hidden=runner.embed(IDS[40:])).states
    assert close(runner.head(hidden), want[40:])
    hidden = runner.run_layers([cache], [0], [EMPTY_TREE], hidden=runner.embed([IDS[40] ^ 1])).states
    assert not close(runner.head(hidden), want[40:])


def test_hidden_inputs_are_not_modified(runner):
    cache, given = prefilled(runner), runner.embed([3])
    before = given.clone()
    runner.run_layers([cache], [0], [EMPTY_TREE], hidden=given)
    assert torch.equal(given, before)


def test_tied_head():
    model = tiny_llama(tie_word_embeddings=True)
    runner = runner_of(model)
    assert close(runner.extend([runner.open()], [IDS], all_logits=True).logits, oracle(model, IDS))


@pytest.mark.parametrize("windows", [(), (8, None)])
def test_fixed_shape_scoring_equals_eager(model, windows):
    eager, fixed = (runner_of(model, windows=windows, cache_slots=64, forget_behind_windows=False) for _ in range(2))
    fixed.graphs = ScoringGraphs(fixed.passes.decoder, fixed.rotary, fixed.arena, capture=False)
    both = []
    for runner in (eager, fixed):
        caches = [runner.open() for _ in range(3)]
        runner.extend(caches, [IDS[:40], IDS[:5], IDS[:17]])
        first = runner.score(caches, [1, 2, 3], [TREE, EMPTY_TREE, TokenTree.chain([1, 2, 3])], taps=(0, 3))
        runner.commit(caches, [(1, 3), (), (0, 1)])
        second = runner.score(caches, [4, 5, 6], [TREE] * 3)
        grown = runner.score(caches[:1], [4], [TokenTree.build([*TREE.tokens, 3], [*TREE.parents, 4])], computed=[7])
        both.append((first, second, grown))
    for ours, theirs in zip(*both, strict=True):
        assert ours.rows == theirs.rows
        assert close(ours.logits, theirs.logits, 1e-5)
    assert close(both[0][0].taps[3], both[1][0].taps[3], 1e-5)
    assert not close(both[0][0].logits, both[1][1].logits[:12], 1e-3)


class FakeCuda:
    """The parts of torch.cuda that capture takes; what is captured runs at once and is noted with its stream."""

    def __init__(self) -> None:
        self.captured: list[tuple[object, object, object]] = []
        self.warmed: list[object] = []

    def graph_pool_handle(self) -> object:
        return "pool"

    def Stream(self) -> MagicMock:
        return MagicMock()

    def current_stream(self) -> MagicMock:
        return MagicMock()

    def stream(self, stream: object) -> nullcontext[None]:
        self.warmed.append(stream)
        return nullcontext()

    def CUDAGraph(self) -> MagicMock:
        return MagicMock()

    def graph(self, graph: object, pool: object = None, stream: object = None) -> nullcontext[None]:
        self.captured.append((graph, pool, stream))
        return nullcontext()


def test_a_capture_names_a_stream_that_has_not_warmed_up(model, runner, monkeypatch):
    """What cuBLAS keeps for a stream is then made within the capture."""
    fake = FakeCuda()
    for name in ("Stream", "current_stream", "stream", "CUDAGraph", "graph", "graph_pool_handle"):
        monkeypatch.setattr(torch.cuda, name, getattr(fake, name))
    runner.graphs = ScoringGraphs(runner.passes.decoder, runner.rotary, runner.arena, capture=True)
    assert close(runner.score([prefilled(runner)], IDS[-1:], [TREE]).logits, by_path(model, IDS, TREE))
    ((graph, pool, stream),) = fake.captured
    assert pool == "pool"
    assert stream is not None
    assert stream not in fake.warmed
    assert len(fake.warmed) == 1
    graph.replay.assert_called_once()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_models_on_two_devices_are_captured_each_on_its_own(model):
    for device in (torch.device("cuda:0"), torch.device("cuda:1"), torch.device("cuda:0")):
        weights = {name: weight.to(device) for name, weight in weights_of(model).items()}
        runner = NativeRunner(spec_of(model.config), weights, name="tiny", device=device, dtype=torch.float32)
        assert runner.graphs is not None
        for _ in range(2):
            logits = runner.score([prefilled(runner)], IDS[-1:], [TREE]).logits
            assert logits.device == device
            assert close(logits.cpu(), by_path(model, IDS, TREE), 1e-3)


def test_shapes_beyond_the_buckets_go_to_the_eager_path(model, runner):
    assert bucket_for([Segment(runner.open(), 65)], ()) is None
    assert bucket_for([Segment(runner.open(), 5)], (1, 0, 1)).taps == (0, 1)
    runner.graphs = ScoringGraphs(runner.passes.decoder, runner.rotary, runner.arena, capture=False)
    tree = TokenTree.chain(tokens(70, seed=4))
    assert close(runner.score([prefilled(runner)], IDS[-1:], [tree]).logits, by_path(model, IDS, tree))


def test_stale_nan_of_a_released_sequence_does_not_leak(model, runner):
    poisoned = prefilled(runner)
    with torch.inference_mode():
        runner.arena.kv[:, [slot for block in poisoned.blocks for slot in range(16 * block, 16 * block + 16)]] = (
            torch.nan
        )
    blocks = set(poisoned.blocks)
    runner.release(poisoned)
    again = prefilled(runner)
    assert blocks & set(again.blocks)
    runner.release(again)
    assert close(runner.score([prefilled(runner)], IDS[-1:], [TREE]).logits, by_path(model, IDS, TREE))


def test_mistakes_are_named(runner):
    cache = prefilled(runner)
    with pytest.raises(ConfigError, match="extend needs at least one token"):
        runner.extend([cache], [[]])
    with pytest.raises(ConfigError, match="score first"):
        runner.commit([cache], [(0,)])
    with pytest.raises(ConfigError, match="computed"):
        runner.score([cache], [1], [TREE], computed=[1])
    with pytest.raises(ConfigError, match="needs hidden states"):
        runner.run_layers([cache], [1], [EMPTY_TREE], plan=LayerPlan(first=1))
    with pytest.raises(ConfigError, match="hidden must be"):
        runner.run_layers([cache], [1], [EMPTY_TREE], hidden=torch.zeros(2, 32))
    with pytest.raises(ConfigError, match="truncate"):
        runner.truncate(cache, 41)
    runner.release(cache)
    runner.release(cache)
    with pytest.raises(ConfigError, match="released"):
        runner.extend([cache], [[1]])
    assert np.all(runner.arena.pool.counts >= 0)
