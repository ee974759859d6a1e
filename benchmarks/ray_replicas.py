"""`paceline serve --replicas 2` on this machine: are its tokens the single server's, what does `kill -9` of a replica
cost, what does routing by prefixes find in the caches, and what does the way through Ray take?

usage: ray_replicas.py MODEL [--prompts 16] [--tokens 48] [--kills 8] [--conversations 8] [--turns 5] [--seed 0]

Each replica and the single server have one thread. Streams and whole answers are asked for at the same time, greedily.

equal: texts of the replicas and of the single server. In the control one answer is another prompt's.
kills: a replica drawn at random is killed at a random moment under load. Right is an answer equal to the calm one's;
  lost may be only streams of which something had come, each with an error event that says so. Then seconds until two
  replicas answer again.
routing: conversations side by side, each turn on all earlier ones; tokens of prompts found in prefix caches, by the
  servers' own metrics, with prefix routing, with Ray's own choice (the shorter of two queues drawn at random), and on a
  single server, which has one cache.
cost: one stream at a time behind one replica, in turn with a server of one thread; and many at a time on two replicas
  of one thread, in turn with a server of two. Decoded plainly. And what tensor parallelism would need at every layer:
  microseconds in which two processes sum vectors (PyTorch's gloo).

Exits with 1 if an answer differs, or something is lost that may not be. Results: `results/ray.json`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import re
import signal
import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import psutil
import ray
import torch
import torch.distributed as dist
from common import RESULTS, save
from served import CHAT, COMPLETIONS, Child, Json, Reply, ask, child, free_port, get, paceline, parsed

from paceline.bench import bundled_prompts

PATIENCE = 300.0
"""Seconds in which a replica must be replaced."""

REDUCTIONS = 500

LOAD = (1, 4, 16)
"""Streams at a time."""


@contextmanager
def serving(model: str, *flags: Any, threads: int = 1, method: str = "auto") -> Iterator[Child]:
    """A server in a process of its own."""
    port = free_port()
    with child([*paceline(model, method, port=port, threads=threads), *flags], threads=threads, port=port) as found:
        yield found


def prompts(count: int) -> list[str]:
    """The shipped ones, of several kinds."""
    texts = [one.prompt[:400] for one in bundled_prompts()]
    return [texts[5 * index % len(texts)] + " " * (5 * index // len(texts)) for index in range(count)]


def body(prompt: str, tokens: int, *, stream: bool) -> Json:
    return {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": stream}


def text_of(reply: Reply) -> str:
    """Of an answer, as far as it came."""
    if reply.events:
        return "".join(one["choices"][0]["text"] for one in reply.events if "choices" in one)
    return str(reply.body["choices"][0]["text"])


async def answers(server: Child, asked: Sequence[str], tokens: int, *, delay: float = 0.0) -> list[Reply]:
    """To all prompts side by side, every other one streamed; begun over `delay` seconds."""

    async def one(index: int, prompt: str) -> Reply:
        await asyncio.sleep(delay * index / len(asked))
        return parsed(await ask(server.address, COMPLETIONS, body(prompt, tokens, stream=index % 2 == 0)))

    return list(await asyncio.gather(*(one(*each) for each in enumerate(asked))))


async def metric(server: Child, name: str) -> float:
    """A metric, summed over its labels."""
    page = (await get(server.address, "/metrics")).raw.decode()
    return sum(float(found) for found in re.findall(rf"^paceline:{name}(?:\{{.*?\}})? (\S+)$", page, re.MULTILINE))


def replicas(server: Child) -> list[psutil.Process]:
    """Processes with an engine behind a server."""
    found = psutil.Process(server.process.pid).children(recursive=True)
    return [one for one in found if "ray::ServeReplica" in "".join(one.cmdline())]


@dataclass
class Kill:
    """What one kill cost.

    Attributes:
        right: answers equal to the calm ones. lost: streams that ended with the error event behind a right beginning.
        wrong: whatever else.
        seconds: until all replicas answered again.
    """

    at: float
    right: int
    lost: int
    wrong: int
    seconds: float

    @property
    def good(self) -> bool:
        return not self.wrong


def judged(reply: Reply, wanted: str) -> str:
    """Which of `Kill`'s a reply is."""
    if reply.status != 200:
        return "wrong"
    failed = [one["error"]["code"] for one in reply.events if "error" in one]
    if not failed:
        return "right" if text_of(reply) == wanted else "wrong"
    begun = text_of(reply)
    whole_end = reply.raw.endswith(b"data: [DONE]\n\n")
    return "lost" if failed == ["replica_died"] and begun and wanted.startswith(begun) and whole_end else "wrong"


async def killed(server: Child, asked: list[str], tokens: int, wanted: list[str], chance: random.Random) -> Kill:
    """Load with a kill in its middle."""
    at, count = chance.uniform(0.0, 2.0), len(replicas(server))
    load = asyncio.create_task(answers(server, asked, tokens, delay=1.0))
    await asyncio.sleep(at)
    os.kill(chance.choice(replicas(server)).pid, signal.SIGKILL)
    start = perf_counter()
    found = [judged(*each) for each in zip(await load, wanted, strict=True)]
    async with asyncio.timeout(PATIENCE):
        while await metric(server, "num_replicas") < count:
            await asyncio.sleep(0.2)
    return Kill(at, *(found.count(kind) for kind in ("right", "lost", "wrong")), perf_counter() - start)


async def conversed(server: Child, texts: Sequence[str], turns: int) -> Json:
    """Conversations side by side, and what the caches had of their prompts."""
    before = [await metric(server, f"{name}_total") for name in ("prompt_tokens", "prefix_cache_hits")]

    async def one(text: str) -> None:
        messages = [{"role": "user", "content": text}]
        for turn in range(turns):
            asked = {"messages": messages, "max_tokens": 32, "temperature": 0}
            reply = parsed(await ask(server.address, CHAT, asked))
            messages.append(reply.body["choices"][0]["message"])
            messages.append({"role": "user", "content": f"Go on, part {turn + 2}."})

    start = perf_counter()
    await asyncio.gather(*map(one, texts))
    seconds = perf_counter() - start
    after = [await metric(server, f"{name}_total") for name in ("prompt_tokens", "prefix_cache_hits")]
    tokens, hits = (now - then for now, then in zip(after, before, strict=True))
    return {"prompt_tokens": tokens, "hits": hits, "hit_rate": hits / tokens, "seconds": seconds}


async def streamed(server: Child, asked: Sequence[str], tokens: int, together: int) -> Json:
    """Tokens per second of that many streams at a time, and milliseconds to the first event."""
    left, first = iter(asked), list[float]()

    async def client() -> None:
        for prompt in left:
            reply = await ask(server.address, COMPLETIONS, body(prompt, tokens, stream=True))
            first.append(reply.first * 1000)

    start = perf_counter()
    await asyncio.gather(*(client() for _ in range(together)))
    return {"tokens_per_s": tokens * len(asked) / (perf_counter() - start), "first_ms": statistics.median(first)}


async def in_turn(servers: dict[str, Child], given: argparse.Namespace, together: int) -> dict[str, Json]:
    """`streamed` on several servers, three times in turn; medians."""
    found: dict[str, list[Json]] = {name: [] for name in servers}
    for repeat in range(4):  # the first is not counted
        for name, server in servers.items():
            asked = [f"{repeat} {text}" for text in prompts(max(4, 2 * together))]
            found[name].append(await streamed(server, asked, given.tokens, together))
    return {
        name: {key: statistics.median(run[key] for run in runs[1:]) for key in runs[0]} for name, runs in found.items()
    }


async def equality_and_kills(given: argparse.Namespace) -> Json:
    """The first two parts."""
    asked, chance = prompts(given.prompts), random.Random(given.seed)
    with serving(given.model) as single, serving(given.model, "--replicas", 2) as many:
        replies = await answers(single, asked, given.tokens)
        wanted = [text_of(one) for one in replies]
        got = [text_of(one) for one in await answers(many, asked, given.tokens)]
        equal = sum(one == other for one, other in zip(wanted, got, strict=True))
        control = sum(one == other for one, other in zip([wanted[1], *wanted[1:]], got, strict=True))
        if control == len(asked) or judged(replies[0], wanted[1]) != "wrong":
            sys.exit("a wrong answer would not be seen")
        kills = []
        for _ in range(given.kills):
            kills.append(await killed(many, asked, given.tokens, wanted, chance))
            print(asdict(kills[-1]), flush=True)
    return {
        "answers": len(asked), "equal": equal, "equal_in_control": control,
        "kills": [asdict(kill) for kill in kills], "good_kills": sum(kill.good for kill in kills),
        "lost": sum(kill.lost for kill in kills), "right": sum(kill.right for kill in kills),
        "seconds_to_replace": statistics.median(kill.seconds for kill in kills),
    }  # fmt: skip


async def routing(given: argparse.Namespace) -> Json:
    """The third part, on fresh servers."""
    flags = {"prefix": ("--replicas", 2), "shorter_of_two": ("--replicas", 2, "--no-prefix-routing"), "single": ()}
    found = {}
    for name, each in flags.items():
        with serving(given.model, *each) as server:
            found[name] = await conversed(server, prompts(given.conversations), given.turns)
        print(name, found[name], flush=True)
    return found


def reduce(rank: int, port: int, sizes: Sequence[int], found: Any) -> None:
    """One of two processes that sum vectors; the first says how long it takes."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    for size in sizes:
        vector, seconds = torch.ones(size), list[float]()
        for _ in range(REDUCTIONS):
            start = perf_counter()
            dist.all_reduce(vector)
            seconds.append(perf_counter() - start)
        if not rank:
            found.put(1e6 * statistics.median(seconds[REDUCTIONS // 10 :]))
    dist.destroy_process_group()


def all_reduce() -> Json:
    """Microseconds to sum rows of 576 and 4096 numbers of two processes over the loopback interface."""
    rows = [(hidden, count) for hidden in (576, 4096) for count in (1, 16)]
    context = multiprocessing.get_context("spawn")
    found, port = context.SimpleQueue(), free_port()
    sizes = [hidden * count // 2 for hidden, count in rows]  # of bfloat16, as many bytes in float32
    processes = [context.Process(target=reduce, args=(rank, port, sizes, found)) for rank in range(2)]
    for process in processes:
        process.start()
    taken = [found.get() for _ in sizes]
    for process in processes:
        process.join()
    return {f"{count} x {hidden}": seconds for (hidden, count), seconds in zip(rows, taken, strict=True)}


async def cost(given: argparse.Namespace) -> Json:
    """The fourth part, decoded plainly: each process learns by itself what drafts cost."""
    found: Json = {}
    with serving(given.model, method="null") as single, serving(given.model, "--replicas", 1, method="null") as one:
        found["one_stream"] = await in_turn({"server": single, "1 replica": one}, given, 1)
    with (
        serving(given.model, threads=2, method="null") as single,
        serving(given.model, "--replicas", 2, method="null") as two,
    ):
        servers = {"2 threads": single, "2 replicas": two}
        found["streams"] = {str(count): await in_turn(servers, given, count) for count in LOAD}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a folder")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--kills", type=int, default=8)
    parser.add_argument("--conversations", type=int, default=8)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=RESULTS)
    given = parser.parse_args()
    result: Json = {"model": Path(given.model).name, "ray": ray.__version__}
    result |= asyncio.run(equality_and_kills(given))
    result |= {"routing": asyncio.run(routing(given)), "cost": asyncio.run(cost(given))}
    result["all_reduce_us"] = all_reduce()
    save("ray", result, given.folder)
    print(json.dumps({name: value for name, value in result.items() if name != "kills"}, indent=1))
    sys.exit(0 if result["equal"] == result["answers"] and result["good_kills"] == given.kills else 1)


if __name__ == "__main__":
    main()
