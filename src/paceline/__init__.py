"""Paceline: faster decoding of language models with the same output.

The names below are the public API; everything else may change without notice. They are imported on first use, so that
`import paceline` is fast.
"""

from __future__ import annotations

from paceline.version import __version__ as __version__

TYPE_CHECKING = False  # as in typing, whose import would take longer than all of this
if TYPE_CHECKING:
    from typing import Any

    from paceline.async_llm import AsyncLLM
    from paceline.config import RequestOutputKind, SamplingParams, SpeculativeConfig, StructuredOutputsParams
    from paceline.engine import CompletionOutput, DrafterMetrics, RequestMetrics, RequestOutput, StreamChunk
    from paceline.errors import (
        CapabilityError,
        CheckpointError,
        ConfigError,
        DrafterError,
        NumericsError,
        OutOfMemoryError,
        PacelineError,
        PromptError,
        UnsupportedModelError,
    )
    from paceline.llm import LLM
    from paceline.sampling import Logprob

__all__ = [
    "LLM",
    "AsyncLLM",
    "CapabilityError",
    "CheckpointError",
    "CompletionOutput",
    "ConfigError",
    "DrafterError",
    "DrafterMetrics",
    "Logprob",
    "NumericsError",
    "OutOfMemoryError",
    "PacelineError",
    "PromptError",
    "RequestMetrics",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "SpeculativeConfig",
    "StreamChunk",
    "StructuredOutputsParams",
    "UnsupportedModelError",
]

_HOMES = {
    "AsyncLLM": "paceline.async_llm",
    "LLM": "paceline.llm",
    "RequestOutputKind": "paceline.config",
    "SamplingParams": "paceline.config",
    "SpeculativeConfig": "paceline.config",
    "StructuredOutputsParams": "paceline.config",
    "Logprob": "paceline.sampling.logprobs",
    "RequestMetrics": "paceline.engine.outputs",
    "DrafterMetrics": "paceline.engine.outputs",
    "CompletionOutput": "paceline.engine.outputs",
    "RequestOutput": "paceline.engine.outputs",
    "StreamChunk": "paceline.engine.outputs",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'paceline' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES.get(name, "paceline.errors")), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
