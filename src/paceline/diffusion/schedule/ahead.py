"""The current block and those after it: a schedule that looks past the block wall.

In: block length, number of further blocks. Out: masked slots of all of them. Not here: which of them are written.
Source: the cross-block part of From Bits to Rounds (arXiv:2511.21103).
"""

from __future__ import annotations

from paceline.diffusion.canvas import Canvas
from paceline.diffusion.schedule.blocks import Blocks
from paceline.diffusion.setting import Setting
from paceline.models.denoiser import Ints
from paceline.utils import need


class Ahead(Blocks):
    """As `Blocks`, but masked slots of the next `look_ahead` blocks may be written too.

    A slot there needs a prediction: policies that compute only the current block, and block-causal models, have none to
    give unless they are told to compute more.

    Args:
        block_length: see `Blocks`.
        look_ahead: further blocks; 0 is `Blocks`.
    """

    def __init__(self, setting: Setting, *, block_length: int | None = None, look_ahead: int = 1) -> None:
        super().__init__(setting, block_length=block_length)
        need(look_ahead >= 0, "look_ahead", "be at least 0", look_ahead)
        self.further = look_ahead

    def eligible(self, canvas: Canvas) -> Ints:
        """See `base.Schedule`."""
        block = self.block(canvas)
        return canvas.masked(block.start, min(block.start + (1 + self.further) * self.length, canvas.length))
