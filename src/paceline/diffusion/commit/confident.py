"""Confident decoding: all slots above a threshold, or as many of the best as a time grid asks for.

In: clean probabilities, scores of any base order. Out: the slots to write. Not here: the base orders (scores), text
given in advance (`Canvas.of(priors=...)`: structure priors, which are never written and count in no quota).
Source: Dimple: Discrete Diffusion Multimodal Large Language Model with Parallel Decoding (arXiv:2505.16990).
"""

from __future__ import annotations

import numpy as np

from paceline.diffusion.base import Step
from paceline.diffusion.commit.time_grid import TimeGrid, grid
from paceline.diffusion.progress import BlockProgress
from paceline.diffusion.setting import Setting
from paceline.models.denoiser import Ints


class Confident(TimeGrid):
    """Slots whose clean probability exceeds the threshold; where none does, the scheduled number by the base order.

    That number comes from the share of slots still masked, not from the round: the grid is walked from there until it
    asks for one slot at least. The last round writes everything, so that a block takes `denoising_steps` rounds at
    most.

    Args:
        confidence_threshold: above 1 it is the scheduled sampler.
        denoising_steps: most rounds for a block; None is a round for each of its slots.
    """

    def __init__(
        self, setting: Setting, *, confidence_threshold: float = 0.95, denoising_steps: int | None = None
    ) -> None:
        super().__init__(setting, denoising_steps=denoising_steps)
        self.threshold = confidence_threshold

    def number(self, progress: BlockProgress) -> int:
        """Slots of a round in which none is sure."""
        steps = self.steps or progress.slots
        levels, share = grid(steps), progress.masked / max(1, progress.slots)
        later = np.flatnonzero(levels < share)
        for i in range(max(int(later[0]) if later.size else steps, progress.done + 1), steps):
            wanted = int(progress.masked * (1 - levels[i] / share))
            if wanted >= 1:
                return wanted
        return progress.masked

    def choose(self, step: Step) -> Ints:
        """See `base.Commit`."""
        progress = BlockProgress.of(step)
        if progress.done >= (self.steps or progress.slots) - 1:
            return step.eligible
        sure = step.eligible[step.predictions.confidence[step.predictions.rows(step.eligible)] > self.threshold]
        return sure if sure.size else step.ranked[: self.number(progress)]
