"""How far an approximate cache policy is from no cache: in what is written, and in the logits it is written by.

Two things are measured. Decoded twice, with the policy and without, how many slots end up with another token. And at
every decision of the run with the policy, how far the logits of masked slots are from those of a pass over the whole
canvas as it is then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from paceline.diffusion import (
    Canvas,
    ConfiguredMethod,
    FinishedCanvas,
    NoCache,
    Predictions,
    Setting,
    Verification,
    decode,
)
from paceline.models import Call, Denoiser


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one run: passes of the model, slots computed in them, seconds."""

    calls: int
    slots_computed: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Deviation:
    """A policy against no cache, on one canvas or several.

    Attributes:
        slots: slots that decoding filled.
        different: of them, those with another token (or none, where the text has become shorter).
        predictions: masked slots with logits, summed over the passes of the run with the policy.
        other_tokens: of them, those whose most probable token is another.
        largest: largest absolute difference of a logit, over all passes.
        mean: mean absolute difference of a logit, over all passes.
        cost: of the run with the policy, without the passes that measure.
        cost_without: of the run without cache.
    """

    slots: int
    different: int
    predictions: int
    other_tokens: int
    largest: float
    mean: float
    cost: Cost
    cost_without: Cost

    @property
    def fraction(self) -> float:
        """Of the slots filled, with another token."""
        return self.different / max(1, self.slots)


def deviation(denoiser: Denoiser, canvas: Canvas, config: Mapping[str, Any] | str, *, seed: int = 0) -> Deviation:
    """Decode a canvas with the cache policy of `config` and without.

    Args:
        canvas: not changed.
        config: see `diffusion.methods`; the run without cache differs from it in the cache policy only.
    Raises:
        PacelineError: what stopped either run.
    """
    method = ConfiguredMethod(config)
    ours, plain = method.parts(denoiser, canvas, seed=seed), method.parts(denoiser, canvas, seed=seed)
    plain.cache, plain.store = NoCache(Setting(canvas, denoiser)), None
    [reference] = decode([canvas], denoiser, [plain])
    costed = method.parts(denoiser, canvas, seed=seed)
    [outcome] = decode([canvas], denoiser, [costed])
    probe = _Probe(ours.verification, denoiser, NoCache(Setting(canvas, denoiser)))
    decode([canvas], denoiser, [replace(ours, verification=probe)])
    for run in (reference, outcome):
        if run.error:
            raise run.error
    filled = canvas.masked()
    same = _tokens(outcome.canvas, canvas.length)[filled] == _tokens(reference.canvas, canvas.length)[filled]
    sizes = (filled.size, int((~same).sum()), probe.rows, probe.other_tokens)
    return Deviation(*sizes, probe.largest, probe.total / max(1, probe.logits), _cost(outcome), _cost(reference))


def pooled(parts: Sequence[Deviation]) -> Deviation:
    """Several canvases as one: sums, the largest difference, the mean by predictions."""
    rows = sum(d.predictions for d in parts)
    mean = sum(d.mean * d.predictions for d in parts) / max(1, rows)
    counts = (sum(d.slots for d in parts), sum(d.different for d in parts), rows, sum(d.other_tokens for d in parts))
    costs = (_sum([d.cost for d in parts]), _sum([d.cost_without for d in parts]))
    return Deviation(*counts, max((d.largest for d in parts), default=0.0), mean, *costs)


@dataclass(slots=True)
class _Probe(Verification):
    """Looks at every decision with the eyes of a pass over the whole canvas; decides nothing."""

    inner: Verification
    denoiser: Denoiser
    whole: NoCache
    rows: int = 0
    other_tokens: int = 0
    logits: int = 0
    total: float = 0.0
    largest: float = 0.0

    def drafts(self, canvas: Canvas, predictions: Predictions) -> list[Canvas]:
        masked = canvas.masked()
        masked = masked[predictions.known(masked)]
        if masked.size:
            self._compare(canvas, predictions.at(masked))
        return self.inner.drafts(canvas, predictions)

    def choose(self, drafts: Sequence[Canvas], predictions: Sequence[Predictions]) -> int:
        return self.inner.choose(drafts, predictions)

    def _compare(self, canvas: Canvas, ours: Predictions) -> None:
        block = range(int(ours.slots[0]), int(ours.slots[-1]) + 1)
        slots = self.whole.ahead(canvas, block).slots
        [full] = self.denoiser.forward([Call(canvas.tokens[slots], slots)])
        theirs = full[torch.from_numpy(ours.slots).to(full.device)].to(ours.logits)
        usable = torch.arange(full.shape[1], device=full.device) != self.denoiser.mask_token_id
        gaps = (ours.logits - theirs)[:, usable].abs().double()
        self.rows += len(gaps)
        self.logits += gaps.numel()
        self.total += float(gaps.sum())
        self.largest = max(self.largest, float(gaps.max()))
        self.other_tokens += int((ours.logits.argmax(-1) != theirs.argmax(-1)).sum())


def _tokens(canvas: Canvas, length: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Padded to `length`; -1 where the canvas has ended."""
    return np.concatenate([canvas.tokens, np.full(length - canvas.length, -1)])


def _cost(outcome: FinishedCanvas) -> Cost:
    return Cost(outcome.trajectory.calls, outcome.trajectory.slots_computed, outcome.trajectory.seconds)


def _sum(costs: Sequence[Cost]) -> Cost:
    return Cost(sum(c.calls for c in costs), sum(c.slots_computed for c in costs), sum(c.seconds for c in costs))
