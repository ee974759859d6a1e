"""What strict mode needs of a model's passes: which models can have it, and PyTorch's operators in a form that keeps a
row's bits.

In: a ModelSpec, passes of models.decoder.eager. Out: a refusal in words, or passes that feed at most so many rows at
once. Not
here: the proof (models.decoder.invariance), products of fixed width (models.decoder.linear), attention in the order of
    positions (models.decoder.strict_attention).

Compiled passes (models.cpu) need nothing: every row goes through the same sums. PyTorch's matrix products choose their
order of summation by the number of rows, so strict layers that do not keep a row's bits are multiplied in blocks of
equally many rows, and attention is summed chunk by chunk at fixed positions.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from paceline.errors import ConfigError
from paceline.models.cpu.visible_slots import Part, parts_of
from paceline.models.decoder.decoder import ALL_LAYERS, LayerPlan
from paceline.models.decoder.eager import EagerPasses, Found
from paceline.models.decoder.segments import Segment
from paceline.models.decoder.strict_attention import products_keep_order
from paceline.models.decoder.tree_attention import SPLIT_ROWS
from paceline.models.spec import ModelSpec

TRANSFORMERS = "it runs in transformers, whose sums depend on how a text is fed"


def unavailable(name: str, reason: str) -> ConfigError:
    """The refusal of strict mode."""
    return ConfigError(f"exactness='strict' is not available for {name}: {reason}; use exactness='auto'")


def refusal(spec: ModelSpec, device: torch.device) -> str | None:
    """Why a model cannot decode in strict mode there, or None."""
    if device.type != "cpu":
        return f"no form of its passes on {device.type.upper()} is known to keep the bits of a row"
    kinds = sorted({rope.kind for rope in spec.ropes.values()} & {"dynamic", "longrope"})
    if kinds:
        return f"its {kinds[0]} rotary embedding depends on how a prompt is cut into chunks"
    return None


class InParts:
    """Passes of PyTorch's operators that feed long inputs piece by piece, since attention beyond SPLIT_ROWS takes
    another form.

    Attributes:
        row_invariant: as of `models.decoder.eager.Passes`; False where this CPU's matrix products do not keep the order
            of their sums.
    """

    def __init__(self, passes: EagerPasses, spec: ModelSpec) -> None:
        self._passes, self._most = passes, max(1, SPLIT_ROWS // (spec.num_heads // spec.num_kv_heads))
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
    ) -> Found:
        """See `models.decoder.eager.Passes.run`."""
        rows = sum(segment.rows for segment in segments)
        if rows <= self._most:
            return self._passes.run(segments, inputs, lengths, plan, taps, logits=logits, states=states)
        wanted = range(rows) if logits is None else logits
        found: list[Found] = []
        done = 0
        for parts in parts_of(segments, self._most):
            count = sum(part.stop - part.first for part in parts)
            picked = [row - done for row in wanted if done <= row < done + count]
            given = inputs[done : done + count]
            found.append(
                self._passes.run([_cut(part) for part in parts], given, (), plan, taps, logits=picked, states=states)
            )
            done += count
        kept = {layer: torch.cat([one[2][layer] for one in found]) for layer in found[0][2]}
        return torch.cat([one[0] for one in found]), torch.cat([one[1] for one in found]), kept


def _cut(part: Part) -> Segment:
    """The inputs of a segment up to the part's end, of which those before the part are in their slots."""
    whole, stop = part.segment, part.stop
    depths = None if whole.depths is None else whole.depths[:stop]
    sees = None if whole.sees is None else whole.sees[:stop, :stop]
    return Segment(whole.cache, stop, part.first, depths, sees)
