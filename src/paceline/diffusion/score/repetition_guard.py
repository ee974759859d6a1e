"""A penalty on the token that stands to the left, against stutter where many slots are written at once.

In: predictions. Out: predictions from logits with the penalty. Not here: penalties of the sampling parameters.
Source: the serving code of LLaDA2.1 (arXiv:2602.08676).
"""

from __future__ import annotations

import numpy as np
import torch

from paceline.diffusion.canvas import Canvas
from paceline.diffusion.predictions import Predictions
from paceline.diffusion.setting import Setting
from paceline.utils import need


class RepetitionGuard:
    """The logit of a slot's left neighbour, where that is a token, is lowered by `penalty_lambda` before anything else
    looks.

    Args:
        penalty_lambda: 0 changes nothing; 3 is suggested where a model stutters.
    """

    stateless = True

    def __init__(self, setting: Setting, *, penalty_lambda: float = 0.0) -> None:
        need(penalty_lambda >= 0, "penalty_lambda", "be at least 0", penalty_lambda)
        self.penalty, self.seed, self.temperature = penalty_lambda, setting.seed, setting.temperature

    def correct(self, predictions: Predictions, canvas: Canvas) -> Predictions:
        """See `base.Correction`."""
        if self.penalty == 0:
            return predictions
        left = np.where(predictions.slots > 0, canvas.tokens[predictions.slots - 1], canvas.mask_token_id)
        rows = np.flatnonzero(left != canvas.mask_token_id)
        logits = predictions.logits.clone()
        at = (torch.from_numpy(rows).to(logits.device), torch.from_numpy(left[rows]).to(logits.device))
        logits[at] -= self.penalty
        return Predictions.of(
            logits, predictions.slots, temperature=self.temperature, seed=self.seed, round_=canvas.round
        )
