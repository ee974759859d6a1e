"""The key-value cache of a sequence: a list of blocks of the model's arena (models.state.arena).

A sequence's committed tokens fill its first `length` slots; the root and tree nodes of a step use the slots right
behind them as scratch. A sequence that shares nothing stays physically contiguous: it grows in place, or moves to a
free run of twice its size (amortised), and scoring reads *views* of the arena, so that nothing is copied. Sequences
that share a prefix after `fork` part where the first of them writes: the last, partial block is copied (copy-on-write),
or the whole sequence if it is at most `copy_limit` tokens long, which makes it contiguous again. Where memory is
limited and short, sequences take single blocks from wherever one is free instead. A change that an exception cuts short
(Ctrl-C) leaks nothing: the next one starts from what the sequences say they hold.
Source: PagedAttention (arXiv:2309.06180).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import torch

from paceline.errors import ConfigError
from paceline.models.base import PartAbilities
from paceline.models.state.arena import Arena, adjacent, blocks_for
from paceline.models.state.window_slots import BLOCK, WindowSlots
from paceline.tree import first_nodes

Views = dict[int, tuple[torch.Tensor, torch.Tensor]]


class NativeCache:
    """The handle of one sequence: its blocks, its committed length, and what the last step left in scratch slots.

    Attributes:
        blocks: physical blocks in order; empty after release.
        length: committed tokens; the pending root is not among them (models.base).
        scratch: slots of the last step that await `commit`: its root and nodes.
        base: physical slot of position 0 if the blocks are adjacent, else -1.
        ready: blocks from the first on that can be written to as far as they are private; 0 where that is not known.
        forgets_behind_windows: what is committed is never taken back, so that layers with a sliding window may forget
            what is behind it.
    """

    abilities: ClassVar = PartAbilities()

    __slots__ = (
        "__weakref__",
        "_places",
        "_views",
        "_views_of",
        "arena",
        "base",
        "blocks",
        "forgets_behind_windows",
        "length",
        "prompt_length",
        "ready",
        "released",
        "scratch",
    )

    def __init__(self, arena: Arena, prompt_length: int = 0) -> None:
        self.arena, self.prompt_length = arena, prompt_length
        self.blocks: list[int] = []
        self.length, self.scratch, self.base, self.ready = 0, 0, 0, 0
        self.released = self.forgets_behind_windows = False
        self._views: dict[tuple[int, int], Views] = {}
        self._views_of = (0, 0)
        self._places: np.ndarray[tuple[int], np.dtype[np.int64]] | None = None
        arena.pool.holders.add(self)

    def __del__(self) -> None:
        if getattr(self, "blocks", None):
            self.blocks = []
            self.arena.pool.stale = True

    def reserve(self, slots: int) -> None:
        """Make room for `slots` tokens behind the committed ones, in slots that nobody else reads.

        Raises:
            ConfigError: the cache was released.
        """
        if self.released:
            raise ConfigError("this sequence's cache was released; open a new one with runner.open()")
        blocks, first, need = self.blocks, self.length // BLOCK, -(-(self.length + slots) // BLOCK)
        private = first >= len(blocks) or self.arena.pool.counts.item(blocks[first]) == 1
        if need <= self.ready and private:
            return
        if not private or need > len(blocks):
            if not (private and self._extend_in_place(need)):
                self.relocate(need, first if not private else len(self.blocks))
            self.locate()
        if (windowed := self.arena.windowed) is not None:
            self.arena.prepare(windowed, self.blocks[first:need])
            self.ready = need

    def locate(self) -> None:
        """Find out where the blocks are; to be called when they have changed."""
        self._places = None
        self.ready = len(self.blocks) if self.arena.windowed is None else 0
        self.base = (self.blocks[0] * BLOCK if adjacent(self.blocks) else -1) if self.blocks else 0

    def _extend_in_place(self, need: int) -> bool:
        """Take free blocks behind the own ones: half as many again as there are where there is room, else what is
        needed.
        """
        if not self.blocks:
            return False
        held, pool = len(self.blocks), self.arena.pool
        count, at = need - held, self.blocks[-1] + 1
        more = count if self.arena.single_blocks else max(count, held // 2)
        if pool.is_free(at, more):
            count = more
        elif not pool.is_free(at, count):
            return False
        with self.arena.change():
            self.arena.allocate(count, at)
            self.blocks.extend(range(at, at + count))
        return True

    def relocate(self, need: int, shared: int) -> None:
        """Move to a run of twice the size: everything, or, for a long sequence with a shared prefix, all behind block
        `shared`. Where room is short, only what is behind block `shared`, and no further than needed.
        """
        with self.arena.change():
            private = bool((self.arena.pool.counts[self.blocks] == 1).all())
            keep = 0 if private or self.length <= self.arena.copy_limit else shared
            count = 2 * (need - keep)
            if self.arena.single_blocks:
                keep, count = shared, need - shared
            new = self.arena.allocate(count)
            old, filled = self.blocks[keep:], self.blocks[keep : blocks_for(self.length + self.scratch)]
            self.arena.copy(filled, new[: len(filled)])
            if (windowed := self.arena.windowed) is not None:
                if private:
                    windowed.alias(filled, new[: len(filled)])
                else:
                    late = max(0, self._first_in_window(windowed) - keep)
                    self.arena.copy_windowed(windowed, filled[late:], new[late : len(filled)])
            self.arena.pool.drop(old)
            self.blocks[keep:] = new
            if windowed is not None and private:
                windowed.drop(old)

    @property
    def window_blocks(self) -> Sequence[int]:
        """See `models.state.block_pool.Holder`."""
        windowed = self.arena.windowed
        return self.blocks if windowed is None else self.blocks[self._first_in_window(windowed) :]

    def _first_in_window(self, windowed: WindowSlots) -> int:
        return windowed.first_read(self.length) if self.forgets_behind_windows else 0

    def slot_index(self, start: int, stop: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """(stop - start,) int64 physical slots of the positions start .. stop - 1."""
        if self._places is None:
            blocks = np.asarray(self.blocks, np.int64)
            self._places = (blocks[:, None] * BLOCK + np.arange(BLOCK)).reshape(-1)
        return self._places[start:stop]

    def in_order(self, window: int | None) -> bool:
        """Whether slots in the layers of a window kind follow each other from `base` on."""
        return self.base >= 0 and (window is None or self.arena.windowed is None)

    def slots_of_kind(self, start: int, stop: int, window: int | None) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """The same in the layers of a window kind."""
        slots, windowed = self.slot_index(start, stop), self.arena.windowed
        return slots if window is None or windowed is None else windowed.slots[slots]

    def views(self, start: int, stop: int) -> Views:
        """Per layer the keys and values of positions start .. stop - 1, each (1, kv heads, stop - start, head dim).

        Views of the arena, remembered until the sequence or the arena moves. Only for a contiguous sequence (`base` >=
        0), and layers that keep all keys.
        """
        current = (self.arena.version, self.base)
        if current != self._views_of or len(self._views) > 8:
            self._views.clear()
            self._views_of = current
        views = self._views.get((start, stop))
        if views is None:
            at, count = self.base + start, stop - start
            keys, values = self.arena.keys, self.arena.values
            views = self._views[start, stop] = {
                layer: (keys[layer].narrow(2, at, count), values[layer].narrow(2, at, count)) for layer in keys
            }
        return views

    def commit(self, path: Sequence[int]) -> None:
        """Commit the root and the nodes of `path` out of the scratch slots; the rest of the scratch is forgotten.

        Raises:
            ConfigError: nothing is scored, or a node was not part of the tree last scored, or the path does not go
                downwards.
        """
        scratch, count, arena = self.scratch, len(path), self.arena
        in_place = path == first_nodes(count) and count < scratch
        if not in_place:
            self._collect(path)
        self.length += 1 + count
        if scratch > arena.widest:  # noqa: PLR1730  max() costs a call in every step
            arena.widest = scratch
        self.scratch = 0

    def _collect(self, path: Sequence[int]) -> None:
        """Move the nodes of a path to the slots where they belong."""
        if not self.scratch or any(not 0 <= node < self.scratch - 1 for node in path):
            raise ConfigError(
                f"commit: path {list(path)} does not lie in the {self.scratch} inputs last scored; score first"
            )
        first = next((i for i, node in enumerate(path) if node != i), len(path))
        if first < len(path):
            at = self.length + 1
            slots = self.slot_index(0, self.length + self.scratch)
            source = [int(slots[at + node]) for node in path[first:]]
            self.arena.move(source, [int(slots[at + i]) for i in range(first, len(path))])

    def check_truncate(self, length: int) -> None:
        """Say whether `truncate` can go back to `length` tokens.

        Raises:
            ConfigError: `length` lies outside 0 .. the committed length, or layers with a sliding window have let go of
                what they read there.
        """
        if not 0 <= length <= self.length:
            raise ConfigError(f"truncate: length must lie in 0..{self.length}, got {length}")
        windowed = self.arena.windowed
        if windowed is None:
            return
        if not windowed.has(self.blocks[windowed.first_read(length) : blocks_for(length)]).all():
            raise ConfigError(f"truncate: what the windows of {length} tokens hold was given back")

    def truncate(self, length: int) -> None:
        """Forget all but the first `length` committed tokens and the scratch; shared blocks behind them are given back.

        Raises:
            ConfigError: it cannot go back to this length (`check_truncate`).
        """
        self.check_truncate(length)
        if self.arena.windowed is not None:
            self.ready = 0
        self.length, self.scratch = length, 0
        if length < self.prompt_length:
            self.prompt_length = 0
        rest = self.blocks[blocks_for(length) :]
        if rest and (self.arena.pool.counts[rest] > 1).any():
            self._drop_last(rest)

    def trim(self, slots: int) -> None:
        """Give back the blocks behind those that `slots` more tokens need."""
        rest = self.blocks[blocks_for(self.length + slots) :]
        if rest:
            self._drop_last(rest)

    def _drop_last(self, rest: Sequence[int]) -> None:
        """Give back the last blocks, which are `rest`."""
        with self.arena.change():
            self.arena.pool.drop(rest)
            del self.blocks[-len(rest) :]
        self.locate()

    def fork(self) -> NativeCache:
        """A second sequence that shares the committed blocks; nothing is copied."""
        other = NativeCache(self.arena, self.prompt_length)
        self.share_with(other)
        return other

    def share_with(self, other: NativeCache) -> None:
        """Let another sequence, which is still empty, begin with all committed tokens."""
        with self.arena.change():
            other.begin_with(self.blocks[: blocks_for(self.length)], self.length)

    def begin_with(self, blocks: Sequence[int], length: int) -> None:
        """Hold blocks of another sequence or of an ended one, within a change, where this sequence is still empty.

        Args:
            blocks: those of its first `length` tokens, all of which are committed then.
        """
        self.arena.pool.add_reference(blocks)
        self.blocks, self.length = list(blocks), length
        self.locate()

    def release(self) -> None:
        """Give all blocks back; a second call does nothing."""
        with self.arena.change():
            self.arena.pool.drop(self.blocks)
            self.blocks, self.length, self.scratch, self.released = [], 0, 0, True
        self._places = None
        self._views.clear()
