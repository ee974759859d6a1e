"""Blocks, reference counts, growth and forks of the cache, against a model that keeps a plain list per sequence."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from paceline.errors import ConfigError
from paceline.models.state import NativeCache
from paceline.models.state.arena import Arena, adjacent, blocks_for
from paceline.models.state.block_pool import BlockPool
from paceline.models.state.window_slots import BLOCK


def arena_of(slots: int = 64, copy_limit: int = 1024) -> Arena:
    return Arena(2, 1, 2, dtype=torch.float32, device=torch.device("cpu"), slots=slots, copy_limit=copy_limit)


def write(cache: NativeCache, values: list[int]) -> None:
    """Reserve and fill scratch slots with the values (in layer 0 and, negated, in layer 1)."""
    cache.reserve(len(values))
    slots = torch.from_numpy(cache.slot_index(cache.length, cache.length + len(values)))
    filled = torch.tensor(values, dtype=torch.float32)[:, None, None].expand(-1, 2, 2)
    with torch.inference_mode():
        cache.arena.layers[0][slots] = filled
        cache.arena.layers[1][slots] = -filled
    cache.scratch = len(values)


def read(cache: NativeCache) -> list[int]:
    slots = torch.from_numpy(cache.slot_index(0, cache.length))
    first, second = (layer[slots, 0, 0].tolist() for layer in cache.arena.layers)
    assert first == [-value for value in second]
    return first


def append(cache: NativeCache, values: list[int]) -> None:
    write(cache, values)
    cache.commit(range(len(values) - 1))


def test_blocks_for():
    assert [blocks_for(n) for n in (0, 1, 16, 17)] == [0, 1, 1, 2]


def test_pool_finds_the_first_free_run():
    pool = BlockPool(8)
    pool.add_reference(range(0, 0 + 2))
    pool.add_reference(range(3, 3 + 1))
    assert (pool.find(1), pool.find(2), pool.find(5)) == (2, 4, None)
    assert pool.is_free(4, 4)
    assert not pool.is_free(4, 5)
    assert not pool.is_free(2, 2)
    pool.drop([3])
    assert pool.find(5) == 2


def test_a_lone_sequence_stays_contiguous_and_is_read_by_views():
    cache = NativeCache(arena_of())
    for value in range(100):
        append(cache, [value])
    assert read(cache) == list(range(100))
    assert adjacent(cache.blocks)
    keys, values = cache.views(16, 96)[1]
    assert keys.shape == values.shape == (1, 1, 80, 2)
    assert keys[0, 0, :, 0].tolist() == [-float(v) for v in range(16, 96)]
    assert keys.data_ptr() == cache.arena.kv[1, cache.base + 16].data_ptr()


def test_growth_keeps_all_sequences():
    arena = arena_of(32)
    caches = [NativeCache(arena) for _ in range(3)]
    for value in range(90):
        for i, cache in enumerate(caches):
            append(cache, [1000 * i + value])
    assert arena.version >= 3
    assert [read(cache) for cache in caches] == [[1000 * i + v for v in range(90)] for i in range(3)]


def test_views_follow_the_sequence_when_the_arena_moves():
    arena = arena_of(48)
    cache = NativeCache(arena)
    append(cache, [1, 2, 3])
    before = cache.views(0, 16)[0][0]
    append(other := NativeCache(arena), list(range(60)))
    assert other.length == 60
    after = cache.views(0, 16)[0][0]
    assert after.data_ptr() != before.data_ptr()
    assert after[0, 0, :3, 0].tolist() == [1, 2, 3]


def test_keep_compacts_the_path():
    cache = NativeCache(arena_of())
    append(cache, [7, 8])
    write(cache, [10, 11, 12, 13, 14, 15])
    cache.commit((1, 2, 4))
    assert read(cache) == [7, 8, 10, 12, 13, 15]


@pytest.mark.parametrize("copy_limit", [0, 1024])
def test_forks_share_until_one_writes(copy_limit):
    arena = arena_of(256, copy_limit)
    cache = NativeCache(arena)
    append(cache, list(range(40)))
    held = len(arena.pool.counts) - arena.pool.free
    fork = cache.fork()
    assert len(arena.pool.counts) - arena.pool.free == held
    append(fork, [100])
    append(cache, [200])
    assert read(fork) == [*range(40), 100]
    assert read(cache) == [*range(40), 200]
    shared = set(fork.blocks) & set(cache.blocks)
    assert len(shared) == (2 if copy_limit == 0 else 0)
    assert (fork.base < 0) == (copy_limit == 0)


def test_without_copy_on_write_the_fork_would_be_overwritten(monkeypatch):
    cache = NativeCache(arena_of())
    append(cache, list(range(10)))
    fork = cache.fork()
    monkeypatch.setattr(NativeCache, "relocate", lambda *args: None)
    append(fork, [100])
    append(cache, [200])
    assert read(fork) != [*range(10), 100]


def test_truncate_gives_shared_blocks_back():
    arena = arena_of(256)
    cache = NativeCache(arena)
    append(cache, list(range(50)))
    fork = cache.fork()
    fork.truncate(20)
    assert len(fork.blocks) == 2
    append(fork, list(range(100, 130)))
    assert read(fork) == [*range(20), *range(100, 130)]
    assert read(cache) == list(range(50))


def test_release_frees_everything_once():
    arena = arena_of()
    cache = NativeCache(arena)
    append(cache, [1, 2, 3])
    fork = cache.fork()
    for each in (cache, cache, fork):
        each.release()
    assert arena.pool.counts.tolist() == [1] + [0] * (len(arena.pool.counts) - 1)
    with pytest.raises(ConfigError, match="released"):
        cache.reserve(1)


def test_a_sequence_grows_by_half_where_there_is_room_and_by_what_it_needs_where_there_is_not():
    arena = arena_of(slots=20 * BLOCK)
    cache = NativeCache(arena)
    append(cache, [5] * (4 * BLOCK))
    assert len(cache.blocks) == 8
    append(cache, [6] * (4 * BLOCK + 1))
    assert len(cache.blocks) == 12
    arena.single_blocks = True
    append(cache, [7] * (4 * BLOCK))
    assert len(cache.blocks) == 13
    arena.pool.add_reference(range(cache.blocks[-1] + 3, cache.blocks[-1] + 3 + 1))  # two are left behind it
    arena.single_blocks = False
    append(cache, [8] * (BLOCK - 1))
    assert len(cache.blocks) == 13
    append(cache, [9])
    assert (len(cache.blocks), cache.length) == (14, 13 * BLOCK + 1)
    assert cache.base >= 0


def test_blocks_that_no_mask_reads_are_left_as_they_are():
    arena = arena_of()
    arena.masked = False
    cache = NativeCache(arena)
    append(cache, [5] * 20)
    used = list(cache.blocks)
    cache.release()
    other = NativeCache(arena)
    other.reserve(20)
    assert other.blocks == used
    assert arena.layers[0][torch.from_numpy(other.slot_index(0, 20))].all()


def test_reused_blocks_are_zeroed():
    arena = arena_of()
    cache = NativeCache(arena)
    append(cache, [5] * 20)
    used = list(cache.blocks)
    cache.release()
    other = NativeCache(arena)
    other.reserve(20)
    assert set(used) & set(other.blocks)
    slots = torch.from_numpy(other.slot_index(0, 20))
    assert not arena.layers[0][slots].any()


def test_paths_outside_the_scratch_are_rejected():
    cache = NativeCache(arena_of())
    with pytest.raises(ConfigError, match="score first"):
        cache.commit(())
    write(cache, [1, 2])
    with pytest.raises(ConfigError, match="does not lie"):
        cache.commit((1,))


class Caches(RuleBasedStateMachine):
    """Any sequence of operations leaves every sequence with its own tokens and the pool without leaks."""

    @initialize(copy_limit=st.sampled_from([0, 24, 1024]))
    def start(self, copy_limit):
        self.arena = arena_of(48, copy_limit)
        self.live: list[tuple[NativeCache, list[int]]] = []
        self.next = 1

    @rule()
    def open(self):
        if len(self.live) < 5:
            self.live.append((NativeCache(self.arena), []))

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 9), count=st.integers(1, 40), keep=st.sets(st.integers(0, 38)))
    def score_and_commit(self, which, count, keep):
        cache, model = self.live[which % len(self.live)]
        values = list(range(self.next, self.next + count))
        self.next += count
        write(cache, values)
        path = sorted(node for node in keep if node < count - 1)
        cache.commit(path)
        model.extend([values[0], *(values[1 + node] for node in path)])

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 9), part=st.floats(0, 1))
    def truncate(self, which, part):
        cache, model = self.live[which % len(self.live)]
        length = int(part * len(model))
        cache.truncate(length)
        del model[length:]

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 9))
    def fork(self, which):
        if len(self.live) < 5:
            cache, model = self.live[which % len(self.live)]
            self.live.append((cache.fork(), list(model)))

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 9))
    def release(self, which):
        self.live.pop(which % len(self.live))[0].release()

    @invariant()
    def contents_and_counts(self):
        held = np.zeros(len(self.arena.pool.counts), np.int32)
        held[0] = 1
        for cache, model in self.live:
            assert cache.length == len(model)
            assert read(cache) == model
            assert len(cache.blocks) * BLOCK >= cache.length
            held[cache.blocks] += 1
            if cache.blocks:
                assert cache.base == (cache.blocks[0] * BLOCK if adjacent(cache.blocks) else -1)
        assert np.array_equal(held, self.arena.pool.counts)


TestCaches = Caches.TestCase
TestCaches.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
