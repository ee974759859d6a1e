"""What the trainers of parallel drafts share (PARD, P-EAGLE): the rows of a pass in which all anchors of a text have
masks behind them, and which masks a step keeps.

A mask of depth g behind token a, its *anchor*, predicts token a + g + 1; token a itself, depth 0, predicts a + 1. In
training all anchors of a text share one pass:

    rows of the pass: every token (depth 0), then (anchor, g) for g = 1 .. depths - 1       (r,)
    position: anchor + g
    row (a, g) sees tokens up to a of its document, masks (a, 1) .. (a, g), and nothing else   (r, r)
    conditional drop: depth g keeps at most max(retention^g, least_retention) of the anchors of which an answer has
        token a + g + 1, drawn from those that depth g - 1 has kept, so that the masks before one that is kept are there

which is what a row sees when it drafts. Anchors are those that an answer's token follows, as drafts have it.

Source: PARD: accelerating LLM inference with low-cost parallel draft model adaptation (arXiv:2504.18583).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.config import documented, option
from paceline.training.batches import Batch
from paceline.training.train_config import TrainConfig


@documented
@dataclass(frozen=True, kw_only=True)
class MaskedConfig(TrainConfig):
    """Says how many mask tokens of a text are learned in a step."""

    retention: float = option(
        0.7, "Of mask tokens from one depth to the next.", low=0.0, high=1.0, rule="be above 0 and at most 1",
        open_low=True,
    )  # fmt: skip
    least_retention: float = option(0.2, "Of mask tokens at any depth.", low=0.0, high=1.0, rule="be in 0..1")
    max_anchors: int | None = option(None, "Tokens of a row with mask tokens behind them; all by default.", low=1)


@dataclass(frozen=True, slots=True)
class MaskedRows:
    """Holds the rows of a pass over one packed row of t tokens.

    Attributes:
        anchors: (r,) int64 place of the last token that a row sees; its own place where it is a token.
        depths: (r,) int64, 0 of tokens, g of the g-th mask behind its anchor.
    """

    anchors: Tensor
    depths: Tensor

    @classmethod
    def of(cls, tokens: Tensor, kept: Sequence[Tensor]) -> MaskedRows:
        """The tokens at some places (n,), then the masks of each depth behind the anchors (t,) bool that are kept."""
        places = [tokens.cpu(), *(one.cpu().nonzero().squeeze(1) for one in kept)]
        depths = [torch.full_like(anchors, depth) for depth, anchors in enumerate(places)]
        return cls(torch.cat(places), torch.cat(depths))

    def visible(self, documents: Tensor) -> Tensor:
        """(r, r) bool: which rows each row sees; documents: (t,) of the tokens."""
        document = documents.to(self.anchors.device)[self.anchors]
        anchor, depth = self.anchors[:, None], self.depths[:, None]
        tokens = (self.depths == 0) & (document[:, None] == document) & (self.anchors <= anchor)
        return tokens | ((self.depths > 0) & (self.anchors == anchor) & (self.depths <= depth))


def anchors_of(batch: Batch, depth: int) -> Tensor:
    """(b, t) bool: where a token and the `depth`-th mask behind it both predict a token of an answer."""
    steps = depth + 1
    inside = batch.ahead(batch.documents + 1, steps) == batch.documents + 1
    return inside & batch.ahead(batch.wanted, 1) & batch.ahead(batch.wanted, steps)


def retained(batch: Batch, depths: int, config: MaskedConfig, generator: torch.Generator) -> list[Tensor]:
    """(b, t) bool anchors that are kept at each depth from 1 to depths - 1, each among those of the depth before."""
    rank, chosen, kept = torch.rand(batch.tokens.shape, generator=generator), anchors_of(batch, 0).cpu(), []
    if config.max_anchors is not None:
        chosen = _first(rank, chosen, torch.full((len(rank),), config.max_anchors))
    before = chosen
    for depth in range(1, depths):
        possible = chosen & anchors_of(batch, depth).cpu()
        share = max(config.retention**depth, config.least_retention)
        before = _first(rank, before & possible, (possible.sum(1) * share).long())
        kept.append(before)
    return kept


def _first(rank: Tensor, among: Tensor, most: Tensor) -> Tensor:
    """(b, t) bool those (b, t) bool with the lowest ranks (b, t), `most` (b,) of each row."""
    order = torch.where(among, rank, 2.0).argsort(1).argsort(1)
    return among & (order < most[:, None])
