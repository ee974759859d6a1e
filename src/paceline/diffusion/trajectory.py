"""What happened while a canvas was decoded: rounds and what they cost.

In: canvases before and after each round, passes of the model. Out: counts (model calls, slots computed, seconds), the
order in which slots were written, information per round. Not here: judging any of it (`bench`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from paceline.diffusion.canvas import Canvas, Floats, Status
from paceline.models.denoiser import Ints


@dataclass(frozen=True, slots=True)
class Round:
    """One round of writing.

    Attributes:
        slots: written, the surest first.
        tokens: of `slots`.
        confidence: of `slots`, clean probability.
        edited: committed slots that got another token.
        remasked: committed slots that were masked again.
    """

    slots: Ints
    tokens: Ints
    confidence: Floats
    edited: Ints
    remasked: Ints

    @property
    def information(self) -> float:
        """Nats committed: the sum of -log of the confidences (From Bits to Rounds, arXiv:2511.21103)."""
        return float(-np.log(np.maximum(self.confidence, 1e-300)).sum())

    @classmethod
    def between(cls, before: Canvas, after: Canvas) -> list[Round]:
        """What changed from one canvas to a later one, on the slots that both have: one round for each that wrote
        something.
        """
        size = min(before.length, after.length)
        was, now = before.status[:size] == Status.MASKED, after.status[:size] == Status.MASKED
        edited = np.flatnonzero(~was & ~now & (before.tokens[:size] != after.tokens[:size]))
        remasked = np.flatnonzero(~was & now)
        rounds = []
        for number in range(before.round, after.round):
            written = np.flatnonzero(was & ~now & (after.born[:size] == number))
            written = written[np.argsort(-after.confidence[written], kind="stable")]
            last = number == after.round - 1
            more = (edited, remasked) if last else (edited[:0], remasked[:0])
            rounds.append(cls(written, after.tokens[written], after.confidence[written], *more))
        return rounds


@dataclass(slots=True)
class Trajectory:
    """The record of one canvas.

    Attributes:
        rounds: in order; a draft that was verified several rounds deep counts as that many.
        calls: passes of the model (NFE); drafts computed together are one.
        slots_computed: queries, summed over passes and drafts.
        seconds: wall time in passes of the model and in rules, shared by a batch.
    """

    rounds: list[Round] = field(default_factory=list)
    calls: int = 0
    slots_computed: int = 0
    seconds: float = 0.0

    @property
    def order(self) -> Ints:
        """Slots in the order of writing; within a round the surest first."""
        return np.concatenate([r.slots for r in self.rounds]) if self.rounds else np.empty(0, np.int64)
