"""Limits of what one client may ask, checked before anything is read or decoded: keys, hosts, sizes, the queue."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from starlette.exceptions import HTTPException

from paceline.config import ServerConfig
from paceline.errors import ConfigError
from paceline.serving.protocol import ApiError

PAGE_FILES: Final = ("page.css", "page.js", "explain.css", "tree.js")
"""What the live page is made of, beside itself."""

OPEN: Final = ("/health", "/", *(f"/static/{name}" for name in PAGE_FILES))
"""Routes without a key."""

ADMIN: Final = "admin"
"""The owner of what the administrator's keys ask for."""

LATER: Final = {"Retry-After": "1"}
"""Header of answers 429."""

Scope = dict[str, Any]


def read_keys(config: ServerConfig) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Keys of clients and of administrators: of the configuration, of its files with one a line, and of
    PACELINE_API_KEY and PACELINE_ADMIN_KEY.

    Raises:
        ConfigError: a file that cannot be read, or a key that is of both kinds.
    """
    clients = _keys("api_key", config.api_key, config.api_key_file)
    admins = _keys("admin_key", config.admin_key, config.admin_key_file)
    if set(clients) & set(admins):
        raise ConfigError("admin_key must be another one than each api_key")
    return clients, admins


def _keys(name: str, given: Sequence[str], file: str | None) -> tuple[str, ...]:
    lines = [] if file is None else read_text(f"{name}_file", file).splitlines()
    found = [*given, *lines, os.environ.get(f"PACELINE_{name.upper()}", "")]
    return tuple(dict.fromkeys(key.strip() for key in found if key.strip()))


def read_text(name: str, file: str) -> str:
    """The text of a file that field `name` gives.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        return Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{name} must be a text file that can be read, got {file!r} ({error})") from None


class Keys:
    """Who may use the server.

    Args:
        keys, admins: of clients and of administrators; none at all lets everybody in.
    """

    def __init__(self, keys: Sequence[str], admins: Sequence[str] = ()) -> None:
        hashes = (hashlib.sha256(key.encode()).digest() for key in keys)
        self._owners = [(one, f"key-{one.hex()[:32]}") for one in hashes]
        self._owners += [(hashlib.sha256(key.encode()).digest(), ADMIN) for key in admins]

    def __bool__(self) -> bool:
        return bool(self._owners)

    def owner(self, authorization: str) -> str | None:
        """A name of the key in a header `Bearer KEY`, found in constant time; None for a wrong one.

        The name stays when keys are added or change places: what is stored for it outlives the server.
        """
        scheme, _, key = authorization.partition(" ")
        mine, found = hashlib.sha256(key.strip().encode("latin-1")).digest(), None  # the bytes that were sent
        for known, owner in self._owners:
            if hmac.compare_digest(mine, known):
                found = owner
        return found if scheme.lower() == "bearer" else None


class Guard:
    """ASGI: lets in what has a right Host header, a key, a JSON content type and a body that is not too large.

    Args:
        app: behind it.
        refused: told the status of what is not let in.
    """

    def __init__(self, app: Any, keys: Keys, config: ServerConfig, refused: Callable[[int], None]) -> None:
        self._refused = refused
        self._app, self._keys, self._hosts, self._most = app, keys, config.hosts, config.max_body_bytes
        self._seconds = config.receive_timeout

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            self._check(scope)
        except ApiError as error:
            self._refused(error.status)
            await refuse(send, error, scope["path"])
            return
        await self._app(scope, self._counted(receive), send)

    def _check(self, scope: Scope) -> None:
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        host = re.sub(r":\d*$", "", headers.get("host", "")).lower()
        if self._hosts is not None and host not in self._hosts:
            why = "the Host header does not name this server; see --allowed-host"
            raise ApiError(why, status=421, code="wrong_host")
        if {"content-length", "transfer-encoding"} <= headers.keys():  # a proxy may read the other one
            raise ApiError("give Content-Length or Transfer-Encoding, not both", headers={"Connection": "close"})
        scope["owner"] = ""
        if self._keys and scope["path"] not in OPEN:
            given = headers.get("authorization") or f"Bearer {headers.get('x-api-key', '')}"
            owner = self._keys.owner(given)
            if owner is None:
                raise ApiError("a valid API key is needed in the header Authorization: Bearer KEY, or x-api-key: KEY",
                               status=401, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})  # fmt: skip
            scope["owner"] = owner
        if scope["method"] == "POST":
            kind = headers.get("content-type", "").split(";")[0].strip().lower()
            if kind != "application/json":
                raise ApiError("the Content-Type must be application/json", status=415, code="wrong_content_type")
            length = headers.get("content-length", "0")
            if not length.isdecimal() or int(length) > self._most:
                raise self._too_large()

    def _too_large(self) -> ApiError:
        return ApiError(f"the request must be at most {self._most} bytes long", status=413, code="request_too_large")

    def _counted(self, receive: Any) -> Any:
        """The same messages; a body without a length may not be longer either, and none may take too long."""
        size, whole, end = 0, False, asyncio.get_running_loop().time() + self._seconds

        async def counted() -> Any:
            nonlocal size, whole
            try:
                async with asyncio.timeout_at(None if whole else end):
                    message = await receive()
            except TimeoutError:
                raise HTTPException(408, "the body did not arrive in time") from None
            whole = not message.get("more_body", False)
            size += len(message.get("body", b""))
            if size > self._most:
                error = self._too_large()
                raise HTTPException(error.status, error.message)  # what reads the body lets only these through
            return message

        return counted


async def refuse(send: Any, error: ApiError, path: str) -> None:
    """Answer with an error, without the application."""
    body = json.dumps(error.body(path)).encode()
    headers = {"content-type": "application/json", "content-length": str(len(body)), **error.headers}
    pairs = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": pairs})
    await send({"type": "http.response.body", "body": body})


class Slots:
    """How many requests and outputs run or wait, in all and for each key.

    Attributes:
        running: requests by owner. outputs: likewise, of their prompts and of each `n`.
    """

    def __init__(self, config: ServerConfig) -> None:
        self._config, self.running, self.outputs = config, Counter[str](), Counter[str]()

    @contextmanager
    def slot(self, owner: str, waiting: int) -> Iterator[None]:
        """Have one for a request.

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
        """Have so many outputs, of a request that has a slot.

        Raises:
            ApiError: 429; 400 for more than a key may ever have.
        """
        most = self._config.max_outputs_per_key
        if outputs > most:
            raise ApiError(f"a request may have at most {most} outputs (prompts times n), got {outputs}", param="n")
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


def tenant_of(owner: str, *salts: str | None) -> str | None:
    """The cache salt of a request, which begins with its owner: other keys and other salts share nothing with it; None
    where there is neither.
    """
    given = [salt for salt in salts if salt]
    if not owner and not given:
        return None
    return f"{owner}.{hashlib.sha256(json.dumps([owner, *given]).encode()).hexdigest()[:40]}"


def owner_of(tenant: str) -> str:
    """Whose request it is, by its cache salt."""
    return tenant.partition(".")[0]
