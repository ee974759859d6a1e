"""The oracle asks for just what will be accepted."""

from __future__ import annotations

import numpy as np
import pytest
from engine.harness import engine, run, tokens
from toys import ToyRunner

from benchmarks.oracle_length import LengthRecorder, Lengths, OracleLength
from paceline import registry
from paceline.config import SamplingParams
from paceline.controllers.policies import FixedController
from paceline.drafters import DrafterArgs

PROMPTS = [[1, 2, 3], [4, 5], [3, 3, 1, 2]]
PARAMS = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
TARGET = ToyRunner(12, order=3)


def drafter() -> object:
    runner = ToyRunner(12, order=3, noise=1.0)
    args = DrafterArgs(vocab_size=12, index=0, max_context=4096, target=TARGET, load_runner=lambda name: runner)
    return registry.load("drafters", "draft_model")(args, model="toy")


def recorded() -> list[Lengths]:
    recorder = LengthRecorder(16)
    live = engine(TARGET, [drafter()], controller=recorder)
    found = []
    for prompt in PROMPTS:
        (request,) = run(live, [prompt], PARAMS)
        made = request.outputs[0].token_ids
        assert made == TARGET.greedy(prompt, 60)
        found.append(recorder.lengths(len(prompt) + 60, made))
    return found


def test_nothing_is_drafted_in_vain_and_no_length_takes_fewer_steps() -> None:
    oracle = OracleLength()
    oracle.told = recorded()
    requests = run(engine(TARGET, [drafter()], controller=oracle), PROMPTS, PARAMS)
    assert tokens(requests) == [[TARGET.greedy(prompt, 60)] for prompt in PROMPTS]
    drafted = sum(request.metrics.num_draft_tokens for request in requests)
    assert drafted == sum(request.metrics.num_accepted_tokens for request in requests) > 60
    most = run(engine(TARGET, [drafter()], controller=FixedController(16)), PROMPTS, PARAMS)
    assert [r.metrics.num_steps for r in requests] == [r.metrics.num_steps for r in most]
    assert drafted < 0.5 * sum(request.metrics.num_draft_tokens for request in most)


def test_the_check_catches_records_of_other_prompts() -> None:
    oracle = OracleLength()
    oracle.told = list(np.roll(np.array(recorded(), object), 1))
    requests = run(engine(TARGET, [drafter()], controller=oracle), PROMPTS, PARAMS)
    assert tokens(requests) == [[TARGET.greedy(prompt, 60)] for prompt in PROMPTS]
    assert sum(r.metrics.num_draft_tokens for r in requests) > sum(r.metrics.num_accepted_tokens for r in requests)


def test_without_a_record_it_drafts_nothing() -> None:
    (request,) = run(engine(TARGET, [drafter()], controller=OracleLength()), PROMPTS[:1], PARAMS)
    assert request.metrics.num_draft_tokens == 0


def test_several_sequences_cannot_be_told_apart() -> None:
    recorder = LengthRecorder()
    run(engine(TARGET, [drafter()], controller=recorder), PROMPTS, PARAMS)
    with pytest.raises(ValueError, match="too many values"):
        recorder.lengths(63, [1] * 60)
