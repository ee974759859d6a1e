"""No cache: the whole canvas in every pass. The reference for every other policy.

In: a canvas. Out: a plan of all slots. Not here: storing anything.
"""

from __future__ import annotations

import numpy as np

from paceline.diffusion.base import Plan
from paceline.diffusion.canvas import Canvas
from paceline.diffusion.setting import Setting
from paceline.utils import need


class Whole:
    """Every slot is computed in every pass; in a block-causal model, those up to the end of the current block.

    Args:
        blocks_ahead: further blocks that a block-causal model computes, for drafts that reach into them; without effect
            in a model with full attention, where it is refused unless the verification takes it too.
    """

    exact = True

    def __init__(self, setting: Setting, *, blocks_ahead: int = 0) -> None:
        need(blocks_ahead >= 0, "blocks_ahead", "be at least 0", blocks_ahead)
        self.own = setting.denoiser.block_length if setting.denoiser.attention == "block" else None
        self.more = blocks_ahead

    def plans(self, canvas: Canvas, block: range) -> list[Plan]:
        """See `base.Cache`."""
        return [self.ahead(canvas, block)]

    def ahead(self, canvas: Canvas, block: range) -> Plan:
        """See `base.Cache`."""
        if self.own is None:
            return Plan(np.arange(canvas.length))
        end = -(-block.stop // self.own) * self.own + self.more * self.own
        return Plan(np.arange(min(end, canvas.length)))
