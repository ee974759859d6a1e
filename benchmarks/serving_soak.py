"""A server under mixed traffic for as long as you like: nothing leaks, nothing gets stuck, no answer is wrong.

usage: serving_soak.py [--minutes 30] [--clients 12] [--seed 0]

A server of its own process (the bundled model, strict, with keys, quotas, searches, batches and small limits) gets
random requests of all kinds from --clients clients: completions, chats, responses, messages, llama-server's
completions, searches, embeddings, rankings, files and batches. Finished greedy answers, whole or streamed, must be
those of `LLM`, searches and embeddings too, constrained ones must fit their schema; wrong requests must get the status
that they deserve, a key above its quota 429, and nothing 5xx. Every --rest seconds the
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
from stand_ins import random_cross_encoder

from paceline import LLM, SamplingParams
from paceline.bench import bundled_prompts

HEADERS, LIMITED = {"Authorization": "Bearer soak-key"}, {"Authorization": "Bearer limited-key"}
KEYS = {"keys": [{"key": "soak-key", "name": "soak", "max_outputs": 512, "max_file_bytes": 10**6},
                 {"key": "limited-key", "name": "limited", "requests_per_minute": 12, "tokens_per_minute": 2000,
                  "max_running": 2}]}  # fmt: skip
BODY_BYTES = 100_000
CACHE_BYTES = 32 * 2**20
"""So little that kept prefixes fill it within a minute and requests make way for each other."""

GROWTH = 0.02
"""Share by which resident memory may grow from the third rest to the last one."""

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}},
          "required": ["a", "b"], "additionalProperties": False}  # fmt: skip
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": SCHEMA}}]
SEARCH = {"method": "beam", "beam_width": 3}
TEMPLATE = """{{ tools | tojson if tools else "" }}
{% for one in messages %}{{ one.role }}: {{ one.content }}
{% endfor %}assistant:"""
FILE = '; filename="a.jsonl"'
HELLO = [{"role": "user", "content": "Say hello"}]
Body = dict[str, Any]


@dataclass(slots=True)
class Seen:
    """What came back so far."""

    sent: Counter[str] = field(default_factory=Counter)
    statuses: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    compared: int = 0


@dataclass(frozen=True, slots=True)
class References:
    """What `LLM` gives.

    Attributes:
        texts: requests, and the text of each.
        searches: prompts, and the text that `SEARCH` finds.
        vectors: texts, and their embeddings of `float32[hidden]`.
    """

    texts: Sequence[tuple[Body, str]]
    searches: Sequence[tuple[Body, str]]
    vectors: Sequence[tuple[str, np.ndarray]]


class Soak:
    """Traffic of all kinds on one server.

    Args:
        known: what answers must be.
    """

    def __init__(self, server: Child, known: References, seed: int) -> None:
        self.server, self.known, self.dice, self.seen = server, known.texts, random.Random(seed), Seen()
        self.searches, self.vectors = known.searches, known.vectors
        self.orders: dict[str, str] = {}
        self.traffic: dict[str, tuple[Callable[[], Awaitable[None]], float]] = {
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
            "above its quota": (self.above_quota, 2),
            "search": (self.search, 1),
            "embeddings": (self.embeddings, 1),
            "ranking": (self.ranking, 1),
            "response": (self.response, 2),
            "message": (self.message, 1),
            "llama-server": (self.llama_server, 1),
            "batch": (self.batch, 0.2),
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

    async def above_quota(self) -> None:
        """Half of these come when the key has nothing left, and are told when to come again."""
        body, wanted = self.dice.choice(self.known)
        reply = parsed(await ask(self.server.address, COMPLETIONS, body, LIMITED))
        if reply.status == 429 and b"\r\nretry-after: " in reply.raw.lower():
            self.seen.statuses["429"] += 1
            return
        self.note(reply, 200, "a request within its quota")
        self.compare(reply.body["choices"][0]["text"], wanted)

    async def search(self) -> None:
        body, wanted = self.dice.choice(self.searches)
        self.compare((await self.ask(COMPLETIONS, {**body, "search": SEARCH})).body["choices"][0]["text"], wanted)

    async def embeddings(self) -> None:
        text, wanted = self.dice.choice(self.vectors)
        reply = await self.ask("/v1/embeddings", {"input": ["something else", text]})
        self.seen.compared += 1
        if not np.allclose(reply.body["data"][1]["embedding"], wanted, atol=1e-5):
            self.seen.wrong.append(f"another embedding of {text!r}")

    async def ranking(self) -> None:
        """The order of texts is the same each time that it is asked for."""
        texts = [text for text, _ in self.vectors]
        query = self.dice.choice(texts)
        found = (await self.ask("/v1/rerank", {"query": query, "documents": texts})).body["results"]
        order = " ".join(str(one["index"]) for one in found)
        self.compare(order, self.orders.setdefault(query, order))

    async def response(self) -> None:
        """One that goes on from another, which is then asked for and forgotten."""
        first = (await self.ask("/v1/responses", {"input": "Say hello", "max_output_tokens": 16})).body["id"]
        more = {"input": "Go on", "previous_response_id": first, "max_output_tokens": 16}
        await self.ask("/v1/responses", {**more, "stream": self.dice.random() < 0.5})
        for method, status in (("GET", 200), ("DELETE", 200), ("GET", 404)):
            reply = await get(self.server.address, f"/v1/responses/{first}", HEADERS, method=method)
            self.note(reply, status, f"{method} of a response")

    async def message(self) -> None:
        body = {"model": "model", "messages": HELLO, "max_tokens": 16, "stream": self.dice.random() < 0.5}
        await self.ask("/v1/messages", body)

    async def llama_server(self) -> None:
        body, wanted = self.dice.choice([one for one in self.known if "repetition_penalty" not in one[0]])
        asked = {"prompt": body["prompt"], "n_predict": body["max_tokens"], "temperature": 0.0}
        reply = await self.ask("/completion", {**asked, "stop": body.get("stop", [])})
        self.compare(reply.body["content"], wanted)

    async def batch(self) -> None:
        """Two requests of a file, whose answers are those of the requests alone."""
        asked = [self.dice.choice(self.known) for _ in range(2)]
        lines = [{"custom_id": str(number), "method": "POST", "url": COMPLETIONS, "body": body}
                 for number, (body, _) in enumerate(asked)]  # fmt: skip
        file = await self.upload("".join(json.dumps(line) + "\n" for line in lines))
        given = {"input_file_id": file, "endpoint": COMPLETIONS, "completion_window": "24h"}
        batch = (await self.ask("/v1/batches", given)).body
        while batch["status"] not in ("completed", "failed", "cancelled", "expired"):
            await asyncio.sleep(0.05)
            batch = (await self.get(f"/v1/batches/{batch['id']}")).body
        written = (await self.get(f"/v1/files/{batch['output_file_id']}/content")).raw.partition(b"\r\n\r\n")[2]
        for answer in map(json.loads, written.splitlines()):
            text = answer["response"]["body"]["choices"][0]["text"]
            self.compare(text, asked[int(answer["custom_id"])][1])
        for name in (file, batch["output_file_id"]):
            self.note(await get(self.server.address, f"/v1/files/{name}", HEADERS, method="DELETE"), 200, "a file")

    async def upload(self, text: str) -> str:
        """Return the id of a file with this text."""
        parts = [f'--soak\r\nContent-Disposition: form-data; name="{name}"{more}\r\n\r\n{value}\r\n'
                 for name, more, value in (("purpose", "", "batch"), ("file", FILE, text))]  # fmt: skip
        kind = {"Content-Type": "multipart/form-data; boundary=soak"}
        reader, writer = await asyncio.open_connection(*self.server.address)
        writer.write(request_bytes("/v1/files", ("".join(parts) + "--soak--\r\n").encode(), {**HEADERS, **kind}))
        reply = parsed(Reply(raw=await reader.read(-1)))
        writer.close()
        self.note(reply, 200, "an upload")
        found: str = reply.body["id"]
        return found

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


def references(tokens: int) -> References:
    """Greedy requests, searches and texts, and what `LLM` gives for each."""
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
    searches, params = [], SamplingParams(temperature=0.0, max_tokens=12)
    for body, _ in found[:6]:
        (output,) = llm.generate([{"prompt_token_ids": body["prompt"]}], params, use_tqdm=False, search=SEARCH)
        searches.append(({"prompt": body["prompt"], "temperature": 0.0, "max_tokens": 12}, output.outputs[0].text))
    texts = [one.prompt[:80] for one in bundled_prompts()[:6]]
    vectors = [np.array(one.outputs.embedding, dtype=np.float32) for one in llm.embed(texts)]
    return References(found, searches, list(zip(texts, vectors, strict=True)))


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
    run = Soak(server, references(given.tokens), given.seed)
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
    port, folder = free_port(), Path(tempfile.mkdtemp())
    (folder / "template.jinja").write_text(TEMPLATE)
    (folder / "keys.json").write_text(json.dumps(KEYS))
    limits = {
        "max_num_seqs": 8,
        "kv_cache_memory_bytes": CACHE_BYTES,
        "max_body_bytes": BODY_BYTES,
        "api_key_file": folder / "keys.json",
        "batch_folder": folder / "batches",
        "rerank_model": random_cross_encoder(),
        "served_model_name": "model",
    }
    more = {"exactness": "strict", "chat_template": folder / "template.jinja", "tool_call_parser": "hermes"}
    command = [*paceline(None, "auto", port=port, threads=1, **limits, **more), "--enable-search"]
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
