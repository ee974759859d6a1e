"""What each row of a pass sees, as lists of cache slots for compiled code.

The order of a row's slots is the order of its positions, whether a chain, a tree or a prompt is fed: so its result has
the same bits in all of them. Compiled code reads them by models.cpu.visible_slots.
"""

from __future__ import annotations

import numpy as np

from paceline.models.attention.segments import Bools, Segment, first_in_window
from paceline.models.cpu.pages import address
from paceline.models.state.arena import Arena
from paceline.models.state.cache import NativeCache
from paceline.models.state.window_slots import SPARE, Ints, WindowSlots


class SlotLists:
    """Lists of slots by position for all sequences of an arena.

    Attributes:
        start: address of the list of all slots in order.
        windowed_start: the same of the slots in layers with a window that give back keys.
    """

    def __init__(self, arena: Arena) -> None:
        self._arena, self._version = arena, -1
        self._straight: Ints = np.zeros(0, np.int64)
        self.start = self.windowed_start = 0

    def refresh(self) -> None:
        """Follow the arena's growth."""
        if self._version != self._arena.version:
            self._straight = np.minimum(np.arange(self._arena.slots + SPARE), self._arena.slots - 1)
            if self._arena.windowed is not None:
                self.windowed_start = address(self._arena.windowed.slots)
            self.start, self._version = address(self._straight), self._arena.version

    def of(self, cache: NativeCache, stop: int, kept: list[Ints]) -> tuple[Ints, int]:
        """The slots of positions 0 .. stop - 1 and their address; a list made for this call is added to `kept`."""
        self.refresh()
        if cache.base >= 0:
            return self._straight[cache.base :], self.start + 8 * cache.base
        copied = np.concatenate((cache.slot_index(0, stop), np.zeros(SPARE, np.int64)))
        kept.append(copied)
        return copied, address(copied)

    def windowed(self, windowed: WindowSlots, cache: NativeCache, slots: Ints, kept: list[Ints]) -> tuple[Ints, int]:
        """The same in layers with a window that give back keys, for what `of` has found."""
        if cache.base >= 0:
            return windowed.slots[cache.base :], self.windowed_start + 8 * cache.base
        windowed_slots = windowed.slots[slots]
        kept.append(windowed_slots)
        return windowed_slots, address(windowed_slots)


def fill(segment: Segment, window: int | None, slots: tuple[Ints, int], out: Ints, kept: list[Ints]) -> None:
    """Fill (rows, 4) with address and count of the shared list and of the own list, for one kind of window."""
    if segment.tree is not None:
        _fill_tree(segment, window, slots, out, kept)
        return
    shared, start = segment.cache.length + segment.done, slots[1]
    if window is None:
        out[:] = [(start, shared, start + 8 * shared, i) for i in range(1, len(out) + 1)]
        return
    rows, first = [], first_in_window(shared, window)
    for i in range(len(out)):
        low = max(0, first + i)
        behind = max(shared, low)
        rows.append((start + 8 * low, behind - low, start + 8 * behind, shared + i + 1 - behind))
    out[:] = rows


def fill_gaps(segment: Segment, there: Bools, slots: Ints, out: Ints, kept: list[Ints]) -> None:
    """The same in layers that hold keys of some positions alone.

    Args:
        there: (length + slots,) of which committed positions, then of which inputs. slots: by position.
    """
    length = segment.cache.length
    sees, spare = segment.sees[segment.done :] & there[length:], np.zeros(SPARE, np.int64)
    shared = np.concatenate((slots[:length][there[:length]], spare))
    own, counts = np.concatenate((slots[length + np.nonzero(sees)[1]], spare)), sees.sum(1)
    kept += [shared, own]
    out[:, 0], out[:, 1] = address(shared), len(shared) - SPARE
    out[:, 2], out[:, 3] = address(own) + 8 * (np.cumsum(counts) - counts), counts


def fill_source(memory: NativeCache, lists: SlotLists, out: Ints, kept: list[Ints]) -> None:
    """The same of rows that all see a source, the last slot of which stands in their own lists."""
    _, start = lists.of(memory, memory.length, kept)
    shared = memory.length - 1
    out[:] = (start, shared, start + 8 * shared, 1)


def _fill_tree(segment: Segment, window: int | None, slots: tuple[Ints, int], out: Ints, kept: list[Ints]) -> None:
    length, (first, inputs) = segment.cache.length, segment.visible(window)
    low, counts = first if window is None else np.minimum(first, length), inputs.sum(1)
    own = np.concatenate((slots[0][length + np.nonzero(inputs)[1]], np.zeros(SPARE, np.int64)))
    kept.append(own)
    out[:, 0], out[:, 1] = slots[1] + 8 * low, length - low
    out[:, 2], out[:, 3] = address(own) + 8 * (np.cumsum(counts) - counts), counts
