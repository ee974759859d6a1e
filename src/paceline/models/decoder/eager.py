"""A forward pass by PyTorch's operators: the readable form, the oracle, and what runs wherever compiled passes do not.

In: segments with their tokens or hidden states. Out: logits, hidden states, taps. Not here: the layers
(models.decoder.decoder), attention (models.decoder.tree_attention), compiled passes (models.cpu.compiled_decoder),
which take the same arguments.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

import torch

from paceline.models.decoder.decoder import ALL_LAYERS, Decoder, LayerPlan, Rotary
from paceline.models.decoder.segments import Segment
from paceline.models.decoder.tree_attention import BatchStep, Masks, SequenceStep, Step

Found = tuple[torch.Tensor, torch.Tensor, dict[int, torch.Tensor]]


class Passes(Protocol):
    """Forward passes of one model.

    Attributes:
        row_invariant: built so that a row's bits depend on its own text alone; `models.decoder.invariance` puts it to
        the test.
    """

    row_invariant: bool

    def embed(self, tokens: Sequence[int]) -> torch.Tensor:
        """(r, hidden) embeddings, the family's multiplier included."""

    def head(self, hidden: torch.Tensor, *, norm: bool = True) -> torch.Tensor:
        """(r, v) logits of hidden states (r, hidden), after the final norm unless `norm` is False."""

    def run(
        self,
        segments: Sequence[Segment],
        inputs: Sequence[int] | torch.Tensor,
        lengths: Sequence[tuple[int, int]],
        plan: LayerPlan = ALL_LAYERS,
        taps: Collection[int] = (),
        *,
        logits: Sequence[int] | None = None,
        states: bool = False,
    ) -> Found:
        """Run the planned layers over all rows of the segments.

        Args:
            inputs: the rows' tokens, or (r, hidden) states before layer `plan.first` (embeddings if that is 0), not
            modified.
            lengths: runs of (rows, sequence length), for rotary kinds that depend on it.
            taps: layers whose output is wanted; -1 is the embedding, the number of layers the normed output.
            logits: rows whose logits are wanted, in ascending order; None means all.
            states: whether the hidden states are wanted.
        Returns:
            Logits, hidden states (r, hidden) behind the last layer (empty if not wanted) and taps, in the model's
            dtype.
        """


class EagerPasses:
    """See `Passes`."""

    def __init__(self, decoder: Decoder, rotary: Rotary, masks: Masks) -> None:
        self._decoder, self._rotary, self._masks = decoder, rotary, masks
        self.embed, self.head, self.row_invariant = decoder.embed, decoder.head, masks.row_invariant

    def run(
        self,
        segments: Sequence[Segment],
        inputs: Sequence[int] | torch.Tensor,
        lengths: Sequence[tuple[int, int]],
        plan: LayerPlan = ALL_LAYERS,
        taps: Collection[int] = (),
        *,
        logits: Sequence[int] | None = None,
        states: bool = False,
    ) -> Found:
        """See `Passes.run`."""
        decoder = self._decoder
        x = inputs.clone() if isinstance(inputs, torch.Tensor) else decoder.embed(inputs)
        positions = segments[0].positions() if len(segments) == 1 else [p for s in segments for p in s.positions()]
        kept = decoder.run(x, self._step(segments), self._rotary.at(positions, lengths), plan, taps)
        if len(decoder.layers) in taps:
            kept[len(decoder.layers)] = decoder.final_norm(x).contiguous()
        if logits is None:
            found = decoder.head(x)
        elif len(logits) == 1:
            found = decoder.head(x.narrow(0, logits[0], 1))
        elif logits:
            found = decoder.head(x.index_select(0, torch.tensor(logits, device=x.device)))
        else:
            found = x.new_empty(0, decoder.spec.vocab_size)
        return found, x if states else x[:0], kept

    def _step(self, segments: Sequence[Segment]) -> Step:
        if len(segments) == 1:
            return SequenceStep(self._decoder.shape, self._masks, segments[0])
        return BatchStep(self._decoder.shape, self._masks, segments)
