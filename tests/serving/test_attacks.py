"""What an attack from outside got in by, and does no longer."""

from __future__ import annotations

import json
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import uvicorn
from fastapi.exceptions import RequestValidationError
from serving.conftest import Live, comes, serve

from paceline import LLM, AsyncLLM
from paceline.config import ServerConfig
from paceline.serving import Server, create_app

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hi"}]
MANY = 1000

MISTAKES: dict[str, dict[str, Any]] = {
    "fields": {f"field{number}": 1 for number in range(MANY)},
    "fields of messages": {"messages": [HELLO[0] | {f"field{number}": 1 for number in range(20)}] * MANY},
    "parts": {"messages": [{"role": "user", "content": [{}] * MANY}]},
    "calls": {"messages": [{"role": "assistant", "tool_calls": [{}] * MANY}]},
    "tools": {"tools": [{"type": "function", "function": {"name": "f"} | one} for one in [{"x": 1}] * 100]},
    "biases": {"logit_bias": dict.fromkeys(map(str, range(MANY)), "")},
    "metadata": {"metadata": dict.fromkeys(map(str, range(MANY)), 1)},
    "methods": {"speculative_config": [1] * MANY},
    "predictions": {"prediction": {"content": [1] * MANY}},
    "modalities": {"modalities": [1] * MANY},
}


def raw(live: Live, head: str, body: bytes = b"") -> bytes:
    """The whole answer to a request by hand, on a connection that the server closes."""
    host, port = live.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        lines = f"{head}\r\nHost: {host}\r\nContent-Type: application/json\r\n\r\n"
        connection.sendall(lines.encode() + body)
        found = b""
        while part := connection.recv(65536):
            found += part
    return found


@pytest.mark.parametrize("kind", MISTAKES)
def test_a_body_of_mistakes_is_few_errors(live: Live, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Texts of eight million took minutes, in which the server answered nobody, and eight gigabytes."""
    errors, counts = RequestValidationError.errors, list[int]()

    def counted(error: RequestValidationError) -> Any:
        found = errors(error)
        counts.append(len(found))
        return found

    monkeypatch.setattr(RequestValidationError, "errors", counted)
    live.error(CHAT, **({"messages": HELLO} | MISTAKES[kind]))
    assert max(counts, default=1) < 64


def test_many_mistakes_are_told_as_such(live: Live) -> None:
    error = live.error(CHAT, messages=HELLO, **MISTAKES["metadata"])
    assert error["message"] == "the body: more than 64 things in it are wrong"
    assert live.error(CHAT, messages=HELLO, logit_bias={"1": ""})["param"] == "logit_bias.1"


def test_an_error_repeats_little_of_what_was_sent(live: Live) -> None:
    """A field's name of 8 MB was answered with 16 MB."""
    long = "x" * 100_000
    for path, body in ((CHAT, {long: 1}), (CHAT, {"model": long}), ("/v1/messages", {"model": long, "max_tokens": 1})):
        answer = live.post(path, messages=HELLO, **body)
        assert answer.status_code in (400, 404)
        assert "xxx" in answer.json()["error"]["message"]
        assert len(answer.content) < 5000
    assert "known: bundled" in live.error(CHAT, 404, messages=HELLO, model=long)["message"]


def test_logprobs_of_the_whole_vocabulary_are_not_for_strangers(live: Live) -> None:
    for name in ("logprobs", "prompt_logprobs"):
        for count in (-1, 21):
            assert live.error(COMPLETIONS, prompt="a", **{name: count})["param"] == name
    assert live.error(CHAT, messages=HELLO, logprobs=True, top_logprobs=21)["param"] == "top_logprobs"
    live.ok(COMPLETIONS, prompt="a", max_tokens=1, logprobs=20, prompt_logprobs=20)


def test_arguments_that_nest_without_end_are_a_text(live: Live) -> None:
    for arguments in ("[" * 100_000, "[" * 100_000 + "]" * 100_000):
        call = {"function": {"name": "f", "arguments": arguments}}
        live.ok(CHAT, messages=[{"role": "assistant", "tool_calls": [call]}], max_tokens=1)


def test_errors_tell_no_folder(live: Live) -> None:
    message = live.error(CHAT, messages=HELLO, chat_template_kwargs={"unheard_of": 1})["message"]
    assert "unheard_of" in message
    assert str(live.model.llm.folder) not in message


def test_long_texts_are_encoded_one_by_one_and_hold_up_no_short_one(
    live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.serving.jobs.LONG", 100)
    tokenizer, guard, now, most = live.model.llm.tokenizer, threading.Lock(), 0, 0
    encode, go_on = tokenizer.encode, threading.Event()

    def slow(text: str, *arguments: Any, **more: Any) -> Any:
        nonlocal now, most
        if len(text) > 100:
            with guard:
                now, most = now + 1, max(most, now + 1)
            assert go_on.wait(60)
            with guard:
                now -= 1
        return encode(text, *arguments, **more)

    monkeypatch.setattr(tokenizer, "encode", slow)
    long = "a " * 200

    def ask(path: str) -> None:
        body = {"messages": [HELLO[0] | {"content": long}]} if path == CHAT else {"prompt": long}
        live.ok(path, **body, **({} if path == "/tokenize" else {"max_tokens": 1}))

    with ThreadPoolExecutor(9) as pool:
        asked = [pool.submit(ask, path) for path in (CHAT, COMPLETIONS, "/tokenize") * 3]
        assert comes(lambda: now > 0)
        live.ok("/tokenize", prompt="short")
        assert not any(one.done() for one in asked), "the short one was answered while a long one was encoded"
        go_on.set()
        for one in asked:
            one.result()
    assert most == 1


def test_texts_beside_the_prompt_may_not_be_long(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """Predictions of 7 MB were encoded all at once, with most of a gigabyte each."""
    monkeypatch.setattr("paceline.serving.jobs.LONG", 100)
    for length, status in ((100, 200), (101, 400)):
        text = "a" * length
        parts = [{"type": "text", "text": text[:50]}, {"type": "text", "text": text[50:]}]
        predictions = ({"prediction": {"type": "content", "content": one}} for one in (text, parts))
        for body in (*predictions, {"bad_words": [text[:50], text[50:]]}):
            answer = live.post(CHAT, messages=HELLO, max_tokens=1, **body)
            assert answer.status_code == status, answer.text
            assert status == 200 or answer.json()["error"]["param"] in body
    assert live.error(COMPLETIONS, prompt="a", prediction="a" * 101)["param"] == "prediction"


def test_a_burst_does_not_pass_the_limit_of_waiting_requests(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    encode, go_on = llm.tokenizer.encode, threading.Event()

    def slow(*arguments: Any, **more: Any) -> Any:
        assert go_on.wait(60)
        return encode(*arguments, **more)

    monkeypatch.setattr(llm.tokenizer, "encode", slow)
    room = llm.engine.scheduler.config.max_num_seqs + 2
    for live in serve(AsyncLLM(llm), max_waiting=2):
        with ThreadPoolExecutor(room + 8) as pool:
            asked = [pool.submit(live.post, COMPLETIONS, prompt="a", max_tokens=1) for _ in range(room + 8)]
            assert comes(lambda some=asked: sum(one.done() for one in some) == 8), "these find no room"
            go_on.set()
            found = [one.result() for one in asked]
        refused = [one for one in found if one.status_code == 429]
        assert [one.headers["retry-after"] for one in refused] == ["1"] * 8
        assert sum(one.status_code == 200 for one in found) == room
        live.ok(COMPLETIONS, prompt="a", max_tokens=1)


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="the system cannot limit it")
def test_a_client_that_reads_nothing_gives_its_place_back(llm: LLM) -> None:
    for live in serve(AsyncLLM(llm), receive_timeout=1.0, max_streams_per_key=1):
        host, port = live.url.removeprefix("http://").split(":")
        more = {"include_usage": True, "continuous_usage_stats": True}
        asked = {"prompt": "a", "n": 16, "max_tokens": 2000, "ignore_eos": True, "stream": True, "logprobs": 10}
        body = json.dumps(asked | {"stream_options": more}).encode()
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            connection.connect((host, int(port)))
            head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
            connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            assert connection.recv(1) == b"H", "the answer begins, and nobody reads on"
            assert live.post(COMPLETIONS, prompt="a", max_tokens=1).status_code == 429
            end = time.perf_counter() + 30
            while live.post(COMPLETIONS, prompt="a", max_tokens=1).status_code == 429:
                assert time.perf_counter() < end
                time.sleep(0.2)


def test_a_body_of_two_lengths_is_rejected_and_nothing_behind_it_is_read(live: Live) -> None:
    body = json.dumps({"prompt": "a", "max_tokens": 1}).encode()
    chunked = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nContent-Length: 4\r\nTransfer-Encoding: chunked"
    found = raw(live, head, chunked + b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert found.startswith(b"HTTP/1.1 400 ")
    assert found.count(b"HTTP/1.1") == 1
    once = raw(live, f"POST {COMPLETIONS} HTTP/1.1\r\nConnection: close\r\nTransfer-Encoding: chunked", chunked)
    assert once.startswith(b"HTTP/1.1 200 ")


def test_a_key_may_hold_any_letters(llm: LLM) -> None:
    for live in serve(AsyncLLM(llm), api_key=["schlüssel"]):
        for key, status in (("schlüssel", b" 200 "), ("schlussel", b" 401 ")):
            found = raw(live, f"GET /version HTTP/1.1\r\nConnection: close\r\nAuthorization: Bearer {key}")
            assert status in found.split(b"\r\n")[0]


def test_the_second_signal_stops_at_once_whichever_it_is(llm: LLM) -> None:
    config = ServerConfig(port=0)
    listening = Server(config)
    server = listening.prepared(create_app(AsyncLLM(llm), config))
    for stopped in (False, True):
        server.handle_exit(signal.SIGTERM, None)
        assert (server.should_exit, server.force_exit) == (True, stopped)
    listening.socket.close()


@pytest.mark.parametrize("mended", [True, False])
def test_the_second_signal_ends_the_application_in_order(
    llm: LLM, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, mended: bool
) -> None:
    """uvicorn by itself leaves the application to be cancelled, and logs that as an error with its traceback."""
    config = ServerConfig(port=0)
    listening = Server(config)
    server = listening.prepared(create_app(AsyncLLM(llm), config))
    if not mended:
        monkeypatch.setattr(type(server), "shutdown", uvicorn.Server.shutdown)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening.socket]}, daemon=True)
    thread.start()
    assert comes(lambda: server.started)
    for _ in range(2):
        server.handle_exit(signal.SIGTERM, None)
    thread.join(20)
    errors = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert ("CancelledError" in "".join(errors)) == (not mended), errors
    assert bool(errors) == (not mended)
