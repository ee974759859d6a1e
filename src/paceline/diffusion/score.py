"""How sure the model is of a slot: measures of it, a correction of the logits before them, modifiers of the scores
after them.

Sources: LLaDA (arXiv:2502.09992) for confidence and random order; Dream 7B (arXiv:2508.15487) for margin, entropy and
noise on the order; the others are named at their classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import log2
from typing import Any, Literal

import numpy as np
import torch

from paceline.diffusion.base import Correction, Modifier, Score, Setting, Step
from paceline.diffusion.canvas import Canvas, Floats, Status
from paceline.diffusion.predictions import Predictions, uniform
from paceline.utils import need


class ConfidenceScore(Score):
    """Clean probability of the token predicted ("low_confidence", "maskgit_plus")."""

    def score(self, predictions: Predictions, canvas: Canvas) -> Floats:
        return predictions.confidence


class MarginScore(Score):
    """Probability of the first token less that of the second ("topk_margin")."""

    def score(self, predictions: Predictions, canvas: Canvas) -> Floats:
        return predictions.margin


class EntropyScore(Score):
    """Negative entropy of the slot's distribution, nats."""

    def score(self, predictions: Predictions, canvas: Canvas) -> Floats:
        return -predictions.entropy


class RandomScore(Score):
    """A number drawn for each (seed, round, slot): an order that does not look at values."""

    def __init__(self, setting: Setting) -> None:
        self.seed = setting.seed

    def score(self, predictions: Predictions, canvas: Canvas) -> Floats:
        return uniform(self.seed, canvas.round, canvas.length, purpose=4)[predictions.slots]


class LeftmostScore(Score):
    """From left to right, whatever the model says."""

    def score(self, predictions: Predictions, canvas: Canvas) -> Floats:
        return -predictions.slots.astype(np.float64)


class RepetitionGuard(Correction):
    """The logit of a slot's left neighbour, where that is a token, is lowered by `penalty_lambda` before anything else
    looks, against stutter where many slots are written at once.

    Args:
        penalty_lambda: 0 changes nothing; 3 is suggested where a model stutters.
    Source: the serving code of LLaDA2.1 (arXiv:2602.08676).
    """

    def __init__(self, setting: Setting, *, penalty_lambda: float = 0.0) -> None:
        need(penalty_lambda >= 0, "penalty_lambda", "be at least 0", penalty_lambda)
        self.penalty, self.seed, self.temperature = penalty_lambda, setting.seed, setting.temperature

    def correct(self, predictions: Predictions, canvas: Canvas) -> Predictions:
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


class EndRamp(Modifier):
    """EOSER: confidence of a slot that predicts the end of the text is multiplied by a factor which grows from
    `eos_factor_min` to `eos_factor_max`, so that a text decoded as one block does not end at once.

    Scores below zero (entropies) are divided by it, which lowers them as well. Rounds and their total are both those of
    the whole text, so that the factor does reach its last value; the released code counts rounds within a block against
    the total.

    Args:
        eos_factor_min: in the first round; 1, as the other, changes nothing.
        eos_factor_max: in the last.
        eos_ramp: "linear" in rounds, or "exponential", (2^(s+1) - 1) / 2^S, as fits the ascending step schedule.
        denoising_steps: rounds for a block, from which the rounds of a linear ramp follow; None is a round for each
            slot.
    Source: Taming Masked Diffusion Language Models via Consistency Trajectory Reinforcement Learning with Fewer
        Decoding Step (arXiv:2509.23924).
    """

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
        self.ends = setting.end_tokens
        slots = max(2, setting.canvas.masked().size)
        self.rounds = int(log2(slots)) if eos_ramp == "exponential" else setting.rounds_of_blocks(denoising_steps)

    @staticmethod
    def unread(options: Mapping[str, Any]) -> dict[str, str]:
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
        factor = self.factor(step.canvas.round)
        ends = np.isin(step.predictions.tokens_at(step.eligible), self.ends)
        lower = np.where(step.scores >= 0, step.scores * factor, step.scores / factor)
        return np.where(ends, lower, step.scores)


class EndBar(Modifier):
    """No slot that predicts the end of the text is written before a share of the text is.

    Where every eligible slot predicts the end, the best of them alone is let through, so that decoding goes on.

    Args:
        eos_bar: share of the slots to fill that must be written first; 0 is no bar.
    Source: CAD of CD4LM, https://github.com/yihao-liang/CDLM.
    """

    def __init__(self, setting: Setting, *, eos_bar: float = 0.3) -> None:
        need(0 <= eos_bar <= 1, "eos_bar", "lie in 0..1", eos_bar)
        self.ends = setting.end_tokens
        self.needed = eos_bar * setting.canvas.masked().size

    def modify(self, step: Step) -> Floats:
        written = int((step.canvas.status == Status.COMMITTED).sum())
        if written >= self.needed or not step.eligible.size:
            return step.scores
        ends = np.isin(step.predictions.tokens_at(step.eligible), self.ends)
        if ends.all():
            ends[int(np.argmax(step.scores))] = False
        return np.where(ends, -np.inf, step.scores)


class OrderNoise(Modifier):
    """Scores / alg_temp plus Gumbel noise.

    The best n of these are n draws without replacement from the softmax of scores / alg_temp.

    For rules that take a number of slots; a threshold on such scores means nothing.

    Args:
        alg_temp: temperature of the order; 0 takes the best slots.
    """

    def __init__(self, setting: Setting, *, alg_temp: float = 0.0) -> None:
        need(alg_temp >= 0, "alg_temp", "be at least 0", alg_temp)
        self.temperature, self.seed = alg_temp, setting.seed

    def modify(self, step: Step) -> Floats:
        if self.temperature == 0:
            return step.scores
        u = uniform(self.seed, step.canvas.round, step.canvas.length, purpose=3)[step.eligible]
        return step.scores / self.temperature - np.log(-np.log(np.clip(u, 1e-300, 1 - 1e-16)))
