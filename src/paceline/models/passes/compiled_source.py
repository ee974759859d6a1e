"""The half of a decoder layer that attends to another model's cache, compiled: attention of given states to keys and
values of one of that model's layers, and the MLP behind it.

It is a decoder's attention to its source (`CompiledDecoder`, `at.SOURCE_ATTENTION`), whose source is a text in the
other model's blocks: they are read where they lie, and nothing is written there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import torch

from paceline.models.attention.segments import Segment
from paceline.models.attention.slot_lists import fill_source
from paceline.models.base import LayerPlan
from paceline.models.cpu import offsets as at
from paceline.models.layers.own_weights import Weights
from paceline.models.passes.compiled_decoder import CompiledDecoder, Lengths
from paceline.models.spec import EncoderSpec, LayerSpec, ModelSpec, RopeSpec
from paceline.models.state.arena import Arena
from paceline.models.state.window_slots import Ints

UNUSED: Final = 32
"""Rows of an embedding and a head that never run."""


class CompiledSource(CompiledDecoder):
    """Runs it over rows of many sequences.

    Args:
        spec: of the layer. weights: canonical, without a number of the layer: cross_norm, cross_q, cross_o, mlp_norm,
            gate_up, down; taken out as they are packed.
        arena: of the other model. read: its layer. rope: by which queries are rotated as that layer's are; None where
            they are not.
    """

    def __init__(self, spec: ModelSpec, weights: Weights, arena: Arena, read: int, rope: RopeSpec | None) -> None:
        empty = weights["cross_norm.weight"].new_zeros(UNUSED, spec.hidden_size)
        own = {"embed.weight": empty, **{f"layers.0.{name}": weights.pop(name) for name in list(weights)}}
        self._read, self._turns = read, rope is not None
        super().__init__(spec_of_source(spec, rope), own, arena)
        if self._turns:
            self.layers.put({at.ROPE: self._ropes["default"].address}, 1)

    def states(self, caches: Sequence[Segment], rows: torch.Tensor) -> torch.Tensor:
        """(r, hidden) behind the layer, of states (r, hidden) behind its self-attention.

        Args:
            caches: of each sequence's rows: the other model's cache of its text, which is not empty, and how far
                behind it the rows stand.
        """
        return self.run(caches, rows.contiguous(), (), logits=(), states=True).states

    def _caches(self) -> Sequence[torch.Tensor]:
        return [self._arena.layers[self._read]]

    def _plan(self, plan: LayerPlan) -> None:
        super()._plan(plan)
        self.layers.put({at.ATTENTION: 1}, 1)  # the layer has no attention but this

    def _place(self, segments: Sequence[Segment], lengths: Lengths, done: int) -> list[Ints]:
        row, lists = 0, list[Ints]()
        for segment in segments:
            stop = row + segment.rows
            self._rows[2, row:stop] = list(segment.positions())
            fill_source(segment.cache, self._slots, self._seen_of_source[row:stop], lists)
            row = stop
        return self._rotations(row, lengths, done, lists)


def spec_of_source(spec: ModelSpec, rope: RopeSpec | None) -> ModelSpec:
    """A layer without attention of its own, in front of what it attends to."""
    layer = LayerSpec(rope=None if rope is None else "default", attention=False)
    ropes = {} if rope is None else {"default": replace(rope, growth=None)}
    return replace(
        spec, vocab_size=UNUSED, tied=True, layers=(layer,), ropes=ropes, encoder=EncoderSpec(model=spec),
        final_norm=False,
    )  # fmt: skip
