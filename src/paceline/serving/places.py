"""Places for what prepares requests (threads, processes), in which keys take turns: a key that floods the server waits
for itself, and the others for no more than what runs.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import Final

from paceline.engine import FairQueue

OWNER: Final = ContextVar("owner", default="")
"""Whose request the present task answers."""


class Places:
    """Lets so many work at once, and keys wait in turn. It is used by one event loop.

    Attributes:
        waiting: how many wait, by owner.
    """

    def __init__(self, count: int) -> None:
        self.waiting, self._free = Counter[str](), count
        self._line = FairQueue[asyncio.Future[None]]()

    @asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """Hold a place until the block ends."""
        await self.take()
        try:
            yield
        finally:
            self.give()

    async def take(self) -> None:
        """Wait for a place, and hold it until `give`."""
        if self._free:
            self._free -= 1
            return
        owner, turn = OWNER.get(), asyncio.get_running_loop().create_future()
        self._line.append(owner, turn)
        self.waiting[owner] += 1
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._line.remove(owner, turn)
            else:  # it had just come
                self.give()
            raise
        finally:
            self.waiting[owner] -= 1

    def give(self) -> None:
        """Let the next one have the place."""
        while self._line:
            turn = self._line.pop(self._line.owners[0])
            if not turn.done():  # nobody waits for one that was cancelled
                turn.set_result(None)
                return
        self._free += 1
