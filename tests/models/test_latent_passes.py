"""Latent attention in compiled passes: the numbers of transformers, and rows that depend on their text alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from models.checkpoints import perturb
from tiny_llama import CPU, close, spec_of, stepwise, tiny_llama, tokens, whole_pass

from paceline.checkpoints import Checkpoint, load_weights, spec_from_config, targets
from paceline.models import LatentSpec, LayerPlan, LayerSpec, ModelSpec
from paceline.models.cpu.processor import has_bfloat
from paceline.models.cpu.tiles import DOT, FULL, HALF
from paceline.models.passes import EagerPasses, compiled_decoder
from paceline.models.passes.compiled_decoder import CompiledDecoder
from paceline.models.runners import NativeRunner, layer_drafts_of, what_varies
from paceline.tree import EMPTY_TREE, TokenTree

Weights = Mapping[str, torch.Tensor]

IDS = tokens(120)
TREE = TokenTree.build([5, 6, 7, 8, 9, 5], [-1, -1, 0, 1, 2, 3])
SIZES = {"kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 128}
SIZES |= {"hidden_size": 96, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 6}
SIZES |= {"num_key_value_heads": 6, "vocab_size": 72, "max_position_embeddings": 256, "first_k_dense_replace": 3}
SIZES |= {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "pad_token_id": 0}
KINDS = [(torch.float32, FULL), (torch.bfloat16, HALF), *([(torch.bfloat16, DOT)] if has_bfloat() else [])]
in_each_kind = pytest.mark.parametrize(("dtype", "kind"), KINDS)
with_and_without_query_rank = pytest.mark.parametrize("query_rank", [None, 160])


def model(query_rank: int | None, **changes: Any) -> tuple[ModelSpec, Weights]:
    """A spec and random weights; its queries may be made of more dimensions than the hidden state has."""
    latent = LatentSpec(rank=64, nope=32, rope=32, value=128, query_rank=query_rank)
    spec = spec_of(tiny_llama(hidden_size=96, intermediate_size=96, vocab_size=72, head_dim=32).config)
    spec = replace(
        spec, **{"latent": latent, "num_heads": 5, "num_kv_heads": 1, "head_dim": 96, "attention_scale": 0.4} | changes
    )
    generator = torch.Generator().manual_seed(0)
    return spec, {one.name: torch.randn(one.shape, generator=generator) / 4 for one in targets(spec)}


@pytest.fixture
def of_kind(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A compiled runner whose products are of one kind."""

    def make(dtype: torch.dtype, kind: int, query_rank: int | None = 160, *, windows: Any = (), **options: Any) -> Any:
        monkeypatch.setattr(compiled_decoder, "best_kind", lambda _: kind)
        layers = {"layers": tuple(LayerSpec(window=windows[i % len(windows)]) for i in range(3))} if windows else {}
        runner = runner_of(*model(query_rank, **layers), dtype, **options)
        assert isinstance(runner.passes, CompiledDecoder)
        return runner

    return make


def runner_of(spec: ModelSpec, weights: Weights, dtype: torch.dtype = torch.float32, **options: Any) -> NativeRunner:
    own = {name: weight.to(dtype) for name, weight in weights.items()}
    return NativeRunner(spec, own, name="tiny", device=CPU, dtype=dtype, cache_slots=64, **options)


@pytest.mark.parametrize("query_rank", [None, 64])
def test_float32_is_that_of_transformers(query_rank: int | None, tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model("deepseek_v2", **SIZES, q_lora_rank=query_rank)
    theirs = perturb(AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval())
    theirs.save_pretrained(tmp_path)
    spec = replace(spec_from_config(config.to_dict()), moe=None)
    weights = load_weights(Checkpoint(tmp_path), spec, device=CPU, dtype=torch.float32)
    runner = runner_of(spec, weights)
    assert isinstance(runner.passes, CompiledDecoder)
    with torch.no_grad():
        want, other = (theirs(torch.tensor([ids])).logits[0] for ids in (IDS, [IDS[0] ^ 1, *IDS[1:]]))
    assert want.std() > 0.2
    assert close(whole_pass(runner, IDS), want)
    assert close(stepwise(runner, IDS), want)
    assert not close(whole_pass(runner, IDS), other)


@pytest.mark.parametrize("spoilt", ["kv_b", "kv_norm", "q_norm", "q_b"])
def test_every_weight_counts(spoilt: str) -> None:
    spec, weights = model(160)
    want, name = whole_pass(runner_of(spec, weights, compiled=False), IDS), f"layers.1.{spoilt}.weight"
    assert close(whole_pass(runner_of(spec, weights), IDS), want)
    assert not close(whole_pass(runner_of(spec, {**weights, name: weights[name].roll(1, 0)}), IDS), want)


@pytest.mark.parametrize("kind", [kind for dtype, kind in KINDS if dtype is torch.bfloat16])
def test_bfloat16_errs_no_more_than_the_operators(of_kind: Any, kind: int) -> None:
    spec, weights = model(160)
    rounded = {name: weight.bfloat16().float() for name, weight in weights.items()}
    exact = whole_pass(runner_of(spec, rounded, compiled=False), IDS)
    ours, operators = of_kind(torch.bfloat16, kind), runner_of(spec, weights, torch.bfloat16, compiled=False)
    assert isinstance(operators.passes, EagerPasses)
    errors = [float((whole_pass(runner, IDS).float() - exact).abs().mean()) for runner in (ours, operators)]
    assert 0 < errors[0] < 1.05 * errors[1]


@in_each_kind
@with_and_without_query_rank
def test_a_row_has_the_same_bits_however_the_text_is_fed(
    of_kind: Any, dtype: torch.dtype, kind: int, query_rank: int | None
) -> None:
    runner = of_kind(dtype, kind, query_rank)
    assert what_varies(runner) is None
    plain = stepwise(runner, IDS)
    assert torch.equal(whole_pass(runner, IDS), plain)
    for width in (2, 3, 5, 7, 16, 17, 40):
        assert torch.equal(stepwise(runner, IDS, width), plain), width
    assert not torch.equal(plain[1:], plain[:-1])


@in_each_kind
def test_a_row_has_the_same_bits_whatever_stands_beside_it(of_kind: Any, dtype: torch.dtype, kind: int) -> None:
    runner = of_kind(dtype, kind)
    caches = [runner.open() for _ in range(20)]
    runner.extend(caches, [IDS[i : i + 5 + 2 * i] for i in range(20)])
    roots = [3 + i for i in range(20)]
    alone = [runner.score([cache], [root], [EMPTY_TREE]).logits for cache, root in zip(caches, roots, strict=True)]
    for count in (2, 3, 7, 16, 20):
        rows = runner.score(caches[:count], roots[:count], [EMPTY_TREE] * count).logits
        assert torch.equal(rows, torch.cat(alone[:count])), count
    shifted = runner.score(caches, [*roots[1:], 3], [EMPTY_TREE] * 20).logits
    assert not torch.equal(shifted[:1], alone[0])


@in_each_kind
@pytest.mark.parametrize("windows", [(), (8,), (24, None)])
def test_tree_rows_and_moved_entries_have_the_bits_of_plain_decoding(
    of_kind: Any, dtype: torch.dtype, kind: int, windows: Any
) -> None:
    runner = of_kind(dtype, kind, windows=windows)
    cache = runner.open()
    runner.extend([cache], [IDS[:40]])
    rows = runner.score([cache], IDS[40:41], [TREE]).logits
    for node in range(len(TREE)):
        path = [int(TREE.tokens[i]) for i in TREE.path(node)]
        assert torch.equal(rows[1 + node], whole_pass(runner, [*IDS[:41], *path])[-1])
    runner.commit([cache], [(1, 3, 5)])
    kept = [*IDS[:41], 6, 8, 5]
    after = runner.score([cache], [9], [EMPTY_TREE]).logits
    assert torch.equal(after, whole_pass(runner, [*kept, 9])[-1:])
    assert not torch.equal(after, whole_pass(runner, [*kept[:-1], 6, 9])[-1:])


@in_each_kind
def test_any_number_of_threads_gives_the_same_bits(
    of_kind: Any, dtype: torch.dtype, kind: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, rows, runner = torch.get_num_threads(), [], of_kind(dtype, kind)
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            rows.append(whole_pass(runner, IDS[:70]))
    finally:
        torch.set_num_threads(before)
    monkeypatch.setattr(compiled_decoder, "find_team", lambda: None)
    rows.append(whole_pass(of_kind(dtype, kind), IDS[:70]))
    assert all(torch.equal(rows[0], other) for other in rows[1:])


def test_more_rows_than_a_pass_holds(of_kind: Any) -> None:
    runner = of_kind(torch.float32, FULL)
    tree = TokenTree.build([i % 60 for i in range(140)], [-1, -1, *(i // 2 for i in range(138))])
    caches = [runner.open() for _ in range(2)]
    runner.extend(caches, [IDS[:70], IDS[:50]])
    scores = runner.score(caches, [1, 2], [tree, tree])
    for i, length in enumerate((70, 50)):
        path = [int(tree.tokens[j]) for j in tree.path(139)]
        assert torch.equal(scores.of(i)[-1], whole_pass(runner, [*IDS[:length], 1 + i, *path])[-1])


@pytest.mark.parametrize("copy_limit", [0, 1024])
def test_forks_share_what_they_have_in_common(of_kind: Any, copy_limit: int) -> None:
    runner = of_kind(torch.float32, FULL, copy_limit=copy_limit)
    cache = runner.open()
    runner.extend([cache], [IDS[:37]])
    forks = [cache, runner.fork(cache), runner.fork(cache)]
    for step, tree in enumerate([TREE, TokenTree.chain([1, 2]), EMPTY_TREE]):
        scores = runner.score(forks, [step, step + 1, step + 2], [tree, EMPTY_TREE, tree])
        assert torch.equal(scores.of(1), whole_pass(runner, [*IDS[:37], *range(1, step + 2)])[-1:])
        runner.commit(forks, [()] * 3)


def test_drafts_by_part_of_the_layers_read_the_same_cache() -> None:
    spec, weights = model(None)
    found = []
    for compiled in (True, False):
        runner = runner_of(spec, weights, compiled=compiled)
        cache, drafts = runner.open(), layer_drafts_of(runner, "kangaroo")
        runner.extend([cache], [IDS[:20]])
        drafts.step([cache], [[4]], LayerPlan(stop=2))
        found.append(drafts.step([cache], [[4, 5]], LayerPlan(stop=2)).logits)
    assert close(*found)
    assert found[0].std() > 0.05
