"""The memory of a model's caches as the engine sees it: how many blocks there may be, who needs more, which prefixes
are kept. Who runs, waits or shares is for the engine to say.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from paceline.errors import ConfigError
from paceline.models.decoder.arena import BLOCK, Arena, blocks_for, pieces_of
from paceline.models.decoder.cache import NativeCache
from paceline.models.memory import available

MEMORY_SHARE = 0.6
"""Default limit as a share of the free memory: while a cache grows, old and new are held, half as much again."""


UNLIMITED = 2**40


KEPT_BYTES = 2**30
"""Bytes of kept prefixes where the user gave no limit."""


class ArenaMemory:
    """See `models.base.CacheMemory`."""

    block_size = BLOCK

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._left = (-1, 0)

    @property
    def block_bytes(self) -> int:
        """Keys and values of one block, all layers."""
        return self._arena.kv.nbytes // (self._arena.slots // BLOCK)

    @property
    def capacity(self) -> int:
        """Most blocks that sequences may hold together."""
        return UNLIMITED if self._arena.limit is None else self._arena.limit - 1

    @property
    def changes(self) -> int:
        """A number that changes whenever blocks change hands."""
        return self._arena.pool.changes

    @property
    def widest(self) -> int:
        """Most inputs that a step of one sequence has had so far."""
        return self._arena.widest

    def limit(self, size: int | None) -> None:
        """Limit the blocks to `size` bytes; None takes a share of the free memory.

        Raises:
            ConfigError: not even two blocks fit.
        """
        arena, block = self._arena, self.block_bytes
        if size is None:
            free = int(MEMORY_SHARE * (available(arena.kv.device) + arena.kv.nbytes))
            arena.limit = max(len(arena.pool.counts), free // block)
            arena.prefixes.most = min(self.capacity // 2, KEPT_BYTES // block)
            return
        if size < 3 * block:
            raise ConfigError(
                f"kv_cache_memory_bytes must be at least {3 * block}, which holds {2 * BLOCK} tokens, got {size}"
            )
        arena.limit, arena.prefixes.most = size // block, None
        arena.shrink(arena.limit)

    def spare(self) -> int:
        """Blocks that can be taken at no cost: free ones, those by which the cache may grow."""
        pool = self._arena.pool
        return self.capacity + 1 - len(pool.counts) + pool.free

    def left(self) -> int:
        """Blocks that can be taken: spare ones and those of kept prefixes."""
        pool = self._arena.pool
        pool.recount()
        if self._left[0] != pool.changes:
            counts = pool.counts.copy()
            np.subtract.at(counts, np.asarray(self._arena.prefixes.blocks, np.int64), 1)
            self._left = (pool.changes, self.capacity + 1 - len(counts) + int((counts == 0).sum()))
        return self._left[1]

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold this many tokens."""
        return blocks_for(tokens)

    def need(self, cache: NativeCache, inputs: int) -> int:
        """Blocks that a sequence must take for `inputs` more tokens."""
        first, held = cache.length // BLOCK, len(cache.blocks)
        shared = first < held and bool(self._arena.pool.counts[cache.blocks[first]] > 1)
        return max(0, blocks_for(cache.length + inputs) - held) + int(shared)

    def trim(self, cache: NativeCache, inputs: int) -> None:
        """Give back what a sequence holds beyond its next `inputs` tokens."""
        cache.trim(inputs)

    def save(self, lean: bool) -> None:
        """Whether sequences shall take single blocks, or runs in which they can grow."""
        self._arena.lean = lean

    def pieces(self, tokens: Sequence[int]) -> list[bytes]:
        """The full blocks of a text, to be looked up."""
        return pieces_of(tokens)

    def known(self, tenant: str, pieces: Sequence[bytes]) -> int:
        """How many blocks of a text's beginning are kept."""
        return self._arena.prefixes.known(tenant, pieces)

    def adopt(self, tenant: str, pieces: Sequence[bytes]) -> NativeCache:
        """A new sequence that begins with the kept blocks of this text."""
        cache, arena = NativeCache(self._arena), self._arena
        arena.begin()
        blocks = arena.prefixes.find(tenant, pieces)
        arena.pool.share(blocks)
        cache.blocks, cache.length = blocks, BLOCK * len(blocks)
        arena.pool.end()
        cache.locate()
        return cache

    def share(self, cache: NativeCache, blocks: int) -> NativeCache:
        """A new sequence that begins with the first blocks of another."""
        return cache.beginning(BLOCK * blocks)

    def keep(self, cache: NativeCache, tenant: str, pieces: Sequence[bytes]) -> None:
        """Keep the blocks of a sequence whose text this is, as far as they are full, for texts to come."""
        self._arena.begin()
        self._arena.prefixes.add(tenant, pieces, cache.blocks[: cache.length // BLOCK])
        self._arena.pool.end()

    def forget(self) -> None:
        """Give up all kept prefixes."""
        self._arena.begin()
        self._arena.prefixes.clear()
        self._arena.pool.end()
