"""What a server does before it takes requests, so that the first of them need not wait for it."""

from __future__ import annotations

import logging
from time import perf_counter
from typing import Final

import numpy as np

from paceline.config import SamplingParams
from paceline.engine import Probe
from paceline.llm import LLM
from paceline.speech import SAMPLE_RATE, Thresholds
from paceline.transcriber import Transcriber, TranscriptionParams

logger = logging.getLogger("paceline.serving")

TEXT: Final = "1 2 3 " * 16
"""The prompt repeats itself, so that there is something to draft."""

TOKENS: Final = 24
"""So many new tokens are enough for drafters and controllers to do all that they do."""

APART: Final = "paceline serve: warm-up"
"""The warm-up has a tenant of its own."""

ROWS: Final = (1, 2, 4, 8, 16, 32)
"""Drafts need passes of so many rows."""


def warm_up(llm: LLM) -> None:
    """Read prompts and decode, alone and together, with passes of all sizes that drafts need: what is compiled,
    captured and measured at first use is so now.

    That is done by an engine of its own around the same weights, for a tenant of its own: no table, no cache and no
    controller of the server's learns from it.

    Raises:
        PacelineError: the model cannot decode.
    """
    start = perf_counter()
    most = llm.backend.info.max_context
    count = max(1, min(TOKENS, most // 2))
    ids = llm.tokenizer.encode(TEXT)[: max(1, most - count)]
    greedy = SamplingParams(temperature=0.0, max_tokens=count)
    if llm.source is not None and llm.source.reads != "encoder_tokens":
        _transcribe(llm)
    elif not llm.backend.can_draft:
        _decode(llm, [ids], greedy)
    else:
        apart = llm.with_speculative_config(llm.speculative and llm.speculative.without_learning())
        _decode(apart, [ids], greedy)
        sampled = SamplingParams(temperature=1.0, top_p=0.9, max_tokens=min(4, count), seed=0)
        _decode(apart, [ids, ids[: len(ids) // 2 + 1]], sampled)
        if llm.speculative is not None:
            _score(llm)
    logger.info("warmed up in %.1f s", perf_counter() - start)


def _transcribe(llm: LLM) -> None:
    """The same for a model that reads speech: a second of silence, which is decoded like speech."""
    if llm.source is None or llm.source.reads != "input_features":
        return
    thresholds = Thresholds(compression_ratio=None, avg_logprob=None, no_speech_prob=None)
    transcriber = Transcriber(llm.with_speculative_config(llm.speculative))
    silence = np.zeros(SAMPLE_RATE, np.float32)
    transcriber.transcribe([silence], TranscriptionParams(temperature=(0.0,), thresholds=thresholds))


def _decode(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> None:
    asked = [{"prompt_token_ids": ids, "cache_salt": APART} for ids in prompts]
    for output in llm.generate(asked, params, use_tqdm=False):
        output.raise_for_error()


def _score(llm: LLM) -> None:
    try:
        for _ in Probe(llm.runner)(ROWS, 1):
            pass
    except RuntimeError as error:  # no room for so many rows
        logger.info("the largest passes were not warmed up: %s", error)
