"""Transfer Q*: it collapses to plain decoding where its card says so, and follows its reward as found by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from paceline import LLM, SamplingParams
from paceline.engine import RequestOutput
from paceline.errors import PacelineError

PROMPT = "Once upon a time"
HERE = "tests.search.test_transfer_q"


def params(**changes: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.9, "max_tokens": 12, "seed": 7, "ignore_eos": True, **changes})


def searched(llm: LLM, how: SamplingParams, prompt: str = PROMPT, **options: Any) -> RequestOutput:
    (result,) = llm.generate(prompt, how, search={"method": "transfer_q", **options})
    result.raise_for_error()
    return result


def letters(texts: Sequence[str]) -> list[float]:
    return [float(text.count("e")) for text in texts]


def lengths(texts: Sequence[str]) -> list[float]:
    return [len(text) / 10 for text in texts]


def constant(texts: Sequence[str]) -> list[float]:
    return [3.0] * len(texts)


def test_no_weight_is_plain_decoding_and_one_token_tried_is_greedy(llm: LLM) -> None:
    for how in (params(), params(temperature=0.0)):
        (plain,) = llm.generate(PROMPT, how)
        assert searched(llm, how, reward=letters, weight=0.0).outputs[0].token_ids == plain.outputs[0].token_ids
    (greedy,) = llm.generate(PROMPT, params(temperature=0.0))
    found = searched(llm, params(), reward=letters, weight=9.0, top_k=1).outputs[0]
    assert found.token_ids == greedy.outputs[0].token_ids
    assert found.score == letters([found.text])[0]
    rewarded = searched(llm, params(temperature=0.0), reward=letters, weight=9.0).outputs[0]
    assert rewarded.token_ids != greedy.outputs[0].token_ids
    assert letters([rewarded.text]) > letters([greedy.outputs[0].text])


def test_a_constant_reward_is_the_model_on_the_tokens_tried(llm: LLM) -> None:
    for seed in range(4):
        how, cut = params(seed=seed), params(seed=seed, top_k=4)
        (plain,) = llm.generate(PROMPT, cut)
        found = searched(llm, how, reward=constant, top_k=4, weight=5.0, rollout_tokens=1)
        assert found.outputs[0].token_ids == plain.outputs[0].token_ids
    (whole,) = llm.generate(PROMPT, params(seed=3))
    assert whole.outputs[0].token_ids != plain.outputs[0].token_ids


def logits_of(llm: LLM, tokens: list[int]) -> torch.Tensor:
    cache = llm.runner.open()
    logits = llm.runner.extend([cache], [tokens]).logits[0].float()
    llm.runner.release(cache)
    return logits


@pytest.mark.parametrize("rollout", [0, 2])
@pytest.mark.parametrize("indirect", [False, True])
def test_tokens_are_those_found_by_hand(llm: LLM, rollout: int, indirect: bool) -> None:
    """With a rollout of no tokens this is guidance by the reward of the next token."""
    prompt, chosen, weight = llm.tokenizer.encode(PROMPT), list[int](), 2.0
    for _ in range(5):
        top = logits_of(llm, [*prompt, *chosen]).log_softmax(-1).topk(6)
        totals = []
        for value, token in zip(top.values.tolist(), top.indices.tolist(), strict=True):
            text = [*chosen, token]
            for _ in range(min(rollout, 5 - len(text))):  # it ends where the output does
                text.append(int(logits_of(llm, [*prompt, *text]).argmax()))
            written = llm.tokenizer.decode(text)
            (reward,), (other,) = letters([written]), lengths([written])
            totals.append(value + weight * (math.exp((reward - other) / 3) * reward if indirect else reward))
        chosen.append(int(top.indices[max(range(6), key=totals.__getitem__)]))
    options: dict[str, Any] = {"reward": f"{HERE}:letters", "weight": weight, "top_k": 6, "rollout_tokens": rollout}
    if indirect:
        options |= {"baseline_reward": lengths, "beta": 3.0}
    found = searched(llm, params(temperature=0.0, max_tokens=5), **options)
    assert found.outputs[0].token_ids == chosen
    (plain,) = llm.generate(PROMPT, params(temperature=0.0, max_tokens=5))
    assert found.outputs[0].token_ids != plain.outputs[0].token_ids
    assert found.search is not None
    assert found.search.num_tokens == 5 + sum(6 * min(rollout, 4 - i) for i in range(5))


def test_another_model_continues_and_gives_its_memory_back(llm: LLM) -> None:
    how, options = params(temperature=0.0, max_tokens=8), {"reward": letters, "weight": 0.7}
    own = searched(llm, how, **options)
    same = searched(llm, how, rollout_model="bundled/target", **options)
    assert same.outputs[0].token_ids == own.outputs[0].token_ids
    seen: list[str] = []

    def reward(texts: Sequence[str]) -> list[float]:
        seen.extend(texts)
        return letters(texts)

    searched(llm, how, **{**options, "reward": reward})
    first = list(seen)
    seen.clear()
    searched(llm, how, rollout_model="bundled/draft", **{**options, "reward": reward})
    assert seen[:10] != first[:10]
    other: Any = llm.models.open("bundled/draft")
    assert other.memory.used == 0
    own_memory: Any = llm.runner.memory  # type: ignore[attr-defined]
    llm.reset_prefix_cache()
    assert own_memory.used == 0


def test_sampling_follows_values_over_the_temperature(llm: LLM) -> None:
    """The first token's distribution, over many seeds, beside that of the formula."""
    prompt, temperature, weight = llm.tokenizer.encode(PROMPT), 0.5, 4.0
    top = (logits_of(llm, prompt) / temperature).log_softmax(-1).topk(4)
    rewards = torch.tensor(lengths([llm.tokenizer.decode([token]) for token in top.indices.tolist()]))
    expected = (top.values + weight * rewards / temperature).softmax(0)
    search = {"method": "transfer_q", "reward": lengths, "weight": weight, "top_k": 4, "rollout_tokens": 0}
    many = [params(seed=seed, max_tokens=1, temperature=temperature) for seed in range(600)]
    drawn = [one.outputs[0].token_ids[0] for one in llm.generate([PROMPT] * 600, many, search=search)]
    shares = torch.tensor([drawn.count(token) / 600 for token in top.indices.tolist()])
    assert (shares - expected).abs().sum() < 0.12 < (shares - top.values.softmax(0)).abs().sum()
    assert (shares - (top.values + weight * rewards).softmax(0)).abs().sum() > 0.12
    assert shares.sum() == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "reward must be a function"),
        ({"reward": letters, "top_k": 0}, "top_k must be an integer"),
        ({"reward": letters, "rollout_model": 3}, "rollout_model must be a folder"),
        ({"reward": letters, "rollout_model": "bundled/nothing"}, "nothing"),
        ({"reward": letters, "beta": 0.0}, "beta must be above 0"),
    ],
)
def test_bad_options_get_one_line(llm: LLM, options: dict[str, Any], message: str) -> None:
    with pytest.raises(PacelineError, match=message):
        searched(llm, params(), **options)
