"""What a drafter brings where it was not trained: tokens a pass and tokens per second, in turn with plain decoding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from paceline.config import SamplingParams
from paceline.training.splits import NO_INTERVAL
from paceline.utils import ENOUGH, Estimate, in_turn, speedup, tokens_per_second

if TYPE_CHECKING:
    from paceline.engine import Prompt, ReadPrompt
    from paceline.llm import LLM
    from paceline.utils import Turn

CHAIN: Final = 3
"""Drafts of a step where their number is fixed."""


def measured(
    llm: LLM,
    drafter: Mapping[str, Any],
    prompts: Sequence[Prompt | ReadPrompt],
    *,
    depths: int,
    max_tokens: int,
    ignore_eos: bool = True,
) -> dict[str, Any]:
    """Greedy answers to prompts, one at a time: plainly, with chains of drafts, and with as many as `auto`
    finds worth it.

    Args:
        drafter: its speculative_config. depths: most drafts of a chain.
        max_tokens: of an answer. ignore_eos: the model's ends are no end of it.
    Returns:
        "plain", "chain" and "auto", each with tokens_per_second and, but for plain, over_plain (as `figure` gives
        them), tokens_per_pass, and equal: how many answers are those of plain decoding. "prompts" and "max_tokens" say
        what all of them rest on.
    """
    length = min(CHAIN, depths)
    fixed = {**drafter, "controller": "fixed", "num_speculative_tokens": length}
    llms = {
        "plain": llm.with_speculative_config(None),
        "chain": llm.with_speculative_config(fixed),
        "auto": llm.with_speculative_config({**drafter, "controller": "auto"}),
    }
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=ignore_eos)

    def run(name: str, prompt: Prompt | ReadPrompt, repeat: int = 0) -> Any:
        request, decoder = llms[name].request(prompt, params)
        decoder.run([request])
        output = request.result()
        output.raise_for_error()
        return output

    for name in llms:
        run(name, prompts[0])
    turns = list(in_turn({name: partial(run, name) for name in llms}, prompts, 1))
    speeds = {name: _against_plain(turns, name) for name in llms}
    return {"prompts": len(prompts), "max_tokens": max_tokens, "drafts": length, **speeds}


def _against_plain(turns: Sequence[Turn[Any]], name: str) -> dict[str, Any]:
    """How fast a way of decoding was in turns with plain decoding, and how many of its answers are the same."""
    outputs, plain = ([turn.outputs[key] for turn in turns] for key in (name, "plain"))
    tokens, plain_tokens = (_column([len(ids) for ids in _token_ids(texts)]) for texts in (outputs, plain))
    seconds, plain_seconds = (_column([turn.seconds[key] for turn in turns]) for key in (name, "plain"))
    rate: dict[str, Any] = {"tokens_per_second": figure(tokens_per_second(tokens, seconds))}
    if name == "plain":
        return rate
    return rate | {
        "over_plain": figure(speedup(plain_tokens, plain_seconds, tokens, seconds)),
        "tokens_per_pass": float(np.mean([output.metrics.mean_acceptance_length for output in outputs])),
        "equal": sum(a == b for a, b in zip(_token_ids(outputs), _token_ids(plain), strict=True)),
    }


def _token_ids(outputs: Sequence[Any]) -> list[Sequence[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def figure(estimate: Estimate | None) -> dict[str, Any] | None:
    """Its value and number of prompts, with low and high ends of its interval, or why it has none."""
    if estimate is None:
        return None
    if estimate.n < ENOUGH:
        return {"value": estimate.value, "n": estimate.n, "no_interval": NO_INTERVAL}
    return estimate.to_dict()


def _column(values: Sequence[float]) -> np.ndarray[Any, np.dtype[np.float64]]:
    return np.array(values, dtype=np.float64)[:, None]
