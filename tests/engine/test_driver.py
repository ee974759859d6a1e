"""Threads that share a model, streams that are forgotten, cancellations in the middle of a step."""

from __future__ import annotations

import gc
from collections.abc import Callable
from itertools import count
from threading import Event, Thread
from typing import Any

import pytest
from engine.harness import engine
from toys import ToyRunner

from paceline.config import SamplingParams
from paceline.engine import EngineDriver, Request, Turns

PARAMS = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
PROMPTS = [[i, i + 1, 2] for i in range(8)]


def request(name: str, prompt: list[int]) -> Request:
    return Request(name, None, prompt, PARAMS, 7, 40)


def driver(runner: ToyRunner) -> EngineDriver:
    return EngineDriver(engine(runner), Turns())


def together(*works: Callable[[], Any]) -> None:
    """Run all at once; what one raises is raised here."""
    errors: list[BaseException] = []

    def guarded(work: Callable[[], Any]) -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [Thread(target=guarded, args=[work], daemon=True) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    if errors:
        raise errors[0]


def test_threads_get_their_own_texts() -> None:
    runner = ToyRunner(16, order=None)
    desk, found = driver(runner), {}

    def stream(i: int) -> None:
        found[i] = [token for chunk in desk.stream(request(f"s{i}", PROMPTS[i])) for token in chunk.token_ids]

    def run(i: int) -> None:
        mine = request(f"r{i}", PROMPTS[i])
        desk.run([mine])
        found[i] = mine.outputs[0].token_ids

    together(*(lambda i=i: (stream if i % 2 else run)(i) for i in range(8)))
    assert found == {i: runner.greedy(PROMPTS[i], 40) for i in range(8)}
    assert not desk.engine.has_work
    assert runner.open_caches == 0


def test_without_turns_threads_get_in_each_other_s_way(monkeypatch: pytest.MonkeyPatch) -> None:
    inside, most = 0, 0
    runner = ToyRunner(16, order=None)
    score, met = runner.score, Event()

    def watched(*given: Any, **more: Any) -> Any:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        met.wait(0.002)
        inside -= 1
        return score(*given, **more)

    monkeypatch.setattr(runner, "score", watched)
    for turns, together_at_most in ((None, 2), (Turns(), 1)):
        most = 0
        own = [EngineDriver(engine(runner), turns or Turns()) for _ in range(2)]
        together(*(lambda d=d: d.run([request("x", [1, 2, 3])]) for d in own))
        assert most == together_at_most


@pytest.mark.parametrize("forget", [False, True], ids=["closed", "forgotten"])
def test_a_stream_given_up_gives_everything_back(forget: bool) -> None:
    runner = ToyRunner(16, order=None)
    desk = driver(runner)
    stream: Any = desk.stream(request("x", [1, 2, 3]))
    next(stream)
    assert desk.engine.has_work
    if forget:
        del stream
        gc.collect()
    else:
        stream.close()
    assert not desk.engine.has_work
    assert runner.open_caches == 0
    assert not desk.inboxes


def test_a_stream_forgotten_in_the_middle_of_a_step_does_not_disturb_it(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = ToyRunner(16, order=None)
    desk, score = driver(runner), runner.score
    streams = [desk.stream(request("forgotten", [4, 5]))]
    next(streams[0])

    def collecting(*given: Any, **more: Any) -> Any:
        streams.clear()  # as the garbage collector may do at any moment
        return score(*given, **more)

    monkeypatch.setattr(runner, "score", collecting)
    kept = request("kept", [1, 2, 3])
    desk.run([kept])
    assert kept.outputs[0].token_ids == runner.greedy([1, 2, 3], 40)
    assert not desk.engine.has_work
    assert runner.open_caches == 0


def test_a_step_that_raises_ends_all_that_took_part() -> None:
    runner = ToyRunner(16, order=None)
    desk = driver(runner)
    other = desk.stream(request("other", [4, 5]))
    next(other)
    desk.engine.watchers.append(lambda record: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        desk.run([request("mine", [1, 2])])
    desk.engine.watchers.clear()
    *_, last = other
    assert last.finish_reason == "error"
    assert "ZeroDivisionError" in str(last.output.outputs[0].error)
    assert runner.open_caches == 0
    after = request("after", [1, 2])
    desk.run([after])
    assert after.outputs[0].token_ids == runner.greedy([1, 2], 40)


def step_often(desk: EngineDriver) -> None:
    for _ in range(60):
        desk.step()


def failing_at(call: int, real: Callable[..., Any]) -> Callable[..., Any]:
    """Raises in one of its calls."""
    calls = count(1)

    def wrapped(*given: Any, **more: Any) -> Any:
        if next(calls) == call:
            raise MemoryError("no room")
        return real(*given, **more)

    return wrapped


@pytest.mark.parametrize("call", [1, 2])
def test_outputs_that_end_in_a_step_whose_removals_fail_are_whole(call: int, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = ToyRunner(16, order=None)
    desk = driver(runner)
    for name in ("one", "other"):
        desk.open(request(name, [4, 5]))
    monkeypatch.setattr(desk.engine.scheduler, "remove", failing_at(call, desk.engine.scheduler.remove))
    with pytest.raises(MemoryError):
        step_often(desk)
    for name in ("one", "other"):
        chunks = desk.collect(name)
        assert [token for chunk in chunks for token in chunk.token_ids] == runner.greedy([4, 5], 40)
        assert [chunk.finish_reason for chunk in chunks if chunk.finish_reason] == ["length"]
    assert not desk.engine.has_work
    assert runner.open_caches == 0


def test_a_cancellation_that_fails_ends_what_had_begun_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = ToyRunner(16, order=None)
    desk = driver(runner)
    for name in ("gone", "other"):
        desk.open(request(name, [4, 5]))
    desk.step()
    monkeypatch.setattr(desk.engine.scheduler, "remove", failing_at(1, desk.engine.scheduler.remove))
    with pytest.raises(MemoryError):
        desk.drop("gone")
    desk.step()
    assert [chunk.finish_reason for chunk in desk.collect("other")] == [None, "error"]
    assert not desk.engine.has_work
    assert runner.open_caches == 0
