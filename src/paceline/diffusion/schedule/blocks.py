"""Blocks from left to right: the usual schedule (semi-autoregressive decoding).

In: a block length. Out: the current block, the masked slots in it. Not here: which of them are written.
Source: Large Language Diffusion Models (arXiv:2502.09992); Block Diffusion (arXiv:2503.09573) for blocks at fixed
places.
"""

from __future__ import annotations

from paceline.diffusion.canvas import Canvas
from paceline.diffusion.setting import Setting
from paceline.models.denoiser import Ints
from paceline.utils import need


class Blocks:
    """The leftmost block with a masked slot is the current one.

    Blocks count from the end of the prompt; in a block-causal model from the first slot of the canvas, as the model's
    own do, so that the first may begin with the end of the prompt.

    Args:
        block_length: slots of a block; None takes the model's, or the whole text for a model without blocks.
    Raises:
        ConfigError: a length below 1, blocks that do not divide the text, or are not those of a block-causal model.
    """

    stateless = True

    def __init__(self, setting: Setting, *, block_length: int | None = None) -> None:
        need(
            block_length is None or block_length >= 1,
            "block_length",
            "be at least 1 (None takes the default)",
            block_length,
        )
        canvas, denoiser = setting.canvas, setting.denoiser
        causal = denoiser.attention == "block"
        self.origin = 0 if causal else canvas.start
        slots = canvas.length - self.origin
        own = denoiser.block_length if causal and denoiser.block_length else slots
        self.length = own if block_length is None else block_length
        if causal:
            rule = f"divide the model's block length {own} (attention is causal between its blocks)"
            need(own % self.length == 0, "block_length", rule, self.length)
        rule = f"divide the {slots} slots of the text; choose a divisor, or another length"
        need(slots % self.length == 0, "block_length", rule, self.length)

    def block(self, canvas: Canvas) -> range:
        """See `base.Schedule`."""
        masked = canvas.masked()
        first = int(masked[0]) if masked.size else canvas.length - 1
        low = self.origin + (first - self.origin) // self.length * self.length
        return range(low, min(low + self.length, canvas.length))

    def index(self, slots: Ints) -> Ints:
        """The number of the block that each slot is in, from 0."""
        return (slots - self.origin) // self.length

    def eligible(self, canvas: Canvas) -> Ints:
        """See `base.Schedule`."""
        block = self.block(canvas)
        return canvas.masked(block.start, block.stop)
