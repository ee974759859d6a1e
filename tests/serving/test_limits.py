"""Clients that send slowly or much, and conversations that are slow to render, hold nobody up."""

from __future__ import annotations

import json
import random
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from pkgutil import resolve_name
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from serving.conftest import Live, comes, serve, slowed

from paceline import LLM, AsyncLLM
from paceline.serving.bodies import count_items

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
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
        sent = [
            (b"", b""),  # nothing
            (head, b"X-A: b\r\n"),
            (head + b"Content-Length: 200\r\n\r\n", b" "),
            (head + b"Content-Length: 999999999\r\n\r\n", b" "),
        ]
        with ThreadPoolExecutor(len(sent)) as pool:
            found = list(pool.map(lambda given, live=live: closed(live, *given), sent))
        assert all(over for over, _ in found)
        for (_, told), code in zip(found[2:], (b" 408 ", b" 413 "), strict=True):
            assert code in told.split(b"\r\n")[0]
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
def roomy(llm: LLM) -> Any:
    """Takes bodies as long as by default."""
    yield from serve(AsyncLLM(llm))


def items_of(value: Any) -> tuple[int, int, int]:
    """Items and fields of a value, those that are fields, and its lists and objects, counted one by one."""
    if not isinstance(value, dict | list):
        return int(isinstance(value, float)), 0, 0  # a number with a point counts once more
    inside = [items_of(one) for one in (value.values() if isinstance(value, dict) else value)]
    own = (len(value), len(value) if isinstance(value, dict) else 0, 1)
    items, fields, nested = (sum(counts) for counts in zip(own, *inside, strict=True))
    return items, fields, nested


PARTS = [{"type": "text", "text": "a"}]
MANY: dict[str, tuple[str, dict[str, Any], str]] = {
    "parts": (CHAT, {"messages": [{"role": "user", "content": PARTS * 40_000}]}, "lists and objects"),
    "parts of messages": (CHAT, {"messages": [{"role": "user", "content": PARTS * 5}] * 3000}, "lists and objects"),
    "biases": (CHAT, {"logit_bias": dict.fromkeys(map(str, range(70_000)), 1)}, "fields of objects"),
    "stops": (CHAT, {"stop": ["a"] * 270_000}, "items and fields"),
    "fields": ("/tokenize", dict.fromkeys(map(str, range(70_000)), 1), "fields of objects"),
    "ids": ("/detokenize", {"tokens": [1] * 270_000}, "items and fields"),
    "fractions": ("/detokenize", {"tokens": [0.12345678901234567] * 140_000}, "items and fields"),
    "prompts": ("/v1/completions", {"prompt": [[1]] * 40_000}, "lists and objects"),
    "blocks": ("/v1/messages", {"messages": [{"role": "user", "content": PARTS * 40_000}]}, "lists and objects"),
    "items": ("/v1/responses", {"input": [{"role": "user", "content": "a"}] * 40_000}, "lists and objects"),
}


@pytest.mark.parametrize("kind", MANY)
def test_a_body_holds_so_many_things_in_all(roomy: Live, kind: str) -> None:
    path, body, what = MANY[kind]
    error = roomy.error(path, **body)
    assert error["message"].startswith("the body must hold at most ")
    assert what in error["message"]


def test_more_biases_than_tokens_are_rejected_by_name(roomy: Live) -> None:
    biases = dict.fromkeys(map(str, range(65_537)), 1)
    assert roomy.error(CHAT, messages=[{"role": "user", "content": "a"}], logit_bias=biases)["param"] == "logit_bias"


def test_what_stands_in_a_text_is_not_counted(roomy: Live) -> None:
    for text in ("{[,:" + "9" * 600 + "{[,:" * 60_000, '\\"{,' * 60_000, "\\\\" * 100_000 + '"' + ",[" * 40_000):
        assert roomy.ok("/tokenize", prompt=text)["tokens"] == roomy.model.llm.tokenizer.encode(text)
    assert roomy.ok("/detokenize", tokens=[5] * 250_000)["prompt"], "as many numbers as a long text has tokens"


def test_things_are_counted_as_they_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever a text is cut into pieces."""
    dice = random.Random(5)

    def text() -> str:
        return "".join(dice.choices('\\"{[,:.]} a', k=dice.randrange(12)))

    def value(depth: int) -> Any:
        kind = dice.randrange(4 if depth else 2)
        if kind == 3:
            return {f"{number}{text()}": value(depth - 1) for number in range(dice.randrange(4))}
        return (
            [value(depth - 1) for _ in range(dice.randrange(4))] if kind == 2 else [text(), dice.choice((7, 0.5))][kind]
        )

    for piece in (1, 2, 3, 7, 64):
        monkeypatch.setattr("paceline.serving.bodies.PIECE", piece)
        for _ in range(60):
            one = value(4)
            items, *others = items_of(one)
            empty = json.dumps(one).count("[]") + json.dumps(one).count("{}")  # which may stand in texts, too
            found = count_items(json.dumps(one).encode())
            assert list(found[1:]) == others
            assert items <= found[0] <= items + empty


def test_large_bodies_are_read_beside_the_event_loop(roomy: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    read, threads = json.loads, list[str]()

    def noted(text: Any, **more: Any) -> Any:
        threads.append(threading.current_thread().name)
        return read(text, **more)

    monkeypatch.setattr("paceline.serving.json_bodies.json", SimpleNamespace(loads=noted, JSONDecodeError=ValueError))
    roomy.ok("/tokenize", prompt="a")
    roomy.ok("/tokenize", prompt="a " * 50_000)
    small, large = threads
    assert small != large
    assert large.startswith("asyncio_")


def test_what_is_no_json_is_said_in_a_line(live: Live) -> None:
    for body, why in ((b'{"prompt": "\xff"}', "UTF-8"), (b"[" * 50_000, "nest"), (b'{"n": ' + b"9" * 500, "digits")):
        answer = live.http.post("/tokenize", content=body, headers={"content-type": "application/json"})
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "invalid_json"
        assert why in answer.json()["error"]["message"]


def test_a_body_in_chunks_of_a_byte_is_read_whole(live: Live) -> None:
    """In pieces, with the turns of others between them."""
    host, port = live.url.removeprefix("http://").split(":")
    body = json.dumps({"prompt": "One day, " * 3000}).encode()
    head = f"POST /tokenize HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n".encode()
    chunks = b"".join(b"1\r\n%c\r\n" % one for one in body) + b"0\r\n\r\n"
    with socket.create_connection((host, int(port)), timeout=20) as raw:
        raw.sendall(head + b"Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n" + chunks)
        answer = b"".join(iter(lambda: raw.recv(65536), b""))
    assert json.loads(answer.partition(b"\r\n\r\n")[2]) == live.ok("/tokenize", prompt="One day, " * 3000)


def test_outputs_of_a_key_are_counted(llm: LLM) -> None:
    with slowed(llm):
        for live in serve(AsyncLLM(llm), api_key=["one", "two"], max_outputs_per_key=8):
            one, two = ({"authorization": f"Bearer {key}"} for key in ("one", "two"))

            def ask(key: dict[str, str], live: Live = live, **body: Any) -> httpx.Response:
                body = {"prompt": "One day", "max_tokens": 2} | body
                return live.http.post("/v1/completions", json=body, headers=key)

            answer = ask(one, prompt=["a", "b", "c"], n=3)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "n")
            long = {"prompt": ["a", "b"], "n": 3, "max_tokens": 1900, "stream": True, "ignore_eos": True}
            with live.http.stream("POST", "/v1/completions", json=long, headers=one) as stream:
                lines = stream.iter_lines()  # which closes the stream when it is forgotten
                next(lines)
                refused = ask(one, n=3)
                assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_outputs")
                assert refused.headers["retry-after"] == "1"
                assert ask(one, n=2).status_code == 200, "eight in all"
                assert ask(two, n=8).status_code == 200, "another key has as many of its own"
            assert comes(lambda key=one: ask(key, n=8).status_code == 200), "they are given back"


def test_a_full_queue_of_one_key_keeps_no_other_key_out(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    encode, go_on = llm.tokenizer.encode, threading.Event()

    def slow(*arguments: Any, **more: Any) -> Any:
        assert go_on.wait(60)
        return encode(*arguments, **more)

    monkeypatch.setattr(llm.tokenizer, "encode", slow)
    room = llm.engine.scheduler.config.max_num_seqs + 4
    for live in serve(AsyncLLM(llm), max_waiting=4, api_key=["one", "two"]):

        def ask(key: str, live: Live = live) -> httpx.Response:
            body = {"prompt": "a", "max_tokens": 1}
            return live.http.post("/v1/completions", json=body, headers={"authorization": f"Bearer {key}"})

        with ThreadPoolExecutor(room + 4) as pool:
            asked = [pool.submit(ask, "one") for _ in range(room + 1)]
            assert comes(lambda some=asked: sum(one.done() for one in some) == 1), "one finds no room"
            others = [pool.submit(ask, "two") for _ in range(3)]
            assert comes(lambda some=others: sum(one.done() for one in some) == 1), "two are its share"
            go_on.set()
            statuses = [sorted(one.result().status_code for one in some) for some in (asked, others)]
        assert statuses == [[200] * room + [429], [200, 200, 429]]


def test_keys_take_turns_in_being_prepared(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever of one key's has to be encoded, another key waits for no more than is under way."""
    monkeypatch.setattr("paceline.serving.jobs.LONG", 10)
    encode, order, go_on = llm.tokenizer.encode, list[str](), threading.Event()

    def slow(text: str, *arguments: Any, **more: Any) -> Any:
        if "long" in text:
            order.append(text[:3])
            assert go_on.wait(60)
        return encode(text, *arguments, **more)

    monkeypatch.setattr(llm.tokenizer, "encode", slow)
    for live in serve(AsyncLLM(llm), api_key=["one", "two"]):

        def ask(key: str, live: Live = live) -> None:
            body = {"prompt": f"{key} a long text"}
            answer = live.http.post("/tokenize", json=body, headers={"authorization": f"Bearer {key}"})
            assert answer.status_code == 200

        with ThreadPoolExecutor(8) as pool:
            asked = [pool.submit(ask, "one") for _ in range(5)]
            assert comes(lambda: order == ["one"])
            time.sleep(0.3)  # the others of this key have come as well
            asked += [pool.submit(ask, "two")]
            time.sleep(0.3)
            go_on.set()
            for one in asked:
                one.result()
    assert order[:3] in (["one", "one", "two"], ["one", "two", "one"])
    assert order.count("one") == 5


@pytest.fixture(scope="module")
def slow(llm: LLM, tmp_path_factory: pytest.TempPathFactory) -> Any:
    file = Path(tmp_path_factory.mktemp("templates")) / "slow.jinja"
    file.write_text(SLOW)
    yield from serve(AsyncLLM(llm), chat_template=str(file))


@pytest.mark.parametrize("content", ["slow", "large"])
def test_a_conversation_that_is_slow_to_render_is_given_up(
    slow: Live, monkeypatch: pytest.MonkeyPatch, content: str
) -> None:
    """Meanwhile others are answered: between the begin and the end of the very same rendering. On a busy machine their
    client may be too slow to ask meanwhile: then there are further rounds.
    """
    name = "paceline.serving.workers.Workers.ask"
    found: list[dict[str, Any]] = []
    begun, ended, render = [0], [0], resolve_name(name)

    async def noted(*given: Any) -> Any:
        begun[0] += 1
        try:
            return await render(*given)
        finally:
            ended[0] += 1

    def ask() -> None:
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 1}
        found.append(slow.error(CHAT, **body))
        found.append(slow.error("/tokenize", messages=body["messages"]))

    def answered_beside() -> set[int]:
        """During which of the two renderings another request was answered."""
        before, beside = begun[0], set()
        thread = threading.Thread(target=ask)
        thread.start()
        while thread.is_alive():
            now = begun[0]
            assert slow.http.get("/health").status_code == 200
            if now > ended[0]:
                beside.add(now - before)
            time.sleep(0.02)
        thread.join()
        return beside

    with monkeypatch.context() as patched:
        patched.setattr("paceline.serving.jobs.RENDER_SECONDS", 0.5)
        patched.setattr(name, noted)
        assert {1, 2} in (answered_beside() for _ in range(10))
    assert all("chat template" in one["message"] for one in found)
    if content == "slow":
        assert {one["code"] for one in found} == {"template_timeout"}
    assert len(found) >= 2
    slow.ok(CHAT, messages=[{"role": "user", "content": "Hello"}], max_tokens=1)


def test_names_of_fields_are_no_names_for_the_template(slow: Live) -> None:
    body = {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"messages": []}}
    assert slow.error(CHAT, **body)["param"] == "chat_template_kwargs"


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/tokenize"])
def test_a_text_of_too_many_tokens_is_rejected_before_they_are_listed(roomy: Live, path: str) -> None:
    def asked(text: str) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": text}]} if path == CHAT else {"prompt": text}

    context = roomy.model.llm.runner.info.max_context
    if path == "/tokenize":
        assert roomy.ok(path, prompt="a " * context)["count"] > context
    else:
        assert f"the context holds {context}" in roomy.error(path, **asked("a " * context))["message"]
    assert "at most 262144 are read" in roomy.error(path, **asked("a " * 300_000))["message"]


@pytest.mark.parametrize("path", ["/detokenize", "/tokenize"])
def test_few_texts_are_written_at_once(llm: LLM, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    """Whatever a key asks for many times, threads are left for what others ask."""
    tokenizer, guard, now, most, go_on = llm.tokenizer, threading.Lock(), 0, 0, threading.Event()
    name = "decode" if path == "/detokenize" else "token_text"
    real = getattr(tokenizer, name)

    def slow(*arguments: Any, **more: Any) -> Any:
        nonlocal now, most
        with guard:
            now, most = now + 1, max(most, now + 1)
        assert go_on.wait(60)
        with guard:
            now -= 1
        return real(*arguments, **more)

    monkeypatch.setattr("paceline.serving.jobs.ENCODERS", 2)
    body = {"tokens": [5]} if path == "/detokenize" else {"prompt": "a", "return_token_strs": True}
    for live in serve(AsyncLLM(llm)):
        live.ok(path, **body)
        monkeypatch.setattr(tokenizer, name, slow)
        with ThreadPoolExecutor(12) as pool:
            asked = [pool.submit(live.ok, path, **body) for _ in range(12)]
            assert comes(lambda: now >= 2)
            time.sleep(0.2)
            go_on.set()
            for one in asked:
                one.result()
    assert most <= 3
