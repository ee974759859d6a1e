"""What a model writes alone, to which a search with a second model comes at its ends."""

from __future__ import annotations

from typing import Any

from paceline import LLM, SamplingParams


def params(**changes: Any) -> SamplingParams:
    """Forty tokens, greedy."""
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 40, "seed": 7, "ignore_eos": True, **changes})


def tokens(llm: LLM, prompt: str, how: SamplingParams) -> list[int]:
    """Of one text."""
    (result,) = llm.generate(prompt, how)
    return list(result.outputs[0].token_ids)
