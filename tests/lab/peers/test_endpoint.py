"""The endpoint adapter against a loopback server."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from lab.peers import PeerError, open_peer
from paceline.errors import ConfigError


class Letters:
    """A tokenizer of single letters."""

    def encode(self, text: str) -> list[int]:
        return [ord(c) - 97 for c in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(97 + i) for i in ids)


class Handler(BaseHTTPRequestHandler):
    """Continues the alphabet; `server.mode` says how it behaves."""

    def log_message(self, *_: Any) -> None:
        """Silent."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server: Any = self.server
        server.seen.append((self.path, self.headers.get("Authorization"), body))
        as_text = isinstance(body["prompt"], str)
        if server.mode == "down" or (server.mode == "text" and not as_text):
            self.send_error(400, "prompt must be a string")
            return
        self.send_response(200)
        self.end_headers()
        last = ord(body["prompt"][-1]) - 97 if as_text else body["prompt"][-1]
        for i in range(body["max_tokens"]):
            choice: dict[str, Any] = {"text": chr(98 + last + i)}
            if server.mode == "ids":
                choice["token_ids"] = [last + 1 + i]
            event = {"error": "out of memory"} if server.mode == "error" else {"choices": [choice]}
            self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
        if server.mode == "silent":
            server.release.wait(10)
        if server.mode != "cut":
            self.wfile.write(b"data: [DONE]\n\n")


@pytest.fixture
def server() -> Iterator[Any]:
    made: Any = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    made.seen, made.mode, made.release = [], "ids", threading.Event()
    made.url = f"http://127.0.0.1:{made.server_port}/v1"
    thread = threading.Thread(target=made.serve_forever, args=(0.01,))
    thread.start()
    yield made
    made.release.set()
    made.shutdown()
    thread.join()
    made.server_close()


def test_ids_both_ways(server: Any) -> None:
    with open_peer("openai", "m", options={"url": server.url, "api_key": "k"}) as peer:
        run = peer.generate([1, 2], 3)
    assert run.token_ids == [3, 4, 5]
    assert run.ttft is not None
    assert 0 < run.ttft <= run.seconds
    assert (run.settings["prompt"], run.settings["ids"]) == ("ids", "sent")
    path, key, body = server.seen[0]
    assert (path, key, body["temperature"], body["ignore_eos"], body["model"]) == (
        "/v1/completions",
        "Bearer k",
        0,
        True,
        "m",
    )


def test_a_server_that_wants_text_gets_it_and_the_settings_say_so(server: Any) -> None:
    server.mode = "text"
    peer = open_peer("openai", "m", options={"url": server.url, "tokenizer": Letters()})
    assert [peer.generate([1, 2], 3).token_ids for _ in range(2)] == [[3, 4, 5]] * 2
    assert (peer.settings["prompt"], peer.settings["ids"]) == ("text", "re-encoded")
    assert [isinstance(body["prompt"], str) for _, _, body in server.seen] == [
        False,
        True,
        True,
    ]  # rejected once, remembered


@pytest.mark.parametrize(
    ("mode", "tokenizer", "message"),
    [
        ("text", None, "rejects token ids .400.*give a tokenizer"),
        ("plain", None, "sends text without token ids"),
        ("down", Letters(), "rejects the request: 400"),
        ("error", None, "out of memory"),
        ("cut", None, r"ended before \[DONE\]"),
        ("silent", None, "did not answer for 0.3 s"),
    ],
)
def test_failures_are_one_line(server: Any, mode: str, tokenizer: Any, message: str) -> None:
    server.mode = mode
    peer = open_peer("openai", "m", options={"url": server.url, "tokenizer": tokenizer}, request_timeout=0.3)
    with pytest.raises(PeerError, match=message) as caught:
        peer.generate([1], 2)
    assert "\n" not in str(caught.value)


def test_no_server_and_no_url() -> None:
    with pytest.raises(PeerError, match="is the server running"):
        open_peer("openai", "m", options={"url": "http://127.0.0.1:9/v1"}).generate([1], 1)
    with pytest.raises(ConfigError, match="must begin with http"):
        open_peer("openai", "m", options={"url": "ftp://x"})
