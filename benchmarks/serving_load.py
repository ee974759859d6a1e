"""The server under load: what HTTP costs beside the library, whether drafting pays under many clients, and llama.cpp's
server on the same weights.

usage: serving_load.py --data FOLDER [--model smollm2] [--clients 1,4,16,64] [--tokens 48] [--repeats 5] [--quick]

Every setting is a process of its own, loaded all the time, and runs in turn with the others: `server` and `library`
(AsyncLLM without HTTP), both with `auto`; `plain`, the server without drafts; `llama-server`. Each of N clients streams
its requests one after the other, greedily, to exactly --tokens tokens, from one process that reads bytes and parses
them when all have come. Prompts are of --data (shipped ones without), other ones in every repeat; no prefix is cached
twice, and nothing drafted from earlier repeats. Seconds of CPU are told apart by thread: the server's event loop, its
other threads (the engine), the clients.

over     ratios of paired repeats: tokens per CPU second of the engine and per second, server over library; per second,
         `auto` over plain and over llama-server
loop_ms  milliseconds of CPU of the event loop for each token that is streamed

llama-server decodes --slots sequences at once, from a F16 file of the same weights; `llama_server.py` makes and finds
it. Results: `results/serving_load_MODEL.json`; the exit code is 1 where something asked for is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from time import perf_counter, thread_time
from typing import Any

import numpy as np
from common import RESULTS, ratio, save
from decoding import Ids, Model, add_model, model_of, prompts_of, published
from llama_server import COMPLETION, llama_version, serve_llama
from served import COMPLETIONS, Child, ask, child, free_port, paceline, parsed

from paceline import LLM, AsyncLLM, SamplingParams

SETS = ("spec-bench", "mt-redundant", "humaneval", "gsm8k")
ASKED = {"engine cpu, server over library": 0.95, "server over library": 0.75, "auto over plain": 0.97,
         "auto over llama-server": 1.2}  # fmt: skip
LOOP_MS = 0.1
SALTS = count()


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one load on one setting: seconds on the clock and of CPU, and the texts or tokens."""

    seconds: float
    loop: float
    engine: float
    clients: float
    first: float
    outputs: list[Any]


def library(model: str, threads: int, seqs: int) -> None:
    """Decode loads that come as lines of JSON; runs in a process of its own."""
    llm = LLM(None if model == "bundled" else model, threads=threads, max_num_seqs=seqs)
    served = AsyncLLM(llm)
    print(json.dumps("ready"), flush=True)

    async def one(ids: Ids, tokens: int, salt: str) -> list[int]:
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        found: list[int] = []
        async for chunk in served.stream({"prompt_token_ids": ids, "cache_salt": salt}, params):
            found += chunk.token_ids
        return found

    async def client(prompts: Sequence[Ids], tokens: int, salt: str) -> list[list[int]]:
        return [await one(ids, tokens, salt) for ids in prompts]

    async def load(given: dict[str, Any]) -> list[list[int]]:
        n, prompts = given["clients"], given["prompts"]
        parts = await asyncio.gather(*(client(prompts[i::n], given["tokens"], given["salt"]) for i in range(n)))
        return [tokens for part in parts for tokens in part]

    for line in sys.stdin:
        given, start = json.loads(line), perf_counter()
        outputs = asyncio.run(load(given))
        print(json.dumps({"seconds": perf_counter() - start, "outputs": outputs}), flush=True)


def of_library(where: Child, prompts: Sequence[Ids], clients: int, tokens: int) -> Cost:
    before = where.cpu()
    found = where.ask({"prompts": prompts, "clients": clients, "tokens": tokens, "salt": f"{next(SALTS)}"})
    after = where.cpu()
    return Cost(found["seconds"], after[0] - before[0], after[1] - before[1], 0.0, 0.0, found["outputs"])


def of_server(where: Child, prompts: Sequence[Ids], clients: int, tokens: int) -> Cost:
    """Of either server."""
    theirs = where.kind == "llama"
    salt = f"{next(SALTS)}"

    def body(ids: Ids) -> dict[str, Any]:
        if theirs:
            return {"prompt": ids, "n_predict": tokens, "stream": True, "temperature": 0, "ignore_eos": True,
                    "cache_prompt": False, "return_tokens": True}  # fmt: skip
        return {"prompt": ids, "max_tokens": tokens, "stream": True, "temperature": 0, "ignore_eos": True,
                "cache_salt": salt, "return_token_ids": True}  # fmt: skip

    async def client(mine: Sequence[Ids]) -> list[Any]:
        path = COMPLETION if theirs else COMPLETIONS
        return [await ask(where.address, path, body(ids)) for ids in mine]

    async def load() -> list[Any]:
        parts = await asyncio.gather(*(client(prompts[i::clients]) for i in range(clients)))
        return [one for part in parts for one in part]

    before, mine, start = where.cpu(), thread_time(), perf_counter()
    replies = asyncio.run(load())
    seconds, spent, after = perf_counter() - start, thread_time() - mine, where.cpu()
    outputs = []
    for one in replies:
        if parsed(one).status != 200:
            sys.exit(f"a request failed: {one.raw[:400]!r}")
        parts = [event.get("tokens", []) if theirs else event["choices"][0]["token_ids"] for event in one.events]
        outputs.append([token for part in parts for token in part])
        if theirs and one.events[-1].get("tokens_predicted") == tokens:
            continue  # some of them without their ids, where their text is half a character
        if len(outputs[-1]) != tokens:
            sys.exit(f"{where.kind}: {len(outputs[-1])} tokens came in place of {tokens}")
    first = float(np.median([one.first for one in replies]))
    return Cost(seconds, after[0] - before[0], after[1] - before[1], spent, first, outputs)


def opened(stack: ExitStack, model: Model, given: argparse.Namespace) -> dict[str, Child]:
    """All settings, loaded."""
    folder = None if model.name == "bundled" else model.folder
    seqs, threads = max(given.clients), given.threads
    found = {}
    for name, method in (("server", "auto"), ("plain", None)):
        port = free_port()
        command = paceline(folder, method, port=port, threads=threads, max_num_seqs=seqs)
        found[name] = stack.enter_context(child(command, threads=threads, port=port))
    command = [sys.executable, __file__, "--serve-library", folder or "bundled", "--threads", threads]
    command += ["--clients", ",".join(map(str, given.clients))]
    found["library"] = stack.enter_context(child(command, threads=threads))
    found["library"].heard()  # it is loaded
    if given.peer:
        found["llama-server"] = stack.enter_context(serve_llama(model.folder, slots=given.slots, threads=threads))
    return found


def prompts_for(model: Model, given: argparse.Namespace) -> list[Ids]:
    llm = model.open(profile=False)
    wanted = given.repeats * max(given.turns * n for n in given.clients) if given.data else 64
    if given.data is None:
        return prompts_of(llm, wanted)
    each = -(-wanted // len(SETS))
    groups = [published(llm, given.data, name, each, longest=given.longest) for name in SETS]
    return [group[i] for i in range(each) for group in groups if i < len(group)]


def measured(settings: Mapping[str, Child], clients: int, prompts: Sequence[Ids], given: Any) -> dict[str, Any]:
    """One number of clients."""
    names = [name for name in settings if name != "llama-server" or clients <= given.slots]
    size = clients * (given.turns if clients <= 16 else 1)
    costs: dict[str, list[Cost]] = {name: [] for name in names}
    start = 0
    for turn in range(-1, given.repeats):
        mine = [prompts[(start + i) % len(prompts)] for i in range(size)]
        start += size
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            cost = (of_library if name == "library" else of_server)(settings[name], mine, clients, given.tokens)
            if turn >= 0:  # the first of all is a warm-up
                costs[name].append(cost)
    return summary(costs, size * given.tokens)


def summary(costs: Mapping[str, Sequence[Cost]], tokens: int) -> dict[str, Any]:
    def column(name: str, key: str) -> list[float]:
        return [asdict(cost)[key] for cost in costs[name]]

    def equal(a: str, b: str) -> float:
        pairs = [
            pair for x, y in zip(costs[a], costs[b], strict=True) for pair in zip(x.outputs, y.outputs, strict=True)
        ]
        return sum(x == y for x, y in pairs) / len(pairs)

    over = {
        "engine cpu, server over library": ratio(column("library", "engine"), column("server", "engine")),
        "server over library": ratio(column("library", "seconds"), column("server", "seconds")),
        "auto over plain": ratio(column("plain", "seconds"), column("server", "seconds")),
    }
    if "llama-server" in costs:
        over["auto over llama-server"] = ratio(column("llama-server", "seconds"), column("server", "seconds"))
        over["plain over llama-server"] = ratio(column("llama-server", "seconds"), column("plain", "seconds"))
    return {
        "tokens": tokens,
        "tokens per second": {name: tokens / float(np.median(column(name, "seconds"))) for name in costs},
        "cpu seconds": {
            name: {key: float(np.median(column(name, key))) for key in ("loop", "engine", "clients")} for name in costs
        },
        "seconds to the first token": {n: float(np.median(column(n, "first"))) for n in costs if n != "library"},
        "loop_ms": {n: 1e3 * float(np.median(column(n, "loop"))) / tokens for n in ("server", "plain", "library")},
        "over": over,
        "outputs equal to the library's": {name: equal("library", name) for name in costs if name != "library"},
    }


def missed(results: Mapping[str, Any]) -> list[str]:
    """What is asked for and not reached."""
    found = []
    for clients, one in results.items():
        for name, least in ASKED.items():
            asked = name != "auto over llama-server" or int(clients) <= 4
            if asked and name in one["over"] and one["over"][name]["median"] < least:
                found.append(f"{clients} clients, {name}: {one['over'][name]['median']:.3f}, asked {least}")
        if one["loop_ms"]["server"] >= LOOP_MS:
            found.append(f"{clients} clients: {one['loop_ms']['server']:.3f} ms of the event loop a token")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model(parser)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--clients", type=lambda text: [int(n) for n in text.split(",")], default=[1, 4, 16, 64])
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument(
        "--turns", type=int, default=2, help="requests of a client, one after the other, up to 16 clients"
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--longest", type=int, default=200, help="tokens of a prompt")
    parser.add_argument("--slots", type=int, default=16, help="of llama-server")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--no-peer", dest="peer", action="store_false", help="without llama-server")
    parser.add_argument("--quick", action="store_true", help="the bundled model, few tokens, one repeat")
    parser.add_argument("--folder", type=Path, default=RESULTS)
    parser.add_argument("--serve-library", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve_library:
        library(given.serve_library, given.threads, max(given.clients))
        return
    if given.quick:
        given.model, given.repeats, given.tokens, given.clients = "bundled", 1, 24, [1, 4, 16]
    model = model_of(given.model)
    prompts, results = prompts_for(model, given), dict[str, Any]()
    with ExitStack() as stack:
        settings = opened(stack, model, given)
        for clients in given.clients:
            results[str(clients)] = measured(settings, clients, prompts, given)
            print(clients, "clients", json.dumps(results[str(clients)], indent=1), flush=True)
    failed = missed(results)
    options = {key: value for key, value in vars(given).items() if key in ("tokens", "turns", "repeats", "slots")}
    about = {"weights": model.weights, "options": options, "llama-server": llama_version() if given.peer else None}
    save(f"serving_load_{model.name}", {**about, "clients": results, "missed": failed}, given.folder)
    print("\n".join(failed) or "all that is asked for is reached")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
