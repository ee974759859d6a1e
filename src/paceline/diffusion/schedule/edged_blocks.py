"""Blocks of any lengths, from left to right: what schedules with lengths of their own share.

In: the slots at which blocks begin. Out: the current block, the masked slots in it. Not here: how long blocks are.
"""

from __future__ import annotations

import numpy as np

from paceline.diffusion.canvas import Canvas
from paceline.models.denoiser import Ints


class EdgedBlocks:
    """The leftmost block with a masked slot is the current one.

    Attributes:
        edges: (blocks + 1,) first slots of the blocks, and the end of the last; set by the schedule.
    """

    edges: Ints

    def index(self, slots: Ints) -> Ints:
        """The number of the block that each slot is in, from 0."""
        return np.clip(np.searchsorted(self.edges, slots, side="right") - 1, 0, self.edges.size - 2)

    def block(self, canvas: Canvas) -> range:
        """See `base.Schedule`."""
        masked = canvas.masked()
        first = masked[:1] if masked.size else np.asarray([canvas.length - 1])
        number = int(self.index(first)[0])
        return range(int(self.edges[number]), min(int(self.edges[number + 1]), canvas.length))

    def eligible(self, canvas: Canvas) -> Ints:
        """See `base.Schedule`."""
        block = self.block(canvas)
        return canvas.masked(block.start, block.stop)
