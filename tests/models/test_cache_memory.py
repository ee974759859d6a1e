"""The limit of an arena: what is left under it, sequences in single blocks, kept prefixes that make way, and what is
rejected.
"""

from __future__ import annotations

import pytest
import torch

from paceline.errors import ConfigError
from paceline.models.state import NativeCache, cache_memory
from paceline.models.state.arena import Arena
from paceline.models.state.cache_memory import ArenaMemory
from paceline.models.state.window_slots import BLOCK


def memory_of(blocks: int, slots: int = 2048) -> tuple[Arena, ArenaMemory]:
    """An arena limited to `blocks` blocks, one of which belongs to nobody."""
    arena = Arena(2, 1, 2, dtype=torch.float32, device=torch.device("cpu"), slots=slots)
    memory = ArenaMemory(arena)
    memory.set_limit(blocks * memory.block_bytes)
    return arena, memory


def append(cache: NativeCache, values: list[int]) -> None:
    cache.reserve(len(values))
    slots = torch.from_numpy(cache.slot_index(cache.length, cache.length + len(values)))
    with torch.inference_mode():
        cache.arena.kv[:, slots] = torch.tensor(values, dtype=torch.float32)[None, :, None, None]
    cache.scratch = len(values)
    cache.commit(range(len(values) - 1))


def read(cache: NativeCache) -> list[int]:
    return cache.arena.kv[0, torch.from_numpy(cache.slot_index(0, cache.length)), 0, 0].int().tolist()


def test_the_limit_is_in_bytes_and_shrinks_what_was_allocated() -> None:
    arena, memory = memory_of(10)
    assert memory.capacity == memory.left() == 9
    assert arena.kv.nbytes == 10 * memory.block_bytes
    with pytest.raises(ConfigError, match=f"at least {3 * memory.block_bytes}"):
        memory.set_limit(2 * memory.block_bytes)


def test_without_a_limit_a_share_of_the_free_memory_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    arena, memory = memory_of(200)
    monkeypatch.setattr(cache_memory, "available", lambda device: 1000 * memory.block_bytes)
    memory.set_limit(None)
    assert arena.limit == int(0.6 * (1000 + 128))
    assert arena.prefixes.most == (arena.limit - 1) // 2
    monkeypatch.setattr(cache_memory, "available", lambda device: 0)
    memory.set_limit(None)
    assert arena.limit == 128


def test_need_counts_new_blocks_and_the_copy_of_a_shared_one() -> None:
    arena, memory = memory_of(40)
    memory.allocate_single_blocks(True)
    cache = NativeCache(arena)
    assert memory.need(cache, 33) == 3
    append(cache, list(range(20)))
    assert (memory.need(cache, 12), memory.need(cache, 13)) == (0, 1)
    fork = cache.fork()
    assert memory.need(fork, 12) == 1
    append(fork, [1])
    assert memory.need(fork, 11) == memory.need(cache, 12) == 0


def test_lean_sequences_fill_every_gap_and_keep_their_tokens() -> None:
    arena, memory = memory_of(13)
    memory.allocate_single_blocks(True)
    caches = [NativeCache(arena) for _ in range(3)]
    for value in range(4 * BLOCK):
        for i, cache in enumerate(caches):
            append(cache, [1000 * i + value])
    assert memory.left() == 0
    assert len(arena.pool.counts) == 13
    assert any(cache.base < 0 for cache in caches)
    assert [read(cache) for cache in caches] == [[1000 * i + v for v in range(4 * BLOCK)] for i in range(3)]


def test_generous_sequences_would_not_fit_there() -> None:
    arena, memory = memory_of(13)
    memory.allocate_single_blocks(False)
    caches = [NativeCache(arena) for _ in range(3)]
    for _ in range(4 * BLOCK):
        for cache in caches:
            append(cache, [1])
    assert len(arena.pool.counts) > 13


def test_trim_gives_back_what_was_taken_for_growth() -> None:
    arena, memory = memory_of(20)
    cache = NativeCache(arena)
    append(cache, list(range(20)))
    assert len(cache.blocks) == 4
    memory.trim(cache, 1)
    assert (len(cache.blocks), memory.left()) == (2, 17)
    append(cache, list(range(20, 60)))
    assert read(cache) == list(range(60))


def test_kept_prefixes_are_found_and_make_way() -> None:
    arena, memory = memory_of(9)
    memory.allocate_single_blocks(True)
    tokens = list(range(70))
    cache = NativeCache(arena)
    append(cache, tokens)
    memory.retain(cache, "a", memory.pieces(tokens))
    cache.release()
    assert memory.left() == memory.capacity == 8
    assert memory.known("a", memory.pieces(tokens)) == 4
    again = NativeCache(arena)
    memory.adopt("a", memory.pieces(tokens[:60]), again)
    assert (again.length, read(again)) == (48, tokens[:48])
    assert memory.left() == 5
    other = NativeCache(arena)
    append(other, list(range(100, 180)))
    assert (memory.left(), len(arena.pool.counts)) == (0, 9)
    assert memory.known("a", memory.pieces(tokens)) < 4
    assert read(again) == tokens[:48]
    assert read(other) == list(range(100, 180))


def test_a_beginning_is_shared_by_blocks() -> None:
    arena, memory = memory_of(40)
    cache = NativeCache(arena)
    append(cache, list(range(50)))
    other = NativeCache(arena, 40)
    memory.share(cache, 2, other)
    assert (other.length, other.prompt_length) == (32, 40)
    append(other, [7, 8])
    assert read(other) == [*range(32), 7, 8]
    assert read(cache) == list(range(50))


def test_all_can_be_forgotten() -> None:
    arena, memory = memory_of(9)
    cache = NativeCache(arena)
    append(cache, list(range(32)))
    memory.retain(cache, "a", memory.pieces(list(range(32))))
    cache.release()
    assert arena.pool.free < 8
    memory.forget()
    assert arena.pool.free == 8


def windowed(size: int, sequences: int) -> tuple[Arena, ArenaMemory, int]:
    """Two of three layers have a window of 32; what places are worth, in blocks of the third."""
    windows = (32, None, 32)
    arena = Arena(3, 1, 2, dtype=torch.float32, device=torch.device("cpu"), windows=windows)
    memory = ArenaMemory(arena)
    memory.set_limit(size * memory.block_bytes, sequences, 48)
    return arena, memory, 2


def test_windows_of_all_sequences_are_set_aside_and_the_rest_is_for_whole_texts() -> None:
    arena, memory, worth = windowed(100, 3)
    assert arena.windowed is not None
    assert arena.windowed.most == 4 + 3 * (2 + 6)
    assert memory.capacity + 1 == 300 - worth * arena.windowed.most > 2 * 100
    assert arena.nbytes <= 100 * memory.block_bytes
    assert memory.sequences_fit([10_000] * 3)
    assert memory.sequences_fit([10_000, 10_000, *[1] * 8])
    assert not memory.sequences_fit([10_000] * 4)


def test_where_not_all_sequences_fit_blocks_are_four_times_as_many() -> None:
    arena, memory, worth = windowed(100, 1000)
    assert arena.windowed is not None
    assert arena.windowed.most == 300 // (worth + 4)
    assert memory.capacity + 1 == 300 - worth * arena.windowed.most == 4 * arena.windowed.most


def test_where_no_window_fits_a_block_costs_what_all_layers_need() -> None:
    arena, memory, _ = windowed(12, 4)
    assert arena.windowed is not None
    assert arena.windowed.most == memory.capacity + 1 == 12
    assert memory.sequences_fit([10_000] * 100)
