"""Masks and attention steps against attention written out key by key."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from paceline.models.attention import Masks
from paceline.models.attention import tree_attention as module
from paceline.models.attention.fixed_shape_attention import PaddedStep, padded_masks
from paceline.models.attention.segments import Segment, tree_segment
from paceline.models.attention.tree_attention import BatchStep, SequenceStep, attention, span, spare_rows
from paceline.models.layers.linear import can_pack
from paceline.models.passes.graphs import Bucket, pack
from paceline.models.spec import AttentionShape
from paceline.models.state import NativeCache
from paceline.models.state.arena import Arena
from paceline.tree import EMPTY_TREE, TokenTree

CPU = torch.device("cpu")
CASES = (5, 40, 97)
TREE = TokenTree.build([1, 2, 3, 4, 5], [-1, -1, 0, 2, 1])


def shape_of(windows=(None,), softcap=None, groups=3, kv_heads=2, scale=0.3, head_dim=8) -> AttentionShape:
    return AttentionShape(groups, kv_heads, head_dim, scale, softcap, windows, tuple(range(len(windows))))


def filled(shape: AttentionShape, length: int, *, slots: int = 256, copy_limit: int = 1024) -> NativeCache:
    arena = Arena(len(shape.windows), shape.kv_heads, shape.head_dim, dtype=torch.float32, device=CPU, slots=slots,
                  copy_limit=copy_limit)  # fmt: skip
    cache = NativeCache(arena)
    if length:
        cache.reserve(length)
        with torch.inference_mode():
            arena.kv[:, torch.from_numpy(cache.slot_index(0, length))] = torch.randn(
                len(shape.windows), length, 2 * shape.kv_heads, shape.head_dim
            )
        cache.length = length
    return cache


def segment_of(cache: NativeCache, tree: TokenTree) -> Segment:
    segment = tree_segment(cache, tree, 0)
    cache.reserve(segment.slots)
    return segment


def visible(segment: Segment, row: int, window: int | None) -> list[int]:
    """Positions in the cache that a row sees, by the definition."""
    length, depths = segment.cache.length, None if segment.tree is None else segment.tree.depths
    depths = np.arange(segment.slots) if depths is None else depths
    sees = np.tri(segment.slots, dtype=bool) if segment.tree is None else segment.tree.sees
    near = length + depths[row] - (window or 10**9)
    inputs = [length + j for j in range(segment.slots) if sees[row, j] and length + depths[j] > near]
    return [*(p for p in range(length) if p > near), *inputs]


def by_definition(
    shape: AttentionShape, segment: Segment, qkv: torch.Tensor, layer: int, sinks: torch.Tensor | None = None
) -> torch.Tensor:
    """Key by key, head by head; reads the cache after the new keys were written."""
    cache, out = segment.cache, []
    slots = torch.from_numpy(cache.slot_index(0, cache.length + segment.slots))
    kv = cache.arena.layers[layer][slots].double()
    for row in range(segment.slots):
        seen = visible(segment, row, shape.windows[shape.kind_of[layer]])
        for head in range(shape.heads):
            kv_head = head % shape.kv_heads
            scores = kv[seen, kv_head] @ qkv[row, head].double() * shape.scale
            if shape.softcap is not None:
                scores = shape.softcap * torch.tanh(scores / shape.softcap)
            if sinks is not None:
                scores = torch.cat((scores, sinks[kv_head, head // shape.kv_heads].double().view(1)))
            out.append(torch.softmax(scores, 0)[: len(seen)] @ kv[seen, shape.kv_heads + kv_head])
    return torch.stack(out).view(segment.slots, -1).float()


def rows_for(shape: AttentionShape, segment: Segment) -> torch.Tensor:
    return torch.randn(segment.slots, shape.heads + 2 * shape.kv_heads, shape.head_dim) * 2


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("length", [0, 1, 15, 16, 40])
@pytest.mark.parametrize("tree", [EMPTY_TREE, TREE, TokenTree.chain([1, 2, 3])])
def test_a_step_equals_the_definition(softcap, length, tree):
    shape = shape_of((None, 5, 32), softcap)
    segment = segment_of(filled(shape, length), tree)
    step, qkv = SequenceStep(shape, Masks(torch.float32, CPU), segment), rows_for(shape, segment)
    for layer in range(3):
        out = step.attend(layer, qkv)
        theirs = by_definition(shape, segment, qkv, layer)
        assert torch.allclose(out, theirs, atol=1e-5)
        assert not torch.allclose(out, theirs.roll(shape.head_dim, 1), atol=1e-2)


@pytest.mark.parametrize("row_invariant", [False, True])
@pytest.mark.parametrize("tree", [EMPTY_TREE, TREE, TokenTree.chain(list(range(60)))])
def test_sinks_take_part_in_the_softmax(row_invariant, tree):
    shape = shape_of((None, 5))
    segment, sinks = segment_of(filled(shape, 20), tree), torch.randn(shape.kv_heads, shape.groups) * 3
    step, qkv = (
        SequenceStep(shape, Masks(torch.float32, CPU, row_invariant=row_invariant), segment),
        rows_for(shape, segment),
    )
    with torch.inference_mode():
        for layer in range(2):
            out = step.attend(layer, qkv, sinks)
            assert torch.allclose(out, by_definition(shape, segment, qkv, layer, sinks), atol=1e-5)
            assert not torch.allclose(out, by_definition(shape, segment, qkv, layer, sinks.flip(1)), atol=1e-2)


def test_ignoring_the_window_is_caught():
    shape = shape_of((5,))
    segment = segment_of(filled(shape, 40), TREE)
    qkv = rows_for(shape, segment)
    out = SequenceStep(shape_of((None,)), Masks(torch.float32, CPU), segment).attend(0, qkv)
    assert not torch.allclose(out, by_definition(shape, segment, qkv, 0), atol=1e-2)


def test_many_rows_leave_the_heads_unfolded():
    shape = shape_of((None, 7))
    segment = segment_of(filled(shape, 20), TokenTree.chain(list(range(60))))
    step, qkv = SequenceStep(shape, Masks(torch.float32, CPU), segment), rows_for(shape, segment)
    for layer in range(2):
        assert torch.allclose(step.attend(layer, qkv), by_definition(shape, segment, qkv, layer), atol=1e-5)


def test_a_scattered_sequence_is_gathered():
    shape = shape_of((None, 5))
    cache = filled(shape, 40, copy_limit=0)
    fork = cache.fork()
    segment = segment_of(fork, TREE)
    assert fork.base < 0
    step, qkv = SequenceStep(shape, Masks(torch.float32, CPU), segment), rows_for(shape, segment)
    for layer in range(2):
        assert torch.allclose(step.attend(layer, qkv), by_definition(shape, segment, qkv, layer), atol=1e-5)


def test_a_batch_is_its_sequences():
    shape = shape_of()
    cache = filled(shape, 20)
    segments = [segment_of(cache.fork(), tree) for tree in (TREE, EMPTY_TREE)]
    masks, qkv = Masks(torch.float32, CPU), torch.randn(7, shape.heads + 4, 8)
    out = BatchStep(shape, masks, segments, SequenceStep).attend(0, qkv)
    alone = [SequenceStep(shape, masks, s).attend(0, part) for s, part in zip(segments, qkv.split([6, 1]), strict=True)]
    assert torch.equal(out, torch.cat(alone))


@pytest.mark.parametrize("windows", [(None,), (5,), (None, 20)])
def test_padded_steps_equal_sequences(windows):
    shape = shape_of(windows)
    first = filled(shape, 20)
    segments = [segment_of(first, TREE), segment_of(NativeCache(first.arena), EMPTY_TREE)]
    bucket = Bucket(2, 8, 8, 64, ())
    flat = torch.from_numpy(pack(bucket, segments, [[0] * 6, [0]]))
    sizes = bucket.sizes()
    parts = flat.split([int(np.prod(size)) for size in sizes.values()])
    given = {name: part.view(size) for part, (name, size) in zip(parts, sizes.items(), strict=True)}
    read = (given["tables"].unsqueeze(-1) * 16 + torch.arange(16)).view(2, 64)
    qkv = torch.randn(16, shape.heads + 4, 8)
    padded = PaddedStep(shape, first.arena.layers, given["write"], read, padded_masks(given, shape, 64, torch.float32))
    for layer in range(len(windows)):
        with torch.inference_mode():
            out = padded.attend(layer, qkv)
        assert torch.isfinite(out).all()
        assert torch.allclose(out[:6], by_definition(shape, segments[0], qkv[:6], layer), atol=1e-5)
        assert torch.allclose(out[8:9], by_definition(shape, segments[1], qkv[8:9], layer), atol=1e-5)


def test_spans_are_whole_blocks():
    cache = filled(shape_of(), 100)
    assert span(Segment(cache, 6), None) == (0, 112)
    assert span(Segment(cache, 1), 10) == (80, 112)
    assert span(Segment(cache, 1), 21) == (80, 112)
    assert span(Segment(cache, 1), 22) == (64, 112)
    assert span(Segment(cache, 1), 1) == (96, 112)


def test_constant_masks():
    masks = Masks(torch.float32, CPU)
    assert masks.row(3, 5)[0, 0, 0].tolist() == [0, 0, 0, -torch.inf, -torch.inf]
    assert masks.row(9000, 9008)[0, 0, 0].isinf().sum() == 8


def test_attention_with_a_cap_far_away_is_plain_attention():
    q, kv, mask = torch.randn(1, 2, 3, 8), torch.randn(1, 2, 6, 8), torch.zeros(1, 1, 3, 6)
    plain, capped = attention(q, kv, kv, mask, shape_of()), attention(q, kv, kv, mask, shape_of(softcap=1e4))
    assert torch.allclose(plain, capped, atol=1e-5)
    assert not torch.allclose(plain, attention(q, kv, kv, mask, shape_of(softcap=0.5)), atol=1e-3)


def test_spare_rows():
    assert [spare_rows(n) for n in (1, 2, 3, 4, 5, 32, 33, 36, 66)] == [3, 2, 1, 0, 0, 0, 3, 0, 2]


@pytest.mark.skipif(not can_pack(CPU, torch.bfloat16), reason="bit equality is claimed for CPUs with packed bfloat16")
@pytest.mark.parametrize("groups", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_the_same_bits_alone_and_among_others(groups, dtype, monkeypatch):
    shape = shape_of(groups=groups, head_dim=32)
    assert alone_equals_among(shape, dtype)
    if dtype is torch.bfloat16:  # rounding the result hides other orders
        return
    assert not alone_equals_among(shape, dtype, turned=True)
    if rows_round_otherwise(shape, dtype):
        monkeypatch.setattr(module, "spare_rows", lambda rows: 0)
        assert not alone_equals_among(shape, dtype)


def random_case(shape: AttentionShape, dtype: torch.dtype, length: int) -> tuple[NativeCache, torch.Tensor]:
    """A sequence with random keys and values, and random projections of eight rows behind it."""
    arena = Arena(1, shape.kv_heads, shape.head_dim, dtype=dtype, device=CPU)
    cache = NativeCache(arena)
    cache.reserve(length + 8)
    cache.length = length
    torch.manual_seed(length)
    with torch.inference_mode():
        arena.kv.copy_(torch.randn(arena.kv.shape))
    return cache, torch.randn(8, shape.heads + 2 * shape.kv_heads, shape.head_dim).to(dtype)


def alone_equals_among(shape: AttentionShape, dtype: torch.dtype, *, turned: bool = False) -> bool:
    """Whether a row has the same bits among eight rows and alone; `turned`: alone over the same keys in reverse, which
    sums in another order on every CPU.
    """
    masks, same = Masks(dtype, CPU), True
    for length in CASES:
        cache, qkv = random_case(shape, dtype, length)
        among = SequenceStep(shape, masks, Segment(cache, 8)).attend(0, qkv)
        if turned:
            slots = torch.from_numpy(cache.slot_index(0, length))
            with torch.inference_mode():
                cache.arena.kv[:, slots] = cache.arena.kv[:, slots.flip(0)]
        alone = SequenceStep(shape, masks, Segment(cache, 1)).attend(0, qkv[:1])
        same &= torch.equal(alone, among[:1])
    return same


def rows_round_otherwise(shape: AttentionShape, dtype: torch.dtype) -> bool:
    """Whether PyTorch's attention on this CPU gives the few queries of one row other bits than among those of eight."""
    if shape.groups >= 4:
        return False
    for length in CASES:
        cache, qkv = random_case(shape, dtype, length)
        qkv, stop = qkv[:, : shape.heads], span(Segment(cache, 8), None)[1]
        keys, values = cache.views(0, stop)[0]
        queries = qkv.reshape(1, 8 * shape.groups, shape.kv_heads, shape.head_dim).transpose(1, 2)
        mask = torch.zeros(8 * shape.groups, stop, dtype=dtype)
        mask[:, length + 1 :] = -torch.inf
        many = attention(queries, keys, values, mask, shape)[:, :, : shape.groups]
        few = attention(queries[:, :, : shape.groups], keys, values, mask[: shape.groups], shape)
        if not torch.equal(many, few):
            return True
    return False
