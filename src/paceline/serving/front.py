"""The address that clients talk to, before any number of replicas: it lets in, chooses a replica, and passes on what
comes as it comes.

A replica that dies costs only what had begun: a request of which nothing was sent yet goes to another one, and a stream
ends with an error event. It knows of replicas only what `Fleet` says.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterable, Coroutine, Iterable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any, Final, Protocol

from prometheus_client import Counter, Gauge, Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from starlette.types import Message, Receive, Scope, Send

from paceline.config import ServerConfig
from paceline.serving.api_errors import ApiError, internal_error
from paceline.serving.bodies import LARGE, check_items
from paceline.serving.entrance import COMPACT, FACTS, RESPONSES, STREAM, Entrance, error_event, guarded, metered
from paceline.serving.limits import HEALTH, LIVE, LOAD, OPEN, BodyError, Slots, refuse, reply, uploads
from paceline.serving.metrics import Registry
from paceline.serving.routing import Affinity, affinity_of

TRIES: Final = 3
"""Replicas that a request is sent to, while they die before they have sent anything."""

PASSED: Final = (
    *("type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "query_string", "root_path", "headers"),
    *("client", "server"),
)
"""A replica is told these parts of a request's scope."""

LATER: Final = 5.0
"""Seconds that a replica has more than a request may take, so that it can say so itself."""

Json = dict[str, Any]
AnswerStream = AbstractAsyncContextManager[AsyncIterable[list[Message]]]
"""Messages of ASGI as they come; the end of the block ends the request."""


class Fleet(Protocol):
    """Passes requests to replicas."""

    gone: tuple[type[Exception], ...]
    """Raised where the replica that answers has died."""

    failed: tuple[type[Exception], ...]
    """Raised where it has failed otherwise."""

    def answer(self, scope: Json, body: bytes, affinity: Affinity) -> AnswerStream:
        """Ask one replica, the one that suits the request best."""
        ...

    async def all(self, scope: Json, body: bytes = b"") -> list[tuple[str, int, list[Message]]]:
        """Ask every replica; returns of each its name, the status and the messages of its answer."""
        ...


def front_app(fleet: Fleet, config: ServerConfig, *, shared_responses: bool = True) -> Entrance:
    """Build the server before replicas, as an ASGI application.

    Args:
        config: the same that the replicas have.
        shared_responses: the replicas share a file of stored responses; otherwise requests that need one are refused.
    Raises:
        ConfigError: a file of keys that cannot be read.
    """
    counts = _Counts((*config.served_model_name, "")[0] if config.vllm_metrics else None)
    front = Front(fleet, config, counts, shared_responses=shared_responses)
    return guarded(metered(front, config, counts.refused), config, counts.refused)


class Front:
    """ASGI, behind a `Guard`: passes each request to a replica, and answers what is about all of them."""

    def __init__(self, fleet: Fleet, config: ServerConfig, counts: _Counts, *, shared_responses: bool) -> None:
        self._fleet, self._config, self._counts, self._shared = fleet, config, counts, shared_responses
        self._slots = Slots(config, {})  # a replica counts outputs

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _live(receive, send)
            return
        try:
            await self._routed(scope, receive, send)
        except ApiError as error:
            self._counts.refused(error.status)
            await refuse(send, error, scope["path"])

    async def _routed(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer what is about the front or about all replicas, and pass everything else to one."""
        path, plain = scope["path"], Json({name: scope[name] for name in PASSED if name in scope}, relayed=True)
        body = await _body(receive)
        if path == "/metrics":
            await self._metrics(plain, send)
        elif path == LIVE:
            await reply(send, 200, {"status": "live"})
        elif path == LOAD:
            await reply(send, 200, {"server_load": self._slots.running.total()})
        elif path in HEALTH:
            await self._pick(plain, send, (200,))
        elif path.startswith(f"{RESPONSES}/") and path != COMPACT:
            await self._pick(plain, send, (200, 409, 400))
        elif path.startswith("/page") or path in OPEN:
            raise ApiError("the live page shows one engine; with replicas, read /metrics", status=404, code="no_page")
        else:
            owner = scope["owner"]
            with self._slots.slot(owner, 0):
                if len(body) > LARGE and not uploads(scope):
                    await asyncio.to_thread(check_items, body)
                if path == RESPONSES and not self._shared:
                    body = await asyncio.to_thread(_unstored, body)
                read = asyncio.to_thread(affinity_of, owner, path, body) if len(body) > LARGE else None
                affinity = affinity_of(owner, path, body) if read is None else await read
                plain["metered"] = scope.get("metered", False)
                await _until_gone(receive, self._relayed(plain, body, affinity, send))

    async def _relayed(self, scope: Json, body: bytes, affinity: Affinity, send: Send) -> None:
        """Answer from one replica, or another one while nothing has been sent."""
        passing = Passing(send, scope["path"])
        try:
            async with asyncio.timeout(self._config.request_timeout + LATER) as clock:
                for _ in range(TRIES):
                    if await self._passed(self._fleet.answer(scope, body, affinity), passing, clock):
                        return
        except TimeoutError:
            raise ApiError("no replica has answered in time", status=504, code="timeout") from None
        again = {"Retry-After": "1"}
        raise ApiError(f"{TRIES} replicas died under this request", status=503, code="replica_died", headers=again)

    async def _passed(self, answer: AnswerStream, passing: Passing, clock: asyncio.Timeout) -> bool:
        """Pass on an answer; returns whether the client has had one, be it the end of what had begun.

        Args:
            clock: stopped once it has begun, since its replica has one.
        """
        try:
            async with answer as parts:
                async for part in parts:
                    await passing.add(part)
                    if passing.begun:
                        clock.reschedule(None)
        except self._fleet.gone:
            pass
        except self._fleet.failed:
            if not passing.begun:
                raise internal_error() from None
            if not passing.complete:
                await passing.end(internal_error())
            return True
        if passing.complete:
            return True
        self._counts.lost.inc()
        if passing.begun:
            await passing.end(ApiError("the replica that answered has died", status=502, code="replica_died"))
        return passing.begun

    async def _pick(self, scope: Json, send: Send, good: tuple[int, ...]) -> None:
        """Ask all replicas, and pass on the answer whose status comes first in `good`; any, where none is in it."""
        answers = await self._asked(scope)
        best = min(answers, key=lambda answer: good.index(answer[1]) if answer[1] in good else len(good))
        for message in best[2]:
            await send(message)

    async def _metrics(self, scope: Json, send: Send) -> None:
        pages = {name: _text(messages) for name, status, messages in await self._asked(scope) if status == 200}
        self._counts.replicas.set(len(pages))
        page = generate_latest(_Merged({"front": self._counts.page(), **pages}))
        kind = [(b"content-type", b"text/plain; version=0.0.4; charset=utf-8")]
        await send({"type": "http.response.start", "status": 200, "headers": kind})
        await send({"type": "http.response.body", "body": page})

    async def _asked(self, scope: Json) -> list[tuple[str, int, list[Message]]]:
        try:
            answers = await self._fleet.all(scope)
        except TimeoutError:
            answers = []
        if not answers:
            raise ApiError("no replica answers now; try again later", status=503, headers={"Retry-After": "1"})
        return answers


class Passing:
    """Passes the messages of one answer on to a client; its head waits for the first of its body.

    Attributes:
        begun: something was sent. complete: all was.
    """

    def __init__(self, send: Send, path: str) -> None:
        self._send, self._path = send, path
        self._head: Message = {}
        self.begun = self.complete = False

    async def add(self, messages: Iterable[Message]) -> None:
        """Pass these messages on."""
        for message in messages:
            if message["type"] == FACTS:
                await self._send(message)
                continue
            if message["type"] == "http.response.start":
                self._head = message
                continue
            if not self.begun:
                self.begun = True
                await self._send(self._head)
            await self._send(message)
            self.complete = not message.get("more_body", False)

    async def end(self, error: ApiError) -> None:
        """End what has begun with an error, as an event where it is a stream.

        Raises:
            ConnectionError: it is none; the connection must break, so that half an answer is not taken for a whole.
        """
        headers = dict(self._head["headers"])
        if not headers.get(b"content-type", b"").startswith(STREAM):
            raise ConnectionError(error.message)
        await self._send({"type": "http.response.body", "body": error_event(error, self._path)})


class _Counts:
    """Counts what happens in this process, beside what replicas count."""

    def __init__(self, model_name: str | None) -> None:
        self._registry = Registry(model_name)
        new = self._registry.new
        self.rejected = new(Counter, "requests_rejected", "Requests answered with an error, by status.", "status")
        self.lost = new(Counter, "replica_lost", "Requests whose replica died.")
        self.replicas = new(Gauge, "num_replicas", "Replicas that answer.")

    def refused(self, status: int) -> None:
        self.rejected.labels(str(status)).inc()

    def page(self) -> str:
        return self._registry.page().decode()


class _Merged:
    """Merges the metrics of several pages, each sample labelled with the name of its page.

    Args:
        pages: in Prometheus's text format, by name.
    """

    def __init__(self, pages: Mapping[str, str]) -> None:
        self._pages = pages

    def collect(self) -> Iterable[Metric]:
        """Return the families of metrics of all pages, each once."""
        merged: dict[str, Metric] = {}
        for name, page in self._pages.items():
            for family in text_string_to_metric_families(page):
                whole = merged.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                for sample in family.samples:
                    whole.add_sample(sample.name, {**sample.labels, "replica": name}, sample.value)
        return merged.values()


async def _live(receive: Receive, send: Send) -> None:
    """Answer for the life of an application that has nothing to begin or to end."""
    for kind in ("startup", "shutdown"):
        await receive()
        await send({"type": f"lifespan.{kind}.complete"})


async def _body(receive: Receive) -> bytes:
    """Read the whole body; a client that goes away leaves what came.

    Raises:
        ApiError: it is too long, or takes too long to arrive.
    """
    body, more = bytearray(), True
    while more:
        try:
            message = await receive()
        except BodyError as error:  # too long, or too slow
            raise error.error from None
        body += message.get("body", b"")
        more = message.get("more_body", False)
    return bytes(body)


async def _until_gone(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Do the work, or end it where the client goes away."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(receive())
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
    finally:
        for running in (task, gone):
            running.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


def _text(messages: Iterable[Message]) -> str:
    return b"".join(message.get("body", b"") for message in messages).decode()


def _unstored(body: bytes) -> bytes:
    """Return the body of a request to `/v1/responses` as it is where none are stored.

    Raises:
        ApiError: it needs a stored one, or asks for it.
    """
    try:
        asked = json.loads(body)
    except (ValueError, RecursionError):
        return body  # the replica says what is wrong
    if not isinstance(asked, dict):
        return body
    for name, wrong in (("previous_response_id", asked.get("previous_response_id")), ("store", asked.get("store"))):
        if wrong:
            why = f"{name}: replicas on several machines store no responses; send the whole input, with store: false"
            raise ApiError(why, param=name, code="responses_not_stored")
    return json.dumps(asked | {"store": False}).encode()
