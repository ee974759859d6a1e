"""Closing waits for nothing that takes long: a step under way, whatever it compiles or measures, ends by itself."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from threading import Event, Thread
from typing import Any

import pytest
import torch

from paceline import LLM, AsyncLLM, SamplingParams

PATIENCE = 20.0
"""Seconds after which something is taken to wait for ever."""


class Stuck:
    """A logits processor that goes on when it is let go."""

    def __init__(self) -> None:
        self.reached, self.free = Event(), Event()

    def __call__(self, tokens: list[int], logits: torch.Tensor) -> torch.Tensor:
        self.reached.set()
        assert self.free.wait(2 * PATIENCE)
        return logits

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(temperature=0.0, max_tokens=50, logits_processors=[self])


@pytest.fixture
def stuck() -> Iterator[Stuck]:
    made = Stuck()
    yield made
    made.free.set()


def returns(work: Any, seconds: float = PATIENCE) -> bool:
    """Whether a call comes back; if not, it is left alone."""
    thread = Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    return not thread.is_alive()


def test_a_model_closes_while_another_thread_is_in_a_step(stuck: Stuck) -> None:
    llm, found = LLM(speculative_config=None, dtype="float32"), list[Any]()
    other = Thread(target=lambda: found.extend(llm.generate("One day", stuck.params, use_tqdm=False)), daemon=True)
    other.start()
    assert stuck.reached.wait(PATIENCE)
    assert not returns(llm.reset_prefix_cache, 0.2)  # which needs a turn, as closing did
    assert returns(llm.close)
    assert not found
    stuck.free.set()
    other.join(PATIENCE)
    (output,) = found[0].outputs
    assert output.finish_reason == "abort"
    assert len(output.token_ids) <= 1


def test_a_model_of_event_loops_closes_while_its_thread_is_in_a_step(stuck: Stuck) -> None:
    async def closing() -> Any:
        model = AsyncLLM(speculative_config=None, dtype="float32")
        chunks = model.stream("One day", stuck.params)
        first = asyncio.ensure_future(anext(chunks))
        assert await asyncio.to_thread(stuck.reached.wait, PATIENCE)
        closed = await asyncio.to_thread(returns, model.close)
        waiting = not first.done()
        stuck.free.set()
        ends = [(await first).finish_reason, *[chunk.finish_reason async for chunk in chunks]]
        return closed, waiting, ends[-1]

    assert asyncio.run(closing()) == (True, True, "abort")
