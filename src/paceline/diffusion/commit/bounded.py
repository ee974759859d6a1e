"""Bounded adaptive confidence decoding: the threshold of a block is the mean confidence of what was written in it so
far.

In: confidences of one round, what the block holds. Out: the slots to write. Not here: another block size for a
second phase (`tccf`).
Source: BACD of TDAR (arXiv:2602.09555).
"""

from __future__ import annotations

import numpy as np

from paceline.diffusion.base import Step
from paceline.diffusion.canvas import Status
from paceline.diffusion.setting import Setting
from paceline.models.denoiser import Ints
from paceline.utils import need


class Bounded:
    """Threshold = mean confidence of the slots written in the current block, or the best confidence where there is none
    yet, kept within two bounds.

    What was written, and how sure, is read off the canvas: the history is that of one block of one text by
    construction.

    Args:
        confidence_low: lower bound.
        confidence_high: upper bound; equal bounds are the threshold rule.
    Raises:
        ConfigError: bounds out of order.
    """

    stateless = True

    def __init__(self, setting: Setting, *, confidence_low: float = 0.6, confidence_high: float = 0.9) -> None:
        del setting
        need(
            confidence_low <= confidence_high,
            "confidence_low",
            f"be at most confidence_high ({confidence_high})",
            confidence_low,
        )
        self.low, self.high = confidence_low, confidence_high

    def threshold(self, step: Step) -> float:
        """Of this round."""
        part = slice(step.block.start, step.block.stop)
        written = step.canvas.status[part] == Status.COMMITTED
        history = step.canvas.confidence[part][written]
        middle = float(history.mean()) if history.size else float(step.scores.max())
        return float(np.clip(middle, self.low, self.high))

    def choose(self, step: Step) -> Ints:
        """See `base.Commit`."""
        return step.eligible[step.scores >= self.threshold(step)]
