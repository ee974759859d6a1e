"""One live server with the bundled model, for the tests of this folder."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import uvicorn

from paceline import LLM, AsyncLLM
from paceline.config import ServerConfig, StructuredOutputsParams
from paceline.serving import Server, create_app
from paceline.serving.chat import FORMATS
from paceline.serving.chat.base import AllowedCalls
from paceline.serving.chat.constraints import answer_grammar
from paceline.serving.protocol import Tool

TEMPLATE = """{% for m in messages %}[{{ m.role }}]{{ m.reasoning_content }}{{ m.content }}{% for c in m.tool_calls or
[] %}<tool_call>{{ c | tojson }}</tool_call>{% endfor %}{% endfor %}{% for t in tools or [] %}{{ t | tojson }}{% endfor
%}{% if add_generation_prompt %}[assistant]{% endif %}"""
"""Shows everything that a message has."""


async def _nap(seconds: float) -> None:
    """Ten times a second uvicorn looks whether it shall stop: too seldom where hundreds of servers do."""
    await asyncio.sleep(min(seconds, 0.01))


pytest.MonkeyPatch().setattr("uvicorn.server.asyncio", SimpleNamespace(**vars(asyncio) | {"sleep": _nap}))
IDLE = SimpleNamespace(freeze=lambda: None, unfreeze=lambda: None)
"""In place of `gc`: a server that ends would let all that was ever imported be searched for garbage again."""
pytest.MonkeyPatch().setattr("paceline.serving.app.gc", IDLE)


@pytest.fixture(scope="session")
def openai() -> Any:
    """OpenAI's client; imported where it is used, since that takes a second."""
    return pytest.importorskip("openai")


@pytest.fixture(scope="session")
def anthropic() -> Any:
    """Anthropic's client, likewise."""
    return pytest.importorskip("anthropic")


@dataclass
class Live:
    """A running server: where it is, its model, a client of it, and what runs it."""

    url: str
    model: AsyncLLM
    http: httpx.Client
    server: uvicorn.Server

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
    config = ServerConfig(**{"port": 0, "served_model_name": ["bundled", "other-name"], "drain_timeout": 2.0} | options)
    listening, app = Server(config), create_app(model, config)
    server = listening.prepared(app)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening.socket]}, daemon=True)
    thread.start()
    while not server.started and thread.is_alive():  # before, connections are refused
        time.sleep(0.01)
    with httpx.Client(base_url=listening.url, timeout=60) as http:
        yield Live(listening.url, model, http, server)
    server.should_exit = True
    thread.join(20)


@contextmanager
def slowed(model: LLM) -> Iterator[None]:
    """A step of decoding takes a tenth of a second more: 1,900 tokens take more than ten seconds, since a step brings
    seventeen at most, and are not through before the test has done what it does meanwhile.
    """
    engine, over = model.engine, threading.Event()
    step = engine.step

    def slow() -> Any:
        over.wait(0.1)
        return step()

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(engine, "step", slow)
        yield
        over.set()


def comes(what: Callable[[], bool]) -> bool:
    """Whether something is so, within half a minute."""
    end = time.monotonic() + 30
    while not (found := what()) and time.monotonic() < end:
        time.sleep(0.01)
    return found


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


class Scripted(AsyncLLM):
    """Decodes a text that is set, or what it will."""

    script = ""

    def stream(self, prompt: Any, params: Any = None, **more: Any) -> Any:
        if self.script:
            regex = "".join(c if c.isalnum() or c in ' <>"' else f"\\{c}" for c in self.script)
            params = replace(params, structured_outputs=StructuredOutputsParams(regex=regex))
        return super().stream(prompt, params, **more)


@pytest.fixture(scope="session")
def talking(llm: LLM, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    template = tmp_path_factory.mktemp("template") / "chat.jinja"
    template.write_text(TEMPLATE)
    yield from serve(Scripted(llm), chat_template=str(template), tool_call_parser="hermes")


def calls_grammar(
    tools: Sequence[Tool], form: str, *, only: str | None = None, many: bool = True, strict: bool = False, **more: Any
) -> str:
    """The grammar of calls of these functions and nothing else."""
    calls = AllowedCalls.of(tools, only, needed=True, many=many, strict=strict)
    return answer_grammar(calls, None, FORMATS[form], **more)
