"""What a key that floods the server costs another key.

usage: serving_fairness.py [--model FILE] [--threads 2] [--asks 12] [--tokens 48] [--floods wide,many,long,row]
                           [--limits JSON]

A server with two keys. One asks for a stream at a time, as a person does, and is timed: seconds to its first token and
from token to token. It does so alone, then beside floods of the other key, in turn:

wide   requests of 64 prompts with n = 16, of 400 tokens each
many   64 clients at once, each with n = 4
long   16 clients, each with prompts of about 1,700 tokens
row    one client, one request with n = 16 after the other, of 400 tokens each

With --limits the floods come twice: of a key that has none, and of one whose key file has these
(`{"max_running": 2, "tokens_per_minute": 60000}`); the first tells what the limits are good for.

A flood should cost the other key at most twice its idle times (the exit code is 1 where medians over --asks streams say
otherwise, beside the key with limits where there is one), and its tokens must be the same, greedily. What the flood
itself gets is told as well.

Results: `results/serving_fairness.json`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from common import RESULTS, save
from served import COMPLETIONS, Json, child, free_port, paceline, request_bytes

TEXT = "The ships came back to the harbour in the evening, and everybody went down to look at them. "
FLOODS: dict[str, tuple[int, Json]] = {
    "wide": (1, {"prompt": [f"{i}. {TEXT}" for i in range(64)], "n": 16, "max_tokens": 400}),
    "many": (64, {"prompt": TEXT, "n": 4, "max_tokens": 400}),
    "long": (16, {"prompt": TEXT * 80, "max_tokens": 32}),
    "row": (1, {"prompt": TEXT, "n": 16, "max_tokens": 400}),
}
"""Clients, and what each asks for again and again."""


@dataclass(slots=True)
class Times:
    """Of the streams of one key: seconds to the first token of each, and from token to token on average."""

    first: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)
    texts: list[bytes] = field(default_factory=list)

    def summary(self) -> Json:
        return {"first_ms": round(1e3 * median(self.first), 1), "between_ms": round(1e3 * median(self.between), 2)}


async def timed(address: tuple[str, int], body: Json, times: Times) -> None:
    """One stream of the key that is timed."""
    start, stamps, parts = time.perf_counter(), list[float](), list[bytes]()
    reader, writer = await asyncio.open_connection(*address)
    try:
        writer.write(asked(body, "one"))
        while line := await reader.readline():
            if line.startswith(b"data: {"):
                stamps.append(time.perf_counter())
                parts.append(line)
    finally:
        writer.close()
    times.first.append(stamps[0] - start)
    times.between.append((stamps[-1] - stamps[0]) / (body["max_tokens"] - 1))
    times.texts.append(b"".join(part.partition(b'"text":"')[2].partition(b'","logprobs"')[0] for part in parts))


def asked(body: Json, key: str) -> bytes:
    return request_bytes(COMPLETIONS, json.dumps(body).encode(), {"Authorization": f"Bearer {key}"})


async def answered(reader: asyncio.StreamReader, got: list[float]) -> None:
    """Note when each event comes; a quota that is used up waits a little."""
    while line := await reader.readline():
        if line.startswith(b"data: {"):
            got.append(time.perf_counter())
        elif line.startswith(b"HTTP/1.1 429"):
            await asyncio.sleep(0.1)
        elif line.startswith(b"HTTP/1.1 4"):
            raise RuntimeError(f"the flood is refused: {(await reader.read()).decode()}")


@asynccontextmanager
async def flood(address: tuple[str, int], name: str) -> AsyncIterator[list[float]]:
    """Clients of the other key inside the block; events that they got, as times."""
    clients, body = FLOODS[name]
    got: list[float] = []

    async def client(number: int) -> None:
        turn = 0
        while True:
            turn += 1
            prompts = body["prompt"]
            given = [f"{turn} {one}" for one in prompts] if isinstance(prompts, list) else f"{number} {turn} {prompts}"
            more = {"prompt": given, "stream": True, "ignore_eos": True, "temperature": 0}
            reader, writer = await asyncio.open_connection(*address)
            try:
                writer.write(asked(body | more, "other"))
                await answered(reader, got)
            finally:
                writer.close()

    tasks = [asyncio.create_task(client(number)) for number in range(clients)]
    try:
        while len(got) < 50:
            await asyncio.sleep(0.05)
            if refused := [task for task in tasks if task.done()]:
                await refused[0]
        yield got
    finally:
        for task in tasks:
            task.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.gather(*tasks, return_exceptions=True)


async def series(address: tuple[str, int], given: argparse.Namespace, times: Times) -> None:
    for number in range(given.asks):
        body = {"prompt": f"Chapter {number}. {TEXT * 3}", "max_tokens": given.tokens, "temperature": 0}
        await timed(address, body | {"stream": True, "ignore_eos": True, "cache_salt": f"{time.time_ns()}"}, times)


async def compared(address: tuple[str, int], given: argparse.Namespace) -> dict[str, Any]:
    alone: Times = Times()
    await series(address, given, Times())  # compiles, and settles what is drafted
    await series(address, given, alone)
    found: dict[str, Any] = {"alone": alone.summary()}
    print("alone", found["alone"], flush=True)
    for name in given.floods.split(","):
        beside = Times()
        async with flood(address, name) as got:
            before, start = len(got), time.perf_counter()
            await series(address, given, beside)
            events = (len(got) - before) / (time.perf_counter() - start)
        await asyncio.sleep(1.0)
        one = beside.summary()
        for key in ("first_ms", "between_ms"):
            one[key.replace("_ms", "_ratio")] = round(one[key] / found["alone"][key], 2)
        found[name] = one | {"same_text": beside.texts == alone.texts, "events_of_flood_per_s": round(events, 1)}
        print(name, found[name], flush=True)
    return found


def served(given: argparse.Namespace, limits: Json | None) -> dict[str, Any]:
    """Times beside floods of a key that has these limits, or none.

    Args:
        limits: as a key file has them.
    """
    port = free_port()
    command = paceline(given.model, given.method, port=port, threads=given.threads, served_model_name="model")
    with TemporaryDirectory() as folder:
        file = Path(folder) / "keys.json"
        file.write_text(json.dumps({"keys": [{"key": "one"}, {"key": "other", **(limits or {})}]}))
        with child([*command, "--api-key-file", file], threads=given.threads, port=port) as server:
            return asyncio.run(compared(server.address, given))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--method", default="auto")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--asks", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--floods", default=",".join(FLOODS))
    parser.add_argument("--limits", type=json.loads)
    parser.add_argument("--folder", type=Path, default=RESULTS)
    given = parser.parse_args()
    found: dict[str, Any] = {"times": served(given, None)}
    if given.limits is not None:
        print("with", given.limits, flush=True)
        found |= {"limits": given.limits, "times_with_limits": served(given, given.limits)}
    name = Path(given.model).name if given.model else "bundled"
    save("serving_fairness", {"model": name, "asks": given.asks} | found, given.folder)
    floods = [one for name, one in found.get("times_with_limits", found["times"]).items() if name != "alone"]
    sys.exit(any(max(one["first_ratio"], one["between_ratio"]) > 2 for one in floods))


if __name__ == "__main__":
    main()
