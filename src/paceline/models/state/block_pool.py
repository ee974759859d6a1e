"""Who holds which block of a model's arena.

An exception may come between any two operations (Ctrl-C, an error while memory grows), and a handle may be lost on its
way to whoever asked for it. So counts are only a summary: every change is made within `Arena.change`, and where the
last change did not reach its end, or a holder died with blocks, the counts are made anew from the holders' own lists.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Final, Protocol
from weakref import WeakSet

import numpy as np

CHANGES: Final = count()


class Holder(Protocol):
    """A sequence, or an index of kept ones: the blocks it holds, one entry for each time."""

    @property
    def blocks(self) -> Sequence[int]:
        """Their numbers."""

    @property
    def window_blocks(self) -> Sequence[int]:
        """Those whose keys and values must remain in layers with a sliding window."""


class BlockPool:
    """Reference counts of blocks; finds free runs. Knows nothing of tensors.

    Args:
        blocks: how many there are.
        reserved: so many first blocks are never free.

    Attributes:
        holders: all sequences, as long as they live; what they hold is what counts.
        cut_short: a change began and did not end.
        stale: a holder died with blocks.
        changes: another number whenever blocks have changed hands.
    """

    def __init__(self, blocks: int, reserved: int = 0) -> None:
        self.counts = np.zeros(blocks, np.int32)
        self.counts[:reserved] = 1
        self.used_before = np.zeros(blocks, np.bool_)
        self.reserved = reserved
        self.holders: WeakSet[Holder] = WeakSet()
        self.cut_short = self.stale = False
        self.changes = next(CHANGES)

    def begin(self) -> None:
        """A change of counts and holders begins."""
        self.recount()
        self.cut_short = True

    def end(self) -> None:
        """The change is whole."""
        self.changes = next(CHANGES)
        self.cut_short = False

    def recount(self) -> None:
        """Make the counts anew from the holders, if they may be wrong."""
        if not (self.cut_short or self.stale):
            return
        self.cut_short, self.stale = True, False
        counts = np.zeros_like(self.counts)
        counts[: self.reserved] = 1
        holders = list(self.holders)  # none of them dies before the return
        for holder in holders:
            np.add.at(counts, np.asarray(holder.blocks, np.int64), 1)
        self.used_before |= self.counts > counts
        self.counts = counts
        self.cut_short = False

    @property
    def free(self) -> int:
        """Number of blocks that nobody holds; for the thread that changes them."""
        self.recount()
        return self.unheld

    @property
    def unheld(self) -> int:
        """`free`, inside a change; to another thread, about as many."""
        return int((self.counts == 0).sum())

    def find(self, count: int) -> int | None:
        """First block of the first free run of `count` blocks, or None."""
        start = (self.counts == 0).tobytes().find(b"\x01" * count)
        return None if start < 0 else start

    def is_free(self, start: int, count: int) -> bool:
        """Whether the blocks start .. start + count - 1 exist and nobody holds them."""
        return start + count <= len(self.counts) and not self.counts[start : start + count].any()

    def add_reference(self, blocks: Sequence[int]) -> None:
        """Count these blocks once more."""
        if isinstance(blocks, range):
            self.counts[blocks.start : blocks.stop] += 1
        else:
            self.counts[list(blocks)] += 1

    def drop(self, blocks: Sequence[int]) -> None:
        """Count these blocks once less."""
        index = list(blocks)
        self.used_before[index] = True
        self.counts[index] -= 1

    def shrink(self, blocks: int) -> None:
        """Drop the free blocks beyond this number."""
        self.counts, self.used_before = self.counts[:blocks].copy(), self.used_before[:blocks].copy()

    def grow(self, blocks: int) -> None:
        """Add free blocks up to this number."""
        self.counts = np.concatenate([self.counts, np.zeros(blocks - len(self.counts), np.int32)])
        self.used_before = np.concatenate([self.used_before, np.zeros(blocks - len(self.used_before), np.bool_)])
