"""Approximate rules of acceptance on the bundled model: by name alone, counted, and rejected where they do not fit."""

from __future__ import annotations

from typing import Any

import pytest

from paceline import LLM, SamplingParams
from paceline.errors import ConfigError
from paceline.llm import BUNDLED

DRAFT = {"method": "draft_model", "model": str(BUNDLED / "draft"), "num_speculative_tokens": 8}
PROMPTS = ["def f(x):\n    return", "SELECT name FROM course WHERE", "The first thing is"]
RULES: dict[str, dict[str, Any]] = {
    "typical_acceptance_sampler": {"posterior_threshold": 1e-4, "draft_sample_method": "greedy"},
    "accept_thresholds": {"speculative_accept_threshold_acc": 0.2, "speculative_accept_threshold_single": 0.9},
    "fly": {"fly_window_size": 1, "fly_entropy_threshold": 0.1},
    "relaxed_thinking": {
        "relaxed_topk": 10, "relaxed_delta": 0.9, "begin_thinking_phase_token": 12, "end_thinking_phase_token": 2,
    },
    "reflective": {"reflective_alpha": 1.0},
}  # fmt: skip
AT_ZERO = ("fly", "relaxed_thinking", "reflective")
"""Those that depart at temperature 0, too."""


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(speculative_config=DRAFT, dtype="float32", seed=5)


def prompts(llm: LLM) -> list[dict[str, Any]]:
    """Behind a token that begins thoughts."""
    return [{"prompt_token_ids": [12, *llm.tokenizer.encode(text)]} for text in PROMPTS]


def departures(llm: LLM, rule: str, **more: Any) -> list[int]:
    """Of each request, no more than its tokens; but for reflection, whose own tokens depart too, than its drafts."""
    relaxed = llm.with_speculative_config(DRAFT | {"acceptance_method": rule} | RULES.get(rule, {}))
    params = SamplingParams(**{"max_tokens": 24, "ignore_eos": True} | more)
    found = [out.metrics for out in relaxed.generate(prompts(llm), params)]
    for one in found:
        own = rule == "reflective"
        assert one.num_departures <= (one.num_generation_tokens if own else one.num_accepted_tokens)
    assert [one.to_dict()["num_departures"] for one in found] == [one.num_departures for one in found]
    return [one.num_departures for one in found]


@pytest.mark.parametrize("rule", RULES)
def test_departures_are_counted_where_the_rule_departs_alone(llm: LLM, rule: str) -> None:
    assert any(departures(llm, rule, temperature=0.9, seed=3, n=2)) == (rule != "relaxed_thinking")
    assert any(departures(llm, rule, temperature=0.0)) == (rule in AT_ZERO)
    assert not any(departures(llm, "rejection_sampler", temperature=0.9, seed=3, n=2))


@pytest.mark.parametrize("rule", AT_ZERO)
def test_grammars_and_penalties_hold_at_departures(llm: LLM, rule: str) -> None:
    relaxed = llm.with_speculative_config(DRAFT | {"acceptance_method": rule} | RULES[rule])
    digits = SamplingParams(max_tokens=24, temperature=0.0, structured_outputs={"regex": "[0-9 ]{20}"})
    free = SamplingParams(max_tokens=24, temperature=0.0, repetition_penalty=1.3)
    one, _ = (out.outputs[0].text for out in relaxed.generate(prompts(llm)[:2], [digits, free]))
    assert set(one) <= set("0123456789 ")
    assert len(one) == 20


@pytest.mark.parametrize("rule", RULES)
def test_strict_mode_rejects_what_is_approximate(rule: str) -> None:
    with pytest.raises(ConfigError, match="acceptance_method must be an exact rule with exactness='strict'"):
        LLM(speculative_config={"method": "ngram", "acceptance_method": rule}, exactness="strict")


def test_marks_of_thoughts_that_the_model_lacks_are_rejected(llm: LLM) -> None:
    for given, text in (
        ({}, "begin_thinking_phase_token must be below the vocabulary's"),
        ({"begin_thinking_phase_token": 3, "end_thinking_phase_token": 3}, "end_thinking_phase_token must be another"),
    ):
        with pytest.raises(ConfigError, match=text):
            llm.with_speculative_config(DRAFT | {"use_relaxed_acceptance_for_thinking": True} | given)


@pytest.mark.parametrize("method", [{"method": "lookahead"}, DRAFT | {"tree_policy": "eagle2"}])
@pytest.mark.parametrize("rule", AT_ZERO)
def test_trees_are_rejected_beside_rules_for_chains(llm: LLM, rule: str, method: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"acceptance_method {rule!r} judges chains, but method"):
        llm.with_speculative_config(method | {"acceptance_method": rule} | RULES[rule])


def test_tables_that_could_branch_draft_chains(llm: LLM) -> None:
    relaxed = llm.with_speculative_config({"method": ["suffix", "token_recycling"], "acceptance_method": "fly"})
    for out in relaxed.generate(["a b a b a b a c a b a c a b"] * 2, SamplingParams(max_tokens=24, temperature=0.0)):
        assert not out.metrics.dropped_drafters
        assert out.metrics.num_draft_tokens
