"""What a forward pass is: one protocol for all kinds of passes, with one result (`PassResult`)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol, runtime_checkable

import torch

from paceline.models.attention.segments import Segment
from paceline.models.base import ALL_LAYERS, LayerPlan, PassResult
from paceline.models.state.recurrent import LayerState


class Passes(Protocol):
    """Forward passes of one model.

    Attributes:
        name: see `ModelInfo.passes`.
        row_invariant: built so that a row's bits depend on its own text alone; `models.runners.invariance` puts it to
            the test.
    """

    name: str
    row_invariant: bool

    def embed(self, tokens: Sequence[int]) -> torch.Tensor:
        """(r, hidden) embeddings, the family's multiplier included."""

    def head(self, hidden: torch.Tensor, *, norm: bool = True) -> torch.Tensor:
        """(r, v) logits of hidden states (r, hidden), after the final norm unless `norm` is False."""

    def run(
        self,
        segments: Sequence[Segment],
        fed: Sequence[int] | torch.Tensor,
        lengths: Sequence[tuple[int, int]],
        plan: LayerPlan = ALL_LAYERS,
        taps: Collection[int] = (),
        *,
        logits: Sequence[int] | None = None,
        states: bool = False,
        added_qkv: torch.Tensor | None = None,
    ) -> PassResult:
        """Run the planned layers over all rows of the segments.

        Args:
            fed: the rows' tokens, or (r, hidden) states before layer `plan.first` (embeddings if that is 0), not
                modified.
            lengths: runs of (rows, sequence length), for rotary kinds that depend on it.
            taps: layers whose output is wanted; -1 is the embedding, the number of layers the normed output.
            logits: rows whose logits are wanted, in ascending order; None means all.
            states: whether the hidden states are wanted.
            added_qkv: (r, outputs) numbers that are added to the queries, keys and values of every layer that runs,
                heads in the order of `head_order`: what part of a wider input makes of them.
        """


@runtime_checkable
class QueriesSource(Passes, Protocol):
    """Passes that show what a decoder asks of its source."""

    def source_queries(
        self, segment: Segment, fed: Sequence[int], layers: Collection[int]
    ) -> Mapping[int, torch.Tensor]:
        """Layer -> (r, g * h, d) queries of the attention to the source, heads in the order of `head_order`, while the
        rows of a segment are fed.
        """


@runtime_checkable
class SettlesStates(Passes, Protocol):
    """Passes that make the states behind committed nodes themselves."""

    def settle(self, states: Sequence[LayerState], nodes: Sequence[int], alone: bool) -> Sequence[torch.Tensor]:
        """See `models.state.recurrent.Settle`."""
