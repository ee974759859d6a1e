"""What the APIs beside OpenAI's chat share: their requests become chat requests, and the events of a chat, block by
block, their events and answers. A whole answer is read off the same events.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final, Protocol

from fastapi import Request
from fastapi.responses import Response

from paceline.serving.api_errors import ApiError
from paceline.serving.protocol import ChatRequest, checked
from paceline.serving.request_log import CLOSED
from paceline.serving.runs import Json, RequestRun, event, large_response, unless_gone

CHAT: Final[Json] = {"stream": True, "return_token_ids": True}
"""The chat is asked with these fields beside those of the request."""


class Outgoing(Protocol):
    """Is an answer to be sent, as events or whole."""

    stream: bool

    def events(self) -> AsyncGenerator[bytes]: ...
    async def whole(self, http: Request) -> Response: ...


class ChatHandler(Protocol):
    """Answers a chat, in the words of a translation."""

    async def __call__(
        self, request: ChatRequest, http: Request, translated: Callable[[RequestRun], Outgoing], /
    ) -> Response: ...


@dataclass(slots=True)
class ChatPiece:
    """Is a part of a chat's event, which belongs to one block.

    Attributes:
        block: what it belongs to: "thinking", "text", or the number of a call.
        text: what it adds to the thoughts, the text or the call's arguments.
        call: its id and name, where a call begins.
    """

    block: str | int
    text: str
    call: tuple[str, str] = ("", "")


def pieces(choice: Json) -> Iterator[ChatPiece]:
    """Yield what a choice of a chat's event adds."""
    delta = choice["delta"]
    for name, block in (("reasoning_content", "thinking"), ("content", "text")):
        if delta.get(name):
            yield ChatPiece(block, delta[name])
    for call in delta.get("tool_calls") or ():
        function = call["function"]
        yield ChatPiece(
            call["index"], function.get("arguments") or "", (call.get("id") or "", function.get("name") or "")
        )


class Translation(ABC):
    """Tells an answer in the words of another API.

    Attributes:
        tokens, thoughts: how many were generated, and how many of them when the last thought came.
        reason, stopped_by: why the chat ended, None before; which of the stop texts, if one did.
    """

    last = b""

    def __init__(self, run: RequestRun, *, stream: bool) -> None:
        self.run, self.stream = run, stream
        self.tokens = self.thoughts = 0
        self.reason: str | None = None
        self.stopped_by: str | None = None
        self._block: str | int | None = None

    @abstractmethod
    def begin(self) -> Iterable[Json]:
        """Return the first events."""

    @abstractmethod
    def open(self, piece: ChatPiece) -> Iterable[Json]:
        """Begin a block, and return its events."""

    @abstractmethod
    def add(self, piece: ChatPiece) -> Iterable[Json]:
        """Let the block grow, and return its events."""

    @abstractmethod
    def shut(self) -> Iterable[Json]:
        """End the block, and return its events."""

    @abstractmethod
    async def end(self) -> Iterable[Json]:
        """Return the last events; no block is open."""

    @abstractmethod
    async def fail(self, error: ApiError) -> Iterable[Json]:
        """Return the last events where something ended the chat; a block may be open."""

    @abstractmethod
    def body(self) -> Json:
        """Return the whole answer after the end."""

    def extra(self, choice: Json) -> None:  # noqa: B027
        """Take what else is in a choice, before its pieces are read."""

    def forget(self) -> None:  # noqa: B027
        """Let go of the answer, which is sent, or which nobody waits for."""

    async def events(self) -> AsyncGenerator[bytes]:
        """Yield server-sent events, each with its name."""
        try:
            yield _lines(self.begin())
            async with aclosing(self.run.frames()) as parts:
                async for part in parts:
                    if lines := _lines(self._read(part)):
                        yield lines
            yield _lines([*self.close(), *await self.end()])
        except ApiError as error:
            yield _lines(await self.fail(error))
        finally:
            self.forget()
        if self.last:
            yield self.last

    async def whole(self, http: Request) -> Response:
        """Return the answer of the same events; decoding ends with the client's connection."""
        try:
            answer = await unless_gone(http, self._gathered())
            return Response(status_code=CLOSED) if answer is None else await large_response(answer)
        finally:
            self.forget()

    async def _gathered(self) -> Json:
        list(self.begin())
        async with aclosing(self.run.frames()) as parts:
            async for part in parts:
                list(self._read(part))
        list(self.close())
        await self.end()
        return self.body()

    def _read(self, frames: Iterable[Json]) -> Iterator[Json]:
        """Read the events of the chat into events of this API, and keep what its end needs."""
        for frame in frames:
            for choice in frame["choices"]:
                self.tokens += len(choice.get("token_ids", ()))
                self.extra(choice)
                for piece in pieces(choice):
                    yield from self._piece(piece)
                if choice["finish_reason"] is not None:
                    self.reason, by = choice["finish_reason"], choice.get("stop_reason")
                    self.stopped_by = by if isinstance(by, str) else None

    def _piece(self, piece: ChatPiece) -> Iterator[Json]:
        """Let a piece end and begin blocks as it must, and add it."""
        if piece.block != self._block:
            yield from self.close()
            self._block = piece.block
            yield from self.open(piece)
        if piece.block == "thinking":
            self.thoughts = self.tokens
        if piece.text:
            yield from self.add(piece)

    def close(self) -> Iterator[Json]:
        """End the open block, if there is one."""
        if self._block is not None:
            yield from self.shut()
            self._block = None


def _lines(bodies: Iterable[Json]) -> bytes:
    return b"".join(b"event: " + body["type"].encode() + b"\n" + event(body) for body in bodies)


def chat_request(fields: Json, names: Mapping[str, str]) -> ChatRequest:
    """Return the chat that another API asks for.

    Args:
        fields: of the chat; those that are None are left out.
        names: of its fields in the other API.
    Raises:
        ApiError: a field that is wrong, under the other API's name.
    """
    try:
        return checked(ChatRequest, CHAT | {name: value for name, value in fields.items() if value is not None})
    except ApiError as error:
        raise error.renamed(names) from None
