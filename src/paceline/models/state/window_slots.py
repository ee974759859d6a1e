"""Keys and values of the layers with a sliding window, which need fewer slots than a model's arena has.

Sequences, forks and kept prefixes hold blocks of the arena (models.state.arena). In layers with a window a block has
a *place* only while its keys may be read: it gets one when a step is about to write to it, and loses it when another
block needs the room and every sequence that goes on has moved past it, first the block that got its place first. So
keys behind the windows still serve other texts that begin alike as long as nobody needs their room, and memory grows
only for keys that are needed. The table of places is the only record: whatever it does not name is free.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from paceline.models.cpu import pages
from paceline.models.spec import ModelSpec

BLOCK: Final = 16
"""Slots of one block, and the multiple to which contexts are padded."""

SPARE: Final = 32
"""Readable entries behind the end of a list of slots: compiled code takes them sixteen at a time, and fetches ahead."""

AT_ONCE: Final = 16
"""A sixteenth of all places, or what is asked for if that is more, is taken from those behind the windows at once."""

Ints = npt.NDArray[np.int64]
WITHIN: Final = np.arange(BLOCK)


def windows_of(spec: ModelSpec, device: torch.device, context: int | None = None) -> list[int | None]:
    """Per layer the window that its keys can be given back behind, or None; nothing where they never are: on GPUs,
    whose graphs read all layers by the same slots, where keys depend on what follows, and in contexts that the windows
    span.
    """
    windows = [layer.window for layer in spec.layers]
    changing = any(rope.kind in {"dynamic", "longrope"} for rope in spec.ropes.values())
    longest = max((window for window in windows if window is not None), default=0)
    serves = device.type == "cpu" and not changing and 0 < longest < (context or spec.max_context)
    return windows if serves else []


class WindowSlots:
    """Places of blocks.

    Args:
        layers: with a window.
        window: the longest of theirs.
        heads, head_dim: of keys and values together.
        blocks: of the arena; as many places are there at first.

    Attributes:
        kv: (layers, slots, heads, head dim). The first block is nobody's and remains zero.
        slots: for each slot of the arena and SPARE more, the slot here; in the first block where there is no place.
        most: places beyond which memory is not doubled but grows by what is needed.
    """

    def __init__(
        self,
        layers: int,
        window: int,
        heads: int,
        head_dim: int,
        *,
        blocks: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.window, self.most = window, 2**40
        self.kv = zeros((layers, blocks * BLOCK, heads, head_dim), dtype, device)
        self.slots: Ints = np.zeros(0, np.int64)
        self._table: Ints = np.zeros((0, BLOCK), np.int64)
        self._given: Ints = np.zeros(0, np.int64)
        self._time = self._next = 0
        self.follow(blocks)

    def follow(self, blocks: int) -> None:
        """The arena has so many blocks now."""
        slots, given_at, kept = np.zeros(blocks * BLOCK + SPARE, np.int64), np.zeros(blocks, np.int64), len(self._table)
        kept = min(kept, blocks)
        slots[: kept * BLOCK], given_at[:kept] = self.slots[: kept * BLOCK], self._given[:kept]
        self.slots, self._given, self._table = slots, given_at, slots[: blocks * BLOCK].reshape(blocks, BLOCK)

    @property
    def places(self) -> int:
        """How many blocks fit, the first one included."""
        return int(self.kv.shape[1]) // BLOCK

    def has(self, blocks: Sequence[int]) -> npt.NDArray[np.bool_]:
        """Which of these blocks have a place."""
        placed: npt.NDArray[np.bool_] = self._table[np.asarray(blocks, np.int64), 0] > 0
        return placed

    def first_read(self, length: int) -> int:
        """The first of a sequence's blocks whose keys are read by what follows its first `length` tokens."""
        return max(0, length - self.window + 1) // BLOCK

    def usable(self, blocks: Sequence[int]) -> int:
        """How many of a text's first blocks, as many as possible, a sequence can begin with: those before its end that
        its windows reach have places.
        """
        has, count = self.has(blocks), len(blocks)
        while count:
            first = self.first_read(count * BLOCK)
            gaps = np.flatnonzero(~has[first:count])
            if not len(gaps):
                break
            count = first + int(gaps[-1])
        return count

    def touch(self, blocks: Sequence[int]) -> None:
        """These blocks count as the last that got their place."""
        self._time += 1
        self._given[list(blocks)] = self._time

    def drop(self, blocks: Sequence[int]) -> None:
        """These blocks have no place any more."""
        self._table[list(blocks)] = 0

    def alias(self, source: Sequence[int], target: Sequence[int]) -> None:
        """As many other blocks have the same places, until the first ones are dropped."""
        self._table[list(target)] = self._table[list(source)]
        self._given[list(target)] = self._given[list(source)]

    def lacking(self, blocks: Sequence[int], window_blocks: Iterable[Sequence[int]]) -> int:
        """How many places there are too few for these blocks.

        Args:
            window_blocks: those that keep theirs.
        """
        count = int((~self.has(blocks)).sum())
        short = count - len(self._free())
        if short > 0:
            self._take_back(max(short, self.places // AT_ONCE), window_blocks)
            short = count - len(self._free())
        return short

    def _free(self) -> Ints:
        used = np.zeros(self.places, np.bool_)
        used[0] = True
        used[self._table[:, 0] // BLOCK] = True
        return np.flatnonzero(~used)

    def _take_back(self, count: int, window_blocks: Iterable[Sequence[int]]) -> None:
        behind = self._table[:, 0] > 0
        for blocks in window_blocks:
            behind[list(blocks)] = False
        candidates = np.flatnonzero(behind)
        self._table[candidates[np.argsort(self._given[candidates], kind="stable")[:count]]] = 0

    def grow(self, count: int) -> None:
        """Make room for at least so many more."""
        places = self.places
        layers, slots, heads, head_dim = self.kv.shape
        wanted = max(places + count, min(2 * places, self.most))
        kv = zeros((layers, wanted * BLOCK, heads, head_dim), self.kv.dtype, self.kv.device)
        kv[:, :slots] = self.kv
        self.kv = kv

    def shrink(self) -> None:
        """Forget everything and drop the places beyond `most`."""
        self._table[:] = 0
        if self.most < self.places:
            self.kv = self.kv[:, : self.most * BLOCK].clone()

    def give(self, blocks: Sequence[int], *, clear: bool) -> None:
        """Give these blocks places, those that have one excepted; there are enough.

        Args:
            clear: new places must hold numbers.
        """
        self.touch(blocks)
        index = np.asarray(blocks, np.int64)
        index = index[self._table[index, 0] == 0]
        if not len(index):
            return
        free = self._free()
        free = np.concatenate((free[free >= self._next], free[free < self._next]))[: len(index)]
        slots = free[:, None] * BLOCK + WITHIN
        if clear:
            self.kv[:, torch.from_numpy(slots.reshape(-1))] = 0
        self._next, self._table[index] = int(free[-1]) + 1, slots

    def copy(self, source: Sequence[int], target: Sequence[int]) -> None:
        """Copy what blocks hold to others, all of which have places."""
        self.kv[:, self._index(target)] = self.kv[:, self._index(source)]

    def move(self, source: Sequence[int], target: Sequence[int]) -> None:
        """Copy single slots of the arena; sources may overlap targets."""
        self.kv[:, torch.from_numpy(self.slots[target])] = self.kv[:, torch.from_numpy(self.slots[source])]

    def _index(self, blocks: Sequence[int]) -> torch.Tensor:
        return torch.from_numpy(self._table[list(blocks)].reshape(-1))


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros, in large pages on the CPU."""
    return pages.zeros(shape, dtype) if device.type == "cpu" else torch.zeros(shape, dtype=dtype, device=device)
