"""What approximate cache policies share: everything is computed and stored now and then, little of it in the passes
between.

In: a canvas, its current block. Out: plans. Not here: which slots the passes between compute (`prefix`, `dual`,
`window`).

What is computed between two refreshes is not stored: the later passes until the next refresh compute it again, so
storing it would change nothing, and drafts of one canvas can be computed side by side.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np

from paceline.diffusion.base import Plan
from paceline.diffusion.canvas import Canvas
from paceline.diffusion.setting import Setting
from paceline.models.denoiser import Ints
from paceline.utils import need


class Refreshed(ABC):
    """Refreshes at the start of each block, where the text has become shorter, and every `refresh_period` rounds.

    The logits of a refresh serve the first decision after it.

    Args:
        refresh_period: rounds from one refresh to the next; None is the whole block, 1 is no cache at all.
    Raises:
        ConfigError: a block-causal model, which has an exact cache.
    """

    exact = False

    def __init__(self, setting: Setting, refresh_period: int | None) -> None:
        full = setting.denoiser.attention == "full"
        rule = "be none or block for a block-causal model (its exact cache; the others approximate full attention)"
        need(full, "cache", rule, type(self).__name__.lower())
        need(refresh_period is None or refresh_period >= 1, "refresh_period", "be at least 1", refresh_period)
        setting.store = setting.denoiser.new_cache(setting.canvas.length)
        self.period = refresh_period
        self.needs_left = setting.denoiser.needs_left
        self.block, self.length, self.since, self.storing = range(0), 0, 0, False

    def plans(self, canvas: Canvas, block: range) -> list[Plan]:
        """See `base.Cache`."""
        self.storing = self._due(canvas, block)
        if not self.storing:
            return [self.between(canvas, block)]
        self.block, self.length, self.since = block, canvas.length, canvas.round
        return [self.refresh(canvas)]

    def ahead(self, canvas: Canvas, block: range) -> Plan | None:
        """See `base.Cache`."""
        if self.storing or self._due(canvas, block):
            return None
        return self.between(canvas, block)

    def refresh(self, canvas: Canvas) -> Plan:
        """The pass that stores."""
        return Plan(np.arange(canvas.length), write=True)

    @abstractmethod
    def between(self, canvas: Canvas, block: range) -> Plan:
        """A pass that reads."""

    def with_left(self, slots: Ints) -> Ints:
        """`slots` and, where the model needs them, their left neighbours; ascending."""
        return np.union1d(slots, slots[slots > 0] - 1) if self.needs_left else slots

    def _due(self, canvas: Canvas, block: range) -> bool:
        if block != self.block or canvas.length != self.length:
            return True
        return self.period is not None and canvas.round - self.since >= self.period
