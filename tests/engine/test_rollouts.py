"""Samples decoded in segments are those decoded at once; every token knows the policy that produced it."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import pytest
import torch

from paceline import LLM, SamplingParams
from paceline.engine import Rollout, RolloutPool
from paceline.errors import ConfigError, PromptError

PROMPTS = ["def fib(n):", "Once upon a time", "One day, a cat", "import os", "The end"]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(dtype="float32", speculative_config=None)


def params(**changes: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.9, "max_tokens": 40, "seed": 7, **changes})


def ordered(found: list[Rollout]) -> list[Rollout]:
    return sorted(found, key=lambda one: (one.prompt_index, one.index))


def at_once(llm: LLM, how: SamplingParams) -> list[Any]:
    return [one for result in llm.generate(PROMPTS, how) for one in result.outputs]


RULES = {
    "greedy": {"temperature": 0.0},
    "sampled": {},
    "penalties": {"frequency_penalty": 1.5, "repetition_penalty": 1.2, "min_tokens": 20},
    "stop": {"stop": ["\n    "], "n": 2},
    "grammar": {"structured_outputs": {"regex": "(a|bc|[0-9]){20,30}"}},
}


@pytest.fixture(scope="module", params=RULES)
def ruled(llm: LLM, request: pytest.FixtureRequest) -> tuple[SamplingParams, list[Any]]:
    """How to sample, and the outputs of decoding at once, which another seed changes."""
    how = params(**{"max_tokens": 24, **RULES[request.param]})
    plain = at_once(llm, how)
    if request.param != "greedy":
        other = at_once(llm, replace(how, seed=8))
        assert [one.token_ids for one in other] != [one.token_ids for one in plain]
    return how, plain


@pytest.mark.parametrize("speculative", [None, "ngram", "draft_model"])
def test_segments_change_no_token(llm: LLM, ruled: tuple[SamplingParams, list[Any]], speculative: str | None) -> None:
    config = {"method": "draft_model", "model": "bundled/draft"} if speculative == "draft_model" else speculative
    chosen = llm.with_speculative_config(config)
    how, plain = ruled
    for segment in (3, 1000):
        pool = chosen.rollouts(PROMPTS, how, segment_tokens=segment, pool_size=4)
        found = ordered(list(pool))
        assert [one.token_ids for one in found] == [one.token_ids for one in plain]
        assert [one.text for one in found] == [one.text for one in plain]
        assert [(one.finish_reason, one.stop_reason) for one in found] == [
            (one.finish_reason, one.stop_reason) for one in plain
        ]
        assert all(max(one.segments) <= segment and sum(one.segments) == len(one.token_ids) for one in found)
        assert all(set(one.segments[:-1]) <= {segment} for one in found)
        assert pool.done
        assert not pool.unfinished


def test_log_probabilities_are_those_of_decoding_at_once(llm: LLM) -> None:
    plain = at_once(llm, params(logprobs=0))
    found = ordered(list(llm.rollouts(PROMPTS, params(), segment_tokens=5)))
    for one, other in zip(found, plain, strict=True):
        chosen = [entry[token].logprob for entry, token in zip(other.logprobs, other.token_ids, strict=True)]
        assert one.logprobs == pytest.approx(chosen, abs=1e-4)
        assert one.policy_versions == [0] * len(one.token_ids)


def test_what_has_ended_leaves_the_pool_which_is_filled_up(llm: LLM) -> None:
    taken: list[str] = []

    def prompts() -> Any:
        for one in PROMPTS * 2:
            taken.append(one)
            yield one

    pool = llm.rollouts(prompts(), params(max_tokens=60, seed=2), segment_tokens=6, pool_size=3)
    ended: list[Rollout] = []
    while not pool.done:
        ended += pool.step()
        assert len(pool.unfinished) <= 3
        assert len(taken) <= len(ended) + 3
        assert all(len(one.token_ids) % 6 == 0 for one in pool.unfinished)
    assert sorted(one.prompt_index for one in ended) == list(range(10))
    assert [one.prompt_index for one in ended] != list(range(10)), "short ones end before long ones that began earlier"
    memory: Any = llm.runner.memory  # type: ignore[attr-defined]
    llm.reset_prefix_cache()
    assert memory.used == 0


def test_other_requests_go_on_beside_a_parked_pool(llm: LLM) -> None:
    (alone,) = llm.generate("Some day", params())
    pool = llm.rollouts(PROMPTS, params(ignore_eos=True), segment_tokens=4)
    assert pool.step() == []
    (beside,) = llm.generate("Some day", params())
    assert beside.outputs[0].token_ids == alone.outputs[0].token_ids
    assert [len(one.token_ids) for one in pool.unfinished] == [4] * 5
    assert len(list(pool)) == 5


def test_new_weights_read_the_text_anew_and_tokens_name_their_policy() -> None:
    llm = LLM(dtype="float32", speculative_config=None)
    how = params(temperature=0.0, max_tokens=96, ignore_eos=True)
    prompt = "Once upon a time there was a little girl. " * 3
    weights: torch.Tensor = llm.runner.passes.embedding  # type: ignore[attr-defined]
    found = {}
    for told in (True, False):
        llm.reset_prefix_cache()
        pool = llm.rollouts([prompt], how, segment_tokens=48)
        pool.step()
        (half,) = [list(one.token_ids) for one in pool.unfinished]
        (of_old,) = [list(one.logprobs) for one in pool.unfinished]
        with torch.inference_mode():
            before = weights.clone()
            weights[3:].copy_(before[:-3])
        if told:
            pool.update_policy()
        (done,) = list(pool)
        found[told] = done.token_ids
        assert done.policy_versions == [0] * 48 + [int(told)] * 48
        if told:
            llm.reset_prefix_cache()
            text = {"prompt_token_ids": [*done.prompt_token_ids, *half]}
            (anew,) = llm.generate(text, params(temperature=0.0, max_tokens=48, ignore_eos=True, logprobs=0))
            new = anew.outputs[0]
            assert done.token_ids == [*half, *new.token_ids]
            of_new = [entry[token].logprob for entry, token in zip(new.logprobs, new.token_ids, strict=True)]
            assert done.logprobs[48:] == pytest.approx(of_new, abs=1e-4)
            assert done.logprobs[:48] == pytest.approx(of_old, abs=1e-4), "of the policy that produced them"
        with torch.inference_mode():
            weights.copy_(before)
    assert found[True] != found[False], "keys and values of old weights would have given other tokens"


def test_a_pool_that_is_closed_or_forgotten_gives_everything_back(llm: LLM) -> None:
    memory: Any = llm.runner.memory  # type: ignore[attr-defined]
    endless = params(ignore_eos=True)
    with llm.rollouts(PROMPTS, endless, segment_tokens=4) as pool:
        pool.step()
        assert len(llm.engine.scheduler.parked) == 5
    assert not llm.engine.scheduler.parked
    with pytest.raises(ConfigError, match="closed"):
        pool.step()
    forgotten: RolloutPool | None = llm.rollouts(PROMPTS, endless, segment_tokens=4)
    assert forgotten is not None
    forgotten.step()
    del forgotten
    gc.collect()
    assert not llm.engine.scheduler.parked
    llm.reset_prefix_cache()
    assert memory.used == 0


def test_bad_arguments_get_one_line(llm: LLM) -> None:
    with pytest.raises(ConfigError, match="segment_tokens must be an integer"):
        llm.rollouts(PROMPTS, params(), segment_tokens=0)
    with pytest.raises(ConfigError, match="pool_size must be an integer of 4 or more"):
        llm.rollouts(PROMPTS, params(n=4), segment_tokens=8, pool_size=3)
    for name, value in (("logprobs", 1), ("prompt_logprobs", 0)):
        with pytest.raises(ConfigError, match=f"^{name} must be"):
            llm.rollouts(PROMPTS, params(**{name: value}), segment_tokens=8)
    with pytest.raises(ConfigError, match="version must be an integer of 0 or more, got 'new'"):
        llm.rollouts(PROMPTS, params(), segment_tokens=8).update_policy("new")  # type: ignore[arg-type]
    with pytest.raises(PromptError, match="got None"):
        list(llm.rollouts([None, PROMPTS[0]], params(), segment_tokens=8))  # type: ignore[list-item]
    pool = llm.rollouts(["", PROMPTS[0]], params(max_tokens=4), segment_tokens=8)
    with pytest.raises(PromptError, match="the prompt is empty"):
        pool.step()
    assert [one.prompt_index for one in pool] == [1]


@pytest.mark.parametrize("prompt", ["def", {"prompt": "def"}])
def test_a_single_prompt_is_one(llm: LLM, prompt: Any) -> None:
    found = list(llm.rollouts(prompt, params(max_tokens=4), segment_tokens=8))
    assert [one.text for one in found] == [llm.generate("def", params(max_tokens=4))[0].outputs[0].text]
