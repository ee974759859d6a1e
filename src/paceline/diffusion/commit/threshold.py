"""Every slot that the model is sure of: Fast-dLLM's two rules.

In: scores. Out: the slots above a fixed threshold, or as many as a bound on the joint allows. Not here: caches.
Source: Fast-dLLM (arXiv:2505.22618).
"""

from __future__ import annotations

import numpy as np

from paceline.diffusion.base import Step
from paceline.diffusion.setting import Setting
from paceline.models.denoiser import Ints


class Threshold:
    """All eligible slots with a score of at least `confidence_threshold`; the loop writes the best where none has.

    Args:
        confidence_threshold: above 1 it is the static baseline, one slot a round.
    """

    stateless = True

    def __init__(self, setting: Setting, *, confidence_threshold: float = 0.9) -> None:
        del setting
        self.threshold = confidence_threshold

    def choose(self, step: Step) -> Ints:
        """See `base.Commit`."""
        return step.eligible[step.scores >= self.threshold]


class Factor:
    """The largest n with (n + 1) (1 - c_n) < factor, where c_n is the n-th highest confidence; one at least.

    While all n marginals exceed 1 - e and (n + 1) e <= 1, the joint's most probable tokens are those of the marginals.

    Args:
        factor: 1 is the bound itself; larger commits more.
    """

    stateless = True

    def __init__(self, setting: Setting, *, factor: float = 1.0) -> None:
        del setting
        self.factor = factor

    def choose(self, step: Step) -> Ints:
        """See `base.Commit`."""
        ranked = step.ranked
        sure = step.predictions.confidence[step.predictions.rows(np.sort(ranked))]
        sure = -np.sort(-sure)
        fine = (np.arange(1, sure.size + 1) + 1) * (1 - sure) < self.factor
        return ranked[: max(1, int(np.flatnonzero(fine).max(initial=-1)) + 1)]
