"""Applications of ASGI that no server runs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any


@asynccontextmanager
async def alive(app: Any) -> AsyncIterator[None]:
    """The life of an ASGI application that no server runs: it begins and ends with the block."""
    told, said = asyncio.Queue[dict[str, Any]](), asyncio.Queue[dict[str, Any]]()
    scope = {"type": "lifespan", "asgi": {"version": "3.0"}, "state": {}}
    life = asyncio.create_task(app(scope, told.get, said.put))
    told.put_nowait({"type": "lifespan.startup"})
    await said.get()
    try:
        yield
    finally:
        told.put_nowait({"type": "lifespan.shutdown"})
        await life
