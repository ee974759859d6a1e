"""Servers in processes of their own, what their threads cost, and clients that read bytes: what the scripts about
`paceline serve` share.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from socket import socket
from threading import Thread
from time import perf_counter, sleep
from typing import Any
from urllib.request import urlopen

from paceline import AsyncLLM
from paceline.config import ServerConfig
from paceline.serving import Server, create_app

Json = dict[str, Any]
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
END = b"data: [DONE]\n\n"


@dataclass(slots=True)
class Child:
    """A process that serves.

    Attributes:
        address: host and port; none for one that is spoken to through its standard input.
        kind: of server.
    """

    process: subprocess.Popen[str]
    address: tuple[str, int] = ("", 0)
    kind: str = "paceline"

    def cpu(self) -> tuple[float, float]:
        """CPU seconds of the first thread, which runs the event loop, and of all others, which live as long."""
        first, rest = 0.0, 0.0
        for task in Path(f"/proc/{self.process.pid}/task").iterdir():
            seconds = int((task / "schedstat").read_text().split()[0]) / 1e9
            if task.name == str(self.process.pid):
                first = seconds
            else:
                rest += seconds
        return first, rest

    def ask(self, question: Json) -> Json:
        """A line of JSON there, and one back."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(question) + "\n")
        self.process.stdin.flush()
        found: Json = self.heard()
        return found

    def wait_until_ready(self, seconds: float = 300) -> None:
        """Return once the server says that it is well.

        Raises:
            SystemExit: it has ended, or takes too long.
        """
        end = perf_counter() + seconds
        while perf_counter() < end and self.process.poll() is None:
            try:
                with urlopen(f"http://127.0.0.1:{self.address[1]}/health", timeout=5):
                    return
            except OSError:
                sleep(0.1)
        raise SystemExit(f"a server did not start: {self.process.args}")

    def heard(self) -> Any:
        """A line of JSON from it."""
        assert self.process.stdout is not None
        if not (line := self.process.stdout.readline()):
            raise SystemExit(f"a process has ended: {self.process.args}")
        return json.loads(line)


@contextmanager
def child(command: Sequence[Any], *, threads: int, port: int = 0, kind: str = "paceline") -> Iterator[Child]:
    """A process, ended behind the block.

    Args:
        threads: that PyTorch and llama.cpp compute with.
        port: where its server listens; the process is waited for until that says that it is well. 0: it is no server.
    """
    process = subprocess.Popen(
        [str(word) for word in command], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL if port else subprocess.PIPE,
        text=True, stderr=subprocess.DEVNULL, env=os.environ | {"OMP_NUM_THREADS": str(threads)},
    )  # fmt: skip
    found = Child(process, ("127.0.0.1", port), kind)
    try:
        if port:
            found.wait_until_ready()
        yield found
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()


def free_port() -> int:
    """That nobody listens on now."""
    with socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def paceline(model: Any, method: Any, *, port: int, threads: int, **options: Any) -> list[str]:
    """The command of a server."""
    words = [sys.executable, "-m", "paceline", "serve", *([] if model is None else [model]), "--port", port]
    words += ["--speculative-config", json.dumps(method) if not isinstance(method, str) else method]
    for name, value in {**options, "threads": threads}.items():
        words += [f"--{name.replace('_', '-')}", value]
    return [str(word) for word in words]


@dataclass(slots=True)
class Reply:
    """What came back: seconds from the request to the first and to the last byte of a body, and its events."""

    status: int = 0
    first: float = 0.0
    seconds: float = 0.0
    raw: bytes = b""
    events: list[Json] = field(default_factory=list)

    @property
    def body(self) -> Json:
        """Of an answer that is no stream."""
        found: Json = json.loads(self.raw.partition(b"\r\n\r\n")[2])
        return found


def request_bytes(path: str, body: bytes, headers: Mapping[str, str] | None = None) -> bytes:
    """A POST; the connection is closed behind its answer."""
    given = {"Host": "127.0.0.1", "Content-Type": "application/json", "Connection": "close",
             "Content-Length": str(len(body)), **(headers or {})}  # fmt: skip
    lines = [f"POST {path} HTTP/1.1", *(f"{name}: {value}" for name, value in given.items()), "", ""]
    return "\r\n".join(lines).encode() + body


async def ask(address: tuple[str, int], path: str, body: Json, headers: Mapping[str, str] | None = None) -> Reply:
    """Send a request and read bytes until the server closes; nothing is read out of them (see `parsed`)."""
    start, found, parts = perf_counter(), Reply(), list[bytes]()
    reader, writer = await asyncio.open_connection(*address)
    try:
        writer.write(request_bytes(path, json.dumps(body).encode(), headers))
        while data := await reader.read(1 << 16):
            if not found.first and b"data: " in data:
                found.first = perf_counter() - start
            parts.append(data)
    finally:
        writer.close()
    found.raw, found.seconds = b"".join(parts), perf_counter() - start
    return found


def parsed(found: Reply) -> Reply:
    """The same with its status and events."""
    head, _, rest = found.raw.partition(b"\r\n\r\n")
    found.status = int(head.split()[1])
    if b"transfer-encoding: chunked" in head.lower():
        rest = dechunked(rest)
        found.raw = head + b"\r\n\r\n" + rest
    if b"text/event-stream" in head.lower():
        lines = [line.removeprefix("data: ") for line in rest.decode().splitlines() if line.startswith("data: {")]
        found.events = [json.loads(line) for line in lines]
    return found


def dechunked(data: bytes) -> bytes:
    """A body without the lengths of its chunks; as far as it came."""
    parts, place = list[bytes](), 0
    while (end := data.find(b"\r\n", place)) > 0 and (size := int(data[place:end], 16)):
        parts.append(data[end + 2 : end + 2 + size])
        place = end + 4 + size
    return b"".join(parts)


@contextmanager
def inside(
    model: AsyncLLM, started: Callable[[asyncio.AbstractEventLoop], object] = bool, **options: Any
) -> Iterator[tuple[str, int]]:
    """The address of a server in this process, on a thread of its own.

    Args:
        started: told its event loop.
    """
    config = ServerConfig(**{"port": 0, "served_model_name": ["model"], **options})
    listening = Server(config)
    server = listening.prepared(create_app(model, config))
    thread = Thread(target=server.run, kwargs={"sockets": [listening.socket]}, daemon=True)
    thread.start()
    while not server.started:
        sleep(0.01)
    started(server.servers[0].get_loop())
    try:
        yield "127.0.0.1", int(listening.url.rsplit(":", 1)[1])
    finally:
        server.should_exit = True
        thread.join(20)


async def get(
    address: tuple[str, int], path: str, headers: Mapping[str, str] | None = None, *, method: str = "GET"
) -> Reply:
    """The answer to a request without a body."""
    given = {"Host": "127.0.0.1", "Connection": "close", **(headers or {})}
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in given.items()), "", ""]
    reader, writer = await asyncio.open_connection(*address)
    writer.write("\r\n".join(lines).encode())
    found = Reply(raw=await reader.read(-1))
    writer.close()
    return parsed(found)
