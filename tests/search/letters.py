"""The bundled model held to three letters, so that every text can be looked at."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import torch

from paceline import LLM, SamplingParams
from paceline.engine import RequestOutput

PROMPT = "x = "
LETTERS = "abc"


def letter_params(llm: LLM, **changes: Any) -> SamplingParams:
    """Of a language of three letters."""
    ids = [llm.tokenizer.encode(letter)[-1] for letter in LETTERS]
    given = {"temperature": 0.0, "max_tokens": 4, "allowed_token_ids": ids, "ignore_eos": True, "seed": 3, **changes}
    return SamplingParams(**given)


def searched(llm: LLM, how: SamplingParams, prompt: str = PROMPT, **search: Any) -> RequestOutput:
    """What a search finds, which did not fail."""
    (result,) = llm.generate(prompt, how, search=search)
    result.raise_for_error()
    return result


def texts(result: RequestOutput) -> list[str]:
    return [one.text for one in result.outputs]


def logprobs_of(llm: LLM, text: str) -> torch.Tensor:
    """Of the three letters behind the prompt and a text."""
    ids = [llm.tokenizer.encode(letter)[-1] for letter in LETTERS]
    cache = llm.runner.open()
    given = [*llm.tokenizer.encode(PROMPT), *(ids[LETTERS.index(letter)] for letter in text)]
    logits = llm.runner.extend([cache], [given]).logits[0].float()
    llm.runner.release(cache)
    return logits[ids].log_softmax(-1)


def likelihoods(llm: LLM, longest: int = 3) -> dict[str, float]:
    """Log-probability of every text of so many letters at most."""
    found = {"": 0.0}
    for size in range(longest):
        for prefix in map("".join, product(LETTERS, repeat=size)):
            for letter, value in zip(LETTERS, logprobs_of(llm, prefix).tolist(), strict=True):
                found[prefix + letter] = found[prefix] + value
    return found


def without_pattern(known: Sequence[str]) -> dict[str, int]:
    """A number in 0..100 for every text, no two alike nearby."""
    return {text: (sum(map(ord, text)) * 7919) % 101 for text in known}


def nothing(found: Sequence[str]) -> list[float]:
    """A reward that finds nothing good."""
    return [0.0] * len(found)


def wanted(text: str) -> Callable[[Sequence[str]], list[float]]:
    """A reward of one text alone."""
    return lambda found: [float(one == text) for one in found]
