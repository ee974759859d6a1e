"""Models with mixers: a text begins where another one left keys and values and a state, and reads only the rest; what
follows is what follows a text that was read from its first token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from engine.harness import engine
from engine.test_loop import Guess
from tiny_hybrid import KINDS, hybrid
from tiny_llama import tokens as drawn

from paceline.config import SamplingParams
from paceline.engine import Engine, Request
from paceline.engine.scheduler import Scheduler
from paceline.engine.sequence import DecodingSequence
from paceline.models.runners import RecurrentRunner
from paceline.models.state import cache_memory
from paceline.models.state.cache_memory import ArenaMemory
from paceline.models.state.recurrent import RecurrentPart

PROMPT = drawn(200, seed=1)
SYSTEM = drawn(100, seed=2)
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=0)


class Read:
    """Counts the tokens of prompts that a runner reads, by call."""

    def __init__(self, runner: RecurrentRunner) -> None:
        self.chunks: list[int] = []
        extend = runner.extend

        def counting(caches: Any, tokens: Any, **options: Any) -> Any:
            self.chunks += [len(own) for own in tokens]
            return extend(caches, tokens, **options)

        runner.extend = counting  # type: ignore[method-assign]

    def since(self) -> list[int]:
        """What was read since this was last asked."""
        chunks, self.chunks = self.chunks, []
        return chunks


def decode(
    live: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams = GREEDY, *, tenant: str = ""
) -> list[Request]:
    requests = [
        Request(f"r{i}", None, list(ids), params, 7 + i, params.max_tokens or 1) for i, ids in enumerate(prompts)
    ]
    for request in requests:
        request.tenant = tenant
        live.add(request)
    while live.has_work:
        live.step()
    return requests


def tokens_of(requests: Sequence[Request]) -> list[list[list[int]]]:
    return [[output.token_ids for output in request.outputs] for request in requests]


def apart(found: Sequence[Request], wanted: Sequence[Request]) -> float:
    """By how much the logprobs of the same tokens differ; infinite for other tokens."""
    if tokens_of(found) != tokens_of(wanted):
        return float("inf")
    pairs = zip(found, wanted, strict=True)
    each = [
        abs(a[token].logprob - b[token].logprob)
        for one, other in pairs
        for a, b in zip(one.outputs[0].logprobs or [], other.outputs[0].logprobs or [], strict=True)
        for token in a
        if token in b
    ]
    return max(each)


def cold(kind: str, prompts: Sequence[Sequence[int]], params: SamplingParams = GREEDY) -> list[Request]:
    """Each text read from its first token."""
    return decode(engine(hybrid(kind), enable_prefix_caching=False), prompts, params)


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_that_is_known_is_not_read_again(kind: str, compiled: bool) -> None:
    runner = hybrid(kind, compiled=compiled)
    read, live, wanted = Read(runner), engine(runner), cold(kind, [PROMPT])
    first = decode(live, [PROMPT])
    assert sum(read.since()) == 199
    again = decode(live, [PROMPT])
    assert read.since() == [7]
    assert (first[0].num_cached_tokens, again[0].num_cached_tokens) == (0, 192)
    assert apart(first, wanted) < 1e-3
    assert apart(again, wanted) < 1e-3
    longer = [*PROMPT, *first[0].outputs[0].token_ids, 9, 8]
    found = decode(live, [longer])
    assert found[0].num_cached_tokens == 208, "the last block that decoding filled before its last step"
    assert apart(found, cold(kind, [longer])) < 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_the_comparison_catches_a_state_that_is_forgotten(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = PROMPT[:194]
    live, wanted = engine(hybrid(kind)), cold(kind, [prompt])
    decode(live, [prompt])

    def forgetting(self: RecurrentPart, length: int, state: Any) -> None:
        self.length = length

    monkeypatch.setattr(RecurrentPart, "begin_with", forgetting)
    again = decode(live, [prompt])
    assert again[0].num_cached_tokens == 192
    assert apart(again, wanted) > 0.1


def test_tenants_share_nothing() -> None:
    runner = hybrid()
    read, live = Read(runner), engine(runner)
    decode(live, [PROMPT], tenant="a")
    read.since()
    (other,) = decode(live, [PROMPT], tenant="b")
    assert (sum(read.since()), other.num_cached_tokens) == (199, 0)
    (same,) = decode(live, [PROMPT], tenant="a")
    assert (sum(read.since()), same.num_cached_tokens) == (7, 192), "the control: one tenant shares"


def test_prompts_of_one_batch_wait_for_the_state_that_they_share() -> None:
    runner = hybrid()
    read, live = Read(runner), engine(runner)
    found = decode(live, [PROMPT] * 3)
    assert sum(read.since()) == 199 + 2 * 7
    assert [request.num_cached_tokens for request in found] == [0, 192, 192]
    assert apart(found, cold("mamba2", [PROMPT] * 3)) < 1e-3


@pytest.mark.parametrize("together", [False, True])
def test_a_state_is_kept_where_texts_part(together: bool) -> None:
    prompts = [[*SYSTEM, *drawn(40, seed=seed)] for seed in range(10, 14)]
    runner = hybrid()
    read, live = Read(runner), engine(runner)
    found = decode(live, prompts) if together else [decode(live, [prompt])[0] for prompt in prompts]
    known = [0, 96, 96, 96] if together else [0, 0, 96, 96]  # alone, nobody knows yet where the first one parts
    assert [request.num_cached_tokens for request in found] == known
    assert sum(read.since()) == 4 * 139 - sum(known)
    wanted = [cold("mamba2", [prompt])[0] for prompt in prompts]
    if together:
        wanted = cold("mamba2", prompts)
    assert apart(found, wanted) < 1e-3


def test_long_prompts_have_states_on_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_memory, "STATE_BLOCKS", 6)
    runner = hybrid()
    read, live = Read(runner), engine(runner)
    decode(live, [PROMPT])
    assert read.since() == [96, 96, 7]
    (found,) = decode(live, [[*PROMPT[:150], *drawn(30, seed=4)]])
    assert found.num_cached_tokens == 96
    assert read.since() == [48, 32, 3], "it parts from the first one at 144 and ends at 179"


def test_drafts_pass_borders_and_leave_the_state_there() -> None:
    runner, plain = hybrid(), hybrid()
    drafting = engine(runner, [Guess(_Greedy(plain))], 6)  # type: ignore[arg-type]
    first = decode(drafting, [PROMPT])
    assert first[0].metrics.num_accepted_tokens > 0
    longer = [*PROMPT, *first[0].outputs[0].token_ids, 9, 8]
    (found,) = decode(drafting, [longer])
    assert found.num_cached_tokens in (208, 224)
    assert apart([found], cold("mamba2", [longer])) < 1e-3


def test_outputs_of_a_request_leave_their_states() -> None:
    runner = hybrid()
    live = engine(runner)
    params = SamplingParams(temperature=1.0, max_tokens=24, n=2, ignore_eos=True)
    (first,) = decode(live, [PROMPT], params)
    assert first.outputs[0].token_ids != first.outputs[1].token_ids
    for output in first.outputs:
        longer = [*PROMPT, *output.token_ids, 9, 8]
        (found,) = decode(live, [longer])
        assert found.num_cached_tokens == 208
        assert apart([found], cold("mamba2", [longer])) < 1e-3


def test_memory_stays_below_its_limit_and_states_go_with_their_blocks() -> None:
    runner = hybrid(cache_slots=32)
    arena, memory = runner.native.arena, runner.memory
    held = 2 * 2 * runner.memory.state_bytes
    size = 64 * memory.block_bytes
    live = engine(runner, kv_cache_memory_bytes=size, max_num_seqs=2)
    wanted = cold("mamba2", [PROMPT])
    for seed in range(8):
        decode(live, [drawn(120, seed=20 + seed)])
        assert arena.nbytes + held <= size
        states = [state for state in arena.prefixes.states.values() if state.present]
        assert memory.used == len(arena.prefixes) + sum(len(state.blocks) for state in states)
        assert 0 < len(states) <= len(arena.prefixes)
    assert len(arena.prefixes) < 8 * 8, "some were given up"
    found = decode(live, [PROMPT])
    assert apart(found, wanted) < 1e-3
    (again,) = decode(live, [PROMPT])
    assert again.num_cached_tokens == 192
    memory.forget()
    assert memory.used == 0


def test_where_room_is_short_sequences_make_way_and_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    paused, pause = list[int](), Scheduler.pause

    def noting(self: Scheduler, sequence: DecodingSequence) -> None:
        paused.append(sequence.key)
        pause(self, sequence)

    monkeypatch.setattr(Scheduler, "pause", noting)
    runner, prompts = hybrid("convolution", cache_slots=32), [drawn(40, seed=seed) for seed in range(3)]
    long = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True, logprobs=0)
    size = 15 * runner.memory.block_bytes
    found = decode(engine(runner, kv_cache_memory_bytes=size, max_num_seqs=3), prompts, long)
    assert paused
    assert apart(found, cold("convolution", prompts, long)) < 1e-3


def test_a_sequence_that_made_way_goes_on_from_its_last_block() -> None:
    runner = hybrid()
    read, live = Read(runner), engine(runner)
    request = Request("r0", None, list(PROMPT), GREEDY, 7, GREEDY.max_tokens or 1)
    live.add(request)
    while not request.outputs or len(request.outputs[0].token_ids) < 15:
        live.step()
    read.since()
    (sequence,) = live.scheduler.running
    length = sequence.cache.length
    live.scheduler.pause(sequence)
    while live.has_work:
        live.step()
    assert length == 214
    assert read.since() == [214 - 208]
    assert apart([request], cold("mamba2", [PROMPT])) < 1e-3


def test_more_outputs_than_states_fit_run_one_after_the_other() -> None:
    params, wanted = SamplingParams(temperature=1.0, max_tokens=12, n=4, ignore_eos=True), engine(hybrid())
    runner = hybrid(cache_slots=32)
    each = 2 * runner.memory.state_bytes
    live = engine(runner, kv_cache_memory_bytes=2 * each + 16 * runner.memory.block_bytes)
    assert not runner.memory.sequences_fit([10] * 3)
    assert tokens_of(decode(live, [PROMPT[:40]], params)) == tokens_of(decode(wanted, [PROMPT[:40]], params))


def test_half_of_the_memory_serves_states_that_sequences_hold() -> None:
    runner = hybrid()
    memory: ArenaMemory = runner.memory
    each = 2 * runner.memory.state_bytes
    memory.set_limit(10 * each, sequences=16)
    assert memory.sequences_fit([10] * 5)
    assert not memory.sequences_fit([10] * 6)
    assert memory.capacity == 5 * each // memory.block_bytes - 1
    memory.set_limit(100 * each, sequences=4)
    assert memory.sequences_fit([10] * 4)
    assert not memory.sequences_fit([10] * 5)


class _Greedy:
    """What `Guess` asks of a toy: the logits behind a text."""

    def __init__(self, runner: RecurrentRunner) -> None:
        self.runner, self.info = runner, runner.info

    def logits(self, text: Sequence[int]) -> torch.Tensor:
        cache = self.runner.open()
        row = self.runner.extend([cache], [list(text)]).logits[0]
        self.runner.release(cache)
        return row
