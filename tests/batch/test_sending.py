"""A server that is busy or away for a while is tried again; everything else is the answer of one request."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from email.utils import formatdate
from time import time
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from paceline.batch import Sender, sending
from paceline.batch.inputs import BatchRequest
from paceline.errors import ConfigError

Made = httpx.Response | type[httpx.TransportError]
FINE = {"choices": [], "model": "m", "usage": {"completion_tokens": 3}}


def request() -> BatchRequest:
    return BatchRequest(custom_id="a", url="/v1/completions", body={"prompt": "x"})


def ok(**headers: str) -> httpx.Response:
    return httpx.Response(200, json=FINE, headers=headers)


def error(status: int, text: str = "no", **headers: str) -> httpx.Response:
    return httpx.Response(status, json={"error": {"message": text}}, headers=headers)


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Sends one request to a server with these answers in turn, the last of them for ever: what came, and the waits."""
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    def run(*answers: Made, patience: float = 100.0) -> Any:
        left = list(answers)

        def handler(_: httpx.Request) -> httpx.Response:
            found = left.pop(0) if len(left) > 1 else left[0]
            if isinstance(found, type):
                raise found("away")
            return found

        async def main() -> Any:
            transport = httpx.MockTransport(handler)
            async with httpx.AsyncClient(base_url="http://there", transport=transport) as http:
                monkeypatch.setattr(sending, "asyncio", SimpleNamespace(sleep=sleep))  # not those of other threads
                return await Sender(http, patience=patience).send(request())

        return asyncio.run(main()), waits

    return run


def test_an_answer_is_a_line_as_openai_has_it(sent: Callable[..., Any]) -> None:
    found, waits = sent(ok(**{"x-request-id": "req-1"}))
    assert json.loads(found.line) == {
        "id": request().id,
        "custom_id": "a",
        "response": {"status_code": 200, "request_id": "req-1", "body": FINE},
        "error": None,
    }
    assert (found.failure, found.tokens, waits) == (None, 3, [])
    assert found.line.endswith(b"\n")


@pytest.mark.parametrize("status", [429, 502, 503])
def test_a_busy_server_is_asked_again_after_the_time_it_tells(sent: Callable[..., Any], status: int) -> None:
    at = formatdate(time() + 40, usegmt=True)
    busy = [error(status, **{"retry-after": "7"}), error(status, **{"retry-after": at}), error(status)]
    found, waits = sent(*busy, ok())
    assert found.failure is None
    assert waits[0] == 7.0
    assert 30 < waits[1] <= 40
    assert 0.9 < waits[2] <= 2.0, "the third time, without Retry-After"


def test_patience_ends(sent: Callable[..., Any]) -> None:
    found, waits = sent(error(429, "full", **{"retry-after": "60"}), patience=10.0)
    assert found.failure == "429 full"
    assert json.loads(found.line)["response"]["status_code"] == 429
    assert waits == []


@pytest.mark.parametrize("kind", [httpx.ConnectError, httpx.ReadError, httpx.ReadTimeout, httpx.RemoteProtocolError])
def test_connections_that_fail_are_made_again(
    sent: Callable[..., Any], kind: type[httpx.TransportError], caplog: pytest.LogCaptureFixture
) -> None:
    found, waits = sent(kind, kind, ok())
    assert "the server at http://there is away (away); trying again" in caplog.text
    assert found.failure is None
    assert len(waits) == 2
    assert waits[0] < waits[1]


def test_a_server_that_stays_away_ends_the_run(sent: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match=r"no server answers at http://there \(away\); start it"):
        sent(httpx.ConnectError, patience=0.0)


def test_a_request_that_breaks_every_connection_is_one_failure(sent: Callable[..., Any]) -> None:
    found, _ = sent(httpx.ReadError, patience=0.0)
    line = json.loads(found.line)
    assert line["response"] is None
    assert line["error"] == {"code": "connection_error", "message": "the connection broke (away)"}
    assert found.failure == line["error"]["message"]


@pytest.mark.parametrize("status", [400, 404, 413, 500, 504])
def test_other_errors_are_the_answer(sent: Callable[..., Any], status: int) -> None:
    found, waits = sent(error(status, "wrong"), ok())
    assert found.failure == f"{status} wrong"
    assert json.loads(found.line)["response"]["body"] == {"error": {"message": "wrong"}}
    assert waits == []


def test_a_wrong_key_ends_the_run(sent: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match="a valid key is needed; give --api-key"):
        sent(error(401, "a valid key is needed"))


def test_what_is_no_json_is_a_failure(sent: Callable[..., Any]) -> None:
    found, _ = sent(httpx.Response(200, text="<html>"))
    assert found.failure == "200 no JSON but '<html>'"


def test_half_a_character_stays_what_it_was(sent: Callable[..., Any]) -> None:
    body = {"choices": [{"text": "\ud800ä"}]}
    found, _ = sent(httpx.Response(200, content=json.dumps(body).encode()))
    assert json.loads(found.line)["response"]["body"] == body
    assert "ä".encode() in found.line
