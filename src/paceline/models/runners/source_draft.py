"""A draft on what an encoder-decoder target's own encoder has read: a decoder of a few layers.

Its layers attend to the keys and values that the target's layers, of which they were made, have computed of a source:
these are copied once a source, so nothing is encoded or projected again. Of the text it has a cache of its own. A
sequence is opened with the target's inputs while the target holds them.

Source: Distil-Whisper (arXiv:2311.00430), whose draft shares the target's encoder.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import cast
from weakref import WeakValueDictionary

import torch

from paceline.models.base import Runner
from paceline.models.inputs import NO_INPUTS, Inputs
from paceline.models.layers.own_weights import Weights
from paceline.models.runners.encoder_decoder import EncoderDecoderRunner, source_of
from paceline.models.runners.native import NativeRunner
from paceline.models.runners.remapped_tokens import HeadRows, MappedRunner
from paceline.models.spec import ModelSpec
from paceline.models.state.cache import NativeCache
from paceline.models.state.cross_memory import CrossMemory, SourcePart
from paceline.models.state.parts import CompositeState, StateOperations


class SourceDraftRunner(StateOperations[CompositeState]):
    """See `models.base.Runner` and `models.abilities.EncodesInputs`.

    Args:
        spec: of the draft's decoder. weights: canonical ones, taken out as they are packed.
        target: whose sources it reads. layers: of the target, one for each of the draft's.
        rows: tokens that its head keeps; None for all.
        name: for messages.
    Attributes:
        sources_copied: how many sources it has taken over so far.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: Weights,
        target: EncoderDecoderRunner,
        layers: Sequence[int],
        rows: HeadRows | None,
        *,
        name: str,
    ) -> None:
        info = target.info
        native = self.native = NativeRunner(
            spec, weights, name=name, device=info.device, dtype=info.dtype, max_context=info.max_context,
            row_invariant=False,
        )  # fmt: skip
        self._target, self._layers = target, tuple(layers)
        whole = cast(Runner, native)  # it takes only handles of its own kind, which the protocol cannot say
        scorer = whole if rows is None else MappedRunner.of_head(whole, rows)
        self.info = replace(scorer.info, source=info.source)
        self.capabilities = native.capabilities
        self.extend, self.score = scorer.extend, scorer.score
        self.memory = native.memory
        self.input_kinds, self.most_tokens = target.input_kinds, target.most_tokens
        self._copies = WeakValueDictionary[str, CrossMemory]()
        self.sources_copied = 0

    @torch.inference_mode()
    def open(self, prompt_length: int = 0, inputs: Inputs = NO_INPUTS) -> CompositeState:
        """See `Runner.open`. Without inputs, as for measurements, it is the shortest source."""
        cache = NativeCache(self.native.arena, prompt_length)
        memory = self._copies.get(inputs.digest) if inputs else self._copy(inputs)
        return CompositeState(cache, [SourcePart(inputs, memory)])

    def rows_to_encode(self, cache: CompositeState) -> int:
        """See `EncodesInputs.rows_to_encode`: the target's encoder has read them all."""
        del cache
        return 0

    @torch.inference_mode()
    def encode(self, caches: Sequence[CompositeState]) -> None:
        """Take over what the target has of the sources of these sequences.

        Raises:
            ConfigError: the target does not hold one.
        """
        for part in map(source_of, caches):
            if part.memory is None:
                part.memory = self._copy(part.inputs)

    @property
    def source_bytes(self) -> int:
        """Most bytes that a source takes here."""
        return self._target.source.model.max_context * (self.memory.block_bytes // self.memory.block_size)

    def _copy(self, inputs: Inputs) -> CrossMemory:
        copied = self._copies.get(inputs.digest)
        if copied is None:
            original = self._target.memory_of(inputs)
            copied = CrossMemory(self.native.arena, original.cache.length)
            for place, layer in enumerate(self._layers):
                copied.write(place, original.read(layer))
            self._copies[inputs.digest] = copied
            self.sources_copied += 1
        return copied
