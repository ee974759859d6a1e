"""The outermost layer of a server: an id and a line in the log for each request, and what is answered while the server
starts and stops.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.config import ServerConfig
from paceline.serving.api_errors import MESSAGES, ApiError
from paceline.serving.keys import Keys, limits_by_owner, read_keys
from paceline.serving.limits import HEALTH, LIVE, Guard, Origins, refuse, reply
from paceline.serving.quotas import Quotas
from paceline.serving.request_log import CLOSED, LogFields

logger = logging.getLogger("paceline.serving")

RESPONSES: Final = "/v1/responses"
COMPACT: Final = f"{RESPONSES}/compact"
STREAM: Final = b"text/event-stream"

OPEN_WHILE_DRAINING: Final = (LIVE, "/metrics")

AGAIN: Final = {"Retry-After": "5"}
"""When a server that is starting, or the one that replaces this one, may be asked."""

LAST: Final = {**AGAIN, "Connection": "close"}

FACTS: Final = "paceline.facts"
"""A message beside those of ASGI: what a replica knows of a request, for the log, and its tokens so far."""

FACTS_SECONDS: Final = 0.5
"""A replica sends it so often where the tokens of a key are limited: also who goes away has used what was decoded."""

MOST_ERROR: Final = 16 * 1024
"""So many bytes of an error's body are looked at for the log."""

CUT_SECONDS: Final = 1.0
"""Requests that are cut off have so many seconds to tell their clients."""

Json = dict[str, Any]


def metered(app: ASGIApp, config: ServerConfig, refused: Callable[[int], None]) -> Quotas:
    """Put before an application what counts requests and tokens of keys, for whoever asks it in a key's name.

    Args:
        refused: told the status of what is not let in.
    Raises:
        ConfigError: a file of keys that cannot be read.
    """
    return Quotas(app, limits_by_owner(config), refused)


def guarded(quotas: Quotas, config: ServerConfig, refused: Callable[[int], None]) -> Entrance:
    """Put before an application what decides who may use it, and from which pages, and writes the log.

    Args:
        quotas: before the application.
        refused: told the status of what is not let in.
    Raises:
        ConfigError: a file of keys that cannot be read.
    """
    guard = Guard(quotas, Keys(*read_keys(config)), config, refused)
    origins = Origins(guard, config.allowed_origins, refused)
    return Entrance(origins, refused, texts=config.log_requests, root_path=config.root_path)


class Entrance:
    """ASGI: gives each request an id, and writes one line to the log when it has ended, without any text of it.

    Args:
        refused: told the status of what is not let in.
        texts: errors are logged with what they quote of a request.
        root_path: that a proxy shows the server under; paths may begin with it.
    Attributes:
        draining: new requests are answered 503.
    """

    def __init__(
        self, app: ASGIApp, refused: Callable[[int], None], *, texts: bool = False, root_path: str = ""
    ) -> None:
        self._app, self._refused, self._texts, self._root = app, refused, texts, root_path
        self._running: dict[_Exchange, asyncio.Task[Any]] = {}
        self.draining = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if self._root:
            scope["root_path"] = self._root
            rest = scope["path"].removeprefix(self._root)
            if rest.startswith("/") and not rest.startswith(f"{self._root}/"):  # a proxy has not taken it off
                scope["path"] = rest  # once: the router would take a second one off
        task, exchange = asyncio.current_task(), _Exchange(scope, send, texts=self._texts)
        assert task is not None
        self._running[exchange] = task
        telling = asyncio.create_task(exchange.tell_facts()) if scope.get("metered") else None
        try:
            if self.draining and exchange.path not in OPEN_WHILE_DRAINING:
                await self._turned_away(exchange)
            else:
                await self._app(scope, receive, exchange.send)
        except asyncio.CancelledError:
            if exchange.why is None:
                raise
            task.uncancel()
            await exchange.end(exchange.why)
        finally:
            if telling is not None:
                telling.cancel()
            del self._running[exchange]
            exchange.log()

    async def _turned_away(self, exchange: _Exchange) -> None:
        if exchange.path in HEALTH:
            await reply(exchange.send, 503, {"status": "draining"}, LAST)
            return
        self._refused(503)
        why = "the server is shutting down; try again later"
        await refuse(exchange.send, ApiError(why, status=503, code="shutting_down", headers=LAST), exchange.path)

    async def drain(self, seconds: float, hurried: Callable[[], bool]) -> None:
        """Let nothing more in, and return when all that runs has ended. What has not after `seconds`, or when there is
        no time left for it, ends with an error.

        Args:
            hurried: there is no time left.
        """
        self.draining = True
        if self._running:
            logger.info("stopping when %d requests have ended, or after %g seconds", len(self._running), seconds)
        end = time.monotonic() + seconds
        while self._running and not hurried() and time.monotonic() < end:
            await asyncio.sleep(0.05)
        if self._running:
            why = "a second signal came" if hurried() else f"they took more than {seconds:g} seconds"
            logger.warning("%d requests are cut off: %s", len(self._running), why)
            await self._cut()

    async def _cut(self) -> None:
        why = "the server was shut down before the answer was complete"
        for exchange, task in self._running.items():
            exchange.why = ApiError(why, status=503, code="shutting_down", headers=LAST)
            task.cancel()
        end = time.monotonic() + CUT_SECONDS
        while self._running and time.monotonic() < end:
            await asyncio.sleep(0.01)


class _Exchange:
    """Follows one request, and keeps of its answer what the log tells.

    One that the process before replicas passes on (`relayed`) was let in by that already, which writes the line.

    Attributes:
        why: it is cut off; None where it is not.
    """

    def __init__(self, scope: Scope, send: Send, *, texts: bool) -> None:
        client_id = dict(scope["headers"]).get(b"x-request-id", b"").decode("latin-1")
        self._name = client_id if re.fullmatch(r"[A-Za-z0-9._-]{1,64}", client_id) else f"req-{time.time_ns():x}"
        self._facts = scope["facts"] = LogFields(texts=texts)
        self._scope, self._send, self.path = scope, send, scope["path"]
        self._relayed = scope.get("relayed", False)
        self._status, self._kind, self._error, self._ended = CLOSED, b"", b"", False
        self.why: ApiError | None = None

    async def send(self, message: Message) -> None:
        """Pass a message on, and keep what the log tells of it."""
        if message["type"] == "http.response.start":
            self._status, self._kind = message["status"], dict(message["headers"]).get(b"content-type", b"")
            if not self._relayed:
                message["headers"] = [*message["headers"], (b"x-request-id", self._name.encode())]
        elif message["type"] == FACTS:
            self._facts.update(message["facts"])
            self._facts.use(message["tokens"] - self._facts.tokens)
            return
        else:
            if self._status >= 400 and len(self._error) < MOST_ERROR:
                self._error += message.get("body", b"")
            self._ended = not message.get("more_body", False)
            if self._ended and self._relayed:
                await self._send_facts()
        await self._send(message)

    async def tell_facts(self) -> None:
        """Tell the process before this one again and again what is known of the request, until this is cancelled."""
        while True:
            await asyncio.sleep(FACTS_SECONDS)
            await self._send_facts()

    async def _send_facts(self) -> None:
        await self._send({"type": FACTS, "facts": dict(self._facts), "tokens": self._facts.tokens})

    async def end(self, error: ApiError) -> None:
        """Tell the client that there is no more; half an answer that is no stream is left without its end."""
        if self._ended:
            return
        self._facts.failed(error.status, error.message, error.code, None)
        with suppress(TimeoutError):
            async with asyncio.timeout(CUT_SECONDS):
                if self._status == CLOSED:
                    await refuse(self.send, error, self.path)
                elif self._kind.startswith(STREAM):
                    await self.send({"type": "http.response.body", "body": error_event(error, self.path)})

    def log(self) -> None:
        """Write the line."""
        if self._relayed:
            return
        owner = self._scope.get("owner", "")
        line = LogFields(
            request_id=self._name,
            **({"owner": owner[:12]} if owner else {}),
            method=self._scope["method"],
            path=self.path[:200],
            status=self._status,
            seconds=self._facts.seconds(),
        )
        if self._error and "error" not in self._facts:
            self._facts.failed_with(self._status, self._error)
        line.update(self._facts)
        logger.info("%s", line)


def error_event(error: ApiError, path: str) -> bytes:
    """Return the end of a stream of server-sent events that failed, as clients of that route read it."""
    body = error.body(path)
    if path.startswith(MESSAGES):
        return b"event: error\n" + _event(body)
    if path.startswith(RESPONSES):
        told = {"type": "error", "code": error.code, "message": error.message, "param": None}
        return b"event: error\n" + _event(told)
    return _event(body) + b"data: [DONE]\n\n"


def _event(body: Json) -> bytes:
    return b"data: " + json.dumps(body, separators=(",", ":")).encode() + b"\n\n"


class NotReady:
    """ASGI: answers 503, and why, until there is a model to answer.

    Attributes:
        doing: what is waited for.
    """

    def __init__(self) -> None:
        self.doing = "loading the model"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        if path == LIVE:
            await reply(send, 200, {"status": "live"})
        elif path in HEALTH:
            told = {"code": 503, "message": f"The server is {self.doing}.", "type": "unavailable_error"}
            await reply(send, 503, {"status": self.doing, "error": told}, AGAIN)
        else:
            why = f"the server is not ready yet, it is {self.doing}; try again later"
            await refuse(send, ApiError(why, status=503, code="not_ready", headers=AGAIN), path)
