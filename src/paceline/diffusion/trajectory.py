"""What happened while a canvas was decoded: rounds and what they cost, and measures of them: information per round, how
close the order of writing was to left-to-right.

Sources: From Bits to Rounds: Parallel Decoding with Exploration for Diffusion Language Models (arXiv:2511.21103) for
information; DiffuCoder: Understanding and Improving Masked Diffusion Models for Code Generation (arXiv:2506.20639) for
orders.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil

import numpy as np

from paceline.diffusion.canvas import Canvas, Floats, Status
from paceline.models import Ints
from paceline.utils import need


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
        """What changed from one canvas to a later one, on the slots that both have.

        One round for each that wrote something.
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


@dataclass(frozen=True, slots=True)
class BitsToRounds:
    """Information of one trajectory, in nats.

    Attributes:
        rounds: that wrote something.
        nats: -log of the chance of the text along the path taken: the sum over all slots written.
        largest: nats of the round that wrote most of it.
    """

    rounds: int
    nats: float
    largest: float

    @classmethod
    def of(cls, trajectory: Trajectory) -> BitsToRounds:
        """Measure a trajectory."""
        values = [round_.information for round_ in trajectory.rounds if round_.slots.size]
        return cls(len(values), float(sum(values)), max(values, default=0.0))

    def bound(self, nats: float | None = None) -> int:
        """Fewest rounds that could have written as much at the largest round's rate: ceil(nats / largest).

        Args:
            nats: of the text; None takes the path's own, for which `rounds` never falls below the bound. With -log p of
                the text under the exact joint it does not either as long as no round writes tokens that speak against
                each other.
        """
        total = self.nats if nats is None else nats
        return ceil(total / self.largest - 1e-9) if self.largest > 0 else 0


def order_of(trajectory: Trajectory) -> Ints:
    """Slots by the round that wrote them last, the surest first within a round.

    One that was written twice counts once.
    """
    order = trajectory.order[::-1]
    _, first = np.unique(order, return_index=True)
    return order[np.sort(first)][::-1]


def local_ar(order: Ints, k: int = 1) -> float:
    """Local AR-ness: share of steps whose slot continues a run, so that it and the k slots written before are
    consecutive and increasing.

    Slots count by their rank among those of `order`, so text given in advance does not break a run. The first k steps
    have too few before them and are left out.

    Raises:
        ConfigError: k below 1, or as large as the order is long.
    """
    need(1 <= k < order.size, "k", f"lie in 1..{order.size - 1}, below the number of slots written", k)
    follows = np.diff(_ranks(order)) == 1
    windows = np.lib.stride_tricks.sliding_window_view(follows, k)
    return float(windows.all(axis=1).mean())


def global_ar(order: Ints, k: int = 1) -> float:
    """Global AR-ness: share of steps whose slot was among the k leftmost still masked.

    Raises:
        ConfigError: k below 1, no slots.
    """
    need(k >= 1, "k", "be at least 1", k)
    need(order.size > 0, "order", "hold a slot at least", order.size)
    ranks = _ranks(order)
    left = np.asarray([(ranks[i:] < rank).sum() for i, rank in enumerate(ranks)])
    return float((left < k).mean())


def _ranks(order: Ints) -> Ints:
    return np.argsort(np.argsort(order, kind="stable"), kind="stable")
