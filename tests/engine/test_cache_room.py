"""Where memory is short requests wait and sequences make way, and every result is what it is where there is plenty."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from engine.harness import engine
from tiny_checkpoint import write
from toys import ToyRunner
from wide_trees import WIDE

from paceline import LLM, ConfigError, PromptError, RequestOutput, SamplingParams
from paceline.controllers.auto import Costs
from paceline.engine import Probe, Request, StepRecord, watching
from paceline.engine.cache_room import Room
from paceline.engine.scheduler import Scheduler
from paceline.engine.sequence import DecodingSequence
from paceline.models.state.window_slots import BLOCK

PROMPTS = [[20 + i, 7, 8, 9, 30 + i] * (2 + i) for i in range(5)]
NGRAM = {"method": "ngram", "num_speculative_tokens": 5}
CAP = 12
"""Blocks: one sequence of 5 * 6 + 60 tokens takes six."""


def params(length: int = 60) -> list[SamplingParams]:
    """Everything that a sequence remembers: noise, penalties, logprobs, stop strings, several outputs."""
    common: dict[str, Any] = {"max_tokens": length, "ignore_eos": True, "logprobs": 0}
    return [
        SamplingParams(temperature=0.0, **common),
        SamplingParams(temperature=0.9, seed=3, **common),
        SamplingParams(temperature=0.0, repetition_penalty=1.3, frequency_penalty=0.4, prompt_logprobs=0, **common),
        SamplingParams(temperature=0.8, seed=5, n=2, min_tokens=20, **common),
        SamplingParams(
            temperature=0.7, seed=9, stop=["e", "t"], include_stop_str_in_output=True, **(common | {"min_tokens": 30})
        ),
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write(tmp_path_factory.mktemp("tiny"), max_position_embeddings=512))


@pytest.fixture(scope="module")
def ample(folder: str) -> LLM:
    return LLM(folder, speculative_config=None, exactness="strict", threads=1, enable_prefix_caching=False)


@pytest.fixture(scope="module")
def plain(ample: LLM) -> list[Any]:
    return results(decode(ample))


def capped(folder: str, ample: LLM, blocks: int = CAP, **options: Any) -> LLM:
    size = blocks * ample.runner.memory.block_bytes
    given = {"speculative_config": None, "exactness": "strict", "threads": 1, "kv_cache_memory_bytes": size} | options
    return LLM(folder, **given)


def decode(llm: LLM, given: Sequence[SamplingParams] | None = None) -> list[RequestOutput]:
    return llm.generate([{"prompt_token_ids": ids} for ids in PROMPTS], given or params())


def results(found: Sequence[RequestOutput]) -> list[Any]:
    return [(one.outputs, one.prompt_logprobs) for one in found]


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Keys of the sequences that made way."""
    keys: list[int] = []
    pause = Scheduler.pause

    def noting(self: Scheduler, sequence: DecodingSequence) -> None:
        active = self.active()
        assert sequence.key == max(one.key for one in active)
        keys.append(sequence.key)
        pause(self, sequence)

    monkeypatch.setattr(Scheduler, "pause", noting)
    return keys


BOTH = {"method": ["ngram", "draft_model"], "num_speculative_tokens": 5}


@pytest.mark.parametrize(
    ("blocks", "config", "caching"),
    [(9, None, True), (9, NGRAM, False), (9, BOTH, True), (CAP, NGRAM, True), (CAP, BOTH, False)],
)
def test_results_are_those_of_plenty(
    folder: str, ample: LLM, plain: list[Any], pauses: list[int], *, blocks: int, config: Any, caching: bool
) -> None:
    drafts = {"model": folder} if config and "draft_model" in config["method"] else {}
    llm = capped(folder, ample, blocks, speculative_config=config and config | drafts, enable_prefix_caching=caching)
    held: list[int] = []
    pool = llm.runner.arena.pool

    def look(record: StepRecord) -> None:
        held.append(len(pool.counts) - pool.unheld)

    with watching(llm.engine, look):
        found = decode(llm)
    assert results(found) == plain
    assert pauses
    assert max(held) <= blocks
    assert llm.runner.memory.left() == llm.runner.memory.capacity


SUDDEN = {"method": "wide_trees:Sudden", "num_speculative_tokens": WIDE}


@pytest.mark.parametrize("blocks", [9, 200])
def test_a_tree_wider_than_any_before_is_cut_to_the_room(
    folder: str, ample: LLM, plain: list[Any], monkeypatch: pytest.MonkeyPatch, blocks: int
) -> None:
    def grown() -> tuple[int, int]:
        """Blocks in the end, and how many nodes were cut."""
        llm, cut = capped(folder, ample, blocks, speculative_config=SUDDEN), []

        def look(record: StepRecord) -> None:
            cut.extend(len(a) - len(b) for a, b in zip(record.proposed, record.trees, strict=True))

        with watching(llm.engine, look):
            assert results(decode(llm)) == plain
        return len(llm.runner.arena.pool.counts), sum(cut)

    size, cut = grown()
    assert size <= blocks
    assert (cut > 0) is (blocks < 200)
    monkeypatch.setattr(Room, "fit", lambda self, batch, trees, active: trees)
    size, cut = grown()
    assert cut == 0
    assert (size > blocks) is (blocks < 200)


def test_the_probe_stays_within_the_room(folder: str, ample: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = capped(folder, ample).runner
    probe, pool = Probe(runner), runner.arena.pool
    assert all(seconds > 0 for seconds in probe([1, 8], 300))
    assert len(pool.counts) <= CAP
    with pytest.raises(RuntimeError, match="64 rows need three times theirs"):
        list(probe([64], 300))
    timed = probe([1, 64], 300)
    assert next(iter(timed)) > 0, "those that fit are timed"
    with pytest.raises(RuntimeError, match="64 rows"):
        list(timed)
    assert runner.memory.left() == runner.memory.capacity
    cost = Costs(probe=probe)
    cost.measure_up_to(1, 300, 64)
    assert cost.probe is None
    assert len(pool.counts) <= CAP
    assert runner.memory.left() == runner.memory.capacity
    monkeypatch.setattr(Probe, "fitting", lambda self, rows, context: context)
    list(probe([8], 300))
    assert len(pool.counts) > CAP


def test_streams_show_the_same_pieces(folder: str, ample: LLM, pauses: list[int]) -> None:
    def streamed(llm: LLM) -> list[list[Any]]:
        streams = [llm.stream({"prompt_token_ids": ids}, one) for ids, one in zip(PROMPTS, params(), strict=True)]
        found: list[list[Any]] = [[] for _ in streams]
        live = list(enumerate(streams))
        while live:
            for number, stream in list(live):
                chunk = next(stream, None)
                if chunk is None:
                    live.remove((number, stream))
                else:
                    found[number].append((chunk.index, chunk.text, chunk.token_ids, chunk.finish_reason))
        return found

    assert streamed(capped(folder, ample)) == streamed(ample)
    assert pauses


def test_resuming_from_the_prompt_alone_fails(
    folder: str, ample: LLM, plain: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    pause = Scheduler.pause

    def forgetful(self: Scheduler, sequence: DecodingSequence) -> None:
        pause(self, sequence)
        del sequence.context.tokens[len(sequence.request.prompt_ids) :]

    monkeypatch.setattr(Scheduler, "pause", forgetful)
    assert results(decode(capped(folder, ample))) != plain


@pytest.mark.parametrize(("caching", "together"), [(True, 4), (False, 2)])
def test_a_shared_beginning_takes_room_once(folder: str, ample: LLM, caching: bool, together: int) -> None:
    llm = capped(folder, ample, 14, enable_prefix_caching=caching)
    prompts = [[*range(5, 75), 200 + i, 300 + i] for i in range(4)]
    sizes: list[int] = []
    with watching(llm.engine, lambda record: sizes.append(len(record.sequences))):
        llm.generate(
            [{"prompt_token_ids": ids} for ids in prompts],
            SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True),
        )
    assert max(sizes) == together


def test_who_came_first_ends_first(folder: str, ample: LLM, pauses: list[int]) -> None:
    llm = capped(folder, ample, 9)
    ended: dict[int, None] = {}

    def look(record: StepRecord) -> None:
        ended.update({one.key: None for one in record.sequences if one.output.finish_reason is not None})

    same = [SamplingParams(temperature=0.0, max_tokens=60 - 5 * i, ignore_eos=True) for i in range(5)]
    with watching(llm.engine, look):
        decode(llm, same)
    assert pauses
    assert list(ended) == sorted(ended)


def test_a_request_that_never_fits_is_rejected_in_one_line(folder: str, ample: LLM) -> None:
    llm = capped(folder, ample)
    most = (CAP - 1) * BLOCK
    fits = SamplingParams(temperature=0.0, max_tokens=most - 9, ignore_eos=True)
    assert len(llm.generate([{"prompt_token_ids": PROMPTS[0]}], fits)[0].outputs[0].token_ids) == most - 9
    with pytest.raises(
        PromptError, match=rf"10 tokens with up to {most - 8} new ones needs .* kv_cache_memory_bytes"
    ) as refused:
        llm.generate([{"prompt_token_ids": PROMPTS[0]}], SamplingParams(max_tokens=most - 8))
    assert "\n" not in str(refused.value)
    assert not llm.engine.has_work


def test_a_paused_request_can_be_cancelled(folder: str, ample: LLM, pauses: list[int]) -> None:
    llm = capped(folder, ample, 9)
    long = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    requests = [Request(f"r{i}", None, ids, long, i, 60) for i, ids in enumerate(PROMPTS[:3])]
    for one in requests:
        llm.engine.add(one)
    while not llm.engine.scheduler.paused:
        llm.engine.step()
    gone = llm.engine.scheduler.paused[-1].first
    llm.engine.abort(gone.request.id)
    assert gone.output.finish_reason == "abort"
    while llm.engine.has_work:
        llm.engine.step()
    assert sorted(len(one.outputs[0].token_ids) for one in requests)[1:] == [60, 60]
    assert llm.runner.memory.left() == llm.runner.memory.capacity


def test_a_runner_that_counts_nothing_rejects_a_limit() -> None:
    with pytest.raises(ConfigError, match="kv_cache_memory_bytes is not available for toy"):
        engine(ToyRunner(16), kv_cache_memory_bytes=10**6)


def test_nothing_is_counted_where_there_is_plenty(ample: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    room = ample.engine.scheduler.room
    assert room is not None
    calls: list[int] = []
    enough = type(room).enough
    monkeypatch.setattr(type(room), "enough", lambda self, active: calls.append(1) or enough(self, active))
    stream = ample.stream(
        {"prompt_token_ids": PROMPTS[0]}, SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
    )
    list(stream)
    assert len(calls) < 20


def test_small_limits_are_rejected(tmp_path: Path, folder: str) -> None:
    with pytest.raises(ConfigError, match="kv_cache_memory_bytes must be at least"):
        LLM(folder, kv_cache_memory_bytes=100)
