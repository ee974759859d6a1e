"""Exact block cache: in a block-causal model what is finished never changes, so it is computed and stored once.

In: a canvas, its current block. Out: plans. Not here: the model's blocks (`models`).
Source: Block Diffusion (arXiv:2503.09573); SDAR and LLaDA2.x decode so.
"""

from __future__ import annotations

import numpy as np

from paceline.diffusion.base import Plan
from paceline.diffusion.canvas import Canvas
from paceline.diffusion.setting import Setting
from paceline.models.denoiser import Ints
from paceline.utils import need


class BlockCache:
    """Blocks of the model before the current one are stored when they are finished, the prompt's at the start.

    A block that an edit rule rewrites after it was stored is stored again, with all that follow. Nothing masked is ever
    read. Where logits are shifted, each pass computes the last slot before its own once more, and equals a pass without
    cache up to rounding; otherwise to the bit, as far as the model's rows keep their bits in passes of other sizes.

    Args:
        merge_writes: store a finished block in the first pass over the next one; False takes a pass of its own for it.
        blocks_ahead: further blocks computed in each pass, for drafts that reach into them.
    Raises:
        ConfigError: a model that is not block-causal.
    """

    exact = True

    def __init__(self, setting: Setting, *, merge_writes: bool = True, blocks_ahead: int = 0) -> None:
        denoiser, canvas = setting.denoiser, setting.canvas
        rule = (
            "be none, prefix, dual or window (this model's attention is full: what is written changes the states "
            "of all slots)"
        )
        need(denoiser.attention == "block" and denoiser.block_length is not None, "cache", rule, "block")
        need(blocks_ahead >= 0, "blocks_ahead", "be at least 0", blocks_ahead)
        setting.store = denoiser.new_cache(canvas.length)
        self.own, self.left = denoiser.block_length or 1, int(denoiser.needs_left)
        self.merge, self.more = merge_writes, blocks_ahead
        self.tokens = canvas.tokens[:0]
        self.before = 0

    def plans(self, canvas: Canvas, block: range) -> list[Plan]:
        """See `base.Cache`."""
        low, high = self._bounds(canvas, block)
        self.before = min(self._intact(canvas), low)
        stale = low > self.before
        self.tokens = canvas.tokens[:low].copy()
        if not stale or self.merge:
            return [self._plan(self.before, high, write=stale)]
        first = self._plan(self.before, low, write=True)
        self.before = low
        return [first, self._plan(low, high)]

    def ahead(self, canvas: Canvas, block: range) -> Plan | None:
        """See `base.Cache`."""
        if not np.array_equal(canvas.tokens[: self.before], self.tokens[: self.before]):
            return None
        return self._plan(self.before, self._bounds(canvas, block)[1])

    def _bounds(self, canvas: Canvas, block: range) -> tuple[int, int]:
        """Of the model's blocks that hold `block`, and those ahead of it."""
        high = -(-block.stop // self.own) * self.own + self.more * self.own
        return block.start // self.own * self.own, min(high, canvas.length)

    def _intact(self, canvas: Canvas) -> int:
        """Slots whose stored states are still those of the canvas: whole blocks, as they were stored."""
        size = min(self.tokens.size, canvas.length)
        changed = np.flatnonzero(self.tokens[:size] != canvas.tokens[:size])
        return int(changed[0] if changed.size else size) // self.own * self.own

    def _plan(self, first: int, high: int, *, write: bool = False) -> Plan:
        first = max(first - self.left, 0)
        read: Ints = np.arange(first)
        return Plan(np.arange(first, high), read, write)
