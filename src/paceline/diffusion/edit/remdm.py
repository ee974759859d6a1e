"""Remasking diffusion: written slots are masked again by chance, and the rate of writing makes up for it.

The share of slots that hold a token after each of S rounds is that of plain ancestral sampling, i / S, whatever the
remasking rate; every round is a step of the same process, with a memory that is partly wiped. Errors of parallel
writing can so be repaired: more rounds give better texts, at a cost of exactly S passes.

In: predictions, what was written how surely. Out: the slots to write, the slots to mask again. Not here: greedy
remasking by confidence (`mask_predict`).
Source: Remasking Discrete Diffusion Models with Inference-Time Scaling (arXiv:2503.00307), without its loop variant.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from paceline.diffusion.base import Changes, Step
from paceline.diffusion.canvas import Canvas, Floats, Status
from paceline.diffusion.commit.time_grid import uniform
from paceline.diffusion.progress import rounds_of_text, whole_text
from paceline.diffusion.setting import Setting
from paceline.models.denoiser import Ints
from paceline.utils import need


class Remasking:
    """What both parts of the sampler share: their options, and the chances of each round.

    Args:
        denoising_steps: rounds S, at most 16 for each slot; None is a round for each slot.
        remask_eta: 0 is ancestral sampling.
        remask_rate: "cap", sigma = min(eta, most); "rescale", sigma = eta * most, where most = min(1, (1 - a_s) / a_t).
        remask_from: share of the rounds before which nothing is masked again.
        remask_by: "chance" treats slots alike; "confidence" shares the same expected number out by softmax(-confidence
            when written), so that unsure slots go first (the paper's weights, scaled to keep the number).
    Raises:
        ConfigError: a number out of range, a schedule of several blocks.
    """

    stateless = True

    def __init__(
        self,
        setting: Setting,
        *,
        denoising_steps: int | None = None,
        remask_eta: float = 0.1,
        remask_rate: Literal["cap", "rescale"] = "cap",
        remask_from: float = 0.0,
        remask_by: Literal["chance", "confidence"] = "chance",
    ) -> None:
        need(0 <= remask_eta <= 1, "remask_eta", "lie in 0..1", remask_eta)
        need(remask_rate in ("cap", "rescale"), "remask_rate", "be 'cap' or 'rescale'", remask_rate)
        need(0 <= remask_from <= 1, "remask_from", "lie in 0..1", remask_from)
        need(remask_by in ("chance", "confidence"), "remask_by", "be 'chance' or 'confidence'", remask_by)
        slots = whole_text(setting, "a remasking sampler")
        self.steps, self.seed = rounds_of_text(denoising_steps, slots), setting.seed
        self.eta, self.rate, self.first = remask_eta, remask_rate, remask_from
        self.weighted = remask_by == "confidence"

    def sigma(self, round_: int) -> float:
        """Chance that a written slot is masked again."""
        before, after = round_ / self.steps, (round_ + 1) / self.steps
        if before < self.first or before == 0 or after >= 1:
            return 0.0
        most = min(1.0, (1 - after) / before)
        return min(self.eta, most) if self.rate == "cap" else self.eta * most

    def write(self, round_: int) -> float:
        """Chance that a masked slot is written: (a_s - (1 - sigma) a_t) / (1 - a_t)."""
        if round_ >= self.steps - 1:
            return 1.0
        before, after = round_ / self.steps, (round_ + 1) / self.steps
        return (after - (1 - self.sigma(round_)) * before) / (1 - before)


class RemaskingCommit(Remasking):
    """Every masked slot is written with the chance of the round; a round may write nothing. See `Remasking` for the
    options.
    """

    waits = True

    def choose(self, step: Step) -> Ints:
        """See `base.Commit`."""
        drawn = uniform(self.seed, step.canvas.round, step.canvas.length)[step.eligible]
        return step.eligible[drawn < self.write(step.canvas.round)]


class RemaskingEdit(Remasking):
    """Slots written before this round are masked again with the chance of the round. See `Remasking` for the
    options.
    """

    def changes(self, step: Step, chosen: Ints) -> Changes:
        """See `base.Edit`."""
        written = np.flatnonzero(step.canvas.status == Status.COMMITTED)
        sigma = self.sigma(step.canvas.round)
        if not written.size or sigma == 0:
            return Changes()
        chance = sigma * self._weights(step.canvas.confidence[written])
        drawn = uniform(self.seed, step.canvas.round, step.canvas.length, purpose=5)[written]
        return Changes(remask=written[drawn < chance])

    def _weights(self, confidence: Floats) -> Floats:
        """(w,) of mean 1."""
        if not self.weighted:
            return np.ones(confidence.size)
        weights: Floats = np.exp(-np.nan_to_num(confidence))
        return np.asarray(weights / weights.mean(), np.float64)

    def pending(self, canvas: Canvas) -> bool:
        """See `base.Edit`: the rounds are run to their end."""
        return canvas.round < self.steps
