"""A bar on early ends: no slot that predicts the end of the text is written before a share of the text is.

In: scores of one round. Out: scores, barred slots at -inf. Not here: lowering them gradually (`eoser`).
Source: CAD of CD4LM, https://github.com/yihao-liang/CDLM.
"""

from __future__ import annotations

import numpy as np

from paceline.diffusion.base import Step
from paceline.diffusion.canvas import Floats, Status
from paceline.diffusion.progress import end_tokens
from paceline.diffusion.setting import Setting
from paceline.utils import need


class EosBar:
    """Where every eligible slot predicts the end, the best of them alone is let through, so that decoding goes on.

    Args:
        eos_bar: share of the slots to fill that must be written first; 0 is no bar.
    """

    stateless = True

    def __init__(self, setting: Setting, *, eos_bar: float = 0.3) -> None:
        need(0 <= eos_bar <= 1, "eos_bar", "lie in 0..1", eos_bar)
        self.ends = end_tokens(setting.canvas, setting)
        self.needed = eos_bar * setting.canvas.masked().size

    def modify(self, step: Step) -> Floats:
        """See `base.Modifier`."""
        written = int((step.canvas.status == Status.COMMITTED).sum())
        if written >= self.needed or not step.eligible.size:
            return step.scores
        ends = np.isin(step.predictions.tokens[step.predictions.rows(step.eligible)], self.ends)
        if ends.all():
            ends[int(np.argmax(step.scores))] = False
        return np.where(ends, -np.inf, step.scores)
