"""AsyncLLM: the tokens of LLM for many coroutines at once, cancellation, faults that stay where they belong."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Coroutine
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from paceline import LLM, AsyncLLM, ConfigError, PromptError, RequestOutput, RequestOutputKind, SamplingParams
from paceline.engine import StepRecord, watching

PROMPTS = ["One day", "The name of", "def f(x):", "Once upon a time", "In the year"]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=30),
    SamplingParams(temperature=1.0, seed=3, n=2, max_tokens=20, logprobs=1),
    SamplingParams(temperature=0.0, max_tokens=30, stop=["\n"]),
    SamplingParams(temperature=0.7, seed=1, max_tokens=25, presence_penalty=0.5),
    SamplingParams(temperature=0.0, max_tokens=20, structured_outputs={"choice": ["tea", "coffee"]}),
]
LONG = SamplingParams(temperature=0.0, max_tokens=2000, ignore_eos=True)


@cache
def llm() -> LLM:
    return LLM(dtype="float32", profile=False)


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work, 60))


def seen(output: RequestOutput) -> list[Any]:
    return [
        (one.text, one.token_ids, one.finish_reason, one.stop_reason, one.logprobs, one.cumulative_logprob)
        for one in output.outputs
    ]


async def last(model: AsyncLLM, prompt: str, params: SamplingParams, **more: Any) -> list[Any]:
    found = [seen(output) async for output in model.generate(prompt, params, **more)]
    return found[-1]


@cache
def wanted() -> list[Any]:
    return [seen(one) for one in llm().generate(PROMPTS, PARAMS)]


def test_coroutines_get_what_llm_gives() -> None:
    async def all_at_once() -> list[Any]:
        model = AsyncLLM(llm())
        return await asyncio.gather(*(last(model, *one) for one in zip(PROMPTS, PARAMS, strict=True)))

    assert run(all_at_once()) == wanted()


def test_event_loops_of_several_threads_share_a_model() -> None:
    model, found = AsyncLLM(llm()), dict[int, Any]()

    def one(i: int) -> None:
        found[i] = run(last(model, PROMPTS[i], PARAMS[i]))

    threads = [threading.Thread(target=one, args=[i], daemon=True) for i in range(len(PROMPTS))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [found[i] for i in range(len(PROMPTS))] == wanted()


def test_outputs_come_as_they_are_wanted() -> None:
    async def outputs(kind: RequestOutputKind) -> list[RequestOutput]:
        params = SamplingParams(temperature=0.9, seed=2, n=2, max_tokens=12, logprobs=0, output_kind=kind)
        return [one async for one in AsyncLLM(llm()).generate("One day", params)]

    cumulative, deltas, final = (run(outputs(kind)) for kind in RequestOutputKind)
    assert len(final) == 1
    assert seen(final[0]) == seen(cumulative[-1])
    assert min(len(cumulative), len(deltas)) > 2
    for whole in final[0].outputs:
        mine = [part for one in deltas for part in one.outputs if part.index == whole.index]
        assert "".join(part.text for part in mine) == whole.text
        assert [token for part in mine for token in part.token_ids] == whole.token_ids
        assert [entry for part in mine for entry in part.logprobs or ()] == whole.logprobs


def test_a_cancelled_coroutine_and_a_closed_iterator_end_their_requests() -> None:
    async def both() -> None:
        model = AsyncLLM(llm())
        task = asyncio.create_task(last(model, "One day", LONG))
        chunks = model.stream("The name of", LONG)
        await anext(chunks)
        await asyncio.sleep(0.05)
        assert llm().engine.has_work
        task.cancel()
        await chunks.aclose()
        with pytest.raises(asyncio.CancelledError):
            await task
        for _ in range(100):
            if not llm().engine.has_work:
                return
            await asyncio.sleep(0.01)
        pytest.fail("requests that nobody waits for still run")

    run(both())


@pytest.mark.parametrize("priority", [0, 5, -5])
def test_a_request_that_ends_before_it_has_begun_leaves_nothing_behind(
    priority: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What ends it comes behind what begins it, whatever its priority."""
    model, engine = AsyncLLM(llm()), llm().engine
    go_on, step, decoded = threading.Event(), engine.step, set[str]()

    def look(record: StepRecord) -> None:
        decoded.update(str(sequence.request.prompt) for sequence in record.sequences)

    def held() -> Any:
        go_on.wait(20)
        return step()

    async def begun_and_left() -> None:
        first = asyncio.create_task(anext(model.stream("One day", LONG)))
        while not engine.has_work:
            await asyncio.sleep(0.01)
        late = asyncio.create_task(anext(model.stream("The name of", LONG, priority=priority)))
        await asyncio.sleep(0.05)
        late.cancel()
        first.cancel()
        await asyncio.gather(first, late, return_exceptions=True)
        go_on.set()
        while engine.has_work:
            await asyncio.sleep(0.01)

    monkeypatch.setattr(engine, "step", held)
    with watching(engine, look):
        run(begun_and_left())
    assert "The name of" not in decoded


def test_requests_that_wait_begin_by_priority() -> None:
    """`LLM.generate` and `AsyncLLM` alike, one at a time."""
    model = LLM(dtype="float32", profile=False, max_num_seqs=1)
    few, order = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True), list[str]()

    def look(record: StepRecord) -> None:
        order.extend(str(sequence.request.prompt) for sequence in record.sequences)

    def told() -> list[str]:
        found = list(dict.fromkeys(order))
        order.clear()
        return found

    async def both(numbers: list[int]) -> None:
        live = AsyncLLM(model)
        tasks = [last(live, prompt, few, priority=one) for prompt, one in zip(PROMPTS, numbers, strict=False)]
        await asyncio.gather(*tasks)

    with watching(model.engine, look):
        model.generate(PROMPTS[:3], few, priority=[2, -1, 0])
        assert told() == [PROMPTS[1], PROMPTS[2], PROMPTS[0]]
        model.generate(PROMPTS[:3], few)
        assert told() == PROMPTS[:3], "the control, without"
        run(both([0, 7, 2, 1]))
        assert told()[1:] == [PROMPTS[3], PROMPTS[2], PROMPTS[1]], "behind the one that had begun"
    for wrong in ("1", 1.0, True):
        with pytest.raises(ConfigError, match="priority must be an integer"):
            AsyncLLM(model).generate("x", priority=wrong)  # type: ignore[arg-type]


def test_conversations_that_wait_begin_by_priority() -> None:
    """`LLM.chat` and `AsyncLLM.chat` alike, one at a time."""
    model = LLM(dtype="float32", profile=False, max_num_seqs=1)
    few, order = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True), list[str]()
    talks = [[{"role": "user", "content": text}] for text in ("first", "second", "third", "fourth")]

    def look(record: StepRecord) -> None:
        order.extend(str(sequence.request.prompt) for sequence in record.sequences)

    def told() -> list[str]:
        found = [re.search("first|second|third|fourth", text)[0] for text in dict.fromkeys(order)]  # type: ignore[index]
        order.clear()
        return found

    async def both() -> None:
        live = AsyncLLM(model)

        async def ended(number: int, priority: int) -> None:
            params = few if number else replace(few, max_tokens=100)  # the others come while the first is written
            async for _ in live.chat(talks[number], params, priority=priority):
                pass

        await asyncio.gather(*(ended(number, one) for number, one in enumerate([0, 7, 2, 1])))

    with watching(model.engine, look):
        model.chat(talks[:3], few, priority=[2, -1, 0])
        assert told() == ["second", "third", "first"]
        model.chat(talks[:3], few)
        assert told() == ["first", "second", "third"], "the control, without"
        run(both())
        assert told()[1:] == ["fourth", "third", "second"], "behind the one that had begun"
    with pytest.raises(ConfigError, match="priority must be a list of 3 integers"):
        model.chat(talks[:3], few, priority=[1])


def test_what_is_wrong_with_a_request_is_raised_at_once() -> None:
    model = AsyncLLM(llm())
    with pytest.raises(PromptError, match="empty"):
        model.generate("")
    with pytest.raises(ConfigError, match="logit_bias"):
        model.stream("a", SamplingParams(logit_bias={10**6: 1.0}))
    with pytest.raises(ConfigError, match="beside an LLM"):
        AsyncLLM(llm(), seed=1)


def test_a_step_that_fails_ends_what_had_begun_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    async def around() -> tuple[Any, Any, int]:
        model = AsyncLLM(llm())
        step, calls = llm().engine.step, 0

        def failing() -> Any:
            nonlocal calls
            calls += 1
            if calls == 5:
                raise MemoryError("no room")
            return step()

        monkeypatch.setattr(llm().engine, "step", failing)
        found = [output async for output in model.generate("One day", LONG)]
        after = await last(model, PROMPTS[0], PARAMS[0])
        return found[-1].outputs[0], after, model.faults

    ended, after, faults = run(around())
    assert (ended.finish_reason, faults) == ("error", 1)
    assert "no room" in ended.error
    assert len(ended.token_ids) > 0
    assert after == wanted()[0]


def test_the_last_chunk_is_waited_for_where_another_thread_has_made_it(monkeypatch: pytest.MonkeyPatch) -> None:
    collect, held = llm().backend.collect, list[Any]()

    def late(request_id: str) -> Any:
        """As if the step that made a chunk, on another thread, did not hand it over before the next look."""
        held.append(collect(request_id))
        return held.pop(0) if len(held) > 1 else []

    monkeypatch.setattr(llm().backend, "collect", late)
    assert run(last(AsyncLLM(llm()), PROMPTS[0], PARAMS[0])) == wanted()[0]
    assert held


def test_a_conversation_is_rendered_by_the_template() -> None:
    messages = [{"role": "user", "content": "Hello"}]
    own = LLM(dtype="float32", profile=False)
    if not own.tokenizer.has_chat_template:
        with pytest.raises(ConfigError, match="chat template"):
            AsyncLLM(own).chat(messages)
        return
    expected = own.chat(messages, SamplingParams(temperature=0.0, max_tokens=9))[0]

    async def answer() -> Any:
        found = [one async for one in AsyncLLM(own).chat(messages, SamplingParams(temperature=0.0, max_tokens=9))]
        return seen(found[-1])

    assert run(answer()) == seen(expected)


def test_a_closed_model_takes_nothing_more_and_ends_what_runs() -> None:
    async def closing() -> Any:
        own = AsyncLLM(dtype="float32", profile=False)
        chunks = own.stream("One day", LONG)
        await anext(chunks)
        await asyncio.to_thread(own.close)
        rest = [chunk async for chunk in chunks]
        with pytest.raises(ConfigError, match="closed"):
            own.generate("a")
        return rest[-1].finish_reason

    assert run(closing()) == "abort"


def test_a_diffusion_model_serves_one_request_after_the_other() -> None:
    async def two() -> tuple[list[Any], list[Any]]:
        async with AsyncLLM("bundled/diffusion") as model:
            params, texts = SamplingParams(temperature=0.0, max_tokens=16), ("2+2=", "1+5=")
            together = await asyncio.gather(*(last(model, text, params) for text in texts))
            return together, [seen(one) for one in model.llm.generate(list(texts), params)]

    together, alone = run(two())
    assert together == alone


ROLLED = SamplingParams(temperature=0.9, seed=7, n=2, max_tokens=24)


def test_rollouts_are_those_of_llm_and_go_on_beside_requests() -> None:
    wanted = [one for result in llm().generate(PROMPTS, ROLLED) for one in result.outputs]

    async def together() -> tuple[list[Any], list[Any]]:
        model = AsyncLLM(llm())
        async with model.rollouts(PROMPTS, ROLLED, segment_tokens=5, pool_size=4) as pool:

            async def rolled() -> list[Any]:
                return [one async for one in pool]

            found, beside = await asyncio.gather(rolled(), last(model, PROMPTS[0], PARAMS[0]))
            assert pool.done
            assert not pool.unfinished
        return sorted(found, key=lambda one: (one.prompt_index, one.index)), beside

    found, beside = run(together())
    assert [one.token_ids for one in found] == [one.token_ids for one in wanted]
    assert max(len(one.segments) for one in found) > 2
    assert beside == wanted_alone()
    other = llm().generate(PROMPTS, SamplingParams(temperature=0.9, seed=8, n=2, max_tokens=24))
    assert [one.token_ids for result in other for one in result.outputs] != [one.token_ids for one in wanted]


def wanted_alone() -> list[Any]:
    return seen(llm().generate(PROMPTS[0], PARAMS[0])[0])


def test_a_cancelled_step_of_rollouts_goes_on_and_a_closed_pool_gives_everything_back() -> None:
    async def work() -> None:
        model = AsyncLLM(llm())
        pool = model.rollouts(PROMPTS[:2], SamplingParams(temperature=0.9, seed=7, max_tokens=60), segment_tokens=30)
        task = asyncio.create_task(pool.step())
        await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await pool.update_policy()
        assert pool.policy_version == 1
        ended = [one async for one in pool]
        plain = llm().generate(PROMPTS[:2], SamplingParams(temperature=0.9, seed=7, max_tokens=60))
        assert sorted(one.token_ids for one in ended) == sorted(one.outputs[0].token_ids for one in plain)
        endless = model.rollouts(PROMPTS, SamplingParams(max_tokens=500, ignore_eos=True), segment_tokens=4)
        assert await endless.step() == []
        assert llm().engine.scheduler.parked
        await endless.close()
        assert not llm().engine.scheduler.parked
        with pytest.raises(ConfigError, match="closed"):
            await endless.step()
        with pytest.raises(ConfigError, match="segment_tokens"):
            model.rollouts(PROMPTS, segment_tokens=0)

    run(work())
