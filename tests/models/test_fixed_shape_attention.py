"""Prefix and inputs apart against the dense form, with merges and chunks that must fail."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from models.test_attention import TREE, by_definition, filled, segment_of, shape_of
from tiny_llama import close, runner_of, tiny_llama, tokens

from paceline.models.attention import fixed_shape_attention
from paceline.models.attention.fixed_shape_attention import ChunkedPrefixStep, PaddedStep, padded_masks
from paceline.models.attention.segments import Segment
from paceline.models.cuda import partial_attention
from paceline.models.cuda.partial_attention import by_kernel, far, kernel_agrees, merged
from paceline.models.passes import ScoringGraphs, graphs
from paceline.models.passes.graphs import Bucket, pack
from paceline.models.state import NativeCache
from paceline.tree import EMPTY_TREE, TokenTree

SLOTS = 256
DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")),
]


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(fixed_shape_attention, "CHUNK", 64)
    with torch.inference_mode():
        yield


class Case:
    """Three sequences, one empty, and their random queries; the keys of fed rows are written by either form."""

    def __init__(self, shape, lengths=(150, 0, 64), done=0, device="cpu"):
        torch.manual_seed(0)
        first = filled(shape, lengths[0], slots=1024)
        self.shape, self.segments = shape, []
        for length, tree in zip(lengths, (TREE, EMPTY_TREE, TokenTree.chain([1, 2, 3])), strict=True):
            cache = first if length == lengths[0] else NativeCache(first.arena)
            cache.reserve(length + 1)
            cache.length = length
            self.segments.append(segment_of(cache, tree))
        first.arena.kv.normal_()
        if done:
            tree = self.segments[0]
            self.segments[0] = Segment(tree.cache, tree.slots, done, tree.tree)
        bucket, sizes = Bucket(4, 8, 8, SLOTS, ()), Bucket(4, 8, 8, SLOTS, ()).sizes()
        flat = torch.from_numpy(pack(bucket, self.segments, [[0] * s.rows for s in self.segments])).to(device)
        parts = flat.split([int(np.prod(size)) for size in sizes.values()])
        self.given = {name: part.view(size) for part, (name, size) in zip(parts, sizes.items(), strict=True)}
        self.layers = [layer.to(device) for layer in first.arena.layers]
        self.qkv = torch.randn(32, shape.heads + 2 * shape.kv_heads, shape.head_dim, device=device) * 2

    def dense(self, layer, sinks=None):
        read = (self.given["tables"].unsqueeze(-1) * 16 + torch.arange(16, device=self.qkv.device)).view(4, SLOTS)
        masks = padded_masks(self.given, self.shape, SLOTS, self.qkv.dtype)
        step = PaddedStep(self.shape, self.layers, self.given["write"], read, masks)
        return self.valid(step.attend(layer, self.qkv, sinks))

    def apart(self, layer, sinks=None):
        step = ChunkedPrefixStep(self.shape, self.layers, self.given, self.qkv.dtype)
        return self.valid(step.attend(layer, self.qkv, sinks))

    def valid(self, out):
        assert torch.isfinite(out).all()
        return torch.cat([out[8 * i : 8 * i + s.rows] for i, s in enumerate(self.segments)])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("done", [0, 2])
def test_apart_equals_dense(softcap, done, device):
    case = Case(shape_of((None, 5, 70, 1000), softcap, head_dim=16), done=done, device=device)
    for layer in range(4):
        dense = case.dense(layer)
        assert torch.allclose(case.apart(layer), dense, atol=1e-5, rtol=0)
        assert not torch.allclose(dense, dense.roll(case.shape.head_dim, 1), atol=1e-2)


def test_apart_equals_the_definition():
    case = Case(shape_of((None, 70)))
    for layer in range(2):
        out = case.apart(layer)
        assert torch.allclose(
            out[:6], by_definition(case.shape, case.segments[0], case.qkv[:6].cpu(), layer), atol=1e-5
        )


def test_sinks_take_part_in_the_softmax():
    case = Case(shape_of((None, 70)))
    sinks = torch.randn(case.shape.kv_heads, case.shape.groups) * 3
    for layer in range(2):
        for form in (case.apart, case.dense):
            out = form(layer, sinks)[:6]
            wanted = by_definition(case.shape, case.segments[0], case.qkv[:6], layer, sinks)
            assert torch.allclose(out, wanted, atol=1e-5)
            assert not torch.allclose(form(layer)[:6], wanted, atol=1e-2)


def unweighted(parts):
    return torch.stack([out for out, _ in parts]).mean(0)


def without_the_tree(parts):
    return merged(parts[:-1])


@pytest.mark.parametrize("wrong", [unweighted, without_the_tree])
def test_other_merges_are_caught(wrong, monkeypatch):
    case = Case(shape_of())
    dense = case.dense(0)
    monkeypatch.setattr(fixed_shape_attention, "merged", wrong)
    assert not torch.allclose(case.apart(0), dense, atol=1e-2)


def test_no_mask_has_rows_and_context(monkeypatch):
    shape = shape_of((None, 70))
    case = Case(shape)
    whole, window = ChunkedPrefixStep(shape, case.layers, case.given, torch.float32)._kinds
    assert whole.prefix.shape == (4 * SLOTS // 64, 1, 1, 64)
    assert window.prefix.shape == (4 * 3, 1, 8 * shape.groups, 64)
    assert whole.inputs.shape == (4, 1, 8 * shape.groups, 8)


def test_a_row_has_the_same_bits_beside_other_rows():
    case = Case(shape_of(head_dim=32, groups=2))
    before = case.apart(0)[7:]
    case.qkv[:8] = torch.randn_like(case.qkv[:8])
    assert torch.equal(case.apart(0)[7:], before)


def absent(*args):
    raise NotImplementedError


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("device", DEVICES)
def test_the_kernel_is_taken_only_where_it_agrees(dtype, device, monkeypatch):
    found = [kernel_agrees.__wrapped__(torch.device(device), dtype, 64, one) for one in (True, False)]
    assert found[0] == found[1]
    assert found[0] or device != "cpu"
    monkeypatch.setattr(partial_attention, "by_kernel", lambda *args: [x * 1.1 for x in by_kernel(*args)])
    assert not kernel_agrees.__wrapped__(torch.device(device), dtype, 64, True)
    monkeypatch.setattr(partial_attention, "by_kernel", absent)
    assert not kernel_agrees.__wrapped__(torch.device(device), dtype, 64, True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_chunk_nobody_sees_weighs_nothing(dtype):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, n, 32, generator=generator).to(dtype) for n in (4, 64, 64))
    nothing, all_of_it = torch.full((1, 1, 1, 64), far(dtype), dtype=dtype), torch.zeros(1, 1, 1, 64, dtype=dtype)
    shape = shape_of(groups=1, head_dim=32)
    seen = partial_attention.by_definition(q, k, v, all_of_it, shape)
    unseen = partial_attention.by_definition(q, k, 100 * v, nothing, shape)
    for parts in ([seen, unseen], [unseen, seen]):
        assert torch.equal(merged(parts), seen[0].float())
    assert not torch.equal(merged([seen, (unseen[0], seen[1])]), seen[0].float())


@pytest.mark.parametrize("windows", [(), (8, None)])
def test_a_model_scores_the_same_both_ways(windows, monkeypatch):
    model = tiny_llama()
    eager, fixed = (runner_of(model, windows=windows, cache_slots=64, forget_behind_windows=False) for _ in range(2))
    fixed.graphs = ScoringGraphs(fixed.passes.decoder, fixed.rotary, fixed.arena, capture=False)
    monkeypatch.setattr(graphs, "LONG_CONTEXT", 256)
    ids, rows = tokens(200), []
    for runner in (eager, fixed):
        caches = [runner.open() for _ in range(2)]
        runner.extend(caches, [ids, ids[:5]])
        rows.append(runner.score(caches, [1, 2], [TREE, EMPTY_TREE], taps=(1,)))
    assert close(rows[0].logits, rows[1].logits, 1e-5)
    assert close(rows[0].taps[1], rows[1].taps[1], 1e-4)
    assert not close(rows[0].logits, rows[1].logits.roll(1, 0), 1e-3)
