"""Dual cache: keys and values on both sides of the block are kept from the block's first pass on.

In: a canvas, its current block. Out: plans. Not here: when everything is stored anew (`refreshed`).
Source: Fast-dLLM (arXiv:2505.22618); ReCAP (arXiv:2505.19089) for refreshes by rounds and passes over masked slots
only.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from paceline.diffusion.base import Plan
from paceline.diffusion.cache.refreshed import Refreshed
from paceline.diffusion.canvas import Canvas, Status
from paceline.diffusion.setting import Setting
from paceline.models.denoiser import Ints
from paceline.utils import need


class Dual(Refreshed):
    """A block's first pass computes everything; the later ones compute the block only, and read both sides of it.

    Approximate: neither side sees what is written in the block until the next refresh.

    Args:
        refresh_period: rounds from one pass over everything to the next (ReCAP's groups: one full step, the others
            local); None refreshes at the start of a block only.
        recompute: what the other passes compute of the block: all of it ("block"), or what was masked at the last
            refresh ("masked": slots still masked, and those written since, whose states still settle).
    """

    def __init__(
        self, setting: Setting, *, refresh_period: int | None = None, recompute: Literal["block", "masked"] = "block"
    ) -> None:
        super().__init__(setting, refresh_period)
        need(recompute in ("block", "masked"), "recompute", "be block or masked", recompute)
        self.masked_only = recompute == "masked"

    def between(self, canvas: Canvas, block: range) -> Plan:
        """See `Refreshed`."""
        slots = self.with_left(self._open(canvas, block))
        return Plan(slots, np.setdiff1d(np.arange(canvas.length), slots, assume_unique=True))

    def _open(self, canvas: Canvas, block: range) -> Ints:
        slots: Ints = np.arange(block.start, block.stop)
        if self.masked_only:
            slots = slots[(canvas.status[slots] == Status.MASKED) | (canvas.born[slots] >= self.since)]
        return slots
