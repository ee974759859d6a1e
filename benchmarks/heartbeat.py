"""How long a request may hold the server's event loop: bodies of many shapes up to the largest that is taken, and a
task on the loop that wakes up every millisecond. Used by `serving_faults.py`.
"""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from served import CHAT, COMPLETIONS, Json, inside, request_bytes

from paceline import AsyncLLM

MOST = 8 * 2**20
"""Bytes of a body, as the server has it by default."""

TRIES = 3
"""Of each body; the best counts, since whatever else runs on the machine holds the loop too."""

TOKENIZE, DETOKENIZE, MESSAGES, RESPONSES = "/tokenize", "/detokenize", "/v1/messages", "/v1/responses"
TEMPLATE = """{% for one in messages %}{% if one.content is string %}{{ one.content }}{% else %}{% for part in
one.content %}{{ part.text }}{% endfor %}{% endif %}{% endfor %}{{ tools | tojson if tools }}"""
USER = {"role": "user"}
HELLO = [{"role": "user", "content": "Hi"}]


class Heart:
    """A task of an event loop that wakes up every millisecond.

    Attributes:
        worst: the longest time for which the loop did not come to it, in seconds, since this was last set to 0.
    """

    def __init__(self) -> None:
        self.worst = 0.0

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Beat until the loop is closed."""
        asyncio.run_coroutine_threadsafe(self._beat(), loop)

    async def _beat(self) -> None:
        while True:
            before = time.perf_counter()
            await asyncio.sleep(0.001)
            self.worst = max(self.worst, time.perf_counter() - before - 0.001)


def repeated(given: Json, name: str, piece: Any, *, most: int = 0, brackets: str = "[]") -> bytes:
    """A body with a field of as many equal pieces as fit, or of `most`; bytes are JSON already."""
    text = piece if isinstance(piece, bytes) else json.dumps(piece, separators=(",", ":")).encode()
    head = json.dumps(given)[:-1].encode() + (b"," if given else b"") + f'"{name}":{brackets[0]}'.encode()
    count = min(most or MOST, (MOST - 1024 - len(head)) // (len(text) + 1))
    return head + b",".join([text] * count) + brackets[1].encode() + b"}"


def numbered(given: Json, name: str, value: str, count: int) -> bytes:
    """A body with an object of so many fields, as far as they fit."""
    head = json.dumps(given)[:-1].encode() + (b"," if given else b"") + f'"{name}":{{'.encode()
    fields = [f'"{number}":{value}' for number in range(count)]
    while len(head) + sum(map(len, fields)) + len(fields) > MOST - 1024:
        fields = fields[: len(fields) * 9 // 10]
    return head + ",".join(fields).encode() + b"}}"


def texts() -> dict[str, str]:
    """Long texts, as they stand in JSON."""
    size = MOST - 4096
    return {
        "words": "the name of the harbour, " * (size // 25),
        "one word": "a" * size,
        "Chinese": "\u6e2f\u53e3" * (size // 6),
        "escapes": "\\u0061" * (size // 6),
        "newlines": "\\n" * (size // 2),
        "brackets": "{[,:" * (size // 4),
    }


def chats() -> Iterator[tuple[str, str, bytes]]:
    """Names, routes and bodies."""
    one = {"max_tokens": 1}
    said = {**one, "messages": HELLO}
    part = {"type": "text", "text": "a"}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "string"}}}}}
    for name, text in texts().items():
        yield f"text: {name}", CHAT, f'{{"max_tokens":1,"messages":[{{"role":"user","content":"{text}"}}]}}'.encode()
    for most in (0, 200_000, 16_000):
        body = repeated({}, "content", part, most=most)
        yield f"{most or 'all'} parts", CHAT, b'{"messages":[{"role":"user",' + body[1:] + b"]}"
    yield "messages", CHAT, repeated(one, "messages", HELLO[0])
    yield "8192 messages", CHAT, repeated(one, "messages", {**USER, "content": "a" * 900}, most=8192)
    yield "5000 messages of a part", CHAT, repeated(one, "messages", {**USER, "content": [part]}, most=5000)
    yield "calls", CHAT, repeated({}, "tool_calls", {"function": {"name": "f", "arguments": "{}"}})
    yield "tools", CHAT, repeated(said, "tools", tool)
    wide = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(60)}}
    yield "128 tools", CHAT, repeated(said, "tools", {**tool, "function": {"name": "f", "parameters": wide}}, most=128)
    long = {**tool, "function": {"name": "f", "description": "a " * 30_000}}
    yield "128 long tools", CHAT, repeated(said, "tools", long, most=128)
    for count in (600_000, 65_536):
        yield f"{count} biases", CHAT, numbered(said, "logit_bias", "1.5", count)
    yield "2000 biases", CHAT, numbered(said, "logit_bias", "-1", 2000)
    yield "metadata", CHAT, numbered(said, "metadata", '"a"', 65_000)
    yield "unknown fields", CHAT, numbered({}, "x", "1", 600_000)
    yield "65000 unknown fields", CHAT, b'{"messages":[],' + numbered({}, "x", "1", 65_000)[6:-1]
    yield "stops", CHAT, repeated(said, "stop", "a")
    yield "250000 stops", CHAT, repeated(said, "stop", "a", most=250_000)
    yield "1024 long stops", CHAT, repeated(said, "stop", "ab" * 4000, most=1024)
    yield "bad words", CHAT, repeated(said, "bad_words", "a")
    yield (
        "choices",
        CHAT,
        repeated({}, "choice", "abc", most=250_000).join(
            [b'{"messages":[{"role":"user","content":"a"}],"structured_outputs":', b"}"]
        ),
    )
    yield (
        "templates' values",
        CHAT,
        numbered({}, "a", "[1]", 16_000).join(
            [b'{"messages":[{"role":"user","content":"a"}],"chat_template_kwargs":', b"}"]
        ),
    )
    yield "allowed tokens", CHAT, repeated(said, "allowed_token_ids", 7)
    yield "250000 allowed tokens", CHAT, repeated(said, "allowed_token_ids", 7, most=250_000)
    yield "long user", CHAT, repeated(said, "user", "a" * (MOST - 4096), brackets="  ")
    yield "nested without end", CHAT, b"[" * (MOST - 1)
    yield "nested 900 deep", CHAT, b'{"messages":' + b"[" * 900 + b"]" * 900 + b"}"
    yield "empty lists", CHAT, repeated(said, "x", [])
    yield "empty objects", CHAT, repeated(said, "x", b"{}")
    yield "16000 objects", CHAT, repeated(said, "x", b'{"abc":{}}', most=8_000)
    yield "long numbers", CHAT, repeated(said, "x", b"9" * 4300)
    yield "floats", CHAT, repeated(said, "x", b"0.12345678901234567")
    yield "250000 floats", CHAT, repeated(said, "x", b"0.12345678901234567", most=250_000)
    yield "not UTF-8", CHAT, b'{"x":"' + b"\xff" * (MOST - 100) + b'"}'


def others() -> Iterator[tuple[str, str, bytes]]:
    """The same for other routes."""
    one: Json = {"max_tokens": 1}
    for name, text in texts().items():
        yield f"text: {name}", COMPLETIONS, f'{{"max_tokens":1,"prompt":"{text}"}}'.encode()
        yield f"text: {name}", TOKENIZE, f'{{"prompt":"{text}"}}'.encode()
    yield "prompts", COMPLETIONS, repeated(one, "prompt", "a")
    yield "256 prompts", COMPLETIONS, repeated(one, "prompt", "a" * 30_000, most=256)
    yield "256 short prompts", COMPLETIONS, repeated(one, "prompt", "Hi", most=256)
    yield "ids", COMPLETIONS, repeated(one, "prompt", 7)
    yield "250000 ids", COMPLETIONS, repeated(one, "prompt", 7, most=250_000)
    yield "prompts of ids", COMPLETIONS, repeated(one, "prompt", [7] * 1000, most=256)
    yield "65536 biases", COMPLETIONS, numbered({**one, "prompt": "a"}, "logit_bias", "1.5", 65_536)
    yield "canvas", COMPLETIONS, repeated({**one, "prompt": "a"}, "canvas", 7, most=250_000)
    yield (
        "texts of tokens",
        TOKENIZE,
        repeated({"return_token_strs": True}, "prompt", "a b " * (MOST // 8), brackets="  "),
    )
    yield "messages", TOKENIZE, repeated({}, "messages", {**USER, "content": "a" * 900}, most=8192)
    yield "ids", DETOKENIZE, repeated({}, "tokens", 7)
    yield "250000 ids", DETOKENIZE, repeated({}, "tokens", 777, most=250_000)
    said = {"model": "model", "max_tokens": 1}
    block = {"type": "text", "text": "a"}
    yield "messages", MESSAGES, repeated(said, "messages", HELLO[0])
    yield "8192 messages", MESSAGES, repeated(said, "messages", {**USER, "content": "a" * 900}, most=8192)
    yield "blocks", MESSAGES, repeated({**said, "messages": HELLO}, "system", block)
    yield "16000 blocks", MESSAGES, repeated({**said, "messages": HELLO}, "system", block, most=16_000)
    tool = {"name": "f", "input_schema": {"properties": {"a": {"type": "string"}}}}
    yield "tools", MESSAGES, repeated({**said, "messages": HELLO}, "tools", tool)
    yield "stops", MESSAGES, repeated({**said, "messages": HELLO}, "stop_sequences", "a", most=250_000)
    item = {"role": "user", "content": "a"}
    asked = {"max_output_tokens": 1}
    yield "items", RESPONSES, repeated(asked, "input", item)
    yield "16000 items", RESPONSES, repeated(asked, "input", item, most=16_000)
    yield "8000 long items", RESPONSES, repeated(asked, "input", {**item, "content": "a" * 950}, most=8000)
    yield "long text", RESPONSES, repeated(asked, "input", "a " * (MOST // 2 - 4096), brackets="  ")
    yield (
        "long instructions",
        RESPONSES,
        repeated({**asked, "input": "a"}, "instructions", "a " * (MOST // 2 - 4096), brackets="  "),
    )
    yield "long user", RESPONSES, repeated({**asked, "input": "a"}, "user", "a" * (MOST - 4096), brackets="  ")


def small_chunks() -> bytes:
    """A body that comes in chunks of a byte each."""
    body = b"".join(b"1\r\n%c\r\n" % one for one in b'{"prompt":"' + b"a" * 500_000 + b'"}') + b"0\r\n\r\n"
    head = request_bytes(COMPLETIONS, b"").replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
    return head + body


def answered(address: tuple[str, int], data: bytes) -> int:
    """Send a request, read its answer to the end, and return its status; 0 where the connection broke."""
    with socket.create_connection(address, timeout=300) as connection:
        found = b""
        try:
            connection.sendall(data)
            while part := connection.recv(1 << 20):
                found = found or part
        except ConnectionError:
            pass
    return int(found.split()[1]) if found else 0


def holds(model: AsyncLLM, tell: Callable[[str], None] = print) -> dict[str, Json]:
    """Milliseconds for which each body held the loop, the best of `TRIES`, with the status of its answer."""
    found: dict[str, Json] = {}
    heart = Heart()
    with TemporaryDirectory() as folder:
        template = Path(folder) / "chat.jinja"
        template.write_text(TEMPLATE)
        with inside(model, heart.start, chat_template=str(template)) as address:
            answered(address, request_bytes(CHAT, b'{"messages":[{"role":"user","content":"a"}],"max_tokens":1}'))
            for name, path, data in chain(requests(), [("small chunks", COMPLETIONS, small_chunks())]):
                worst, seconds, status = min(one_try(address, heart, data) for _ in range(TRIES))
                hold = round(1e3 * worst, 1)
                found[f"{path} {name}"] = {"hold_ms": hold, "status": status, "seconds": round(seconds, 2)}
                tell(f"{path:20} {name:26} {len(data):9,} bytes: {status}, held for {hold:6.1f} ms, {seconds:.2f} s")
    return found


def requests() -> Iterator[tuple[str, str, bytes]]:
    return ((name, path, request_bytes(path, body)) for name, path, body in chain(chats(), others()))


def one_try(address: tuple[str, int], heart: Heart, data: bytes) -> tuple[float, float, int]:
    """The longest hold, the time until the answer was whole, and its status."""
    time.sleep(0.05)
    heart.worst, start = 0.0, time.perf_counter()
    status = answered(address, data)
    return heart.worst, time.perf_counter() - start, status
