"""A forward pass by PyTorch's operators: the readable form, the oracle, and what runs wherever compiled passes
(models.passes.compiled_decoder, with the same arguments) do not.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch

from paceline.models.attention.kv_selection import KVSelection
from paceline.models.attention.segments import Segment, parts_with
from paceline.models.attention.source_attention import RelativeSteps, SourceAttention
from paceline.models.attention.tree_attention import AttentionStep, BatchStep, Masks, SequenceStep, WritingStep
from paceline.models.base import ALL_LAYERS, LayerPlan, PassResult
from paceline.models.layers.decoder import Decoder
from paceline.models.layers.mixers.step import RecurrentStep
from paceline.models.layers.rope import Rotary


class EagerPasses:
    """See `Passes`.

    Args:
        selection: reads a part of the text, in the place of all of it.

    The last layers, if they keep nothing of a text, run for those rows alone whose logits are wanted: of known tokens
    the last one, as a rule.
    """

    name = "operators"

    def __init__(self, decoder: Decoder, rotary: Rotary, masks: Masks, selection: KVSelection | None = None) -> None:
        self._one = SequenceStep if selection is None else selection.step
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
        x = x.to(decoder.sums)
        rotations, recurrent = self.rotary.at(positions, lengths), self._recurrent(segments)
        plain = plan is ALL_LAYERS and not lengths and not states and added_qkv is None
        if logits is not None and plain and len(logits) < len(x) and self._are_before_optional(taps):
            kept = decoder.keep(x, self._plain_step(segments), rotations, taps, recurrent=recurrent)
            x, logits = self._wanted_rows(x, segments, logits, recurrent)
        else:
            kept = decoder.run(
                x, self._step(segments), rotations, plan, taps,
                added_qkv=added_qkv, source=source or self._source(segments), recurrent=recurrent,
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
        return PassResult(scores, (x if states else x[:0]).to(decoder.dtype), kept)

    def _are_before_optional(self, taps: Collection[int]) -> bool:
        """Whether there are layers that not all rows need, and nothing is wanted of them for all rows."""
        optional = self.decoder.optional
        return optional < len(self.decoder.layers) and all(layer < optional for layer in taps)

    def _wanted_rows(
        self, x: torch.Tensor, segments: Sequence[Segment], wanted: Sequence[int], recurrent: RecurrentStep | None
    ) -> tuple[torch.Tensor, list[int]]:
        """Run the optional layers for some rows of x (r, hidden).

        Returns:
            States (n, hidden) behind the last layer, and which of these n are the wanted ones.
        """
        parts, rows, picked = parts_with(segments, wanted)
        index = torch.tensor(rows, dtype=torch.int64, device=x.device)
        x = x[index]
        if parts:
            if recurrent is not None:
                recurrent.keep_rows(index)
            rotations = self.rotary.at([position for part in parts for position in part.positions()], ())
            rest = LayerPlan(first=self.decoder.optional)
            self.decoder.run(x, self._plain_step(parts), rotations, rest, recurrent=recurrent)
        return x, picked

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
        return self._plain_step(segments)

    def _plain_step(self, segments: Sequence[Segment]) -> WritingStep:
        if len(segments) == 1:
            return self._one(self.decoder.shape, self.masks, segments[0])
        return BatchStep(self.decoder.shape, self.masks, segments, self._one)
