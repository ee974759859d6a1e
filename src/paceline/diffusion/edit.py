"""What becomes of written slots: replaced, or masked again; with the commit rules that go with it."""

from __future__ import annotations

from typing import Literal

import numpy as np

from paceline.diffusion.base import Changes, Commit, Edit, MethodPart, Setting, Step
from paceline.diffusion.canvas import Canvas, Floats, Status
from paceline.diffusion.predictions import uniform
from paceline.diffusion.schedule import HeldBlocks
from paceline.models import Ints
from paceline.utils import need


class TokenEdit(Edit):
    """Written slots take the model's first token where that is another one with a probability above `edit_threshold`.

    It is for models trained to correct tokens; others are corrupted by it. Prompt and prior slots are never edited.
    Edits follow the most probable token at any temperature. A block is decoded by thresholds and edited in the same
    rounds. Once it is full it gets further rounds, until nothing changes in one of them or their number is spent; then
    the next block begins.

    Args:
        edit_threshold: 1 edits nothing, and costs no further round.
        max_post_edit_steps: most rounds that edit a full block.
        edit_scope: "block" edits the current block; "text" every slot with a prediction, so earlier blocks too where
            the cache policy computes them (multi-block editing).
    Raises:
        ConfigError: a schedule that does not hold blocks.
    Source: LLaDA2.1: Speeding Up Text Diffusion via Token Editing (arXiv:2602.08676); rounds are counted as in SGLang's
        joint threshold. Masked slots are written from the threshold on, as everywhere here; theirs exceed it.
    """

    stateless = False

    def __init__(
        self,
        setting: Setting,
        *,
        edit_threshold: float = 0.5,
        max_post_edit_steps: int = 16,
        edit_scope: Literal["block", "text"] = "block",
    ) -> None:
        need(max_post_edit_steps >= 0, "max_post_edit_steps", "be at least 0", max_post_edit_steps)
        need(edit_scope in ("block", "text"), "edit_scope", "be 'block' or 'text'", edit_scope)
        rule = "be 'held_blocks' for token editing"
        need(isinstance(setting.schedule, HeldBlocks), "schedule", rule, type(setting.schedule).__name__)
        assert isinstance(setting.schedule, HeldBlocks)
        self.schedule, self.threshold, self.scope = setting.schedule, edit_threshold, edit_scope
        self.most = max_post_edit_steps if edit_threshold < 1 else 0
        self.post = 0

    def changes(self, step: Step, chosen: Ints) -> Changes:
        slots, tokens = self._edits(step)
        full = not np.setdiff1d(step.canvas.masked(step.block.start, step.block.stop), chosen).size
        if self.schedule.held is not None:
            self.post += 1
            if not slots.size or self.post >= self.most:
                self.schedule.held, self.post = None, 0
        elif full and self.most:
            self.schedule.held = step.block
        return Changes(slots, tokens)

    def pending(self, canvas: Canvas) -> bool:
        return self.schedule.held is not None

    def _edits(self, step: Step) -> tuple[Ints, Ints]:
        status = step.canvas.status
        slots = np.flatnonzero(status == Status.COMMITTED)
        if self.scope == "block":
            slots = slots[(slots >= step.block.start) & (slots < step.block.stop)]
        slots = slots[step.predictions.known(slots)]
        best = step.predictions.at(slots).logits.double().softmax(-1).max(-1)
        tokens, sure = best.indices.cpu().numpy(), best.values.cpu().numpy()
        edited = (tokens != step.canvas.tokens[slots]) & (sure > self.threshold)
        return slots[edited], tokens[edited]


class AllCommit(Commit):
    """All eligible slots."""

    def choose(self, step: Step) -> Ints:
        return step.eligible


class MaskPredictEdit(Edit):
    """After round i of T (from 0) the floor(N (T - 1 - i) / T) least sure of the N slots are masked again.

    None after the last.

    A slot's confidence is that of the round in which it was written last. Decoding takes T rounds at most; T = 1 writes
    all at once.

    Args:
        denoising_steps: rounds T, at most 16 for each slot; None is a round for each slot.
    Raises:
        ConfigError: fewer rounds than one or more than 16 for each slot, a schedule of several blocks.
    Source: Mask-Predict: Parallel Decoding of Conditional Masked Language Models (arXiv:1904.09324).
    """

    def __init__(self, setting: Setting, *, denoising_steps: int | None = 10) -> None:
        self.slots = setting.whole_text("Mask-Predict")
        self.rounds = setting.rounds_of_text(denoising_steps, "Mask-Predict")

    def changes(self, step: Step, chosen: Ints) -> Changes:
        number = self.slots * max(0, self.rounds - 1 - step.canvas.round) // self.rounds
        sure = step.canvas.confidence.copy()
        sure[chosen] = step.predictions.confidence_at(chosen)
        written = np.union1d(np.flatnonzero(step.canvas.status == Status.COMMITTED), chosen)
        return Changes(remask=np.sort(written[np.argsort(sure[written], kind="stable")][:number]))

    def pending(self, canvas: Canvas) -> bool:
        return False


class RemaskingChances(MethodPart):
    """Remasking diffusion: written slots are masked again by chance, and the rate of writing makes up for it.

    This is what both parts of the sampler share: their options, and the chances of each round.

    The share of slots that hold a token after each of S rounds is that of plain ancestral sampling, i / S, whatever the
    remasking rate; every round is a step of the same process, with a memory that is partly wiped. Errors of parallel
    writing can so be repaired: more rounds give better texts, at a cost of exactly S passes.

    Args:
        denoising_steps: rounds S, at most 16 for each slot; None is a round for each slot.
        remask_eta: 0 is ancestral sampling.
        remask_rate: "cap", sigma = min(eta, most); "rescale", sigma = eta * most, where most = min(1, (1 - a_s) / a_t).
        remask_from: share of the rounds before which nothing is masked again.
        remask_by: "chance" treats slots alike; "confidence" shares the same expected number out by softmax(-confidence
            when written), so that unsure slots go first (the paper's weights, scaled to keep the number).
    Raises:
        ConfigError: a number out of range, a schedule of several blocks.
    Source: Remasking Discrete Diffusion Models with Inference-Time Scaling (arXiv:2503.00307), without its loop
        variant.
    """

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
        self.steps, self.seed = setting.rounds_of_text(denoising_steps, "a remasking sampler"), setting.seed
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


class RemaskingCommit(RemaskingChances, Commit):
    """Every masked slot is written with the chance of the round; a round may write nothing.

    See `RemaskingChances` for the options.
    """

    waits = True

    def choose(self, step: Step) -> Ints:
        drawn = uniform(self.seed, step.canvas.round, step.canvas.length, purpose=2)[step.eligible]
        return step.eligible[drawn < self.write(step.canvas.round)]


class RemaskingEdit(RemaskingChances, Edit):
    """Slots written before this round are masked again with the chance of the round.

    See `RemaskingChances` for the options.
    """

    def changes(self, step: Step, chosen: Ints) -> Changes:
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
        return canvas.round < self.steps  # the rounds are run to their end
