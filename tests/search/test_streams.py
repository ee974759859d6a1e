"""Searches as streams, of several prompts, on event loops and beside other requests; what is left frees its caches."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from paceline import LLM, AsyncLLM, ConfigError, PacelineError, RequestOutput, RequestOutputKind, SamplingParams
from paceline.search import Branch, Found, Search, Steps

HERE = "tests.search.test_streams"
PROMPT = "Once upon a time"
GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
DRAWN = SamplingParams(temperature=0.9, seed=5, max_tokens=16)
LONG = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)
BEAM: dict[str, Any] = {"method": "beam", "beam_width": 4}
CASES: list[tuple[Any, SamplingParams]] = [
    (BEAM, GREEDY),
    (BEAM, SamplingParams(temperature=0.0, max_tokens=20, n=3, stop=["."])),
    ({"method": "self_consistency", "num_samples": 4}, SamplingParams(temperature=0.9, seed=5, max_tokens=16, n=2)),
    ({"method": "sample_and_rank", "num_samples": 3}, DRAWN),
    ({"method": "cautious", "most_trials": 3}, DRAWN),
    ({"method": "adadec", "threshold": 0.5}, GREEDY),
    ({"method": "diverse_beam", "beam_width": 4, "num_beam_groups": 2}, GREEDY),
    ("superposed", GREEDY),
    ({"method": "first_finish", "num_samples": 3}, DRAWN),
]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(dtype="float32", profile=False, speculative_config=None, enable_prefix_caching=False)


def memory_of(llm: LLM) -> Any:
    return llm.runner.memory  # type: ignore[attr-defined]


def seen(output: RequestOutput) -> list[Any]:
    return [(one.text, one.token_ids, one.score, one.finish_reason, one.cumulative_logprob) for one in output.outputs]


@pytest.mark.parametrize(("search", "params"), CASES)
def test_a_stream_tells_what_generate_finds(llm: LLM, search: Any, params: SamplingParams) -> None:
    (whole,) = llm.generate(PROMPT, params, search=search)
    chunks = list(llm.stream(PROMPT, params, search=search))
    assert seen(chunks[-1].output) == seen(whole)
    assert whole.search is not None
    for output in whole.outputs:
        mine = [chunk for chunk in chunks if chunk.index == output.index]
        assert "".join(chunk.text for chunk in mine) == output.text
        assert [token for chunk in mine for token in chunk.token_ids] == output.token_ids
        assert [chunk.finish_reason for chunk in mine] == [None] * (len(mine) - 1) + [output.finish_reason]


def test_what_all_beams_share_comes_before_the_end(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    assert len(list(llm.stream(PROMPT, params, search={"method": "beam", "beam_width": 2}))) > 3
    votes = list(llm.stream(PROMPT, DRAWN, search={"method": "self_consistency", "num_samples": 2}))
    assert [chunk.finish_reason is not None for chunk in votes] == [True], "the control: a vote tells at its end"
    finals = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY)
    (final,) = llm.stream(PROMPT, finals, search={"method": "beam", "beam_width": 2})
    assert final.text == final.output.outputs[0].text


class Lying(Search):
    """Says that its texts go on from the likeliest token, and finds another."""

    name = "lying"
    keeps_beginnings = True

    def steps(self, root: Branch) -> Steps[None]:
        rows = yield [root]
        first, second = (root.child(int(token), 0.0) for token in rows.logprobs[0].topk(2).indices)
        self.alive = [first]
        yield [first]
        self.alive, self.found = [], [Found(second, 0.0)]


def test_a_method_that_told_another_text_ends_with_an_error(llm: LLM) -> None:
    *_, last = llm.stream(PROMPT, GREEDY, search=f"{HERE}:Lying")
    assert last.finish_reason == "error"
    with pytest.raises(PacelineError, match="'lying' has told another text than it has found"):
        last.output.raise_for_error()


def test_each_prompt_may_have_a_search_of_its_own(llm: LLM) -> None:
    prompts, searches = [PROMPT, "def fib(n):", "The name of"], [BEAM, "adadec", {"method": "beam", "beam_width": 2}]
    found = llm.generate(prompts, GREEDY, search=searches)
    alone = [llm.generate(*each[:1], GREEDY, search=each[1])[0] for each in zip(prompts, searches, strict=True)]
    assert [seen(one) for one in found] == [seen(one) for one in alone]
    assert [one.search.method for one in found if one.search] == ["beam", "adadec", "beam"]
    shared = llm.generate(prompts, GREEDY, search=BEAM)
    assert [one.search.method for one in shared if one.search] == ["beam"] * 3
    assert seen(shared[0]) == seen(found[0])
    assert seen(shared[1]) != seen(found[1])
    with pytest.raises(ConfigError, match=r"search must be one for all or one per prompt \(3\)"):
        llm.generate(prompts, GREEDY, search=[BEAM])
    with pytest.raises(ConfigError, match="search must be the name of a method"):
        llm.generate(prompts, GREEDY, search=[BEAM, BEAM, None])  # type: ignore[list-item]


def run(work: Any) -> Any:
    return asyncio.run(asyncio.wait_for(work, 120))


async def last_of(outputs: Any) -> RequestOutput:
    return [one async for one in outputs][-1]


def test_event_loops_get_what_llm_finds(llm: LLM) -> None:
    cases = CASES[:5]

    async def together() -> list[Any]:
        model = AsyncLLM(llm)
        found = await asyncio.gather(
            *(last_of(model.generate(PROMPT, params, search=search)) for search, params in cases),
            last_of(model.generate(PROMPT, GREEDY)),
        )
        return [*found]

    *found, plain = run(together())
    wanted = [llm.generate(PROMPT, params, search=search)[0] for search, params in cases]
    assert [seen(one) for one in found] == [seen(one) for one in wanted]
    assert [one.search.num_tokens for one in found] == [one.search.num_tokens for one in wanted if one.search]
    assert seen(plain) == seen(llm.generate(PROMPT, GREEDY)[0])
    (other,) = llm.generate(PROMPT, GREEDY, search={"method": "beam", "beam_width": 2})
    assert seen(other) != seen(found[0]), "the control: another width finds another score or text"


def test_a_stream_that_is_closed_and_a_cancelled_coroutine_free_their_caches(llm: LLM) -> None:
    memory = memory_of(llm)
    before = memory.used
    chunks = llm.stream(PROMPT, LONG, search={"method": "beam", "beam_width": 2})
    next(chunks)
    assert memory.used > before
    chunks.close()
    assert memory.used == before

    async def left() -> None:
        model = AsyncLLM(llm)
        task = asyncio.create_task(last_of(model.generate(PROMPT, LONG, search=BEAM)))
        while memory.used == before:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        for _ in range(500):
            if memory.used == before:
                return
            await asyncio.sleep(0.01)
        pytest.fail("the caches of a search that nobody waits for are still there")

    run(left())


class Interrupted(Search):
    """Is interrupted after some tokens, as by Ctrl-C."""

    name = "interrupted"

    def steps(self, root: Branch) -> Steps[None]:
        branches = [root, root.child(300, 0.0)]
        for _ in range(5):
            rows = yield branches
            branches = [one.child(int(row.argmax()), 0.0) for one, row in zip(branches, rows.logprobs, strict=True)]
        raise KeyboardInterrupt


def test_ctrl_c_frees_the_caches_and_ends_no_later_search(llm: LLM) -> None:
    before = memory_of(llm).used
    with pytest.raises(KeyboardInterrupt):
        llm.generate([PROMPT, "def fib(n):"], LONG, search=f"{HERE}:Interrupted")
    assert memory_of(llm).used == before
    with pytest.raises(KeyboardInterrupt):
        list(llm.stream(PROMPT, LONG, search=f"{HERE}:Interrupted"))
    assert memory_of(llm).used == before
    assert llm.generate(PROMPT, GREEDY, search=BEAM)[0].outputs[0].finish_reason in ("stop", "length")


class Failing(Search):
    """Fails after three tokens."""

    name = "failing"

    def steps(self, root: Branch) -> Steps[None]:
        here = root
        while here.length < 3:
            rows = yield [here]
            here = here.child(int(rows.logprobs[0].argmax()), 0.0)
        raise ZeroDivisionError("a mistake of a user's")


def test_a_search_that_fails_on_an_event_loop_ends_alone(llm: LLM) -> None:
    async def together() -> tuple[RequestOutput, RequestOutput, int]:
        model = AsyncLLM(llm)
        failing, beam = await asyncio.gather(
            last_of(model.generate(PROMPT, GREEDY, search=f"{HERE}:Failing")),
            last_of(model.generate(PROMPT, GREEDY, search=BEAM)),
        )
        return failing, beam, model.faults

    failing, beam, faults = run(together())
    assert "a mistake of a user's" in str(failing.outputs[0].error)
    assert seen(beam) == seen(llm.generate(PROMPT, GREEDY, search=BEAM)[0])
    assert faults == 0


def test_a_long_prompt_is_read_in_pieces_between_which_others_decode() -> None:
    model = LLM(
        dtype="float32", profile=False, speculative_config=None, enable_prefix_caching=False, max_num_batched_tokens=16
    )
    long = {"prompt_token_ids": [7 + i % 400 for i in range(600)]}
    extend, read = model.runner.extend, list[int]()
    (alone,) = model.generate(long, GREEDY, search=BEAM)

    def noted(caches: Any, chunks: Sequence[Sequence[int]], *more: Any, **others: Any) -> Any:
        read.append(
            model.engine.scheduler.running[0].output.token_ids.__len__() if model.engine.scheduler.running else 0
        )
        return extend(caches, chunks, *more, **others)

    beside = threading.Thread(target=lambda: model.generate(PROMPT, LONG), daemon=True)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(model.runner, "extend", noted)
        beside.start()
        while not model.engine.scheduler.running:
            pass
        (found,) = model.generate(long, GREEDY, search=BEAM)
    beside.join(60)
    assert seen(found) == seen(alone)
    assert len(read) >= 600 // 16
    assert read[30] - read[5] >= 5, "tokens came between the pieces"


def test_a_search_waits_for_memory_that_others_hold_and_decodes_them_meanwhile(llm: LLM) -> None:
    memory, prompt = memory_of(llm), {"prompt_token_ids": [7 + i % 400 for i in range(300)]}
    tight = LLM(
        dtype="float32", profile=False, speculative_config=None, enable_prefix_caching=False,
        kv_cache_memory_bytes=memory.block_bytes * (memory.blocks_for(400) + 4),
    )  # fmt: skip
    long = SamplingParams(temperature=0.0, max_tokens=80, ignore_eos=True)
    (alone,), (plain,) = tight.generate(prompt, GREEDY, search=BEAM), tight.generate(prompt, long)
    stream = tight.stream(prompt, long)
    next(stream)  # nobody asks it for more until the search has ended
    (found,) = tight.generate(prompt, GREEDY, search=BEAM)
    found.raise_for_error()
    assert seen(found) == seen(alone)
    assert not tight.engine.has_work, "it was decoded to its end"
    assert list(stream)[-1].output.outputs[0].token_ids == plain.outputs[0].token_ids


def test_closing_ends_searches(llm: LLM) -> None:
    model = LLM(dtype="float32", profile=False, speculative_config=None)
    chunks = model.stream(PROMPT, LONG, search={"method": "beam", "beam_width": 2})
    next(chunks)
    model.close()
    *_, last = chunks
    assert last.finish_reason == "abort"


class Nested(Search):
    """Searches for something else on its way."""

    name = "nested"
    llm: LLM
    inner: list[Any]

    def steps(self, root: Branch) -> Steps[None]:
        rows = yield [root]
        Nested.inner = [
            Nested.llm.generate(PROMPT, GREEDY, search=BEAM)[0],
            list(Nested.llm.stream(PROMPT, GREEDY, search=BEAM))[-1].output,
        ]
        self.found = [Found(root.child(int(rows.logprobs[0].argmax()), 0.0), 0.0)]


def test_functions_of_a_search_may_search(llm: LLM) -> None:
    Nested.llm = llm
    (found,) = llm.generate(PROMPT, GREEDY, search=f"{HERE}:Nested")
    found.raise_for_error()
    (wanted,) = llm.generate(PROMPT, GREEDY, search=BEAM)
    assert [seen(one) for one in Nested.inner] == [seen(wanted)] * 2


class Aside(Search):
    """Does something long beside the model, in which others must be able to decode."""

    name = "aside"
    llm: LLM
    others: list[Any]

    def steps(self, root: Branch) -> Steps[None]:
        rows = yield [root]

        def work() -> bool:
            def beside() -> None:
                Aside.others += [
                    seen(Aside.llm.generate("One day", GREEDY)[0]),
                    Aside.llm.stream(PROMPT, LONG, search=BEAM).close(),
                ]

            thread = threading.Thread(target=beside, daemon=True)
            thread.start()
            thread.join(30)
            return thread.is_alive()

        assert not self.aside(work)
        self.found = [Found(root.child(int(rows.logprobs[0].argmax()), 0.0), 0.0)]


def test_others_decode_while_a_search_does_something_beside(llm: LLM) -> None:
    Aside.llm, Aside.others = llm, []
    (found,) = llm.generate(PROMPT, GREEDY, search=f"{HERE}:Aside")
    found.raise_for_error()
    assert Aside.others[0] == seen(llm.generate("One day", GREEDY)[0])


@pytest.fixture(autouse=True, scope="module")
def _nothing_is_left(llm: LLM) -> Iterator[None]:
    yield
    assert memory_of(llm).used == 0
