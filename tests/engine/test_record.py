"""Watchers of the loop see every step as it was, and the time split adds up."""

from __future__ import annotations

from paceline import LLM, SamplingParams
from paceline.engine import StepRecord, watching
from paceline.tree import Verdict

PROMPT = "One day, a little girl named Lily found a needle"


def test_records_spell_the_output_and_stop_with_the_block() -> None:
    llm = LLM(speculative_config={"method": "auto", "num_speculative_tokens": 4})
    seen: list[StepRecord] = []
    with watching(llm.engine, seen.append):
        (out,) = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=24, ignore_eos=True))
    tokens: list[int] = []
    for record in seen:
        (verdict,) = record.verdicts
        assert isinstance(verdict, Verdict)
        assert record.lengths == [len(out.prompt_token_ids) + len(tokens)]
        assert record.roots == [([*out.prompt_token_ids, *tokens])[-1]]
        assert record.scores.rows[-1] == 1 + len(record.trees[0]) <= 1 + len(record.proposed[0])
        tokens += verdict.tokens
    assert tokens[:24] == list(out.outputs[0].token_ids)
    assert len(seen) == out.metrics.num_steps
    number = len(seen)
    llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=4))
    assert len(seen) == number


def test_the_split_adds_up_to_the_time_of_the_steps() -> None:
    llm = LLM(speculative_config={"method": "ngram"})
    seen: list[StepRecord] = []
    with watching(llm.engine, seen.append):
        (out,) = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=16))
    total = sum(record.times.total for record in seen)
    parts = llm.engine.times
    assert abs(parts.total - parts.prefill - total) < 1e-9
    metrics = out.metrics
    assert metrics.first_step_time is not None
    assert 0 < total < metrics.first_step_time - metrics.arrival_time + metrics.generation_time + 0.05
    assert all(value >= 0 for value in parts.to_dict().values())
