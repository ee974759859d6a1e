"""Blocks that may be held: a full block stays the current one until the rule that edits it lets go.

In: a block length. Out: as `Blocks`. Not here: when a block is held (`token_editing`).
Source: LLaDA2.1: Speeding Up Text Diffusion via Token Editing (arXiv:2602.08676).
"""

from __future__ import annotations

from paceline.diffusion.canvas import Canvas
from paceline.diffusion.schedule.blocks import Blocks
from paceline.diffusion.setting import Setting


class HeldBlocks(Blocks):
    """As `Blocks`; while `held` is set, that block is the current one, with nothing eligible once it is full.

    Attributes:
        held: the block that is being edited, or None.
    """

    stateless = False

    def __init__(self, setting: Setting, *, block_length: int | None = None) -> None:
        super().__init__(setting, block_length=block_length)
        self.held: range | None = None

    def block(self, canvas: Canvas) -> range:
        """See `base.Schedule`."""
        if self.held is None or self.held.start >= canvas.length:
            return super().block(canvas)
        return range(self.held.start, min(self.held.stop, canvas.length))
