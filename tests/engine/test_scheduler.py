"""Who runs when: long prompts leave the others their turns, the batch stays full, first come is first served."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine.harness import engine, tokens
from toys import ToyRunner

from paceline.config import SamplingParams
from paceline.engine import Engine, Request, StepRecord, watching
from paceline.engine.scheduler import Scheduler

CHUNK = 16
LONG = [1 + i % 7 for i in range(200)]


def request(name: str, prompt: Sequence[int], most: int, **params: Any) -> Request:
    given = SamplingParams(temperature=0.0, max_tokens=most, ignore_eos=True, **params)
    return Request(name, None, list(prompt), given, 7, most)


class Counting(ToyRunner):
    """Counts the prompt tokens fed between two decoding steps."""

    def __init__(self) -> None:
        super().__init__(16, order=2)
        self.between = [0]

    def extend(self, caches: Any, chunks: Any, **options: Any) -> Any:
        self.between[-1] += sum(map(len, chunks))
        return super().extend(caches, chunks, **options)

    def score(self, *given: Any, **options: Any) -> Any:
        self.between.append(0)
        return super().score(*given, **options)


def most_between_steps(live: Engine, runner: Counting) -> int:
    """A short request runs, a long prompt comes: most prompt tokens that the short one has to wait for at a time."""
    short, long = request("short", [1, 2], 40), request("long", LONG, 2)
    live.add(short)
    live.step()
    runner.between = [0]
    live.add(long)
    while not short.finished:
        live.step()
    assert len(short.outputs[0].token_ids) == 40
    assert sum(runner.between) == len(LONG) - 1
    return max(runner.between)


def test_a_long_prompt_holds_nobody_up_for_longer_than_a_chunk() -> None:
    runner = Counting()
    assert most_between_steps(engine(runner, max_num_batched_tokens=CHUNK), runner) == CHUNK


def test_a_prompt_fed_at_once_fails_that_check() -> None:
    runner = Counting()
    assert most_between_steps(engine(runner, max_num_batched_tokens=4096), runner) > CHUNK


def sizes_of_steps(live: Engine, count: int) -> tuple[list[int], list[str]]:
    """Sequences of every step while somebody waits, and the order in which requests began."""
    requests = [request(f"r{i}", [1 + i % 5, 2, 3], 3 + i % 9) for i in range(count)]
    for one in requests:
        live.add(one)
    sizes: list[int] = []
    begun: dict[str, None] = {}

    def look(record: StepRecord) -> None:
        begun.update(dict.fromkeys(sequence.request.id for sequence in record.sequences))
        if live.scheduler.waiting:
            sizes.append(len(record.sequences))

    with watching(live, look):
        while live.has_work:
            live.step()
    assert all(one.finished for one in requests)
    return sizes, list(begun)


def test_a_hundred_requests_keep_the_batch_full_and_start_in_turn() -> None:
    sizes, begun = sizes_of_steps(engine(ToyRunner(16, order=2), max_num_seqs=8), 100)
    assert begun == [f"r{i}" for i in range(100)]
    assert set(sizes) == {8}


def test_a_scheduler_that_waits_for_the_batch_to_end_fails_that_check() -> None:
    class InBatches(Scheduler):
        def prefill(self) -> None:
            if not self.running:
                super().prefill()

    live = engine(ToyRunner(16, order=2), max_num_seqs=8)
    live.scheduler.__class__ = InBatches
    sizes, _ = sizes_of_steps(live, 100)
    assert min(sizes) < 8


def test_a_request_of_many_outputs_is_not_overtaken() -> None:
    live = engine(ToyRunner(16, order=2), max_num_seqs=4)
    first, wide, small = request("first", [1, 2], 12), request("wide", [1, 3], 4, n=4), request("small", [1, 4], 4)
    for one in (first, wide, small):
        live.add(one)
    while not first.finished:
        live.step()
        assert not small.outputs, "a later request went ahead of one that waits for room"
    while live.has_work:
        live.step()
    assert [len(own) for found in tokens([first, wide, small]) for own in found] == [12, 4, 4, 4, 4, 4]
