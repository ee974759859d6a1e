"""Clients that send slowly, and conversations that are slow to render, hold nobody up."""

from __future__ import annotations

import socket
import threading
import time
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest
from serving.conftest import Live, serve

from paceline import LLM, AsyncLLM

CHAT = "/v1/chat/completions"
SLOW = """{% for message in messages %}{{ message.content }}{% endfor %}
{% if messages[0].content == 'slow' %}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}
{% elif messages[0].content == 'large' %}{% set one = namespace(text='a') %}
{% for a in range(60) %}{% set one.text = one.text + one.text %}{% endfor %}{% endif %}"""


def closed(live: Live, first: bytes, rest: bytes = b" ", every: float = 0.1) -> tuple[bool, bytes]:
    """Whether a connection is closed within half a minute on which the client goes on sending, and what it was told."""
    host, port = live.url.removeprefix("http://").split(":")
    start, told = time.perf_counter(), b""
    with socket.create_connection((host, int(port))) as raw:
        raw.settimeout(every)
        raw.sendall(first)
        while time.perf_counter() - start < 30:
            try:
                raw.sendall(rest)
                if not (found := raw.recv(65536)):
                    return True, told
                told += found
            except TimeoutError:
                continue
            except OSError:
                return True, told
    return False, told


def test_heads_and_bodies_that_trickle_in_are_cut_off(llm: LLM) -> None:
    for live in serve(AsyncLLM(llm), receive_timeout=0.5):
        host = live.url.removeprefix("http://").encode()
        head = b"POST /v1/completions HTTP/1.1\r\nHost: " + host + b"\r\nContent-Type: application/json\r\n"
        assert closed(live, b"", b"")[0]  # nothing is sent
        assert closed(live, head, b"X-A: b\r\n")[0]
        over, told = closed(live, head + b"Content-Length: 200\r\n\r\n")
        assert over
        assert b" 408 " in told.split(b"\r\n")[0]
        over, told = closed(live, head + b"Content-Length: 999999999\r\n\r\n")
        assert over
        assert b" 413 " in told.split(b"\r\n")[0]
        body = {"prompt": "One day", "max_tokens": 400, "ignore_eos": True}
        start = time.perf_counter()
        while time.perf_counter() - start < 1.2:  # longer than a request may take to arrive
            live.ok("/v1/completions", **body)


def test_answers_are_sent_at_once(live: Live) -> None:
    """And not when the client confirms their head, which it does 40 ms later."""

    def seconds() -> float:
        start = time.perf_counter()
        live.ok("/tokenize", prompt="a")
        return time.perf_counter() - start

    assert any(seconds() < 0.03 for _ in range(500)), (
        "one that waits for the client takes longer, however quick the rest"
    )


def test_lists_without_end_hold_nobody_up(live: Live) -> None:
    for name, value in (("stop", ["a"] * 1025), ("bad_words", ["a"] * 1025), ("stop", 3), ("stop", [3])):
        assert live.error("/v1/completions", prompt="a", **{name: value})["param"] in (name, f"{name}.0")
    messages = [{"role": "user", "content": "a"}] * 8193
    assert live.error(CHAT, messages=messages)["param"] == "messages"


@pytest.fixture(scope="module")
def slow(llm: LLM, tmp_path_factory: pytest.TempPathFactory) -> Any:
    file = Path(tmp_path_factory.mktemp("templates")) / "slow.jinja"
    file.write_text(SLOW)
    yield from serve(AsyncLLM(llm), chat_template=str(file))


@pytest.mark.parametrize("content", ["slow", "large"])
def test_a_conversation_that_is_slow_to_render_is_given_up(
    slow: Live, monkeypatch: pytest.MonkeyPatch, content: str
) -> None:
    """Meanwhile others are answered: between the begin and the end of the very same rendering."""
    name = "paceline.serving.workers.Workers.ask"
    found: list[dict[str, Any]] = []
    begun, ended, render = [0], [0], resolve_name(name)

    async def noted(*given: Any) -> Any:
        begun[0] += 1
        try:
            return await render(*given)
        finally:
            ended[0] += 1

    monkeypatch.setattr("paceline.serving.jobs.RENDER_SECONDS", 0.7)
    monkeypatch.setattr(name, noted)

    def ask() -> None:
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 1}
        found.append(slow.error(CHAT, **body))
        found.append(slow.error("/tokenize", messages=body["messages"]))

    thread = threading.Thread(target=ask)
    thread.start()
    beside = set()
    while thread.is_alive():
        before = begun[0]
        assert slow.http.get("/health").status_code == 200
        if before > ended[0]:
            beside.add(before)
        time.sleep(0.02)
    assert beside == {1, 2}
    assert all("chat template" in one["message"] for one in found)
    if content == "slow":
        assert [one["code"] for one in found] == ["template_timeout"] * 2
    slow.ok(CHAT, messages=[{"role": "user", "content": "Hello"}], max_tokens=1)


def test_names_of_fields_are_no_names_for_the_template(slow: Live) -> None:
    body = {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"messages": []}}
    assert slow.error(CHAT, **body)["param"] == "chat_template_kwargs"
