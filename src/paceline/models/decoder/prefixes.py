"""Prefixes of ended sequences, found again by their tokens: an index of cache blocks, the least recently used given up
first.

In: full blocks of a sequence with their tokens. Out: the blocks of the longest known beginning of a text. Not here: who
may use them (engine.prefix_cache), tensors.

A block is known by its own tokens and by the entry of the block before it, so an entry stands for the whole text up to
its end; the first block of a text hangs on the tenant's name. Entries are looked up by hash and compared token by
token: equal hashes of other tokens cannot meet. Using an entry makes those before it younger still, so the oldest entry
is always the last one of its chain.
Source: automatic prefix caching of vLLM (PagedAttention, arXiv:2309.06180).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np

from paceline.models.decoder.blocks import BLOCK, BlockPool

Key = tuple[str | int, bytes]
"""The tenant, or the serial number of the entry before; tokens of the block."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A kept block: its number in the arena, and a serial number that no other entry ever has."""

    block: int
    serial: int


def pieces_of(tokens: Sequence[int]) -> list[bytes]:
    """The full blocks of a text, each as the bytes of its tokens."""
    full = len(tokens) // BLOCK
    size = BLOCK * np.dtype(np.int32).itemsize
    whole = np.asarray(tokens[: full * BLOCK], np.int32).tobytes()
    return [whole[i * size : (i + 1) * size] for i in range(full)]


class PrefixIndex:
    """A holder of blocks (models.decoder.blocks). Changes happen between `begin` and `end` of the pool; a change that
    was cut short leaves entries that nobody finds at worst, and they go like all others.

    Args:
        pool: where the blocks are counted.

    Attributes:
        most: most blocks to keep; None for no limit.
    """

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self.most: int | None = None
        self._entries: OrderedDict[Key, Entry] = OrderedDict()
        self._serials = count()
        pool.holders.add(self)

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def blocks(self) -> list[int]:
        """The blocks that are kept."""
        return [entry.block for entry in self._entries.values()]

    def find(self, tenant: str, pieces: Sequence[bytes]) -> list[int]:
        """Blocks of the longest beginning that is known; they count as used."""
        keys = self._path(tenant, pieces)
        for key in reversed(keys):
            self._entries.move_to_end(key)
        return [self._entries[key].block for key in keys]

    def known(self, tenant: str, pieces: Sequence[bytes]) -> int:
        """How many blocks `find` would give."""
        return len(self._path(tenant, pieces))

    def _path(self, tenant: str, pieces: Sequence[bytes]) -> list[Key]:
        before: str | int = tenant
        keys: list[Key] = []
        for piece in pieces:
            entry = self._entries.get((before, piece))
            if entry is None:
                break
            keys.append((before, piece))
            before = entry.serial
        return keys

    def add(self, tenant: str, pieces: Sequence[bytes], blocks: Sequence[int]) -> None:
        """Keep the blocks of a text; where a block of the same text is known, that one stays."""
        before: str | int = tenant
        keys: list[Key] = []
        for piece, block in zip(pieces, blocks, strict=False):
            key = (before, piece)
            entry = self._entries.get(key)
            if entry is None:
                entry = Entry(block, next(self._serials))
                self.pool.share([block])
                self._entries[key] = entry
            keys.append(key)
            before = entry.serial
        for key in reversed(keys):
            self._entries.move_to_end(key)
        if self.most is not None:
            self._drop(len(self._entries) - self.most)

    def evict(self, wanted: int) -> None:
        """Give up the least recently used entries until `wanted` blocks have become free, or none is left."""
        while wanted > 0 and self._entries:
            wanted -= self._drop(1)

    def clear(self) -> None:
        """Give up everything."""
        self._drop(len(self._entries))

    def _drop(self, number: int) -> int:
        """Give up the oldest entries; how many blocks became free."""
        freed = 0
        for _ in range(number):
            _, entry = self._entries.popitem(last=False)
            self.pool.drop([entry.block])
            freed += int(self.pool.counts[entry.block] == 0)
        return freed
