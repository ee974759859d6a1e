"""Every kind of pass shows its rows what the one description of their segment says.

Where attention is computed, keys are all alike, so that whatever a row sees has the same weight, and each value names
the place of its token in the sequence.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
import torch
from models.test_attention import CPU, shape_of
from models.test_strict_attention import random_tree

from paceline.models.attention import Masks, fixed_shape_attention, strict_attention
from paceline.models.attention.fixed_shape_attention import ChunkedPrefixStep, PaddedStep, padded_masks
from paceline.models.attention.segments import Bools, Segment, split_into_passes, tree_segment
from paceline.models.attention.slot_lists import SlotLists, fill
from paceline.models.attention.tree_attention import BatchStep, SequenceStep
from paceline.models.passes.graphs import Bucket, pack
from paceline.models.state import NativeCache
from paceline.models.state.arena import Arena
from paceline.tree import EMPTY_TREE, TokenTree

WINDOWS = (None, 5, 40)
PLACES = 128
"""Of a sequence, the last of which nobody has: what lies in slots that no row may see bears its name."""
SHAPE = shape_of(WINDOWS, groups=2, kv_heads=1, head_dim=PLACES)
LENGTHS = (0, 30, 66, 3, 47, 90)
SEEDS = range(4)


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for module in (strict_attention, fixed_shape_attention):
        monkeypatch.setattr(module, "CHUNK", 32)
    monkeypatch.setattr(strict_attention, "PIECE", 8)
    with torch.inference_mode():
        yield


@dataclass
class Forest:
    """Sequences with trees, chains and single tokens behind them, some of whose inputs are scored already."""

    arena: Arena
    segments: list[Segment]
    trees: list[TokenTree]
    others: list[NativeCache]


def forest(seed: int) -> Forest:
    rng = np.random.default_rng(seed)
    trees = [random_tree(rng, int(rng.integers(5, 24))) for _ in range(4)]
    trees += [TokenTree.chain(list(range(int(rng.integers(1, 24))))), EMPTY_TREE]
    return planted(trees, np.roll(LENGTHS, -seed).tolist(), [int(rng.integers(0, len(tree) + 1)) for tree in trees])


def planted(trees: list[TokenTree], lengths: Sequence[int], scored: Sequence[int]) -> Forest:
    """Trees behind so many committed tokens each, and how many of their inputs are scored."""
    arena = Arena(3, 1, PLACES, dtype=torch.float32, device=CPU, copy_limit=0)
    segments, others = list[Segment](), list[NativeCache]()
    for index, (tree, length, done) in enumerate(zip(trees, lengths, scored, strict=True)):
        cache = NativeCache(arena)
        cache.reserve(length)
        cache.length = length
        if index % 2:  # shares its first blocks, so that its slots are apart
            others.append(cache)
            cache = cache.fork()
        segment = tree_segment(cache, tree, done)
        cache.reserve(segment.slots)
        segments.append(segment)
    arena.kv.zero_()
    arena.kv[:, :, 1, -1] = 1.0
    for segment in segments:
        slots = torch.from_numpy(segment.cache.slot_index(0, segment.cache.length + segment.slots))
        arena.kv[:, slots, 1] = torch.eye(PLACES)[: len(slots)]
    return Forest(arena, segments, trees, others)


def rows_of(segment: Segment) -> torch.Tensor:
    """(rows, heads + 2, PLACES): queries and keys of zeros, and the places of the rows as values."""
    rows = torch.zeros(segment.rows, SHAPE.heads + 2, PLACES)
    rows[:, -1] = torch.eye(PLACES)[segment.cache.length :][segment.done : segment.slots]
    return rows


def shown(out: torch.Tensor) -> Bools:
    """(rows, PLACES): which places have weight in what attention gave (rows, heads * PLACES)."""
    return (out[:, :PLACES] > 1e-4).numpy()


def by_sequence(segments: Sequence[Segment], layer: int, *, row_invariant: bool) -> Bools:
    """Masks, or chunks of strict passes."""
    step = BatchStep(SHAPE, Masks(torch.float32, CPU, row_invariant=row_invariant), segments, SequenceStep)
    return shown(step.attend(layer, torch.cat([rows_of(segment) for segment in segments])))


def by_fixed_shapes(segments: Sequence[Segment], layer: int, *, chunked: bool) -> Bools:
    """Buffers that a captured graph reads."""
    bucket, layers = Bucket(8, 32, 32, PLACES, ()), segments[0].cache.arena.layers
    flat, sizes = torch.from_numpy(pack(bucket, segments, [[0] * segment.rows for segment in segments])), bucket.sizes()
    parts = flat.split([int(np.prod(size)) for size in sizes.values()])
    given = {name: part.view(size) for part, (name, size) in zip(parts, sizes.items(), strict=True)}
    qkv = torch.zeros(8, 32, SHAPE.heads + 2, PLACES)
    for i, segment in enumerate(segments):
        qkv[i, : segment.rows] = rows_of(segment)
    step: ChunkedPrefixStep | PaddedStep
    if chunked:
        step = ChunkedPrefixStep(SHAPE, layers, given, torch.float32)
    else:
        read = (given["tables"].unsqueeze(-1) * 16 + torch.arange(16)).view(8, PLACES)
        step = PaddedStep(SHAPE, layers, given["write"], read, padded_masks(given, SHAPE, PLACES, torch.float32))
    out = step.attend(layer, qkv.flatten(0, 1)).unflatten(0, (8, 32))
    return np.concatenate([shown(out[i, : segment.rows]) for i, segment in enumerate(segments)])


def by_lists(segments: Sequence[Segment], layer: int) -> Bools:
    """Lists of slots for compiled code, each in the order of positions."""
    lists, found = SlotLists(segments[0].cache.arena), []
    for segment in segments:
        cache, stop, kept = segment.cache, segment.cache.length + segment.slots, list[np.ndarray]()
        records = np.zeros((segment.rows, 4), np.int64)
        fill(segment, WINDOWS[layer], lists.of(cache, stop, kept), records, kept)
        places = {slot: place for place, slot in enumerate(cache.slot_index(0, stop).tolist())}
        positions = [*range(cache.length), *(segment.depths + cache.length).tolist()]
        for shared, shared_count, own, own_count in records.tolist():
            seen = [places[slot] for slot in listed(shared, shared_count) + listed(own, own_count)]
            assert [positions[place] for place in seen] == sorted({positions[place] for place in seen})
            found.append(np.isin(np.arange(PLACES), seen))
    return np.stack(found)


def listed(address: int, count: int) -> list[int]:
    return list((ctypes.c_int64 * count).from_address(address))


FORMS: dict[str, Callable[[Sequence[Segment], int], Bools]] = {
    "masks": partial(by_sequence, row_invariant=False),
    "chunks": partial(by_sequence, row_invariant=True),
    "padded": partial(by_fixed_shapes, chunked=False),
    "padded, in chunks": partial(by_fixed_shapes, chunked=True),
    "lists": by_lists,
}


def described(segments: Sequence[Segment], window: int | None) -> Bools:
    """(rows, PLACES): what the segments say."""
    found = []
    for segment in segments:
        length, (first, inputs) = segment.cache.length, segment.visible(window)
        seen = np.zeros((segment.rows, PLACES), np.bool_)
        seen[:, :length], seen[:, length : length + segment.slots] = np.arange(length) >= first[:, None], inputs
        found.append(seen)
    return np.concatenate(found)


def by_definition(woods: Forest, window: int | None) -> Bools:
    """A row sees itself, the nodes above it, the root and the text before that, as far as its window reaches."""
    found = []
    for segment, tree in zip(woods.segments, woods.trees, strict=True):
        length = segment.cache.length
        for place in range(segment.done, segment.slots):
            above = [0] if place == 0 else [0, *(node + 1 for node in tree.path(place - 1))]
            path = [*range(length), *(length + i for i in above)]
            found.append(np.isin(np.arange(PLACES), path if window is None else path[-window:]))
    return np.stack(found)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_description_is_the_definition(seed: int) -> None:
    woods = forest(seed)
    for window in WINDOWS:
        assert np.array_equal(described(woods.segments, window), by_definition(woods, window))
    assert not np.array_equal(described(woods.segments, 6), by_definition(woods, 5))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("form", FORMS)
def test_every_form_shows_what_the_description_says(form: str, seed: int) -> None:
    woods = forest(seed)
    assert {segment.cache.base < 0 for segment in woods.segments} == {True, False}
    for layer, window in enumerate(WINDOWS):
        for segments in [woods.segments, *split_into_passes(woods.segments, 7)]:
            assert np.array_equal(FORMS[form](segments, layer), described(segments, window))
    assert not np.array_equal(FORMS[form](woods.segments, 1), described(woods.segments, 6))


@pytest.mark.parametrize("form", FORMS)
def test_single_rows_lose_sight_of_the_first_token_where_the_window_ends(form: str) -> None:
    woods = planted([EMPTY_TREE] * 6, (3, 4, 5, 38, 39, 40), [0] * 6)
    for layer, (window, sighted) in enumerate(zip(WINDOWS, (6, 2, 5), strict=True)):
        seen = FORMS[form](woods.segments, layer)
        assert np.array_equal(seen, by_definition(woods, window))
        assert seen[:, 0].sum() == sighted


@pytest.mark.parametrize("form", FORMS)
def test_every_form_follows_a_description_that_hides_the_root(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    segments = [segment for segment in forest(0).segments if segment.tree is not None]
    before = FORMS[form](segments, 0)

    def without_root(segment: Segment) -> Bools:
        assert segment.tree is not None
        sees = segment.tree.sees.copy()
        sees[-1, 0] = False
        return sees

    monkeypatch.setattr(Segment, "sees", property(without_root))
    after = FORMS[form](segments, 0)
    assert np.array_equal(after, described(segments, None))
    assert (before ^ after).sum() == len(segments)


def test_a_cut_pass_is_described_as_the_whole_one() -> None:
    woods = forest(1)
    for window in WINDOWS:
        passes = split_into_passes(woods.segments, 7)
        assert len(passes) > 3
        parts = np.concatenate([described(segments, window) for segments in passes])
        assert np.array_equal(parts, described(woods.segments, window))
        assert not np.array_equal(parts[::-1], described(woods.segments, window))
