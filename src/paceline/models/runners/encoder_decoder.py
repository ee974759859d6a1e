"""Encoder-decoder models: a native runner for the decoder, and an encoder that reads each source once.

A sequence is opened with its source (`Inputs.encoder_tokens`, or one of `Inputs.features`), which `encode` reads before
the first tokens are fed. What came of it is kept by the contents' digest as long as a sequence uses it, so that all
outputs and forks of a request, and requests with the same source, share it.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import replace
from weakref import WeakValueDictionary

import numpy as np
import torch

from paceline.checkpoints import Form, form_of
from paceline.errors import ConfigError, PromptError
from paceline.models.abilities import check_inputs
from paceline.models.attention.segments import chunk
from paceline.models.base import PartAbilities
from paceline.models.checks import check_extend
from paceline.models.inputs import NO_INPUTS, Inputs
from paceline.models.layers.encoder import CompiledParts, Encoder
from paceline.models.layers.own_weights import Weights
from paceline.models.passes.base import QueriesSource
from paceline.models.passes.eligibility import fits
from paceline.models.passes.packed_weights import PackedWeights
from paceline.models.passes.strict import NOT_STRICT_WITH_SOURCE, strict_unavailable
from paceline.models.runners.native import NativeRunner
from paceline.models.runners.recurrent import opened_states
from paceline.models.spec import EncoderSpec, ModelSpec, attention_shape
from paceline.models.state.cache import NativeCache
from paceline.models.state.cache_memory import ArenaMemory
from paceline.models.state.cross_memory import CrossMemory, SourcePart
from paceline.models.state.parts import CompositeState, StateOperations, StatePart
from paceline.models.state.recurrent import RecurrentPart
from paceline.utils import shortened


class EncoderDecoderRunner(StateOperations[CompositeState]):
    """See `models.base.Runner` and `models.abilities.EncodesInputs`.

    Args:
        spec: of the whole model. weights: canonical ones of both parts.
        strict, packed and others: as of `NativeRunner`.

    Attributes:
        native: the decoder. encoder: the encoder, by PyTorch's operators but for some parts (passes.compiled_encoder).
        embedding: (v, hidden) table of the decoder's tokens.
        reads_alone: whether the encoder reads each source in a pass of its own.
        sources_read: how many sources the encoder has read so far.
    Raises:
        ConfigError: strict mode without compiled passes.
    """

    def __init__(
        self,
        spec: ModelSpec,
        encoder: EncoderSpec,
        weights: Weights,
        *,
        name: str,
        device: torch.device,
        dtype: torch.dtype,
        max_context: int | None = None,
        compiled: bool = True,
        strict: bool = False,
        packed: PackedWeights | None = None,
    ) -> None:
        form, parts = form_of(weights), CompiledParts()
        if compiled and fits(spec, dtype, device, quantization=form):
            parts = _compiled_parts(encoder, dtype, form)
        with torch.inference_mode():
            self.encoder = Encoder(spec, weights, row_invariant="proven" if strict else True, compiled=parts)
        self.embedding = weights["embed.weight"]
        native = self.native = NativeRunner(
            spec, weights, name=name, device=device, dtype=dtype, max_context=max_context, compiled=compiled,
            packed=packed, strict=strict,
        )  # fmt: skip
        self.reads_alone = strict
        self.info = replace(native.info, fingerprint=f"{native.info.fingerprint}-encoder", source=encoder.reads)
        self.spec, self.source = spec, encoder
        abilities = NativeCache.abilities
        if spec.states:
            abilities = PartAbilities.common([abilities, RecurrentPart.abilities])
        self.capabilities = native.capabilities.within(abilities)
        self.memory = ArenaMemory(native.arena, abilities, sources=self)
        self.input_kinds = ("encoder_tokens",) if encoder.reads == "encoder_tokens" else ("features",)
        if not isinstance(native.passes, QueriesSource):
            raise strict_unavailable(name, NOT_STRICT_WITH_SOURCE)
        self._passes = native.passes
        self.source_heads = [(layer, head) for layer in range(spec.num_layers) for head in range(spec.num_heads)]
        self.extend, self.score, self.run_layers = native.extend, native.score, native.run_layers
        self.embed, self.head = native.embed, native.head
        self._memories = WeakValueDictionary[str, CrossMemory]()
        self.sources_read = 0

    def open(self, prompt_length: int = 0, inputs: Inputs = NO_INPUTS) -> CompositeState:
        """See `Runner.open`. Without inputs, as for measurements and self-tests, it is the shortest source."""
        if inputs:
            self.most_tokens(inputs)
        parts: list[StatePart] = [SourcePart(inputs, self._memories.get(inputs.digest) if inputs else self._shortest)]
        if self.spec.states:
            parts.append(opened_states(self.native))
        return CompositeState(NativeCache(self.native.arena, prompt_length), parts)

    @functools.cached_property
    def _shortest(self) -> CrossMemory:
        steps = next(steps for steps in itertools.count(1) if self.source.rows(steps) > 0)
        with torch.inference_mode():
            channels = [conv.inputs for conv in self.source.convolutions[:1]]
            source = torch.zeros(*channels, steps) if channels else torch.zeros(1, dtype=torch.int64)
            return self.encoder.read([source.to(self.info.device)], self.native.arena)[0]

    def most_tokens(self, inputs: Inputs) -> int:
        """See `TakesInputs.most_tokens`.

        Raises:
            PromptError: no source, or one that is empty, too long, or of another shape or vocabulary.
        """
        check_inputs(self, inputs)
        self._rows(inputs)
        return self.info.max_context

    def rows_to_encode(self, cache: CompositeState) -> int:
        """See `EncodesInputs.rows_to_encode`."""
        part = source_of(cache)
        if part.memory is None:
            part.memory = self._memories.get(part.inputs.digest)
        return 0 if part.memory is not None else self._rows(part.inputs)

    @torch.inference_mode()
    def encode(self, caches: Sequence[CompositeState]) -> None:
        """See `EncodesInputs.encode`."""
        parts = [source_of(cache) for cache in caches]
        inputs = {part.inputs.digest: part.inputs for part in parts if part.inputs.digest not in self._memories}
        made = self._read([self._tensor(one) for one in inputs.values()])
        self.sources_read += len(made)
        self._memories.update(zip(inputs, made, strict=True))
        for part in parts:
            part.memory = self._memories[part.inputs.digest]

    def _read(self, sources: list[torch.Tensor]) -> list[CrossMemory]:
        """What the decoder attends to; in strict mode each source is read alone, so that it keeps its bits."""
        if self.reads_alone:
            return [memory for source in sources for memory in self.encoder.read([source], self.native.arena)]
        return self.encoder.read(sources, self.native.arena) if sources else []

    @torch.inference_mode()
    def attention_to_source(
        self, cache: CompositeState, tokens: Sequence[int], heads: Sequence[tuple[int, int]]
    ) -> torch.Tensor:
        """See `AttendsToSource.attention_to_source`."""
        check_extend(self.info, [cache], [len(tokens)])
        segment, memory, shape = chunk(cache, len(tokens)), source_of(cache).read(), attention_shape(self.spec)
        queries = self._passes.source_queries(segment, tokens, {layer for layer, _ in heads})
        segment.cache.length += segment.slots
        if segment.recurrent is not None:
            segment.recurrent.advance(segment.slots)
        found = []
        for layer, head in heads:
            kv_head, group = divmod(head, shape.groups)
            keys = memory.read(layer)[:, kv_head].float()
            scores = queries[layer][:, group * shape.kv_heads + kv_head].float() @ keys.T * shape.scale
            found.append(scores.softmax(-1))
        return torch.stack(found)

    def memory_of(self, inputs: Inputs) -> CrossMemory:
        """What the decoder attends to, of a source that some sequence holds; without inputs, of the shortest one.

        Raises:
            ConfigError: the encoder has not read it, or nobody holds it any more.
        """
        if not inputs:
            return self._shortest
        memory = self._memories.get(inputs.digest)
        if memory is None:
            raise ConfigError(f"{self.info.name} does not hold this source; let it read the source first")
        return memory

    @property
    def sources_held(self) -> int:
        """How many sources are in the cache."""
        return len(self._memories)

    def rows_to_come(self, inputs: Inputs) -> int:
        """See `models.state.cache_memory.Sources`."""
        return 0 if not inputs or inputs.digest in self._memories else self._rows(inputs)

    def _tensor(self, inputs: Inputs) -> torch.Tensor:
        device = self.info.device
        if self.source.reads == "encoder_tokens":
            return torch.tensor(inputs.encoder_tokens, dtype=torch.int64, device=device)
        return torch.from_numpy(np.array(inputs.features[self.source.reads])).to(device)

    def _rows(self, inputs: Inputs) -> int:
        """Rows of the encoder's layers that a source becomes."""
        source, most = self.source, self.source.model.max_context
        if source.reads == "encoder_tokens":
            steps = len(inputs.encoder_tokens)
            self._check_tokens(inputs)
        else:
            steps = self._checked_features(inputs).shape[-1]
        rows = source.rows(steps)
        if not 0 < rows <= most:
            unit = "tokens" if source.reads == "encoder_tokens" else "steps"
            raise PromptError(
                f"the source has {steps} {unit}, which become {max(rows, 0)} rows of the encoder of {self.info.name}, "
                f"and it takes 1..{most}; {'give more' if rows < 1 else 'shorten or split it'}"
            )
        return rows

    def _check_tokens(self, inputs: Inputs) -> None:
        if not inputs.encoder_tokens:
            raise PromptError(f"{self.info.name} reads a source before it writes, got none; give an encoder_prompt")
        if (highest := max(inputs.encoder_tokens)) >= self.source.model.vocab_size:
            size = self.source.model.vocab_size
            raise PromptError(f"token ids of an encoder_prompt must lie in 0..{size - 1}, got {highest}")

    def _checked_features(self, inputs: Inputs) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
        name, channels = self.source.reads, self.source.convolutions[0].inputs
        wanted = f"({channels}, steps)" if channels > 1 else "(steps,)"
        if set(inputs.features) != {name}:
            raise PromptError(
                f"{self.info.name} reads the features {name!r} {wanted} before it writes, got "
                f"{shortened(sorted(inputs.features)) if inputs.features else 'none'}"
            )
        array = inputs.features[name]
        shape = array.shape[:-1]
        if array.dtype.kind != "f" or shape != (() if channels == 1 else (channels,)) or not np.isfinite(array).all():
            raise PromptError(
                f"{name} must be finite floating-point numbers {wanted}, got {array.dtype} of shape {array.shape}"
            )
        return array


def _compiled_parts(encoder: EncoderSpec, dtype: torch.dtype, quantization: Form | None) -> CompiledParts:
    """See `compiled_parts`; the compiler is loaded where they run only."""
    from paceline.models.passes.compiled_encoder import compiled_parts

    return compiled_parts(encoder, dtype, quantization)


def source_of(cache: CompositeState) -> SourcePart:
    return next(part for part in cache.others if isinstance(part, SourcePart))
