"""Settings within a budget of memory: which fit, and what each may take for its drafts.

A budget counts the weights of target and drafts, the caches of the texts, and what speculation takes. A setting whose
weights and caches leave no room for one drafted token does not fit; each of the others gets what is left for its trees
and its draft models' caches (`EngineConfig.speculative_memory_bytes`), and caches take the blocks that they need and no
more. Among those that fit the fastest is wanted: measured, as all settings are, so that a smaller tree, or a draft
model that is smaller, may win.

Source: SpecMemo, Speculative decoding is in your pocket (arXiv:2506.01986).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any, Final

from paceline.assembly import MemoryMeter, MemoryUse, memory_use
from paceline.engine import watching
from paceline.errors import ConfigError, PacelineError
from paceline.llm import LLM
from paceline.tune.search import RejectedError

TREE: Final = 32
"""Nodes of a tree by whose keys and values caches may grow beyond the texts."""


@dataclass(slots=True)
class FittedSetting:
    """One setting within a budget.

    Attributes:
        limit: bytes for speculation. meter: what its runs have held.
        fixed: bytes of weights.
    """

    llm: LLM
    limit: int
    fixed: int
    meter: MemoryMeter

    @property
    def held(self) -> int:
        """Bytes that were held at the peak, weights included."""
        return self.fixed + self.meter.peak


@dataclass(slots=True)
class MemoryBudget:
    """What all settings must keep within.

    Args:
        size: bytes. lengths: of the texts that are decoded together, when they are complete.
    Attributes:
        settings: words -> the settings that were fitted.
    """

    size: int
    lengths: Sequence[int]
    settings: dict[str, FittedSetting] = field(default_factory=dict)

    def check_plain(self, llm: LLM) -> MemoryUse:
        """What plain decoding takes.

        Raises:
            ConfigError: more than the budget, or it is not counted.
        """
        use = self._use(llm, 0)
        if use.total > self.size:
            raise ConfigError(
                f"--memory must be at least {use.total} bytes, which plain decoding takes ({use.weights} of weights, "
                f"{use.caches} of caches), got {self.size}; use --quantization, fewer prompts at once or shorter ones"
            )
        return use

    def fit(self, llm: LLM, config: Any, words: str) -> LLM:
        """The engine of a setting within the budget.

        Args:
            config: its speculative_config; None is plain decoding.
        Raises:
            RejectedError: not even one drafted token fits.
        """
        free = llm.with_speculative_config(config)
        use = self._use(free, 1)
        slots = _tree_slots(free, len(self.lengths))
        limit = self.size - use.weights - use.drafts - use.caches - slots
        if config is not None and limit < use.speculation:
            raise RejectedError(f"needs {use.total + slots} bytes of memory for one drafted token")
        fitted = copy(llm)
        fitted.config = replace(
            llm.config, speculative_memory_bytes=max(1, limit), kv_cache_memory_bytes=use.caches + slots
        )
        try:
            made = fitted.with_speculative_config(config)
        except PacelineError as error:
            raise RejectedError(f"does not fit: {error}") from error
        meter = MemoryMeter(made.runner, made.engine.parts.drafter_set.drafters)
        self.settings[words] = FittedSetting(made, limit, use.weights + use.drafts, meter)
        return made

    def to_dict(self, plain: MemoryUse) -> dict[str, Any]:
        """JSON-ready; `plain`: what plain decoding takes."""
        settings = {
            words: {"speculative_memory_bytes": one.limit, "held": one.held, "nodes": one.meter.nodes}
            for words, one in self.settings.items()
        }
        return {"budget": self.size, "plain": plain.to_dict(), "settings": settings}

    @contextmanager
    def measured(self, words: str) -> Iterator[None]:
        """What runs in the block is metered."""
        one = self.settings.get(words)
        if one is None:
            yield
            return
        with watching(one.llm.engine, one.meter):
            yield

    def _use(self, llm: LLM, nodes: int) -> MemoryUse:
        return memory_use(llm.runner, llm.engine.parts.drafter_set.drafters, self.lengths, nodes)


def lengths_of(llm: LLM, groups: Sequence[Sequence[Any]], max_tokens: int) -> list[int]:
    """Tokens of the texts of the longest group of prompts, when they are complete, with what an encoder reads."""

    def count(given: Any) -> int:
        return len(llm.tokenizer.encode(given) if isinstance(given, str) else given or ())

    def tokens(prompt: Any) -> int:
        if not isinstance(prompt, dict):
            return count(prompt)
        return count(prompt.get("prompt_token_ids", prompt.get("prompt"))) + count(prompt.get("encoder_prompt"))

    return max(([tokens(prompt) + max_tokens for prompt in group] for group in groups), key=sum)


def _tree_slots(llm: LLM, sequences: int) -> int:
    """Bytes of the keys and values of trees, and of the block that each sequence has begun."""
    empty = memory_use(llm.runner, (), [1] * sequences, 0).caches
    return empty * (1 + -(-TREE // 16))
