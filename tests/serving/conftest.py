"""One live server with the bundled model, for the tests of this folder."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from paceline import LLM, AsyncLLM
from paceline.config import ServerConfig
from paceline.serving import Server, create_app


@dataclass
class Live:
    """A running server: where it is, its model, and a client of it."""

    url: str
    model: AsyncLLM
    http: httpx.Client

    def post(self, path: str, **body: Any) -> Any:
        return self.http.post(path, json=body)

    def ok(self, path: str, **body: Any) -> Any:
        answer = self.post(path, **body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def error(self, path: str, status: int = 400, **body: Any) -> dict[str, Any]:
        answer = self.post(path, **body)
        assert answer.status_code == status, answer.text
        found: dict[str, Any] = answer.json()["error"]
        assert "\n" not in found["message"]
        return found


def serve(model: AsyncLLM, **options: Any) -> Iterator[Live]:
    config = ServerConfig(**{"port": 0, "served_model_name": ["bundled", "other-name"]} | options)
    listening, app = Server(config), create_app(model, config)
    server = listening.prepared(app, drain_seconds=2)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening.socket]}, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    with httpx.Client(base_url=listening.url, timeout=60) as http:
        yield Live(listening.url, model, http)
    server.should_exit = True
    thread.join(20)


@pytest.fixture(scope="session")
def llm() -> LLM:
    return LLM(dtype="float32", profile=False)


@pytest.fixture(scope="session")
def live(llm: LLM) -> Iterator[Live]:
    yield from serve(AsyncLLM(llm), max_body_bytes=400_000, max_n=4)


@pytest.fixture(scope="session")
def following(llm: LLM) -> Iterator[Live]:
    yield from serve(AsyncLLM(llm.with_speculative_config({"method": "prediction", "num_speculative_tokens": 8})))


@pytest.fixture(scope="session")
def locked(llm: LLM) -> Iterator[Live]:
    yield from serve(AsyncLLM(llm), api_key=["first-key", "second-key"], max_streams_per_key=2)
