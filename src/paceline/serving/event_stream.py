"""An answer by server-sent events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import ExitStack
from typing import Final

from fastapi.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

KEEP_ALIVE: Final = 15.0
"""Seconds without an event after which a comment is sent, so that nobody in between hangs up; up to twice as many."""


class EventStream(StreamingResponse):
    """Sends events as they come, and a comment after `KEEP_ALIVE` seconds without one.

    Args:
        slot: closed at the end, also where the client has gone before the first event.
    """

    def __init__(self, events: AsyncGenerator[bytes], slot: ExitStack) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._events, self._slot = events, slot

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sent = False  # since the last look; a timer for each event would cost more than the event

        async def told(message: Message) -> None:
            nonlocal sent
            sent = True
            if not message.get("more_body", True):
                beat.cancel()
            await send(message)

        async def keep_alive() -> None:
            nonlocal sent
            while True:
                sent = False
                await asyncio.sleep(KEEP_ALIVE)
                if not sent:
                    await send({"type": "http.response.body", "body": b": keep-alive\n\n", "more_body": True})

        with self._slot:
            beat = asyncio.create_task(keep_alive())
            try:
                await super().__call__(scope, receive, told)
            finally:
                beat.cancel()
                await self._events.aclose()
