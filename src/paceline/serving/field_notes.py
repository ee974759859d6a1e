"""What becomes of a request's fields, from where they are read to where its answer is told."""

from __future__ import annotations

import re
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

MOST: Final = 64
"""So many ignored fields are named, with so many letters of each."""


@dataclass(slots=True)
class Notes:
    """Holds what becomes of the fields of one request.

    Attributes:
        lenient: fields that cannot be honoured are ignored.
        ignored: their names.
        names: of fields as the client wrote them, where they have others here.
    """

    lenient: bool = False
    ignored: list[str] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)

    def ignore(self, name: str) -> None:
        """Note a field as ignored, in letters that a header may have."""
        told = re.sub(r"[^A-Za-z0-9._-]", "_", name[:MOST])
        if told not in self.ignored and len(self.ignored) < MOST:
            self.ignored.append(told)


NOTES: Final[ContextVar[Notes | None]] = ContextVar("NOTES", default=None)
"""The notes of the request that is read."""


class FieldNotes:
    """ASGI: keeps notes of each request, and names the fields that were ignored in the header `x-ignored-fields`.

    Args:
        lenient: fields that cannot be honoured are ignored.
    """

    def __init__(self, app: ASGIApp, *, lenient: bool) -> None:
        self._app, self._lenient = app, lenient

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        notes = Notes(self._lenient)

        async def told(message: Message) -> None:
            if message["type"] == "http.response.start" and notes.ignored:
                header = (b"x-ignored-fields", ", ".join(notes.ignored).encode())
                message["headers"] = [*message["headers"], header]
            await send(message)

        token = NOTES.set(notes)
        try:
            await self._app(scope, receive, told if self._lenient else send)
        finally:
            NOTES.reset(token)
