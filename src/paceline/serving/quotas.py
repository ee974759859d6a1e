"""What a key may use in a minute: requests, and tokens of prompts and answers, which a bucket for each gives out.

A bucket holds a minute's worth at most and fills up steadily. A request is let in while none of its key's is empty; its
tokens are taken as they are read and decoded, also where that is more than there is, and what a key owes it waits for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from time import monotonic
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.config import KeyLimits
from paceline.serving.api_errors import ApiError
from paceline.serving.limits import OPEN, refuse
from paceline.serving.request_log import LogFields

MINUTE: Final = 60.0

CANCEL: Final = "/cancel"
"""Requests to paths that end so ask for nothing, and are not counted."""


class Bucket:
    """Holds what may still be used, full at first; it fills up to `most` within a minute.

    Attributes:
        most: it holds.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._left, self._looked = float(most), monotonic()

    @property
    def left(self) -> float:
        """What may be used now; negative where more was used than there was."""
        now = monotonic()
        self._left = min(self._left + (now - self._looked) * self.most / MINUTE, float(self.most))
        self._looked = now
        return self._left

    def take(self, amount: int) -> None:
        """Use so much of it."""
        self._left = self.left - amount

    def seconds_until(self, amount: float) -> float:
        """Return how long it takes until it holds so much; 0 where it does."""
        return max(amount - self.left, 0.0) * MINUTE / self.most


@dataclass(slots=True, eq=False)
class _Spending:
    """A request that runs, and how many of its tokens were taken from the bucket."""

    facts: LogFields
    taken: int = 0


class Quota:
    """Holds the buckets of one key.

    Attributes:
        name: of the key's holder, as the key file has it.
    """

    def __init__(self, limits: KeyLimits) -> None:
        self.name = limits.name
        self._requests = None if limits.requests_per_minute is None else Bucket(limits.requests_per_minute)
        self._tokens = None if limits.tokens_per_minute is None else Bucket(limits.tokens_per_minute)
        self._running: list[_Spending] = []

    def admit(self) -> None:
        """Count a request, which may run.

        Raises:
            ApiError: 429, with `Retry-After`: one of the key's buckets is empty.
        """
        self._take_tokens()
        for unit, bucket in (("requests", self._requests), ("tokens", self._tokens)):
            if bucket is not None and bucket.left < 1.0:
                seconds = max(math.ceil(bucket.seconds_until(1.0)), 1)
                why = f"this key has used its {bucket.most} {unit} of a minute; try again in {seconds} s"
                headers = {"Retry-After": str(seconds)}
                raise ApiError(why, status=429, code="rate_limit_exceeded", headers=headers)
        if self._requests is not None:
            self._requests.take(1)

    @contextmanager
    def running(self, facts: LogFields) -> Iterator[None]:
        """In this block a request runs, whose tokens `facts` counts; they are taken from the bucket."""
        spending = _Spending(facts)
        self._running.append(spending)
        try:
            yield
        finally:
            self._take_tokens()
            self._running.remove(spending)

    def headers(self) -> dict[str, str]:
        """Return the headers of OpenAI's API that say what is left, and when the buckets will be full."""
        self._take_tokens()
        told: dict[str, str] = {}
        for unit, bucket in (("requests", self._requests), ("tokens", self._tokens)):
            if bucket is not None:
                told[f"x-ratelimit-limit-{unit}"] = str(bucket.most)
                told[f"x-ratelimit-remaining-{unit}"] = str(max(math.floor(bucket.left), 0))
                told[f"x-ratelimit-reset-{unit}"] = duration(bucket.seconds_until(bucket.most))
        return told

    def _take_tokens(self) -> None:
        """Take what running requests have used since the last time."""
        for spending in self._running if self._tokens is not None else ():
            used = spending.facts.tokens
            if self._tokens is not None and used > spending.taken:
                self._tokens.take(used - spending.taken)
                spending.taken = used


class Quotas:
    """ASGI, behind a `Guard`: lets in what the buckets of its key have room for, and tells in headers what is left.

    The process before replicas does that for them, which are told (`metered`) to report tokens while they decode.

    Args:
        limits: by owner.
        refused: told the status of what is not let in.
    """

    def __init__(self, app: ASGIApp, limits: Mapping[str, KeyLimits], refused: Callable[[int], None]) -> None:
        self._app, self._refused = app, refused
        self._quotas = {owner: Quota(each) for owner, each in limits.items()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        quota = None if scope["type"] != "http" or scope.get("relayed") else self._quotas.get(scope["owner"])
        if quota is None:
            await self._app(scope, receive, send)
            return
        facts: LogFields = scope["facts"]
        if quota.name:
            facts["key"] = quota.name
        told = _with_headers(send, quota)
        if scope["method"] == "POST" and scope["path"] not in OPEN and not scope["path"].endswith(CANCEL):
            try:
                quota.admit()
            except ApiError as error:
                self._refused(error.status)
                await refuse(told, error, scope["path"])
                return
        scope["metered"] = True
        with ExitStack() as running:
            running.enter_context(quota.running(facts))
            await self._app(scope, receive, told)
            if (task := scope.get("goes_on")) is not None:  # decoded for behind its answer
                later = running.pop_all()
                task.add_done_callback(lambda _: later.close())


def _with_headers(send: Send, quota: Quota) -> Send:
    """Return a `send` that adds the quota's headers to an answer."""

    async def told(message: Message) -> None:
        if message["type"] == "http.response.start":
            more = [(name.encode(), value.encode()) for name, value in quota.headers().items()]
            message["headers"] = [*message["headers"], *more]
        await send(message)

    return told


def duration(seconds: float) -> str:
    """Write a time as OpenAI's headers have it: `250ms`, `1.5s`, `6m0s`."""
    if seconds < 1:
        return f"{math.ceil(1000 * seconds)}ms"
    if seconds < MINUTE:
        return f"{math.ceil(1000 * seconds) / 1000:g}s"
    minutes, rest = divmod(math.ceil(seconds), 60)
    return f"{minutes}m{rest}s"
