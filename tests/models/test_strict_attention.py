"""Attention in chunks: values against the definition, bits against plain decoding, with variants that must fail."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from models.test_attention import CPU, TREE, by_definition, filled, rows_for, segment_of, shape_of
from tiny_llama import runner_of, tiny_llama, tokens

from paceline.models.attention import Masks, strict_attention
from paceline.models.attention.segments import Segment, tree_segment
from paceline.models.attention.strict_attention import CHUNK, FAR, PIECE, plan_chunks, products_keep_order
from paceline.models.attention.tree_attention import BatchStep, SequenceStep, takes_strict_attention
from paceline.models.layers.linear import can_pack
from paceline.models.spec import AttentionShape
from paceline.models.state import NativeCache
from paceline.models.state.arena import Arena
from paceline.tree import EMPTY_TREE, TokenTree

LENGTHS = (30, PIECE - 2, 500, CHUNK - 1, CHUNK, 2 * CHUNK + 120)
DTYPES = (torch.float32, torch.bfloat16)
SHAPES = (
    shape_of(head_dim=32),
    shape_of((None, 100, 700), head_dim=32, groups=1),
    shape_of(softcap=5.0, kv_heads=3, head_dim=16),
)
needs_order = pytest.mark.skipif(
    not products_keep_order(2, 32), reason="matrix products of this machine do not keep the order"
)


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


MASKS = Masks(torch.float32, CPU, row_invariant=True)


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("length", [0, 40, *LENGTHS[2:]])
@pytest.mark.parametrize("tree", [EMPTY_TREE, TREE, TokenTree.chain(list(range(40)))])
def test_chunks_equal_the_definition(softcap, length, tree):
    shape = shape_of((None, 20, 600), softcap)
    segment = segment_of(filled(shape, length, slots=2048), tree)
    qkv = rows_for(shape, segment)
    step = SequenceStep(shape, MASKS, segment)
    for layer in range(3):
        out, theirs = step.attend(layer, qkv), by_definition(shape, segment, qkv, layer)
        assert torch.allclose(out, theirs, atol=1e-5)
        assert not torch.allclose(out, theirs.roll(shape.head_dim, 1), atol=1e-2)


def test_a_lost_chunk_is_caught(monkeypatch):
    shape = shape_of()
    segment = segment_of(filled(shape, 2 * CHUNK, slots=2048), TREE)
    qkv = rows_for(shape, segment)
    monkeypatch.setattr(strict_attention.ChunkPlanner, "first_chunk", lambda self, rows, k: 1)
    out = SequenceStep(shape, MASKS, segment).attend(0, qkv)
    assert not torch.allclose(out, by_definition(shape, segment, qkv, 0), atol=1e-3)


@pytest.mark.parametrize("length", [500, CHUNK + 40])
def test_a_scattered_sequence_is_gathered(length):
    shape = shape_of((None, 100))
    cache = filled(shape, length, copy_limit=0, slots=2048)
    fork = cache.fork()
    segment = segment_of(fork, TokenTree.build(list(range(30)), [-1, *range(15), *range(14)]))
    assert fork.base < 0
    qkv = rows_for(shape, segment)
    step = SequenceStep(shape, MASKS, segment)
    for layer in range(2):
        assert torch.allclose(step.attend(layer, qkv), by_definition(shape, segment, qkv, layer), atol=1e-5)


def test_inputs_already_scored_are_not_fed_again():
    shape = shape_of()
    segment = segment_of(filled(shape, CHUNK - 2, slots=2048), TREE)
    qkv = rows_for(shape, segment)
    whole = SequenceStep(shape, MASKS, segment).attend(0, qkv)
    rest = Segment(segment.cache, segment.slots, 2, segment.tree)
    assert torch.allclose(SequenceStep(shape, MASKS, rest).attend(0, qkv[2:]), whole[2:], atol=1e-6)


def test_when_a_pass_is_split():
    shape = shape_of(groups=2)
    segment = Segment(filled(shape, 600, slots=2048), 8)
    assert takes_strict_attention(shape, MASKS, segment)
    assert not takes_strict_attention(shape, Masks(torch.float32, CPU), segment)
    assert not takes_strict_attention(shape, MASKS, Segment(segment.cache, 600))


def test_plans_cut_at_fixed_positions():
    cache = filled(shape_of(), CHUNK + 2 * PIECE - 3, slots=2048)
    (group,) = plan_chunks(segment_of(cache, TokenTree.chain([1, 2])), None)
    assert [(part.count, part.mask) for part in group.chunks] == [(CHUNK, None)]
    assert [(piece.start, piece.count) for piece in group.pieces] == [(0, PIECE), (PIECE, PIECE)]
    (group,) = plan_chunks(segment_of(cache, TREE), None)
    assert [piece.start for piece in group.pieces] == [0, PIECE, 2 * PIECE - 3]
    assert (group.pieces[1].within[:, PIECE - 3 : PIECE + 3] + group.pieces[2].within[:, :6] == 1).all()
    assert set(group.tail.mask.unique().tolist()) == {0.0, float(np.float32(FAR))}
    cache.length = CHUNK - 1
    assert len(plan_chunks(segment_of(cache, TREE), None)) == 6
    assert len(plan_chunks(segment_of(cache, TokenTree.chain([1, 2, 3])), None)) == 2


def random_tree(rng: np.random.Generator, nodes: int) -> TokenTree:
    parents = [-1, *(int(rng.integers(max(-1, i - 4), i)) for i in range(1, nodes))]
    return TokenTree.build(rng.permutation(1000)[:nodes].tolist(), parents)


class World:
    """An arena with random content; scores a tree, and its paths one token at a time in a cache of their own."""

    def __init__(self, shape: AttentionShape, dtype: torch.dtype, masks: Masks, seed: int = 0) -> None:
        self.shape, self.dtype, self.masks = shape, dtype, masks
        self.rng, _ = np.random.default_rng(seed), torch.manual_seed(seed)
        self.arena = Arena(len(shape.windows), shape.kv_heads, shape.head_dim, dtype=dtype, device=CPU, slots=8192)
        self.arena.kv.normal_()

    def tree(self, length: int, nodes: int) -> tuple[Segment, torch.Tensor, TokenTree]:
        cache, tree = NativeCache(self.arena), random_tree(self.rng, nodes)
        cache.reserve(length + nodes + 1)
        cache.length = length
        qkv = torch.randn(nodes + 1, self.shape.heads + 2 * self.shape.kv_heads, self.shape.head_dim) * 1.5
        return tree_segment(cache, tree, 0), qkv.to(self.dtype), tree

    def path(self, segment: Segment, qkv: torch.Tensor, inputs: list[int], layer: int) -> torch.Tensor:
        cache, length = NativeCache(self.arena), segment.cache.length
        cache.reserve(length + len(inputs))
        own, theirs = (torch.from_numpy(c.slot_index(0, length)) for c in (cache, segment.cache))
        out = []
        self.arena.kv[:, own] = self.arena.kv[:, theirs]
        for i in inputs:
            cache.length = length + len(out)
            out.append(SequenceStep(self.shape, self.masks, Segment(cache, 1)).attend(layer, qkv[i : i + 1]))
        cache.release()
        return torch.cat(out)


def equal_to_plain(shape: AttentionShape, dtype: torch.dtype, *, row_invariant: bool = True) -> bool:
    """Whether all rows of random trees, scored in batches of two, have the bits of plain decoding along their paths."""
    world = World(shape, dtype, Masks(dtype, CPU, row_invariant=row_invariant))
    same = True
    for turn, length in enumerate(LENGTHS):
        layer = turn % len(shape.windows)
        found = [world.tree(length, int(world.rng.integers(6, 50))), world.tree(LENGTHS[turn - 1], 3)]
        step = BatchStep(shape, world.masks, [segment for segment, _, _ in found], SequenceStep)
        outs = step.attend(layer, torch.cat([qkv for _, qkv, _ in found])).split([len(qkv) for _, qkv, _ in found])
        for (segment, qkv, tree), out in zip(found, outs, strict=True):
            inputs = [0, *(node + 1 for node in tree.path(len(tree) - 1))]
            same &= torch.equal(world.path(segment, qkv, inputs, layer), out[inputs])
            segment.cache.release()
    return same


@needs_order
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_row_has_the_bits_of_plain_decoding_in_any_tree(dtype, shape):
    assert equal_to_plain(shape, dtype)


@needs_order
def test_sums_in_any_order_are_caught(monkeypatch):
    shape = shape_of(head_dim=32, groups=1)
    assert not equal_to_plain(shape, torch.float32, row_invariant=False)
    with monkeypatch.context() as patch:
        patch.setattr(strict_attention, "ROW_MULTIPLE", 1)
        assert not equal_to_plain(shape, torch.float32)
    monkeypatch.setattr(
        strict_attention.StrictAttention, "pieced", lambda self, q, group, *rest: self.whole(q, group.tail, *rest)
    )  # the weights are summed in the order of slots
    assert not equal_to_plain(shape, torch.float32)


def test_the_check_of_products_finds_a_wrong_order(monkeypatch):
    monkeypatch.setattr(torch, "baddbmm", lambda before, a, b: before + a.flip(2) @ b.flip(1) + 1e-7 * a.shape[2])
    assert not products_keep_order.__wrapped__(2, 32)


@needs_order
@pytest.mark.skipif(not can_pack(CPU, torch.bfloat16), reason="needs packed layers, which keep a row's bits too")
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_model_scores_trees_with_the_bits_of_plain_decoding(dtype, monkeypatch):
    runner = runner_of(tiny_llama(head_dim=32, max_position_embeddings=2048).to(dtype), compiled=False)
    ids, tree = tokens(CHUNK + 12, seed=3), TokenTree.build([5, 6, 7, 8, 9, 4], [-1, -1, 0, 1, 2, 3])

    def rows(masks: Masks) -> tuple[torch.Tensor, torch.Tensor]:
        monkeypatch.setattr(runner.passes, "masks", masks)
        cache, plain = runner.open(), []
        runner.extend([cache], [ids[: CHUNK - 3]])
        fork = runner.fork(cache)
        for token in (ids[CHUNK], 6, 8, 4):
            plain.append(runner.score([cache], [token], [EMPTY_TREE]).logits)
            runner.commit([cache], [()])
        return torch.cat(plain), runner.score([fork], [ids[CHUNK]], [tree]).logits[[0, 2, 4, 6]]

    plain, drafted = rows(Masks(dtype, CPU, row_invariant=True))
    assert torch.equal(plain, drafted)
    assert not torch.equal(plain[1:], drafted[:-1])
    if dtype is torch.float32:
        assert not torch.equal(*rows(Masks(dtype, CPU)))
