"""One request is sent until it is answered, with patience for a server that is busy, or away for a while.

What is tried again: 429, 502 and 503 after the time that Retry-After tells, and connections that fail or break. A
server that stays away ends the run, which goes on later; whatever else happens is the answer of this one request.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from time import monotonic, time
from typing import Final

import httpx

from paceline.batch.inputs import BatchRequest, Json
from paceline.errors import ConfigError
from paceline.utils import shortened

logger = logging.getLogger("paceline")

BUSY: Final = (429, 502, 503)
NOT_ALLOWED: Final = (401, 403)
AWAY: Final = (httpx.ConnectError, httpx.ConnectTimeout)
FIRST_WAIT, LONGEST_WAIT = 0.5, 15.0
"""Seconds before a request is sent again: the first time, and at most, unless Retry-After tells more."""


@dataclass(frozen=True, slots=True)
class BatchAnswer:
    """Says what became of a request.

    Attributes:
        line: as OpenAI's batches have it.
        failure: in a few words, or None.
    """

    line: bytes
    failure: str | None
    tokens: int


class Sender:
    """Sends requests.

    Args:
        http: a client whose base is the server.
        patience: seconds, from the first failure on, for which a request is tried again.
    """

    def __init__(self, http: httpx.AsyncClient, *, patience: float) -> None:
        self._http, self._patience = http, patience

    async def send(self, request: BatchRequest) -> BatchAnswer:
        """Send a request until it is answered, and return the answer.

        Raises:
            ConfigError: the server is away, or lets us not in.
        """
        content, give_up, wait = json.dumps(request.body).encode(), 0.0, FIRST_WAIT
        while True:
            outcome = await self._try(request.url, content)
            if isinstance(outcome, httpx.TransportError):
                logger.warning("the server at %s is away (%s); trying again", self._http.base_url, _words(outcome))
            give_up = give_up or monotonic() + self._patience
            later = _wanted(outcome) if isinstance(outcome, httpx.Response) else 0.0
            if later is None:
                return _answer(request, outcome)
            pause = max(later, wait * random.uniform(0.5, 1.0))
            if monotonic() + pause > give_up:
                if isinstance(outcome, AWAY):
                    why = f"no server answers at {self._http.base_url} ({_words(outcome)})"
                    raise ConfigError(f"{why}; start it and run the same command again")
                return _answer(request, outcome)
            await self.pause(pause)
            wait = min(wait * 2, LONGEST_WAIT)

    async def pause(self, seconds: float) -> None:
        """Wait until a request is sent again."""
        await asyncio.sleep(seconds)

    async def _try(self, url: str, content: bytes) -> httpx.Response | httpx.TransportError:
        """Send a request once; returns the response, or why there is none."""
        try:
            response = await self._http.post(url, content=content, headers={"content-type": "application/json"})
        except httpx.TransportError as error:
            return error
        if response.status_code in NOT_ALLOWED:
            raise ConfigError(f"{self._http.base_url} answers {_told(_body(response))}; give --api-key")
        return response


def _wanted(response: httpx.Response) -> float | None:
    """Return how many seconds to wait before a request that was answered so is sent again; None if it is not to be."""
    if response.status_code not in BUSY:
        return None
    text = response.headers.get("retry-after", "")
    try:
        return max(0.0, float(text) if text.isdecimal() else parsedate_to_datetime(text).timestamp() - time())
    except ValueError:
        return 0.0


def _body(response: httpx.Response) -> Json:
    try:
        body = response.json()
    except ValueError:
        body = None
    if isinstance(body, dict):
        return body
    return {"error": {"message": f"no JSON but {shortened(response.text)}", "type": "server_error"}}


def _told(body: Json) -> str:
    error = body.get("error")
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)


def _words(error: Exception) -> str:
    return str(error) or type(error).__name__


def _answer(request: BatchRequest, outcome: httpx.Response | httpx.TransportError) -> BatchAnswer:
    """Write the line of an answer, and tell whether and why the request failed."""
    line: Json = {"id": request.id, "custom_id": request.custom_id, "response": None, "error": None}
    failure: str | None = None
    tokens = 0
    if isinstance(outcome, httpx.Response):
        body, status = _body(outcome), outcome.status_code
        if status != 200 or not body.keys() & {"choices", "output"} or body.get("error"):
            failure = f"{status} {_told(body)}"
        name = outcome.headers.get("x-request-id", "")
        line["response"] = {"status_code": status, "request_id": name, "body": body}
        usage = body.get("usage") or {}
        tokens = usage.get("completion_tokens", usage.get("output_tokens", 0))
    else:
        failure = f"the connection broke ({_words(outcome)})"
        line["error"] = {"code": "connection_error", "message": failure}
    text = json.dumps(line, ensure_ascii=False, separators=(",", ":"))
    return BatchAnswer(
        text.encode("utf-8", "backslashreplace") + b"\n", failure, tokens
    )  # a lone surrogate as JSON has it
