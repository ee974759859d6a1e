"""What a head, or an adapter, can do on texts that it does not learn: how often it is right, and of how many texts and
tokens that is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from paceline.training.batches import PAD, Batch
from paceline.training.heads import Trainer
from paceline.utils import ENOUGH

DRAWS: Final = 2000
"""Of as many texts, from which an interval is made."""

TAILS: Final = (0.025, 0.975)
"""Ends of an interval."""


@dataclass(slots=True)
class Judged:
    """What a head can do on the texts that choose the best state.

    Attributes:
        step, tokens: when, and after how many tokens of training, those of later epochs included.
        loss: of training since the last time.
        acceptance: by depth, the share of drafts that are right where all before them are.
    """

    step: int
    tokens: int
    loss: float
    acceptance: list[float]

    @property
    def length(self) -> float:
        """Tokens that a pass gives with a chain of all depths: one, and those drafts that are right from the first."""
        return chain_length(self.acceptance)


@dataclass(slots=True)
class Evaluated:
    """What it can do on texts that neither the weights nor the choice of the best state have seen.

    Attributes:
        texts, tokens: how many, and their tokens that are drafted or predicted.
        acceptance: by depth, the share of drafts that are right where all before them are.
        drafts: by depth, how many drafts that is a share of.
        interval: of `length`, at 95 %, by drawing as many of the texts again; None of fewer texts than `ENOUGH`.
    """

    texts: int
    tokens: int
    acceptance: list[float]
    drafts: list[int]
    interval: list[float] | None = None

    @property
    def length(self) -> float:
        """Tokens that a pass gives with a chain of all depths, as of `Judged`."""
        return chain_length(self.acceptance)

    @classmethod
    def of(cls, counts: Tensor, tokens: int) -> Evaluated:
        """From (2, depths, n) of n texts, as `counted` says."""
        per_text, texts = counts.double().cpu().numpy(), counts.shape[-1]
        interval = None
        if texts >= ENOUGH:
            times = np.random.default_rng(0).multinomial(texts, np.full(texts, 1 / texts), DRAWS)
            drawn = [chain_length(shares(draw)) for draw in np.einsum("rn,ckn->rck", times, per_text)]
            interval = [float(end) for end in np.quantile(drawn, TAILS)]
        totals = per_text.sum(-1)
        return cls(texts, tokens, shares(totals), [int(total) for total in totals[1]], interval)


def shares(counts: npt.NDArray[Any]) -> list[float]:
    """By depth, of (2, depths) right drafts and drafts; 0 where there is none."""
    return [float(right / max(1.0, reached)) for right, reached in counts.T]


def chain_length(acceptance: Sequence[float]) -> float:
    """Tokens that a pass gives with a chain: one, and those drafts that are right from the first, by shares of these
    that are right where all before them are.
    """
    total, reach = 1.0, 1.0
    for share in acceptance:
        reach *= share
        total += reach
    return total


def words(acceptance: Sequence[float], *, drafts: bool) -> str:
    """What a head, or what drafts nothing, can do, by shares of right drafts by depth."""
    return f"{chain_length(acceptance):.2f} tokens a pass" if drafts else f"{acceptance[0]:.1%} right"


def counted(head: Trainer, batch: Batch) -> Tensor:
    """(2, depths, n) float32, for each of a batch's n texts: how many of the likeliest drafts are the text's own token
    where all before them are, and how many there are; a token that the draft vocabulary lacks is never drafted.
    """
    size, device = batch.tokens.numel(), head.rows.device
    texts = batch.documents.amax(1) + 1
    before = texts.cumsum(0) - texts
    count = int(texts.sum())
    text = torch.where(batch.documents == PAD, count, batch.documents + before[:, None]).flatten()
    counts = torch.zeros(2, head.depths, count + 1, device=device)
    alive = torch.ones(size, dtype=torch.bool, device=device)
    for depth, (at, predicted) in enumerate(head.predict(batch)):
        _, columns = batch.learned(depth + 2)
        hit, inside = torch.zeros_like(alive), torch.zeros_like(alive)
        hit[at], inside[at] = predicted == columns, True
        counts[1, depth].index_add_(0, text, (alive & inside).float())
        alive = alive & hit
        counts[0, depth].index_add_(0, text, alive.float())
    return counts[..., :count]
