"""Limits of what one client may ask, checked before anything is read or decoded: keys, hosts, sizes, the queue."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import socket
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from ipaddress import ip_address
from typing import Any, Final

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.config import LOOPBACK, KeyLimits, ServerConfig
from paceline.serving.api_errors import ApiError
from paceline.serving.keys import NO_LIMITS, Keys
from paceline.utils import shortened

PAGE_FILES: Final = ("page.css", "page.js", "markdown.js", "explain.css", "tree.js")
"""The live page is made of these files, beside itself."""

LIVE: Final = "/health/live"
"""Answered 200 as long as the process can answer."""

PING: Final = "/ping"
"""SageMaker asks this, with GET; vLLM takes POST, too."""

HEALTH: Final = ("/health", "/health/ready", "/v1/health", PING)
"""Answered 200 while requests are."""

LOAD: Final = "/load"
"""Answered with how many requests run or wait."""

FILES: Final = "/v1/files"
"""Files are uploaded to this route, as forms."""

TRANSCRIPTIONS: Final = "/v1/audio/transcriptions"
TRANSLATIONS: Final = "/v1/audio/translations"
"""Audio is uploaded to these routes, likewise."""

AUDIO: Final = (TRANSCRIPTIONS, TRANSLATIONS)
UPLOADS: Final = (FILES, *AUDIO)

OPEN: Final = (*HEALTH, LIVE, "/", *(f"/static/{name}" for name in PAGE_FILES))
"""These routes need no key."""

EXPOSED: Final = ", ".join([
    "x-request-id", "x-ignored-fields", "retry-after",
    *(f"x-ratelimit-{what}-{of}" for what in ("limit", "remaining", "reset") for of in ("requests", "tokens")),
]).encode()  # fmt: skip
"""Pages of other origins may read these headers of an answer."""

FORM_BYTES: Final = 2**16
"""So many bytes may a form have beside its file."""

LATER: Final = {"Retry-After": "1"}
"""Answers 429 have this header."""


class BodyError(HTTPException):
    """Raised while a body is read, since what reads it lets only such errors through."""

    def __init__(self, error: ApiError) -> None:
        super().__init__(error.status, error.message)
        self.error = error


class Hosts:
    """Says which Host headers are let in, so that no page of the web reaches the server under a name of its own (DNS
    rebinding): names of this machine and of `allowed_host`. Where the server can be reached from elsewhere, addresses
    are let in too, since a page that was loaded from an address can reach nothing else under it.
    """

    def __init__(self, config: ServerConfig) -> None:
        names = {name.lower() for name in (*LOOPBACK, config.host, *config.allowed_host)}
        self._reached = config.host not in LOOPBACK
        if self._reached:
            machine = socket.gethostname().lower()
            names |= {machine, machine.partition(".")[0], f"{machine.partition('.')[0]}.local"}
        self._all, self._names = "*" in names, names
        self._ends = tuple(name.removeprefix("*") for name in names if name.startswith("*."))

    def __contains__(self, header: str) -> bool:
        host = re.sub(r":\d*$", "", header).lower()
        return self._all or host in self._names or host.endswith(self._ends) or (self._reached and _no_name(host))


def _no_name(host: str) -> bool:
    """Tell whether a host is an address, or nothing, which browsers never send."""
    try:
        return host == "" or bool(ip_address(host.removeprefix("[").removesuffix("]")))
    except ValueError:
        return False


class Origins:
    """ASGI: lets pages of other origins use what is behind it, as far as they are allowed to. Browsers ask before
    (OPTIONS), without a key; the process before replicas answers that for them.

    Args:
        allowed: origins; "*" is any.
        refused: told the status of what is not let in.
    """

    def __init__(self, app: ASGIApp, allowed: Sequence[str], refused: Callable[[int], None]) -> None:
        self._app, self._allowed, self._refused = app, allowed, refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"]) if scope["type"] == "http" else {}
        if b"origin" not in headers or scope.get("relayed"):
            await self._app(scope, receive, send)
            return
        origin = headers[b"origin"].decode("latin-1")
        allowed = "*" in self._allowed or origin in self._allowed
        if scope["method"] == "OPTIONS" and b"access-control-request-method" in headers:
            await self._asked(send, origin, scope["path"], headers, allowed=allowed)
        else:
            await self._app(scope, receive, _shared(send, origin) if allowed else send)

    async def _asked(self, send: Send, origin: str, path: str, headers: dict[bytes, bytes], *, allowed: bool) -> None:
        """Answer the question that browsers ask before a request."""
        if not allowed:
            self._refused(403)
            why = f"pages of {shortened(origin)} may not use this server; see --allowed-origins"
            await refuse(send, ApiError(why, status=403, code="origin_not_allowed"), path)
            return
        wanted = headers.get(b"access-control-request-headers", b"").decode("latin-1")
        told = {"access-control-allow-methods": "GET, POST, DELETE", "access-control-max-age": "600"}
        told |= {"access-control-allow-headers": wanted} if wanted else {}
        await reply(_shared(send, origin), 204, None, told)


def _shared(send: Send, origin: str) -> Send:
    """Return a `send` that adds the headers by which browsers let a page read an answer."""

    async def told(message: Message) -> None:
        if message["type"] == "http.response.start":
            more = [
                (b"access-control-allow-origin", origin.encode("latin-1")),
                (b"vary", b"origin"),
                (b"access-control-expose-headers", EXPOSED),
            ]
            message["headers"] = [*message["headers"], *more]
        await send(message)

    return told


class Guard:
    """ASGI: lets in what has a right Host header, a key, a JSON content type and a body that is not too large.

    Args:
        app: behind it.
        refused: told the status of what is not let in.
    """

    def __init__(self, app: ASGIApp, keys: Keys, config: ServerConfig, refused: Callable[[int], None]) -> None:
        self._refused = refused
        self._app, self._keys, self._hosts, self._most = app, keys, Hosts(config), config.max_body_bytes
        self._most_audio = config.max_audio_bytes
        self._most_of = dict.fromkeys(AUDIO, config.max_audio_bytes + FORM_BYTES)
        if config.batch_folder is not None:
            self._most_of[FILES] = config.max_batch_file_bytes + FORM_BYTES
        self._origins = config.allowed_origins
        self._seconds = config.receive_timeout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            self._check(scope)
        except ApiError as error:
            self._refused(error.status)
            await refuse(send, error, scope["path"])
            return
        await self._app(scope, self._counted(receive, scope), send)

    def _limit(self, scope: Scope) -> int:
        """Return how many bytes the body of a request may have."""
        return self._most_of.get(scope["path"], self._most) if uploads(scope) else self._most

    def _check(self, scope: Scope) -> None:
        """Check the head of a request, and note in its scope whose it is."""
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        if (host := headers.get("host", "")) not in self._hosts and not scope.get("relayed"):
            name = re.sub(r":\d*$", "", host)[:200]
            why = f"the Host header {shortened(name)} does not name this server; start it with --allowed-host {name}"
            raise ApiError(why, status=421, code="wrong_host")
        if {"content-length", "transfer-encoding"} <= headers.keys():  # a proxy may read the other one
            raise ApiError("give Content-Length or Transfer-Encoding, not both", headers={"Connection": "close"})
        scope["owner"] = ""
        if self._keys and scope["path"] not in OPEN:
            authorization = headers.get("authorization") or f"Bearer {headers.get('x-api-key', '')}"
            owner = self._keys.owner(authorization)
            if owner is None:
                raise ApiError("a valid API key is needed in the header Authorization: Bearer KEY, or x-api-key: KEY",
                               status=401, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})  # fmt: skip
            scope["owner"] = owner
        if scope["method"] == "POST" and scope["path"] != PING:
            kind = headers.get("content-type", "").split(";")[0].strip().lower()
            wanted = "multipart/form-data" if uploads(scope) else "application/json"
            if kind != wanted:
                raise ApiError(f"the Content-Type must be {wanted}", status=415, code="wrong_content_type")
            if uploads(scope):
                self._check_origin(headers.get("origin"))
            length = headers.get("content-length", "0")
            if not length.isdecimal() or int(length) > self._limit(scope):
                raise self._too_large(scope)

    def _check_origin(self, origin: str | None) -> None:
        """Reject a form of a page that may not use the server: browsers send those of any page, without asking before.

        Raises:
            ApiError: it is of such a page.
        """
        if origin is not None and "*" not in self._origins and origin not in self._origins:
            why = f"pages of {shortened(origin)} may not use this server; see --allowed-origins"
            raise ApiError(why, status=403, code="origin_not_allowed")

    def _too_large(self, scope: Scope) -> ApiError:
        why, param = f"the request must be at most {self._limit(scope)} bytes long", None
        if uploads(scope) and scope["path"] in AUDIO:
            why, param = f"file must be at most {self._most_audio} bytes long (--max-audio-bytes)", "file"
            why += "; cut or compress it"
        return ApiError(why, status=413, param=param, code="request_too_large")

    def _counted(self, receive: Receive, scope: Scope) -> Receive:
        """Return a `receive` of the same messages; a body without a length may not be longer either, and none may take
        too long.
        """
        size, whole, most, end = 0, False, self._limit(scope), asyncio.get_running_loop().time() + self._seconds

        async def counted() -> Message:
            nonlocal size, whole
            try:
                async with asyncio.timeout_at(None if whole else end):
                    message = await receive()
            except TimeoutError:
                raise BodyError(ApiError("the body did not arrive in time", status=408)) from None
            whole = not message.get("more_body", False)
            size += len(message.get("body", b""))
            if size > most:
                raise BodyError(self._too_large(scope))
            return message

        return counted


def uploads(scope: Mapping[str, Any]) -> bool:
    """Tell whether the body of a request is a form with a file."""
    return bool(scope["method"] == "POST" and scope["path"] in UPLOADS)


async def refuse(send: Send, error: ApiError, path: str) -> None:
    """Answer with an error, without the application."""
    await reply(send, error.status, error.body(path), error.headers)


async def reply(send: Send, status: int, told: dict[str, Any] | None, headers: Mapping[str, str] | None = None) -> None:
    """Answer with JSON, or with nothing, without the application."""
    body = b"" if told is None else json.dumps(told).encode()
    about = {} if told is None else {"content-type": "application/json", "content-length": str(len(body))}
    pairs = [(name.lower().encode(), value.encode("latin-1")) for name, value in {**about, **(headers or {})}.items()]
    await send({"type": "http.response.start", "status": status, "headers": pairs})
    await send({"type": "http.response.body", "body": body})


class Slots:
    """Counts how many requests and outputs run or wait, in all and for each key, and lets no more in than may be.

    Args:
        limits: of owners that have some of their own.
    Attributes:
        running: requests by owner. outputs: likewise, of their prompts and of each `n`, or branches of their searches.
    """

    def __init__(self, config: ServerConfig, limits: Mapping[str, KeyLimits]) -> None:
        self._config, self._limits = config, limits
        self.running, self.outputs = Counter[str](), Counter[str]()

    @contextmanager
    def slot(self, owner: str, waiting: int) -> Iterator[None]:
        """Hold a slot for a request, until the block ends.

        Args:
            waiting: requests that wait for the engine. Where they are too many, keys that have less than an equal
                share of the queue are let in all the same.
        Raises:
            ApiError: 429.
        """
        most, keys = self._config.max_waiting, len(self.running.keys() | {owner})
        if waiting >= most and self.running[owner] >= max(most // keys, 1):
            raise ApiError(
                "too many requests are waiting; try again later", status=429, code="queue_full", headers=LATER
            )
        if self.running[owner] >= self._config.max_streams_per_key:
            raise ApiError("too many requests of this key are running; try again later", status=429,
                           code="too_many_streams", headers=LATER)  # fmt: skip
        with _counted(self.running, owner, 1):
            yield

    @contextmanager
    def having(self, owner: str, outputs: int) -> Iterator[None]:
        """Hold so many outputs, of a request that has a slot, until the block ends.

        Raises:
            ApiError: 429; 400 for more than a key may ever have.
        """
        most = self._config.max_outputs_per_key
        if (own := self._limits.get(owner, NO_LIMITS).max_outputs) is not None:
            most = min(most, own)
        if outputs > most:
            what = "outputs (prompts times n, or branches of searches)"
            raise ApiError(f"a request may have at most {most} {what}, got {outputs}", param="n")
        if self.outputs[owner] + outputs > most:
            raise ApiError(f"too many outputs of this key are running, at most {most}; try again later", status=429,
                           code="too_many_outputs", headers=LATER)  # fmt: skip
        with _counted(self.outputs, owner, outputs):
            yield


@contextmanager
def _counted(counts: Counter[str], owner: str, number: int) -> Iterator[None]:
    counts[owner] += number
    try:
        yield
    finally:
        counts[owner] -= number
        if not counts[owner]:
            del counts[owner]


def allowed_priority(limits: KeyLimits, asked: int | None) -> int:
    """Return the priority of a request: what it asks for, or, for nothing or 0, that of its key.

    Raises:
        ApiError: it asks for a lower number, which would begin earlier, than its key's.
    """
    first = limits.priority
    if asked is None or first is None:
        return asked or first or 0
    if asked == 0:  # which clients send that mean nothing by it
        return max(first, 0)
    if asked < first:
        raise ApiError(f"priority must be at least {first} with this key, got {asked}", param="priority")
    return asked


def tenant_of(owner: str, *salts: str | None) -> str | None:
    """Return the cache salt of a request, which begins with its owner: other keys and other salts share nothing with
    it; None where there is neither.
    """
    texts = [salt for salt in salts if salt]
    if not owner and not texts:
        return None
    return f"{owner}.{hashlib.sha256(json.dumps([owner, *texts]).encode()).hexdigest()[:40]}"


def owner_of(tenant: str) -> str:
    """Return whose request it is, by its cache salt."""
    return tenant.partition(".")[0]
