"""Entropy adaptive decoding: each model alone at the ends of the threshold, and two models stepped by hand between."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from math import log2
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from paceline import LLM, SamplingParams
from paceline.errors import ConfigError, PacelineError
from paceline.search.methods import ead
from paceline.search.second_model import SecondModel
from tests.search.letters import searched
from tests.search.two_models import params, tokens

PROMPTS = ["Once upon a time", "def f(x):\n    return"]
BIAS = {40: 3.0, 41: 3.0}


def found(llm: LLM, prompt: str, how: SamplingParams, **options: Any) -> Any:
    return searched(llm, how, prompt, method="ead", model="bundled/draft", **options)


@pytest.mark.parametrize(
    "how",
    [params(), params(temperature=0.9), params(logit_bias=BIAS, repetition_penalty=1.3)],
    ids=["greedy", "drawn", "rules"],
)
@pytest.mark.parametrize("prompt", PROMPTS)
def test_each_model_writes_alone_at_its_end_of_the_threshold(
    llm: LLM, small: LLM, prompt: str, how: SamplingParams
) -> None:
    large, little = tokens(llm, prompt, how), tokens(small, prompt, how)
    assert large != little
    for threshold, wanted, written in ((0.0, large, 0), (99.0, little, 40)):
        one = found(llm, prompt, how, entropy_threshold=threshold)
        assert (one.outputs[0].token_ids, one.metrics.num_departures) == (wanted, written)
    mixed = found(llm, prompt, how, entropy_threshold=4.0, min_dwell=2)
    assert mixed.outputs[0].token_ids not in (large, little)
    assert 0 < mixed.metrics.num_departures < 40


def test_entropy_is_in_bits() -> None:
    assert ead.entropy_of(torch.zeros(1000)) == pytest.approx(log2(1000), abs=1e-4)
    assert ead.entropy_of(torch.tensor([0.5, 0.25, 0.25, 0.0]).log()) == pytest.approx(1.5, abs=1e-5)


def logits_of(llm: LLM, text: Sequence[int]) -> torch.Tensor:
    """(v,) of a pass of its own over the whole text."""
    cache = llm.runner.open()
    try:
        return llm.runner.extend([cache], [list(text)]).logits[0].float()
    finally:
        llm.runner.release(cache)


def by_hand(
    llm: LLM, small: LLM, prompt: str, tau: float, window: int, dwell: int, count: int = 40
) -> tuple[list[int], str]:
    """Tokens of two models without caches, and who wrote each: the likeliest under a bias that no entropy sees."""
    text, start = llm.tokenizer.encode(prompt), len(llm.tokenizer.encode(prompt))
    entropies: list[float] = []
    large, since, by = tau <= 0.0, 0, ""
    while len(by) < count:
        logits = logits_of(llm if large else small, text)
        p = logits.double().softmax(-1)
        entropies.append(float(-(p * p.log2()).sum()))
        biased = logits.clone()
        for token, bias in BIAS.items():
            biased[token] += bias
        text.append(int(biased.argmax()))
        by, since = by + "SL"[large], since + 1
        last = entropies[-window:]
        if since >= dwell and (sum(last) / len(last) >= tau) != large:
            large, since = not large, 0
    return text[start:], by


CASES = [(4.0, 5, 1), (3.5, 5, 4), (3.5, 2, 3)]


@pytest.mark.parametrize(("tau", "window", "dwell"), CASES)
def test_it_is_two_models_stepped_by_hand(llm: LLM, small: LLM, tau: float, window: int, dwell: int) -> None:
    """So the keys and values of a gap that was read in one pass are those of single steps."""
    how, switches = params(logit_bias=BIAS), 0
    options = {"entropy_threshold": tau, "entropy_window": window, "min_dwell": dwell}
    for prompt in PROMPTS:
        wanted, by = by_hand(llm, small, prompt, tau, window, dwell)
        runs = [len(list(group)) for _, group in groupby(by)]
        switches += len(runs) - 1
        assert min(runs[:-1]) >= dwell
        one = found(llm, prompt, how, **options)
        assert (one.outputs[0].token_ids, one.metrics.num_departures) == (wanted, by.count("S"))
    assert switches > 4


def differs(llm: LLM, small: LLM) -> bool:
    """Whether some case is not what is written by hand."""
    how = params(logit_bias=BIAS)
    for tau, window, dwell in CASES:
        wanted, _ = by_hand(llm, small, PROMPTS[0], tau, window, dwell)
        options = {"entropy_threshold": tau, "entropy_window": window, "min_dwell": dwell}
        if found(llm, PROMPTS[0], how, **options).outputs[0].token_ids != wanted:
            return True
    return False


def test_the_comparison_catches_a_gap_that_is_not_read_and_entropy_in_nats(
    llm: LLM, small: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not differs(llm, small)
    read = SecondModel.read

    def read_without_gap(self: SecondModel, branch: Any, *more: Any) -> Any:
        """Of a gap the last token alone, behind padding."""
        text, known = branch.text(), len(self._text)
        padded = [*text[:known], *[1] * (len(text) - known - 1), text[-1]] if known else text
        found = read(self, SimpleNamespace(text=lambda: padded), *more)
        self._text = text
        return found

    monkeypatch.setattr(SecondModel, "read", read_without_gap)
    assert differs(llm, small)
    monkeypatch.undo()
    in_bits = ead.entropy_of
    monkeypatch.setattr(ead, "entropy_of", lambda logits_v: in_bits(logits_v) * 0.6931)
    assert differs(llm, small)


def test_both_models_read_each_token_once_and_give_their_memory_back(llm: LLM) -> None:
    one = found(llm, PROMPTS[0], params(), entropy_threshold=4.0, min_dwell=3)
    size, written = len(llm.tokenizer.encode(PROMPTS[0])), one.metrics.num_departures
    own_rows = one.search.num_tokens - (40 - written)
    assert written <= own_rows <= size + 40
    other: Any = llm.models.open("bundled/draft")
    assert other.memory.used == 0
    llm.reset_prefix_cache()
    own: Any = llm.runner
    assert own.memory.used == 0


def test_searches_side_by_side_are_those_alone(llm: LLM) -> None:
    how, options = params(), {"method": "ead", "model": "bundled/draft", "entropy_threshold": 4.0}
    together = llm.generate(PROMPTS, how, search=options)
    alone = [found(llm, prompt, how, entropy_threshold=4.0) for prompt in PROMPTS]
    assert [one.outputs[0].token_ids for one in together] == [one.outputs[0].token_ids for one in alone]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "model must be a folder or hub id"),
        ({"model": "bundled/draft", "entropy_threshold": -1.0}, "entropy_threshold must be 0 or more"),
        ({"model": "bundled/draft", "entropy_window": 0}, "entropy_window must be an integer"),
        ({"model": "bundled/draft", "min_dwell": 0}, "min_dwell must be an integer"),
    ],
)
def test_bad_options_get_one_line(llm: LLM, options: dict[str, Any], message: str) -> None:
    with pytest.raises(PacelineError, match=message):
        llm.generate("x", params(), search={"method": "ead", **options})


def test_strict_mode_rejects_it() -> None:
    strict = LLM(dtype="float32", speculative_config=None, exactness="strict")
    with pytest.raises(ConfigError, match="search must be a method in which the model alone writes"):
        strict.generate("x", params(), search={"method": "ead", "model": "bundled/draft"})
    strict.generate("x", params(max_tokens=1), search="adadec")
