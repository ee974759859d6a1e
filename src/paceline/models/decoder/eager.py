"""A forward pass by PyTorch's operators: the readable form, the oracle, and what runs wherever compiled passes
(models.cpu.compiled_decoder, with the same arguments) do not; and its strict form, which keeps a row's bits.

Compiled passes need nothing for strict mode: every row goes through the same sums. PyTorch's matrix products choose
their order of summation by the number of rows, so strict layers that do not keep a row's bits are multiplied in blocks
of equally many rows (models.layers.linear), and attention is summed chunk by chunk at fixed positions
(models.attention.strict_attention). models.decoder.invariance is the proof.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from paceline.errors import ConfigError
from paceline.models.attention.segments import Segment, SegmentPart, split_into_passes
from paceline.models.attention.strict_attention import products_keep_order
from paceline.models.attention.tree_attention import STRICT_ROWS, BatchStep, Masks, SequenceStep, Step
from paceline.models.base import ALL_LAYERS, LayerPlan
from paceline.models.layers.decoder import Decoder
from paceline.models.layers.rope import Rotary
from paceline.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class PassResult:
    """What a forward pass gives, in the model's dtype.

    Attributes:
        logits: (picked, v) of the rows whose logits were wanted.
        states: (r, hidden) behind the last layer that ran; (0, hidden) where they were not wanted.
        taps: layer -> (r, hidden).
        best: per row of `logits` its best token, as `Scores.best` has it; None where the pass did not look.
    """

    logits: torch.Tensor
    states: torch.Tensor
    taps: dict[int, torch.Tensor]
    best: list[int] | None = None


class Passes(Protocol):
    """Forward passes of one model.

    Attributes:
        name: see `ModelInfo.passes`.
        row_invariant: built so that a row's bits depend on its own text alone; `models.decoder.invariance` puts it to
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
        inputs: Sequence[int] | torch.Tensor,
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
            inputs: the rows' tokens, or (r, hidden) states before layer `plan.first` (embeddings if that is 0), not
                modified.
            lengths: runs of (rows, sequence length), for rotary kinds that depend on it.
            taps: layers whose output is wanted; -1 is the embedding, the number of layers the normed output.
            logits: rows whose logits are wanted, in ascending order; None means all.
            states: whether the hidden states are wanted.
            added_qkv: (r, outputs) numbers that are added to the queries, keys and values of every layer that runs,
                heads in the order of `head_order`: what part of a wider input makes of them.
        """


class EagerPasses:
    """See `Passes`."""

    name = "operators"

    def __init__(self, decoder: Decoder, rotary: Rotary, masks: Masks) -> None:
        self.decoder, self.rotary, self.masks = decoder, rotary, masks
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
        added_qkv: torch.Tensor | None = None,
    ) -> PassResult:
        """See `Passes.run`."""
        decoder = self.decoder
        x = inputs.clone() if isinstance(inputs, torch.Tensor) else decoder.embed(inputs)
        positions = segments[0].positions() if len(segments) == 1 else [p for s in segments for p in s.positions()]
        kept = decoder.run(x, self._step(segments), self.rotary.at(positions, lengths), plan, taps, added_qkv=added_qkv)
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
        return PassResult(found, x if states else x[:0], kept)

    def _step(self, segments: Sequence[Segment]) -> Step:
        if len(segments) == 1:
            return SequenceStep(self.decoder.shape, self.masks, segments[0])
        return BatchStep(self.decoder.shape, self.masks, segments)


NOT_STRICT_IN_TRANSFORMERS = "it runs in transformers, whose sums depend on how a text is fed"


def strict_unavailable(name: str, reason: str) -> ConfigError:
    """The error that strict mode is not to be had for a model."""
    return ConfigError(f"exactness='strict' is not available for {name}: {reason}; use exactness='auto'")


def why_not_strict(spec: ModelSpec, device: torch.device) -> str | None:
    """Why a model cannot decode in strict mode there, or None."""
    if device.type != "cpu":
        return f"no form of its passes on {device.type.upper()} is known to keep the bits of a row"
    kinds = sorted({rope.kind for rope in spec.ropes.values()} & {"dynamic", "longrope"})
    if kinds:
        return f"the angles of its {kinds[0]} rotary embedding depend on the length of the text"
    return None


class StrictPasses:
    """Passes of PyTorch's operators, fed piece by piece, since attention beyond STRICT_ROWS takes another form.

    Attributes:
        row_invariant: as of `models.decoder.eager.Passes`; False where this CPU's matrix products do not keep the order
            of their sums.
    """

    name = "strict operators"

    def __init__(self, passes: EagerPasses, spec: ModelSpec) -> None:
        self.passes, self.most_rows = passes, max(1, STRICT_ROWS // (spec.num_heads // spec.num_kv_heads))
        self.embed, self.head = passes.embed, passes.head
        self.row_invariant = passes.row_invariant and products_keep_order(spec.num_kv_heads, spec.head_dim)

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
        added_qkv: torch.Tensor | None = None,
    ) -> PassResult:
        """See `models.decoder.eager.Passes.run`."""
        rows = sum(segment.rows for segment in segments)
        if rows <= self.most_rows:
            return self.passes.run(
                segments, inputs, lengths, plan, taps, logits=logits, states=states, added_qkv=added_qkv
            )
        wanted = range(rows) if logits is None else logits
        found: list[PassResult] = []
        done = 0
        for parts in split_into_passes(segments, self.most_rows):
            count = sum(part.stop - part.first for part in parts)
            picked = [row - done for row in wanted if done <= row < done + count]
            cut, given = [_cut(part) for part in parts], inputs[done : done + count]
            more = None if added_qkv is None else added_qkv[done : done + count]
            found.append(self.passes.run(cut, given, (), plan, taps, logits=picked, states=states, added_qkv=more))
            done += count
        kept = {layer: torch.cat([one.taps[layer] for one in found]) for layer in found[0].taps}
        return PassResult(torch.cat([one.logits for one in found]), torch.cat([one.states for one in found]), kept)


def _cut(part: SegmentPart) -> Segment:
    """The inputs of a segment up to the part's end, of which those before the part are in their slots."""
    whole, stop = part.segment, part.stop
    depths = None if whole.depths is None else whole.depths[:stop]
    sees = None if whole.sees is None else whole.sees[:stop, :stop]
    return Segment(whole.cache, stop, part.first, depths, sees)
