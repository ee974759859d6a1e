"""A forward pass by PyTorch's operators: the readable form, the oracle, and what runs wherever compiled passes
(models.passes.compiled_decoder, with the same arguments) do not.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch

from paceline.models.attention.segments import Segment
from paceline.models.attention.source_attention import RelativeSteps, SourceAttention
from paceline.models.attention.tree_attention import AttentionStep, BatchStep, Masks, SequenceStep
from paceline.models.base import ALL_LAYERS, LayerPlan, PassResult
from paceline.models.layers.decoder import Decoder
from paceline.models.layers.mixers.step import RecurrentStep
from paceline.models.layers.rope import Rotary


class EagerPasses:
    """See `Passes`."""

    name = "operators"

    def __init__(self, decoder: Decoder, rotary: Rotary, masks: Masks) -> None:
        self.decoder, self.rotary, self.masks = decoder, rotary, masks
        self.embed, self.head, self.row_invariant = decoder.embed, decoder.head, masks.row_invariant

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
        source: SourceAttention | None = None,
    ) -> PassResult:
        """See `Passes.run`.

        Args:
            source: takes the place of what the segments' sources give.
        """
        decoder = self.decoder
        x = fed.clone() if isinstance(fed, torch.Tensor) else decoder.embed(fed)
        positions = segments[0].positions() if len(segments) == 1 else [p for s in segments for p in s.positions()]
        if not plan.first:
            x = decoder.placement.apply(x, positions)
        kept = decoder.run(
            x, self._step(segments), self.rotary.at(positions, lengths), plan, taps,
            added_qkv=added_qkv, source=source or self._source(segments), recurrent=self._recurrent(segments),
        )  # fmt: skip
        if len(decoder.layers) in taps:
            kept[len(decoder.layers)] = decoder.final_norm(x).contiguous()
        if logits is None:
            scores = decoder.head(x)
        elif len(logits) == 1:
            scores = decoder.head(x.narrow(0, logits[0], 1))
        elif logits:
            scores = decoder.head(x.index_select(0, torch.tensor(logits, device=x.device)))
        else:
            scores = x.new_empty(0, decoder.spec.vocab_size)
        return PassResult(scores, x if states else x[:0], kept)

    def source_queries(
        self, segment: Segment, fed: Sequence[int], layers: Collection[int]
    ) -> Mapping[int, torch.Tensor]:
        """See `QueriesSource.source_queries`."""
        assert segment.memory is not None, "a sequence without a source"
        source = SourceAttention(self.decoder.shape, [segment.memory], [segment.rows], layers)
        self.run([segment], fed, (), logits=(), source=source)
        return source.queries

    def _source(self, segments: Sequence[Segment]) -> SourceAttention | None:
        memories = [segment.memory for segment in segments if segment.memory is not None]
        return SourceAttention(self.decoder.shape, memories, [s.rows for s in segments]) if memories else None

    def _recurrent(self, segments: Sequence[Segment]) -> RecurrentStep | None:
        return RecurrentStep(segments, self.masks.device) if segments[0].recurrent is not None else None

    def _step(self, segments: Sequence[Segment]) -> AttentionStep:
        if self.decoder.biases:
            return RelativeSteps(self.decoder.shape, self.masks, segments, self.decoder.biases)
        if len(segments) == 1:
            return SequenceStep(self.decoder.shape, self.masks, segments[0])
        return BatchStep(self.decoder.shape, self.masks, segments)
