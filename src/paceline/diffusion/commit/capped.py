"""Confidence-adaptive decoding: as many of the best slots as pass the threshold, within a cap.

In: scores of one round. Out: the best slots. Not here: the bar on early ends of text (`eos_bar`), training of the model
it was published with.
Source: CAD of CD4LM, https://github.com/yihao-liang/CDLM.
"""

from __future__ import annotations

import numpy as np

from paceline.diffusion.base import Step
from paceline.diffusion.setting import Setting
from paceline.models.denoiser import Ints
from paceline.utils import need


class Capped:
    """The best k slots, k the number of scores at or above the threshold, at least 1 and at most
    `max_tokens_per_round`.

    Since every round writes a slot, a block takes as many rounds as it has slots at most; no round forces the rest.

    Args:
        confidence_threshold: above 1 it is the static baseline.
        max_tokens_per_round: 1 is the static baseline too.
    """

    stateless = True

    def __init__(self, setting: Setting, *, confidence_threshold: float = 0.95, max_tokens_per_round: int = 32) -> None:
        del setting
        need(max_tokens_per_round >= 1, "max_tokens_per_round", "be at least 1", max_tokens_per_round)
        self.threshold, self.most = confidence_threshold, max_tokens_per_round

    def choose(self, step: Step) -> Ints:
        """See `base.Commit`."""
        sure = int((step.scores >= self.threshold).sum())
        return step.ranked[: int(np.clip(sure, 1, self.most))]
