"""The engine over a model with a recurrent state beside attention: drafts, forks and pauses change no token, and
nothing is shared that the state does not allow.
"""

from __future__ import annotations

import logging
from typing import Any

import pytest
from engine.harness import engine, run, tokens
from engine.test_loop import Guess
from tiny_llama import tokens as tiny_tokens
from toy_parts import ForgetfulHash, HybridReference, HybridRunner, ReplayedHash, RunningHash, SharingHash

from paceline.assembly import build_parts
from paceline.config import EngineConfig, SamplingParams, SpeculativeConfig
from paceline.engine import Engine, EngineDriver, Request, Turns
from paceline.engine.plain_loop import decode_plainly
from paceline.engine.scheduler import Scheduler
from paceline.engine.sequence import DecodingSequence
from paceline.errors import CapabilityError
from paceline.search import SearchConfig, SearchDriver, SearchRequest

PROMPTS = [tiny_tokens(size, seed=size) for size in (3, 20, 37)]
LENGTH = 16
GREEDY = SamplingParams(temperature=0.0, max_tokens=LENGTH, ignore_eos=True)


@pytest.fixture(scope="module")
def reference() -> HybridReference:
    return HybridReference()


@pytest.fixture(scope="module")
def wanted(reference: HybridReference) -> list[list[list[int]]]:
    return [[reference.greedy(prompt, LENGTH)] for prompt in PROMPTS]


def drafting(runner: Any, reference: HybridReference, *, bushy: bool = False, **sizes: Any) -> Engine:
    return engine(runner, [Guess(reference, bushy=bushy)], 4, **sizes)


@pytest.mark.parametrize("kind", [RunningHash, ReplayedHash])
def test_drafts_change_no_token(
    kind: type[RunningHash], reference: HybridReference, wanted: list[list[list[int]]]
) -> None:
    runner = HybridRunner(kind)
    found = run(drafting(runner, reference, max_num_batched_tokens=16), PROMPTS, GREEDY)
    assert tokens(found) == wanted
    accepted = [request.metrics.num_accepted_tokens for request in found]
    assert all(0 < count < LENGTH for count in accepted), "some drafts are accepted, some are not"
    assert runner.memory.used == 0


def test_the_comparison_catches_a_state_that_does_not_go_back(
    reference: HybridReference, wanted: list[list[list[int]]]
) -> None:
    assert tokens(run(drafting(HybridRunner(ForgetfulHash), reference), PROMPTS, GREEDY)) != wanted


def test_outputs_of_a_request_part_from_one_state(reference: HybridReference) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=10, n=3, ignore_eos=True)
    runner = HybridRunner()
    requests = run(drafting(runner, reference), PROMPTS, params)
    for request in requests:
        request.rules = None
        drafting(runner, reference).check(request)
    plain = decode_plainly(runner, requests, (0,))
    assert tokens(requests) == plain
    assert len({tuple(output) for output in plain[0]}) == 3


def test_a_drafter_of_trees_is_left_out(
    reference: HybridReference, wanted: list[list[list[int]]], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        found = run(drafting(HybridRunner(), reference, bushy=True), PROMPTS, GREEDY)
    assert tokens(found) == wanted
    assert all("scores chains only" in request.metrics.dropped_drafters["guess"] for request in found)


def test_sequences_that_make_way_come_back(reference: HybridReference, monkeypatch: pytest.MonkeyPatch) -> None:
    paused, pause = list[int](), Scheduler.pause

    def noting(self: Scheduler, sequence: DecodingSequence) -> None:
        paused.append(sequence.key)
        pause(self, sequence)

    monkeypatch.setattr(Scheduler, "pause", noting)
    runner = HybridRunner(cache_slots=32)
    size, prompts = 7 * runner.memory.block_bytes, [tiny_tokens(3, seed=seed) for seed in range(3)]
    long = SamplingParams(temperature=0.0, max_tokens=56, ignore_eos=True)
    found = run(drafting(runner, reference, kv_cache_memory_bytes=size), prompts, long)
    assert paused
    assert tokens(found) == [[reference.greedy(prompt, 56)] for prompt in prompts]


def test_a_draft_model_must_take_tokens_back(wanted: list[list[list[int]]]) -> None:
    target, draft = HybridRunner(), HybridRunner()
    config = SpeculativeConfig(method="draft_model", model="tiny")
    with pytest.raises(CapabilityError, match="'draft_model' needs a model that can take back tokens that it has read"):
        build_parts(target, config, load=lambda name: draft)  # type: ignore[arg-type]
    _, parts = build_parts(target, config, load=lambda name: draft.native)  # type: ignore[arg-type]
    live, request = Engine(parts, EngineConfig()), Request("a", None, PROMPTS[1], GREEDY, 7, LENGTH)
    live.add(request)
    while live.has_work:
        live.step()
    assert [request.outputs[0].token_ids] == wanted[1]
    assert not request.metrics.dropped_drafters


def test_searches_which_take_tokens_back_are_rejected() -> None:
    request = SearchRequest("a", None, PROMPTS[0], GREEDY, 7, LENGTH, search=SearchConfig.parse("beam").open())

    def search(runner: Any) -> None:
        turns = Turns()
        SearchDriver(EngineDriver(engine(runner), turns), turns, models=None).run([request])  # type: ignore[arg-type]

    with pytest.raises(CapabilityError, match="search needs a model that can take back tokens that it has read; tiny"):
        search(HybridRunner())
    search(HybridRunner().native)
    assert len(request.outputs[0].token_ids) == LENGTH, "the control: its attention alone can"


def test_prompts_that_begin_alike_share_nothing(reference: HybridReference) -> None:
    live = drafting(HybridRunner(), reference)
    prompt = tiny_tokens(40, seed=1)
    for _ in range(2):
        found = run(live, [prompt, prompt], GREEDY)
        assert tokens(found) == [[reference.greedy(prompt, LENGTH)]] * 2
        assert [request.num_cached_tokens for request in found] == [None, None]
    runner = HybridRunner(SharingHash)
    (first,) = run(drafting(runner, reference), [prompt], GREEDY)
    (second,) = run(drafting(runner, reference), [prompt], GREEDY)
    assert second.num_cached_tokens == 32
    assert tokens([first]) != tokens([second]), "the control: a state that cannot be shared and says it can"
