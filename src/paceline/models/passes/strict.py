"""Passes of PyTorch's operators that keep a row's bits, and which models have none.

Compiled passes need nothing for strict mode: every row goes through the same sums. PyTorch's matrix products choose
their order of summation by the number of rows, so strict layers that do not keep a row's bits are multiplied in blocks
of equally many rows (models.layers.linear), and attention is summed chunk by chunk at fixed positions
(models.attention.strict_attention). models.runners.invariance is the proof.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from paceline.errors import ConfigError
from paceline.models.attention.segments import Segment, split_into_passes
from paceline.models.attention.strict_attention import products_keep_order
from paceline.models.attention.tree_attention import STRICT_ROWS
from paceline.models.base import ALL_LAYERS, LayerPlan, PassResult
from paceline.models.passes.eager import EagerPasses
from paceline.models.spec import ModelSpec

NOT_STRICT_IN_TRANSFORMERS = "it runs in transformers, whose sums depend on how a text is fed"


NOT_STRICT_WITH_SOURCE = "only compiled passes keep the bits of a row that attends to a source, and it has none here"


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
    if any(state.heads and not state.by_state for state in spec.states.values()):
        return "its recurrent states are summed in another order where tokens are read one by one"
    return None


class StrictPasses:
    """Passes of PyTorch's operators, fed piece by piece, since attention beyond STRICT_ROWS takes another form.

    Attributes:
        row_invariant: as of `models.passes.base.Passes`; False where this CPU's matrix products do not keep the order
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
        fed: Sequence[int] | torch.Tensor,
        lengths: Sequence[tuple[int, int]],
        plan: LayerPlan = ALL_LAYERS,
        taps: Collection[int] = (),
        *,
        logits: Sequence[int] | None = None,
        states: bool = False,
        added_qkv: torch.Tensor | None = None,
    ) -> PassResult:
        """See `models.passes.base.Passes.run`."""
        rows = sum(segment.rows for segment in segments)
        if rows <= self.most_rows:
            return self.passes.run(
                segments, fed, lengths, plan, taps, logits=logits, states=states, added_qkv=added_qkv
            )
        wanted = range(rows) if logits is None else logits
        results: list[PassResult] = []
        done = 0
        for parts in split_into_passes(segments, self.most_rows):
            count = sum(part.rows for part in parts)
            picked = [row - done for row in wanted if done <= row < done + count]
            fed_part, more = fed[done : done + count], None if added_qkv is None else added_qkv[done : done + count]
            results.append(
                self.passes.run(parts, fed_part, (), plan, taps, logits=picked, states=states, added_qkv=more)
            )
            done += count
        kept = {layer: torch.cat([result.taps[layer] for result in results]) for layer in results[0].taps}
        return PassResult(
            torch.cat([result.logits for result in results]), torch.cat([result.states for result in results]), kept
        )
