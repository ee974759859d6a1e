"""The sampling rules written slowly and obviously: one row at a time, float64, plain Python. The oracle of the tests
beside it.
"""

import math
from collections.abc import Sequence

import numpy as np
from hypothesis import strategies as st
from processors import by_all_tokens, unlike_the_last

from paceline.config import SamplingParams


def slow_edits(
    logits: Sequence[float],
    params: SamplingParams,
    prompt: Sequence[int],
    output: Sequence[int],
    stop_ids: Sequence[int] = (),
    bad_words: Sequence[Sequence[int]] = (),
) -> np.ndarray:
    """Everything before temperature, for the token after prompt + output."""
    row = slow_processors([float(x) for x in logits], params, prompt, output)
    if params.allowed_token_ids is not None:
        row = [x if token in params.allowed_token_ids else -math.inf for token, x in enumerate(row)]
    for word in bad_words:
        before = list(word[:-1])
        if len(before) <= len(output) and list(output[len(output) - len(before) :]) == before:
            row[word[-1]] = -math.inf
    if len(output) < params.min_tokens:
        for token in stop_ids:
            row[token] = -math.inf
    for token, bias in (params.logit_bias or {}).items():
        row[token] += bias
    for token in range(len(row)):
        if token in prompt or token in output:
            row[token] = (
                row[token] / params.repetition_penalty if row[token] > 0 else row[token] * params.repetition_penalty
            )
        row[token] -= params.frequency_penalty * list(output).count(token)
        row[token] -= params.presence_penalty * (token in output)
    return np.array(row)


def slow_processors(
    row: list[float], params: SamplingParams, prompt: Sequence[int], output: Sequence[int]
) -> list[float]:
    """What the two processors of `params_strategy` do."""
    if params.logits_processors:
        if output:
            row[output[-1]] -= 3.0
            row[(output[-1] + 1) % len(row)] += 2.0 + len(output) % 2
        row[(sum(prompt) + sum(output)) % len(row)] += 2.5
    return row


def slow_kept(scaled: np.ndarray, *, top_k: int, top_p: float, min_p: float) -> set[int]:
    """The tokens that survive min_p, top_k and top_p, ties staying together."""
    kept = {t for t in range(len(scaled)) if scaled[t] > -math.inf}
    high = max(scaled[t] for t in kept)
    weight = {t: math.exp(scaled[t] - high) for t in kept}
    kept = {t for t in kept if weight[t] >= min_p}
    if 0 < top_k < len(kept):
        floor = sorted((scaled[t] for t in kept), reverse=True)[top_k - 1]
        kept = {t for t in kept if scaled[t] >= floor}
    total = sum(weight[t] for t in kept)
    if top_p < 1.0:
        kept = {t for t in kept if sum(w for u, w in weight.items() if u in kept and w > weight[t]) < top_p * total}
    return kept


VOCAB = 23
TOKENS = st.integers(0, VOCAB - 1)
TEXTS = st.lists(TOKENS, max_size=8)
STOPS = st.lists(TOKENS, max_size=2, unique=True)
WORDS = st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=3).map(tuple), max_size=4)


@st.composite
def params_strategy(draw: st.DrawFn, greedy: bool | None = None) -> SamplingParams:
    sampled = draw(st.booleans()) if greedy is None else not greedy
    return SamplingParams(
        temperature=draw(st.sampled_from([0.3, 0.7, 1.0, 1.9])) if sampled else 0.0,
        top_k=draw(st.sampled_from([0, -1, 1, 3, 10, VOCAB, 1000])),
        top_p=draw(st.sampled_from([1.0, 0.95, 0.5, 0.05])),
        min_p=draw(st.sampled_from([0.0, 0.02, 0.4, 1.0])),
        presence_penalty=draw(st.sampled_from([0.0, 0.5, -1.3])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.7, -0.9])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.3, 0.6])),
        logit_bias=draw(st.dictionaries(TOKENS, st.floats(-5, 5), max_size=3)),
        allowed_token_ids=draw(st.none() | st.lists(TOKENS, min_size=1)),
        logits_processors=draw(st.sampled_from([(), (unlike_the_last, by_all_tokens)])),
        min_tokens=draw(st.sampled_from([0, 2, 6])),
        max_tokens=None,
    )


@st.composite
def parents_strategy(draw: st.DrawFn) -> list[tuple[int, int]]:
    """(parent, token) of each node, unique, tokens few enough that paths repeat them."""
    nodes: list[tuple[int, int]] = []
    for _ in range(draw(st.integers(0, 10))):
        node = (draw(st.integers(-1, len(nodes) - 1)), draw(st.integers(0, 5)))
        if node not in nodes:
            nodes.append(node)
    return nodes


def random_logits(seed: int, rows: int, *, ties: bool, vocab: int = VOCAB) -> np.ndarray:
    """(rows, vocab) float32; with `ties` on a coarse grid."""
    found = np.random.default_rng(seed).normal(0.0, 3.0, (rows, vocab))
    return (np.round(found) if ties else found).astype(np.float32)
