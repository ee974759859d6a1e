"""Measures of how sure the model is of a slot.

In: predictions. Out: a number for each slot, the highest written first. Not here: corrections (modifiers), how many are
written.
Source: LLaDA (arXiv:2502.09992) for confidence and random; Dream 7B (arXiv:2508.15487) for margin and entropy.
"""

from __future__ import annotations

import numpy as np

from paceline.diffusion.canvas import Canvas, Floats
from paceline.diffusion.predictions import Predictions
from paceline.diffusion.setting import Setting


class Confidence:
    """Clean probability of the token predicted ("low_confidence", "maskgit_plus")."""

    stateless = True

    def __init__(self, setting: Setting) -> None:
        del setting

    def score(self, predictions: Predictions, canvas: Canvas) -> Floats:
        """See `base.Score`."""
        return predictions.confidence


class Margin(Confidence):
    """Probability of the first token less that of the second ("topk_margin")."""

    def score(self, predictions: Predictions, canvas: Canvas) -> Floats:
        """See `base.Score`."""
        return predictions.margin


class Entropy(Confidence):
    """Negative entropy of the slot's distribution, nats."""

    def score(self, predictions: Predictions, canvas: Canvas) -> Floats:
        """See `base.Score`."""
        return -predictions.entropy


class Random:
    """A number drawn for each (seed, round, slot): an order that does not look at values."""

    stateless = True

    def __init__(self, setting: Setting) -> None:
        self.seed = setting.seed

    def score(self, predictions: Predictions, canvas: Canvas) -> Floats:
        """See `base.Score`."""
        key = np.array(
            [self.seed & 0xFFFFFFFFFFFFFFFF, canvas.round + (1 << 63)], np.uint64
        )  # a list would become floats
        stream = np.random.Generator(np.random.Philox(key=key))
        return stream.random(canvas.length)[predictions.slots]


class Leftmost(Confidence):
    """From left to right, whatever the model says."""

    def score(self, predictions: Predictions, canvas: Canvas) -> Floats:
        """See `base.Score`."""
        return -predictions.slots.astype(np.float64)
