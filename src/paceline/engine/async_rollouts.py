"""Rollouts in segments for event loops: the steps of a `RolloutPool`, each on a thread."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Self, TypeVar

from paceline.engine.rollouts import Rollout, RolloutPool

T = TypeVar("T")


class AsyncRolloutPool:
    """Samples on their way. Iterating over it steps until all prompts are done and yields what ends, as it ends.

    A step that is cancelled ends within one step of decoding; the next goes on where it was.

    Args:
        pool: used by nobody else.
    """

    def __init__(self, pool: RolloutPool) -> None:
        self._pool, self._lock = pool, asyncio.Lock()

    @property
    def policy_version(self) -> int:
        """Of the weights, as the caller counts it."""
        return self._pool.policy_version

    @property
    def unfinished(self) -> list[Rollout]:
        """The samples in the pool, as they are after the last step."""
        return self._pool.unfinished

    @property
    def done(self) -> bool:
        """Whether all prompts are done."""
        return self._pool.done

    async def step(self) -> list[Rollout]:
        """As `RolloutPool.step`, while the event loop goes on.

        Raises:
            PromptError, ConfigError: a prompt that cannot be decoded; it is left out, and nothing else is lost.
        """
        async with self._lock:
            await _threaded(self._pool.begin_segment)
            while await _threaded(self._pool.advance):
                pass
            return self._pool.gathered()

    async def update_policy(self, version: int | None = None) -> None:
        """See `RolloutPool.update_policy`."""
        async with self._lock:
            await _threaded(lambda: self._pool.update_policy(version))

    async def __aiter__(self) -> AsyncIterator[Rollout]:
        while not self.done:
            for sample in await self.step():
                yield sample

    async def close(self) -> None:
        """Cancel what is in the pool, behind a step that is on its way."""
        async with self._lock:
            await _threaded(self._pool.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()


async def _threaded(work: Callable[[], T]) -> T:
    """Do `work` on a thread; where the caller is cancelled, it is waited for all the same."""
    task = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        raise
