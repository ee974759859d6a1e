"""No cache: the whole canvas in every pass. The reference for every other policy.

In: a canvas. Out: a plan of all slots. Not here: storing anything.
"""

from __future__ import annotations

import numpy as np

from paceline.diffusion.base import Plan
from paceline.diffusion.canvas import Canvas
from paceline.diffusion.setting import Setting


class Whole:
    """Every slot is computed in every pass; in a block-causal model, those up to the end of the current block."""

    def __init__(self, setting: Setting) -> None:
        self.causal = setting.denoiser.attention == "block"

    def plans(self, canvas: Canvas, block: range) -> list[Plan]:
        """See `base.Cache`."""
        return [Plan(np.arange(block.stop if self.causal else canvas.length))]
