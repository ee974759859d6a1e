"""Mask-Predict: write everything, mask the least sure slots again, fewer of them in every round.

In: predictions, how surely each slot was written. Out: all masked slots to write, the slots to mask again. Not here:
remasking by chance (`remdm`).
Source: Mask-Predict: Parallel Decoding of Conditional Masked Language Models (arXiv:1904.09324).
"""

from __future__ import annotations

import numpy as np

from paceline.diffusion.base import Changes, Step
from paceline.diffusion.canvas import Canvas, Status
from paceline.diffusion.progress import rounds_of_text, whole_text
from paceline.diffusion.setting import Setting
from paceline.models.denoiser import Ints


class Everything:
    """All eligible slots."""

    stateless = True

    def __init__(self, setting: Setting) -> None:
        del setting

    def choose(self, step: Step) -> Ints:
        """See `base.Commit`."""
        return step.eligible


class MaskPredict:
    """After round i of T (from 0) the floor(N (T - 1 - i) / T) least sure of the N slots are masked again; none after
    the last.

    A slot's confidence is that of the round in which it was written last. Decoding takes T rounds at most; T = 1 writes
    all at once.

    Args:
        denoising_steps: rounds T, at most 16 for each slot; None is a round for each slot.
    Raises:
        ConfigError: fewer rounds than one or more than 16 for each slot, a schedule of several blocks.
    """

    stateless = True

    def __init__(self, setting: Setting, *, denoising_steps: int | None = 10) -> None:
        self.slots = whole_text(setting, "Mask-Predict")
        self.rounds = rounds_of_text(denoising_steps, self.slots)

    def changes(self, step: Step, chosen: Ints) -> Changes:
        """See `base.Edit`."""
        number = self.slots * max(0, self.rounds - 1 - step.canvas.round) // self.rounds
        sure = step.canvas.confidence.copy()
        sure[chosen] = step.predictions.confidence[step.predictions.rows(chosen)]
        written = np.union1d(np.flatnonzero(step.canvas.status == Status.COMMITTED), chosen)
        return Changes(remask=np.sort(written[np.argsort(sure[written], kind="stable")][:number]))

    def pending(self, canvas: Canvas) -> bool:
        """See `base.Edit`."""
        return False
