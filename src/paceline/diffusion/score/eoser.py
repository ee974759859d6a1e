"""EOSER: the end of a text loses confidence while decoding is young, so that a text decoded as one block does not end
at once.

In: scores of one round. Out: scores, lower where the prediction ends the text. Not here: how many slots are written.
Source: Taming Masked Diffusion Language Models via Consistency Trajectory Reinforcement Learning with Fewer Decoding
Step (arXiv:2509.23924). Rounds and their total are both those of the whole text, so that the factor does reach its last
value; the released code counts rounds within a block against the total.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import log2
from typing import Any, Literal

import numpy as np

from paceline.diffusion.base import Step
from paceline.diffusion.canvas import Floats
from paceline.diffusion.progress import end_tokens, total_rounds
from paceline.diffusion.setting import Setting
from paceline.utils import need


class Eoser:
    """Confidence of a slot that predicts the end is multiplied by a factor which grows from `eos_factor_min` to
    `eos_factor_max`.

    Scores below zero (entropies) are divided by it, which lowers them as well.

    Args:
        eos_factor_min: in the first round; 1, as the other, changes nothing.
        eos_factor_max: in the last.
        eos_ramp: "linear" in rounds, or "exponential", (2^(s+1) - 1) / 2^S, as fits the ascending step schedule.
        denoising_steps: rounds for a block, from which the rounds of a linear ramp follow; None is a round for each
        slot.
    """

    stateless = True

    def __init__(
        self,
        setting: Setting,
        *,
        eos_factor_min: float = 0.4,
        eos_factor_max: float = 1.0,
        eos_ramp: Literal["linear", "exponential"] = "linear",
        denoising_steps: int | None = None,
    ) -> None:
        need(eos_factor_min > 0, "eos_factor_min", "be positive", eos_factor_min)
        need(eos_factor_max > 0, "eos_factor_max", "be positive", eos_factor_max)
        need(eos_ramp in ("linear", "exponential"), "eos_ramp", "be 'linear' or 'exponential'", eos_ramp)
        self.low, self.high, self.ramp = eos_factor_min, eos_factor_max, eos_ramp
        self.ends = end_tokens(setting.canvas, setting)
        slots = max(2, setting.canvas.masked().size)
        self.rounds = int(log2(slots)) if eos_ramp == "exponential" else total_rounds(setting, denoising_steps)

    @staticmethod
    def unread(options: Mapping[str, Any]) -> dict[str, str]:
        """Options without effect beside others -> what to do about them."""
        exponential = options.get("eos_ramp") == "exponential"
        rule = "be left out with eos_ramp 'exponential', whose rounds follow from the slots"
        return {"denoising_steps": rule} if exponential else {}

    def factor(self, round_: int) -> float:
        """In a round, counted from 0."""
        if self.rounds <= 1:
            return self.high
        s = min(round_, self.rounds - 1)
        t = s / (self.rounds - 1) if self.ramp == "linear" else (2.0 ** (s + 1) - 1) / 2.0**self.rounds
        return self.low + (self.high - self.low) * t

    def modify(self, step: Step) -> Floats:
        """See `base.Modifier`."""
        factor = self.factor(step.canvas.round)
        ends = np.isin(step.predictions.tokens[step.predictions.rows(step.eligible)], self.ends)
        lower = np.where(step.scores >= 0, step.scores * factor, step.scores / factor)
        return np.where(ends, lower, step.scores)
