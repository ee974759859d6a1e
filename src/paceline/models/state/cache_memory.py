"""The memory of a model's caches as the engine sees it: how many blocks there may be, who needs more, which prefixes
are kept. Who runs, waits or shares is for the engine to say.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import numpy as np

from paceline.errors import ConfigError
from paceline.models.base import PartAbilities
from paceline.models.inputs import Inputs
from paceline.models.state.arena import NO_STATES, Arena, blocks_for, pieces_of
from paceline.models.state.cache import NativeCache
from paceline.models.state.free_memory import available
from paceline.models.state.kept_states import KeptState
from paceline.models.state.parts import State, keys_of, states_of
from paceline.models.state.recurrent import RecurrentPart
from paceline.models.state.window_slots import BLOCK, WindowSlots

MEMORY_SHARE = 0.6
"""Default limit as a share of the free memory: while a cache grows, old and new are held, half as much again."""


UNLIMITED = 2**40


KEPT_BYTES = 2**30
"""Bytes of kept prefixes where the user gave no limit."""

STEP_BLOCKS = 6
"""Blocks that a sequence has beside those of its window: for the borders of both and the tree of a step."""

LENGTHS = 4
"""Blocks for one place, where not the windows of all sequences fit."""

LEAST_BYTES = 256
"""What counting a block costs at least, where no layer keeps all keys, or any."""


STATE_BLOCKS = 32
"""Blocks of a prompt between states of mixers that are kept, where these cost no more than their keys and values."""

STATES_HELD = 2
"""States of mixers that a sequence may hold outside the arena: behind its text, and behind its last whole block."""


class Sources(Protocol):
    """What is read beside the texts, and lies in the arena with them (models.state.cross_memory)."""

    def rows_to_come(self, inputs: Inputs) -> int:
        """Slots that the source of a sequence with these inputs would take; 0 where others have the same."""


class ArenaMemory:
    """See `models.block_memory.CacheMemory`.

    Args:
        arena: where keys and values are.
        abilities: of a sequence's whole state, but for states of mixers of `state_bytes`; what not all of its parts can
            share is neither found nor kept.
        sources: of an encoder-decoder model; None for all others.
        state_bytes: of the states of mixers behind any text, copies of which are kept, so that texts that begin alike
            share them; 0 where there are none.

    Attributes:
        state_bytes: as given.
    """

    block_size = BLOCK

    def __init__(
        self,
        arena: Arena,
        abilities: PartAbilities = NativeCache.abilities,
        sources: Sources | None = None,
        *,
        state_bytes: int = 0,
    ) -> None:
        self._arena, self.can_share_prefixes, self._sources = arena, abilities.shared, sources
        self._left, self._chunk = (-1, 0), 1
        self.state_bytes, self._most_sequences = state_bytes, UNLIMITED
        arena.prefixes.needs_states = state_bytes > 0

    @property
    def block_bytes(self) -> int:
        """Keys and values of one block, all layers."""
        arena, windowed = self._arena, self._arena.windowed
        size = arena.block_bytes + (0 if windowed is None else _place_bytes(windowed))
        return max(size, LEAST_BYTES)

    @property
    def state_interval(self) -> int:
        """See `models.block_memory.CacheMemory.state_interval`."""
        return max(STATE_BLOCKS, self._blocks_of_state) if self.state_bytes and self.can_share_prefixes else 0

    @property
    def _blocks_of_state(self) -> int:
        return -(-self.state_bytes // max(self._arena.block_bytes, LEAST_BYTES))

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
        """Most slots that a step of one sequence has taken so far: its root and nodes."""
        return self._arena.widest

    def set_limit(self, size: int | None, sequences: int = 1, chunk: int = 0) -> None:
        """See `models.block_memory.CacheMemory.set_limit`.

        Raises:
            ConfigError: not even two blocks fit.
        """
        arena, block = self._arena, self.block_bytes
        if size is None:
            free = int(MEMORY_SHARE * (available(arena.kv.device) + arena.nbytes))
            free -= self._states_in(free, sequences)
            arena.limit = max(len(arena.pool.counts), self._blocks_in(free, sequences, chunk))
            arena.prefixes.most = min(self.capacity // 2, KEPT_BYTES // block)
            return
        least = 3 * block + STATES_HELD * self.state_bytes
        if size < least:
            raise ConfigError(
                f"kv_cache_memory_bytes must be at least {least}, which holds {2 * BLOCK} tokens, got {size}"
            )
        size -= self._states_in(size, sequences)
        arena.limit, arena.prefixes.most = self._blocks_in(size, sequences, chunk), None
        arena.shrink(arena.limit)

    def _blocks_in(self, size: int, sequences: int, chunk: int) -> int:
        """Blocks that fit into so many bytes.

        Layers with a window get places for the windows of all sequences, as far as these leave others room for texts
        LENGTHS times as long; the rest is for the other layers. Where not even one window fits, each block costs what
        all layers need.
        """
        windowed, block = self._arena.windowed, self.block_bytes
        if windowed is None:
            return size // block
        place = _place_bytes(windowed)
        rest, self._chunk = max(block - place, LEAST_BYTES), 1 + blocks_for(chunk)
        per_sequence = blocks_for(windowed.window) + STEP_BLOCKS
        places = max(
            self._chunk + per_sequence, min(self._chunk + sequences * per_sequence, size // (place + LENGTHS * rest))
        )
        blocks = (size - places * place) // rest
        if blocks <= places:
            blocks = places = size // block
        windowed.most = places
        return blocks

    def _states_in(self, size: int, sequences: int) -> int:
        """Bytes of so many that the states of mixers take that sequences hold, of as many sequences as half of them
        serve, at least of one.
        """
        if not self.state_bytes:
            return 0
        each = STATES_HELD * self.state_bytes
        self._most_sequences = max(1, min(sequences, size // 2 // each))
        return self._most_sequences * each

    def sequences_fit(self, lengths: Iterable[int]) -> bool:
        """See `models.block_memory.CacheMemory.sequences_fit`."""
        windowed, lengths = self._arena.windowed, list(lengths)
        if len(lengths) > self._most_sequences:
            return False
        if windowed is None or windowed.most > self.capacity:
            return True
        per_sequence = blocks_for(windowed.window) + STEP_BLOCKS
        return (
            self._chunk + sum(min(per_sequence, blocks_for(length + self.widest)) for length in lengths)
            <= windowed.most
        )

    @property
    def used(self) -> int:
        """See `models.block_memory.CacheMemory.used`."""
        pool = self._arena.pool
        return len(pool.counts) - pool.reserved - pool.unheld

    def spare(self) -> int:
        """Blocks that can be taken at no cost: free ones, those by which the cache may grow."""
        pool = self._arena.pool
        return self.capacity + 1 - len(pool.counts) + pool.free

    def blocks_to_come(self, inputs: Inputs) -> int:
        """See `models.block_memory.CacheMemory.blocks_to_come`."""
        return 0 if self._sources is None else blocks_for(self._sources.rows_to_come(inputs))

    def left(self) -> int:
        """Blocks that can be taken: spare ones and those of kept prefixes."""
        pool = self._arena.pool
        pool.recount()
        if self._left[0] != pool.changes:
            counts = pool.counts.copy()
            np.subtract.at(counts, np.asarray(self._arena.prefixes.evictable, np.int64), 1)
            self._left = (pool.changes, self.capacity + 1 - len(counts) + int((counts == 0).sum()))
        return self._left[1]

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold this many tokens."""
        return blocks_for(tokens)

    def forget_behind_windows(self, cache: State) -> None:
        """Layers with a sliding window may forget what is behind that of a sequence's committed tokens."""
        keys_of(cache).forgets_behind_windows = True

    @property
    def has_windows(self) -> bool:
        """Whether there are layers with a sliding window that give back what is behind it."""
        return self._arena.windowed is not None

    def blocks_present(self, cache: State, blocks: int) -> int:
        """With how many of the first blocks of a sequence another one can begin."""
        part, windowed = states_of(cache), self._arena.windowed
        if not self.can_share_prefixes:
            return 0
        borders = [blocks]
        if part is not None:
            borders = sorted((border for border in _states_by_blocks(part) if border <= blocks), reverse=True)
        if windowed is None:
            return borders[0] if borders else 0
        held = keys_of(cache).blocks
        if part is None:
            return windowed.usable(held[:blocks])
        return next((border for border in borders if windowed.usable(held[:border]) == border), 0)

    def follow_borders(self, cache: State) -> None:
        """See `models.block_memory.CacheMemory.follow_borders`."""
        if (part := states_of(cache)) is not None:
            part.follows_borders = True

    def keep_state(self, cache: State) -> None:
        """See `models.block_memory.CacheMemory.keep_state`."""
        if (part := states_of(cache)) is not None and self._blocks_of_state <= self.left():
            part.kept[part.length] = self._arena.keep_state(part.packed())

    def need(self, cache: State, slots: int) -> int:
        """Blocks that a sequence must take for `slots` more tokens."""
        keys = keys_of(cache)
        first, held = keys.length // BLOCK, len(keys.blocks)
        shared = first < held and bool(self._arena.pool.counts[keys.blocks[first]] > 1)
        return max(0, blocks_for(keys.length + slots) - held) + int(shared)

    def trim(self, cache: State, slots: int) -> None:
        """Give back what a sequence holds beyond its next `slots` tokens."""
        keys_of(cache).trim(slots)

    def allocate_single_blocks(self, single: bool) -> None:
        """Whether sequences take single blocks from now on, or runs in which they can grow."""
        self._arena.single_blocks = single

    def pieces(self, tokens: Sequence[int]) -> list[bytes]:
        """The full blocks of a text, to be looked up."""
        return pieces_of(tokens)

    def known(self, key: str, pieces: Sequence[bytes]) -> int:
        """How many blocks of a text's beginning are kept."""
        return self._arena.prefixes.known(key, pieces)

    def matching(self, key: str, pieces: Sequence[bytes]) -> int:
        """See `models.block_memory.CacheMemory.matching`."""
        return self._arena.prefixes.matching(key, pieces)

    def adopt(self, key: str, pieces: Sequence[bytes], fresh: State) -> None:
        """Let a new sequence begin with what is kept of this text; its parts other than states of mixers stay as they
        were opened.
        """
        arena, keys = self._arena, keys_of(fresh)
        with arena.change():
            blocks = arena.prefixes.find(key, pieces)
            if arena.windowed is not None:
                arena.windowed.touch(blocks)
            keys.begin_with(blocks, BLOCK * len(blocks))
        _begin_with(fresh, arena.prefixes.state_behind(key, pieces))
        keys.forgets_behind_windows = True

    def share(self, source: State, blocks: int, fresh: State) -> None:
        """Let a new sequence begin with the first blocks of another; its parts other than states of mixers stay as they
        were opened.
        """
        keys, theirs = keys_of(fresh), states_of(source)
        with self._arena.change():
            keys.begin_with(keys_of(source).blocks[:blocks], BLOCK * blocks)
        _begin_with(fresh, None if theirs is None else theirs.kept[BLOCK * blocks])
        keys.forgets_behind_windows = True

    def retain(self, cache: State, key: str, pieces: Sequence[bytes]) -> None:
        """Keep the blocks of a sequence whose text this is, as far as they are full, for texts to come."""
        if not self.can_share_prefixes:
            return
        keys, states = keys_of(cache), self._states_to_retain(cache)
        with self._arena.change():
            self._arena.prefixes.add(key, pieces, keys.blocks[: keys.length // BLOCK], states)

    def _states_to_retain(self, cache: State) -> Mapping[int, KeptState]:
        """The states that are kept of a sequence, and that behind its last whole block, by blocks."""
        part = states_of(cache)
        if part is None:
            return NO_STATES
        states, border = _states_by_blocks(part), part.packed_border()
        if border is not None and border[0] // BLOCK not in states and self._blocks_of_state <= self.left():
            states[border[0] // BLOCK] = self._arena.keep_state(border[1])
        return states

    def forget(self) -> None:
        """Give up all kept prefixes."""
        with self._arena.change():
            self._arena.prefixes.clear()


def _states_by_blocks(part: RecurrentPart) -> dict[int, KeptState]:
    """The states that are kept behind whole blocks of a sequence."""
    kept = part.kept.items()
    return {length // BLOCK: state for length, state in kept if state.present and length % BLOCK == 0}


def _begin_with(fresh: State, state: KeptState | None) -> None:
    """Give a sequence's mixers the states behind the tokens that it has begun with."""
    part = states_of(fresh)
    if part is not None and state is not None:
        part.begin_with(fresh.length, state)


def _place_bytes(windowed: WindowSlots) -> int:
    """Keys and values of one block in the layers with a window."""
    return windowed.kv.nbytes // windowed.places
