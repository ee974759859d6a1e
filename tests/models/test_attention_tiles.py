"""The inner loops of compiled attention against float64 arithmetic; a row's bits depend on its own slots alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from models.translated_once import translated_once
from tiny_llama import close, runner_of, stepwise, tiny_llama, tokens, whole_pass

from paceline.models.cpu.attention_tiles import HALF_MAX_QUERIES, MAX_QUERIES, weigh
from paceline.models.passes.compiled_decoder import CompiledDecoder
from paceline.models.runners import NativeRunner
from paceline.tree import EMPTY_TREE, TokenTree

COUNT, SLOTS, DIMS = 37, 60, 64
WIDE = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 72}
IDS = tokens(80)
TREE = TokenTree.build([5, 6, 7, 8, 9, 5], [-1, -1, 0, 1, 2, 3])


def wide_heads(dtype: torch.dtype, head_dim: int, **kwargs) -> NativeRunner:
    return runner_of(tiny_llama(**WIDE | {"head_dim": head_dim}).to(dtype), cache_slots=64, **kwargs)


@translated_once
def _weigh(
    wide: int, queries: int, weights: int, pitch: int, base: int,
    slots: int, count: int, slot_pitch: int, sums: int, sums_pitch: int,
) -> None:  # fmt: skip
    weigh(wide, queries, weights, pitch, base, slots, count, slot_pitch, sums, sums_pitch)


def weighed(values: torch.Tensor, weights: torch.Tensor, slots: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
    """`start` (queries, dims) plus weights (queries, count) times the values (slots, dims) in some slots."""
    sums, (queries, dims) = start.clone(), start.shape
    _weigh(
        int(values.dtype is torch.float32), queries, weights.data_ptr(), weights.stride(0) * 4,
        values.data_ptr(), slots.data_ptr(),
        len(slots), values.stride(0) * values.element_size(), sums.data_ptr(), 4 * dims,
    )  # fmt: skip
    return sums


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weighted_sums_are_right_and_have_the_same_bits_in_every_variant(dtype):
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(SLOTS, DIMS, generator=generator).to(dtype)
    weights = torch.rand(MAX_QUERIES, COUNT + 3, generator=generator)[:, :COUNT]
    slots, start = (
        torch.randperm(SLOTS, generator=generator)[:COUNT],
        torch.randn(MAX_QUERIES, DIMS, generator=generator),
    )
    want = start.double() + weights.double() @ values[slots].double()
    halves = [weighed(values[:, i : i + 32], weights, slots, start[:, i : i + 32].contiguous()) for i in (0, 32)]
    found = torch.cat(halves, 1)
    assert torch.allclose(found.double(), want, atol=1e-5)
    assert not torch.allclose(
        found.double(), start.double() + weights.double() @ values[slots.flip(0)].double(), atol=1e-2
    )
    assert not torch.equal(
        weighed(values[:, :32], weights.flip(1).contiguous(), slots.flip(0), start[:, :32].contiguous()), halves[0]
    )
    for queries in range(1, MAX_QUERIES + 1):
        assert torch.equal(
            weighed(values[:, :32], weights[:queries], slots, start[:queries, :32].contiguous()), halves[0][:queries]
        )
    for queries in range(1, HALF_MAX_QUERIES + 1):
        assert torch.equal(weighed(values, weights[:queries], slots, start[:queries]), found[:queries])
    assert torch.equal(weighed(values, weights[:2], slots[:0], start[:2]), start[:2])


@pytest.mark.parametrize("head_dim", [64, 96])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_wide_heads_have_the_same_bits_however_the_text_is_fed(dtype, head_dim):
    runner = wide_heads(dtype, head_dim)
    assert isinstance(runner.passes, CompiledDecoder)
    plain, cache = stepwise(runner, IDS), runner.open()
    assert torch.equal(whole_pass(runner, IDS), plain)
    for width in (2, 3, 5, 9):
        assert torch.equal(stepwise(runner, IDS, width), plain), width
    runner.extend([cache], [IDS[:40]])
    rows = runner.score([cache], IDS[40:41], [TREE]).logits
    for node in range(len(TREE)):
        path = [int(TREE.tokens[i]) for i in TREE.path(node)]
        assert torch.equal(rows[1 + node], whole_pass(runner, [*IDS[:41], *path])[-1])
    assert not torch.equal(rows[1], rows[2])


@pytest.mark.parametrize("head_dim", [64, 96])
def test_wide_heads_are_those_of_the_operators(head_dim):
    ours, plain = wide_heads(torch.float32, head_dim), wide_heads(torch.float32, head_dim, compiled=False)
    want = whole_pass(plain, IDS)
    assert close(whole_pass(ours, IDS), want)
    assert not close(whole_pass(ours, [IDS[0] ^ 1, *IDS[1:]]), want)


def test_chains_of_many_lengths_side_by_side_have_the_bits_of_each_alone():
    runner = wide_heads(torch.bfloat16, 64)
    caches, chains = [runner.open() for _ in range(4)], [EMPTY_TREE, *(TokenTree.chain(IDS[:n]) for n in (1, 6, 20))]
    runner.extend(caches, [IDS[: 3 + 20 * i] for i in range(4)])
    scores = runner.score(caches, [1, 2, 3, 4], chains)
    for i, cache in enumerate(caches):
        alone = runner.score([cache], [1 + i], [chains[i]]).logits
        assert torch.equal(scores.of(i), alone)
        tokens = [*IDS[: 3 + 20 * i], 1 + i, *map(int, chains[i].tokens)]
        assert torch.equal(alone, whole_pass(runner, tokens)[-len(alone) :])
    assert np.array_equal(np.diff(scores.rows), [1, 2, 7, 21])
