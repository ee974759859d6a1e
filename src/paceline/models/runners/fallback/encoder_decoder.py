"""Encoder-decoder models of transformers behind the Runner protocol: all that are not native, and the native ones'
oracle.

A source goes through the encoder once; the decoder is called with what came of it, and a cache of its own. `score`
takes chains only.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch

from paceline.errors import ConfigError, PromptError
from paceline.models.abilities import check_inputs
from paceline.models.inputs import NO_INPUTS, Inputs
from paceline.models.runners.fallback.runner import FallbackCache, TransformersRunner
from paceline.models.runners.fallback.transformers_cache import CausalModel, CroppedHistory, History, error_of


class SourceModel(CausalModel):
    """The decoder of a model, called with what its encoder has made of one source (`reading`)."""

    def __init__(self, model: Any, device: torch.device) -> None:
        super().__init__(model, device, layers_of=model.get_decoder())
        self.source: Any = None

    def reading(self, source: Any) -> SourceModel:
        """The same model for this output of the encoder."""
        other = copy.copy(self)
        other.source = source
        return other

    def new_cache(self) -> Any:
        """Of the text and of the source, which forks share."""
        from transformers import DynamicCache, EncoderDecoderCache

        return EncoderDecoderCache(DynamicCache(), DynamicCache())

    def crop(self, cache: Any, extra: int) -> None:
        """See `CausalModel.crop`."""
        super().crop(cache.self_attention_cache, extra)

    def copied(self, cache: Any) -> Any:
        """See `CausalModel.copied`."""
        other = copy.copy(cache)
        other.self_attention_cache = super().copied(cache.self_attention_cache)
        other.is_updated = dict(cache.is_updated)
        return other

    def _call(self, tokens: torch.Tensor, options: dict[str, Any]) -> Any:
        return self.model(decoder_input_ids=tokens, encoder_outputs=self.source, **options)


class SourceCache(FallbackCache):
    """One sequence; it has no history before its source was read."""

    def __init__(self, inputs: Inputs, history: History | None = None) -> None:
        self.history, self.inputs = history, inputs
        self.length, self.marked = 0, False
        self.memory: _Memory | None = None

    def opened(self) -> History:
        """See `FallbackCache.opened`.

        Raises:
            ConfigError: the source was not read.
        """
        if self.history is None and self.memory is None:
            raise ConfigError("this sequence's source was not read; call runner.encode() before its first tokens")
        return super().opened()


class _Memory:
    """What the encoder has made of a source."""

    def __init__(self, output: Any) -> None:
        self.output = output


class TransformersEncoderDecoder(TransformersRunner):
    """See `TransformersRunner` and `models.abilities.EncodesInputs`.

    Attributes:
        sources_read: how many sources the encoder has read so far.
    """

    def __init__(self, model: Any, *, name: str, max_context: int | None = None, tokens: int | None = None) -> None:
        self.main_input = str(model.main_input_name)
        self._memories, self.sources_read = WeakValueDictionary[str, _Memory](), 0
        super().__init__(model, name=name, max_context=max_context, tokens=tokens)
        reads = "encoder_tokens" if self.main_input == "input_ids" else self.main_input
        self.input_kinds = ("encoder_tokens",) if reads == "encoder_tokens" else ("features",)
        encoder = sum(weight.numel() * weight.element_size() for weight in model.get_encoder().parameters())
        info = replace(self.info, source=reads, num_layers=self._bound.num_layers or self.info.num_layers)
        self.info = replace(info, weight_bytes=max(1, info.weight_bytes - encoder))

    @classmethod
    def _loader(cls, config: Any) -> Any:
        from transformers import AutoModelForSeq2SeqLM, AutoModelForSpeechSeq2Seq

        speech = type(config) in AutoModelForSpeechSeq2Seq._model_mapping
        return AutoModelForSpeechSeq2Seq if speech else AutoModelForSeq2SeqLM

    def _caller(self, model: Any, device: torch.device) -> CausalModel:
        source = SourceModel(model, device)
        self._bound = source.reading(self._encoded(model, self._probe(model, device)))
        return self._bound

    def _probe(self, model: Any, device: torch.device) -> torch.Tensor:
        """(1, ...) a source that every model of its kind can read."""
        if self.main_input == "input_ids":
            return torch.tensor([[1, 2, 3, 4]], device=device)
        config = model.config
        bins = getattr(config, "num_mel_bins", None) or getattr(config, "input_feat_per_channel", None)
        if self.main_input == "input_values" or bins is None:
            return torch.zeros(1, 16_000, device=device, dtype=model.dtype)
        whole = model.config.model_type == "whisper"  # whose features come bins first, and of a whole window alone
        shape = (1, bins, 2 * config.max_source_positions) if whole else (1, 200, bins)
        return torch.zeros(shape, device=device, dtype=model.dtype)

    def _encoded(self, model: Any, source: torch.Tensor) -> Any:
        with torch.inference_mode():
            return model.get_encoder()(source)

    def _history_maker(self, caller: CausalModel, vocab_size: int, max_context: int) -> Callable[[], History]:
        tokens = [(7 * i + 1) % vocab_size for i in range(min(9, max_context))]
        expected = caller.run(tokens, keep=False).logits.float()
        limit = 3e-5 if caller.model.dtype == torch.float32 else 0.1
        fits = len(tokens) == 9 and error_of("cropped", lambda: CroppedHistory(caller), tokens, expected) <= limit
        self._history: type[History] = CroppedHistory if fits else History
        return lambda: self._history(self._bound)

    def open(self, prompt_length: int = 0, inputs: Inputs = NO_INPUTS) -> FallbackCache:
        """See `Runner.open`; without inputs the source is a short one, for measurements and self-tests."""
        if not inputs:
            return SourceCache(inputs, self.make_history())
        self.most_tokens(inputs)
        return SourceCache(inputs)

    def most_tokens(self, inputs: Inputs) -> int:
        """See `TakesInputs.most_tokens`.

        Raises:
            PromptError: no source, or another kind of it.
        """
        check_inputs(self, inputs)
        if not inputs:
            raise PromptError(f"{self.info.name} reads a source before it writes, got none; give an encoder_prompt")
        name, reads, length = self.info.name, self.info.source, len(inputs.encoder_tokens)
        if reads != "encoder_tokens" and set(inputs.features) != {reads}:
            raise PromptError(f"{name} reads the features {reads!r}, got {sorted(inputs.features)}")
        longest = getattr(self.model.config, "max_encoder_position_embeddings", None)
        if longest is not None and length > longest:
            raise PromptError(
                f"the source has {length} tokens, and the encoder of {name} takes {longest}; shorten or split it"
            )
        return self.info.max_context

    def rows_to_encode(self, cache: SourceCache) -> int:
        """See `EncodesInputs.rows_to_encode`."""
        if cache.memory is not None or not cache.inputs:
            return 0
        return len(cache.inputs.encoder_tokens) or math.prod(self._tensor(cache.inputs).shape[1:-1]) or 1

    def encode(self, caches: Sequence[SourceCache]) -> None:
        """See `EncodesInputs.encode`; sources are read one by one."""
        for cache in caches:
            if cache.memory is not None or not cache.inputs:
                continue
            memory = self._memories.get(cache.inputs.digest)
            if memory is None:
                memory = _Memory(self._encoded(self.model, self._tensor(cache.inputs)))
                self._memories[cache.inputs.digest] = memory
                self.sources_read += 1
            cache.memory, cache.history = memory, self._history(self._bound.reading(memory.output))

    def fork(self, cache: FallbackCache) -> FallbackCache:
        """See `Runner.fork`."""
        assert isinstance(cache, SourceCache)
        other = SourceCache(cache.inputs, cache.opened().fork())
        other.opened().rewind(cache.length)
        other.length, other.memory = cache.length, cache.memory
        return other

    def _tensor(self, inputs: Inputs) -> torch.Tensor:
        if self.info.source == "encoder_tokens":
            return torch.tensor([inputs.encoder_tokens], dtype=torch.int64, device=self.info.device)
        array = np.array(inputs.features[self.info.source])[None]
        return torch.from_numpy(array).to(self.info.device, self.info.dtype)
