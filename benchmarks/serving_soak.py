"""A server under mixed traffic for as long as you like: nothing leaks, nothing gets stuck, no answer is wrong.

usage: serving_soak.py [--minutes 30] [--clients 12] [--seed 0]

A server of its own process (the bundled model, strict, with keys and small limits) gets random requests of all kinds
from --clients clients. Finished greedy answers, whole or streamed, must be those of `LLM`, constrained ones must fit
their schema; wrong requests must get the status that they deserve, and nothing 5xx. Every --rest seconds the
clients rest, and the server must fall silent: no request running or waiting, as many open files and threads as before,
and from the third rest on as much memory, within GROWTH. (The cache's use is reported: kept prefixes are in it;
serving_faults.py counts blocks without them.) Exits with 1 where something is wrong.

Results: `results/serving_soak.json`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from common import RESULTS, save
from served import CHAT, COMPLETIONS, Child, Reply, ask, child, free_port, get, paceline, parsed, request_bytes

from paceline import LLM, SamplingParams
from paceline.bench import bundled_prompts

KEY = "Bearer soak-key"
HEADERS = {"Authorization": KEY}
BODY_BYTES = 100_000
CACHE_BYTES = 32 * 2**20
"""So little that kept prefixes fill it within a minute and requests make way for each other."""

GROWTH = 0.02
"""Share by which resident memory may grow from the third rest to the last one."""

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}},
          "required": ["a", "b"], "additionalProperties": False}  # fmt: skip
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": SCHEMA}}]
TEMPLATE = """{{ tools | tojson if tools else "" }}
{% for one in messages %}{{ one.role }}: {{ one.content }}
{% endfor %}assistant:"""
HELLO = [{"role": "user", "content": "Say hello"}]
Body = dict[str, Any]


@dataclass(slots=True)
class Seen:
    """What came back so far."""

    sent: Counter[str] = field(default_factory=Counter)
    statuses: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    compared: int = 0


class Soak:
    """Traffic of all kinds on one server.

    Args:
        known: requests and the texts that each must get.
    """

    def __init__(self, server: Child, known: Sequence[tuple[Body, str]], seed: int) -> None:
        self.server, self.known, self.dice, self.seen = server, known, random.Random(seed), Seen()
        self.traffic: dict[str, tuple[Callable[[], Awaitable[None]], int]] = {
            "whole": (self.whole, 6),
            "stream": (self.stream, 6),
            "slow reader": (self.slow, 1),
            "gone before the answer": (self.gone, 3),
            "gone in the stream": (self.gone_in_stream, 4),
            "gone in the request": (self.gone_in_request, 1),
            "wrong": (self.wrong_request, 6),
            "sampled": (self.sampled, 3),
            "constrained": (self.constrained, 3),
            "tools": (self.tools, 1),
            "metrics": (self.metrics, 1),
        }

    async def client(self, until: float) -> None:
        names, weights = list(self.traffic), [weight for _, weight in self.traffic.values()]
        while perf_counter() < until:
            (name,) = self.dice.choices(names, weights)
            self.seen.sent[name] += 1
            try:
                await asyncio.wait_for(self.traffic[name][0](), 60)
            except Exception as error:
                self.seen.wrong.append(f"{name}: {type(error).__name__} {error}")

    async def ask(self, path: str, body: Body, expected: int = 200) -> Reply:
        reply = parsed(await ask(self.server.address, path, body, HEADERS))
        self.note(reply, expected, json.dumps(body)[:200])
        return reply

    def note(self, reply: Reply, expected: int, what: str) -> None:
        self.seen.statuses[str(reply.status)] += 1
        if reply.status != expected:
            self.seen.wrong.append(f"{reply.status} in place of {expected} for {what}: {reply.raw[-200:]!r}")

    def compare(self, text: str, wanted: str) -> None:
        self.seen.compared += 1
        if text != wanted:
            self.seen.wrong.append(f"{text!r} in place of {wanted!r}")

    async def whole(self) -> None:
        body, wanted = self.dice.choice(self.known)
        reply = await self.ask(COMPLETIONS, body)
        self.compare(reply.body["choices"][0]["text"], wanted)

    async def stream(self) -> None:
        body, wanted = self.dice.choice(self.known)
        reply = await self.ask(COMPLETIONS, {**body, "stream": True, "stream_options": {"include_usage": True}})
        self.compare("".join(one["text"] for event in reply.events for one in event["choices"]), wanted)
        if not reply.raw.endswith(b"data: [DONE]\n\n") or reply.events[-1]["usage"]["completion_tokens"] < 1:
            self.seen.wrong.append(f"a stream without its end: {reply.raw[-200:]!r}")

    async def opened(self, body: Body) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(*self.server.address, limit=2048)
        writer.write(request_bytes(COMPLETIONS, json.dumps(body).encode(), HEADERS))
        return reader, writer

    async def slow(self) -> None:
        """Reads little by little, and sees the same."""
        body, wanted = self.dice.choice(self.known)
        reader, writer = await self.opened({**body, "stream": True})
        parts = list[bytes]()
        while data := await reader.read(200):
            parts.append(data)
            await asyncio.sleep(0.01)
        writer.close()
        reply = parsed(Reply(raw=b"".join(parts)))
        self.note(reply, 200, "a slow reader")
        self.compare("".join(one["text"] for event in reply.events for one in event["choices"]), wanted)

    def long(self) -> Body:
        body, _ = self.dice.choice(self.known)
        return {**body, "max_tokens": 1500, "ignore_eos": True, "n": self.dice.choice([1, 1, 3])}

    async def gone(self) -> None:
        _, writer = await self.opened(self.long())
        await asyncio.sleep(self.dice.random() * 0.1)
        writer.close()

    async def gone_in_stream(self) -> None:
        reader, writer = await self.opened({**self.long(), "stream": True})
        await reader.read(self.dice.randrange(1, 3000))
        if self.dice.random() < 0.5:  # with a reset in place of an end
            writer.transport.abort()
        writer.close()

    async def gone_in_request(self) -> None:
        _, writer = await asyncio.open_connection(*self.server.address)
        data = request_bytes(COMPLETIONS, json.dumps(self.long()).encode(), HEADERS)
        writer.write(data[: self.dice.randrange(1, len(data))])
        await asyncio.sleep(0.01)
        writer.close()

    async def wrong_request(self) -> None:
        deep = b'{"items":' * 3000 + b"{}" + b"}" * 3000
        schema = b'{"messages": [{"role": "user", "content": "a"}], "structured_outputs": {"json": ' + deep + b"}}"
        cases: list[tuple[str, bytes, dict[str, str], int]] = [
            (COMPLETIONS, b'{"prompt": "a"', HEADERS, 400),
            (COMPLETIONS, b'{"prompt": "a", "max_tokns": 3}', HEADERS, 400),
            (COMPLETIONS, b'{"prompt": "a", "temperature": -3}', HEADERS, 400),
            (COMPLETIONS, b'{"prompt": "a", "temperature": 1e999}', HEADERS, 400),
            (COMPLETIONS, b'{"prompt": [99999999]}', HEADERS, 400),
            (COMPLETIONS, b'{"prompt": "\\ud800"}', HEADERS, 400),
            (COMPLETIONS, b"[" * 50_000, HEADERS, 400),
            (COMPLETIONS, b'{"prompt":' + b"[" * 40_000 + b"]" * 40_000 + b"}", HEADERS, 400),
            (COMPLETIONS, b"\xff\xfe", HEADERS, 400),
            (COMPLETIONS, b'{"prompt": "' + b"a" * BODY_BYTES + b'"}', HEADERS, 413),
            (COMPLETIONS, b'{"prompt": "a"}', {"Authorization": "Bearer wrong"}, 401),
            (COMPLETIONS, b'{"prompt": "a"}', {**HEADERS, "Content-Type": "text/plain"}, 415),
            (COMPLETIONS, b'{"prompt": "a"}', {**HEADERS, "Host": "evil.example"}, 421),
            (COMPLETIONS, b'{"prompt": "a", "model": "gpt-9"}', HEADERS, 404),
            ("/v1/nothing", b"{}", HEADERS, 404),
            (CHAT, schema, HEADERS, 400),
            (CHAT, json.dumps({"messages": HELLO, "structured_outputs": {"regex": "(" * 500}}).encode(), HEADERS, 400),
            (CHAT, json.dumps({"messages": HELLO, "tool_choice": "required"}).encode(), HEADERS, 400),
        ]
        path, data, headers, expected = self.dice.choice(cases)
        reader, writer = await asyncio.open_connection(*self.server.address)
        writer.write(request_bytes(path, data, headers))
        reply = Reply()
        with suppress(ConnectionError):  # of a body that was not read to its end
            while part := await reader.read(1 << 16):
                reply.raw += part
        writer.close()
        if reply.raw or expected != 413:
            self.note(parsed(reply), expected, f"{path} {data[:80]!r}")

    async def sampled(self) -> None:
        body, _ = self.dice.choice(self.known)
        more = {"temperature": 1.0, "top_p": 0.9, "n": 2, "logprobs": 2, "presence_penalty": 0.5, "seed": 7}
        await self.ask(COMPLETIONS, {**body, **more, "stream": self.dice.random() < 0.5})

    async def constrained(self) -> None:
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
        body = {"messages": HELLO, "response_format": form, "max_tokens": 60, "temperature": 1.0}
        choice = (await self.ask(CHAT, body)).body["choices"][0]
        if choice["finish_reason"] == "stop":
            self.seen.compared += 1
            if set(json.loads(choice["message"]["content"])) != {"a", "b"}:
                self.seen.wrong.append(f"against its schema: {choice}")

    async def tools(self) -> None:
        choice = self.dice.choice(["auto", "required"])
        body = {"messages": HELLO, "tools": TOOLS, "tool_choice": choice, "max_tokens": 40, "temperature": 0}
        await self.ask(CHAT, {**body, "stream": self.dice.random() < 0.5})

    async def metrics(self) -> None:
        for path in ("/metrics", "/v1/models", "/health"):
            reply = await self.get(path)
            self.note(reply, 200, path)

    async def get(self, path: str) -> Reply:
        return await get(self.server.address, path, HEADERS)

    async def resting(self) -> dict[str, float]:
        """What the server holds once it is silent."""
        values = dict[str, float]()
        for _ in range(300):
            page = (await self.get("/metrics")).raw.decode()
            names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "engine_faults")
            values = {name: float(re.search(rf"^paceline:{name} (\S+)", page, re.M)[1]) for name in names}  # type: ignore[index]
            if not values["num_requests_running"] and not values["num_requests_waiting"]:
                break
            await asyncio.sleep(0.1)
        await asyncio.sleep(1)
        process = Path(f"/proc/{self.server.process.pid}")
        status = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines())
        return values | {
            "memory": 1024.0 * int(status["VmRSS"].split()[0]),
            "threads": float(status["Threads"]),
            "files": float(len(list((process / "fd").iterdir()))),
        }


def requests_known(tokens: int) -> list[tuple[Body, str]]:
    """Greedy requests, and the texts that `LLM` gives."""
    llm = LLM(exactness="strict", profile=False, speculative_config=None)
    found = []
    for number, one in enumerate(bundled_prompts()[:24]):
        ids = llm.tokenizer.encode(one.prompt)[:64]
        given: Body = {"temperature": 0.0, "max_tokens": tokens}
        if number % 4 == 1:
            given["stop"] = ["."]
        if number % 4 == 2:
            given["repetition_penalty"] = 1.2
        (output,) = llm.generate([{"prompt_token_ids": ids}], SamplingParams(**given), use_tqdm=False)
        found.append(({"prompt": ids, **given}, output.outputs[0].text))
    return found


def leaks(rests: Sequence[dict[str, float]]) -> list[str]:
    """What the rests say is not given back."""
    found = []
    for number, rest in enumerate(rests):
        for name in ("num_requests_running", "num_requests_waiting", "engine_faults"):
            if rest[name]:
                found.append(f"rest {number}: {name} is {rest[name]}")
    for name in ("threads", "files"):
        if len(rests) > 2 and rests[-1][name] > max(rest[name] for rest in rests[:2]) + 2:
            found.append(f"{name} grow: {[rest[name] for rest in rests]}")
    later = [rest["memory"] for rest in rests[max(2, len(rests) // 3) :]]  # tables and caches fill before
    if len(later) > 2 and np.median(later[-2:]) > (1 + GROWTH) * np.median(later[:2]):
        found.append(f"memory grows: {[round(size / 2**20) for size in later]} MiB")
    return found


async def soak(server: Child, given: argparse.Namespace) -> tuple[Seen, list[dict[str, float]]]:
    run = Soak(server, requests_known(given.tokens), given.seed)
    rests, end = list[dict[str, float]](), perf_counter() + 60 * given.minutes
    while perf_counter() < end:
        until = min(end, perf_counter() + given.rest)
        await asyncio.gather(*(run.client(until) for _ in range(given.clients)))
        rests.append(await run.resting())
        print(rests[-1], sum(run.seen.sent.values()), "requests", *run.seen.wrong[-3:], flush=True)
    return run.seen, rests


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--clients", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rest", type=float, default=60, help="seconds of traffic between two rests")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=RESULTS)
    given = parser.parse_args()
    port, template = free_port(), Path(tempfile.mkdtemp()) / "template.jinja"
    template.write_text(TEMPLATE)
    limits = {
        "max_num_seqs": 8,
        "kv_cache_memory_bytes": CACHE_BYTES,
        "max_body_bytes": BODY_BYTES,
        "api_key": KEY.split()[1],
    }
    more = {"exactness": "strict", "chat_template": template, "tool_call_parser": "hermes"}
    command = paceline(None, "auto", port=port, threads=1, **limits, **more)
    with child(command, threads=1, port=port) as server:
        seen, rests = asyncio.run(soak(server, given))
    wrong = seen.wrong + leaks(rests) + [f"{n} answers {s}" for s, n in seen.statuses.items() if s.startswith("5")]
    kept = [rests[0], *rests[1:-1][:: max(1, len(rests) // 8)], rests[-1]]
    result = {
        "minutes": given.minutes,
        "clients": given.clients,
        "requests": dict(seen.sent),
        "answers": dict(seen.statuses),
        "compared with references": seen.compared,
        "at rest": kept,
        "wrong": wrong[:20],
    }
    save("serving_soak", result, given.folder)
    print(seen.sent, seen.statuses, seen.compared, "compared", *wrong[:20], sep="\n")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
