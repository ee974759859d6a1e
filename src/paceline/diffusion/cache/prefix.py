"""Prefix cache: keys and values of the slots before the block are kept from the block's first pass on.

In: a canvas, its current block. Out: plans. Not here: when everything is stored anew (`refreshed`).
Source: Fast-dLLM (arXiv:2505.22618).
"""

from __future__ import annotations

import numpy as np

from paceline.diffusion.base import Plan
from paceline.diffusion.cache.refreshed import Refreshed
from paceline.diffusion.canvas import Canvas
from paceline.diffusion.setting import Setting


class Prefix(Refreshed):
    """A block's first pass computes everything; the later ones compute the block and what follows it, and read the
    rest.

    Approximate: what stands before the block does not see what is written in it until the next block.

    Args:
        refresh_period: rounds until everything is computed again within a block; None is never.
    """

    def __init__(self, setting: Setting, *, refresh_period: int | None = None) -> None:
        super().__init__(setting, refresh_period)

    def between(self, canvas: Canvas, block: range) -> Plan:
        """See `Refreshed`."""
        first = max(block.start - self.needs_left, 0)
        return Plan(np.arange(first, canvas.length), np.arange(first))
