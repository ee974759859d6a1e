"""Injected faults: nothing that goes wrong with one request, or in one step, changes what another request gets.

usage: serving_faults.py [--count 1000] [--seed 0] [--clients 6] [--tokens 24] [--hold-ms 50]

A server in this process (the bundled model in strict mode, `ngram` and `suffix` drafting) gets --clients requests at
once, again and again; during each round one fault of FAULTS happens in a random call:

step, score, extend, commit, retain, remove   the engine's step, a pass of the model, the feeding of prompts, the
                    handling of cache blocks, or the end of a request raises, before or after its work, also MemoryError
drafter, invalid    a drafter raises, or proposes a tree that is none
rule                the constraint of a request raises
client              a client vanishes after a random number of bytes

Every answer must be the reference that `LLM` gave before, or, where the fault was one of the engine's, a beginning of
it and an error that says so; requests that no fault has met have no error, a constraint's fault ends requests
with a constraint alone, and drafters' and clients' faults meet nobody. /health counts exactly the steps that failed,
the cache is as empty as before, and the server goes on. As a control, references with one token changed must be
noticed.

Then bodies of many shapes, up to the largest that is taken, are sent one after the other; none may hold the event loop
for more than --hold-ms milliseconds, which needs a machine on which nothing else runs (--hold-ms 0 leaves this out).
Exits with 1 where something is wrong.

Results: `results/serving_faults.json`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from common import RESULTS, save
from heartbeat import holds
from served import COMPLETIONS, Reply, ask, get, inside, parsed, request_bytes

from paceline import LLM, AsyncLLM, SamplingParams
from paceline.bench import bundled_prompts
from paceline.grammar import Constraint
from paceline.tree import TokenTree

ENGINE = ("step", "score", "extend", "commit", "retain", "remove")
FAULTS = (*ENGINE, "rule", "drafter", "invalid", "client")
CASES: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 3},
    {"temperature": 0.7, "seed": 5, "presence_penalty": 0.4, "repetition_penalty": 1.1},
    {"temperature": 0.0, "structured_outputs": {"regex": "[a-z]+ [0-9]{3}( [a-z]+){2,9}"}},
)
CONSTRAINED = 3
"""Number of the case with a constraint."""

Body = dict[str, Any]


@dataclass(slots=True)
class Found:
    """What a run has seen."""

    rounds: Counter[str] = field(default_factory=Counter)
    happened: Counter[str] = field(default_factory=Counter)
    requests: int = 0
    equal: int = 0
    told: int = 0
    left: int = 0
    wrong: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Load:
    """A model, requests, and the tokens that each must get."""

    llm: LLM
    bodies: list[Body]
    wanted: list[list[int]]


class Once:
    """Raises in one of the next calls of whatever it wraps.

    Attributes:
        happened: it has.
    """

    def __init__(self, dice: random.Random, *, calls: int = 24, after: bool = True) -> None:
        self.happened = False
        self._left, self._after = dice.randrange(calls), after and dice.random() < 0.5
        self._error = dice.choice([MemoryError("no room"), RuntimeError("injected"), ValueError("injected")])

    def around(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self._left -= 1
            if self._left != -1:
                return real(*args, **kwargs)
            self.happened = True
            if self._after:
                real(*args, **kwargs)
            raise self._error

        return call


@contextmanager
def injected(llm: LLM, kind: str, dice: random.Random) -> Iterator[Once]:
    """One fault in the block."""
    once, engine = Once(dice, after=kind != "step"), llm.engine
    drafter = dice.choice(engine.parts.drafter_set.drafters)
    places = {"step": engine, "score": llm.runner, "extend": llm.runner, "commit": llm.runner,
              "retain": engine.scheduler.memory, "remove": engine.scheduler}  # fmt: skip
    if kind in ("extend", "retain", "remove", "rule", "drafter"):
        once._left %= 6  # which are called seldom
    if kind in places:
        with patch.object(places[kind], kind, once.around(getattr(places[kind], kind))):
            yield once
    elif kind == "rule":
        with patch.object(Constraint, "apply", once.around(Constraint.apply)):
            yield once
    elif kind == "drafter":
        with patch.object(drafter, "propose", once.around(drafter.propose)):
            yield once
    elif kind == "invalid":
        with patch.object(drafter, "propose", broken(once, drafter.propose, dice)):
            yield once
    else:
        yield once


def broken(once: Once, real: Callable[..., Any], dice: random.Random) -> Callable[..., Any]:
    """Proposals of which one is not a tree of tokens."""

    def call(states: Any, budgets: Any, *rest: Any, **more: Any) -> Any:
        trees = list(real(states, budgets, *rest, **more))
        if not once.happened and trees and dice.random() < 0.3:
            once.happened = True
            trees[0] = dice.choice([None, TokenTree.chain(np.array([10**6, 1])), trees[0].__class__])
        return trees

    return call


def bodies_of(llm: LLM, tokens: int) -> list[Body]:
    texts = [llm.tokenizer.encode(one.prompt)[:48] for one in bundled_prompts()]
    return [{"prompt": texts[i % len(texts)], **CASES[i % len(CASES)], "max_tokens": tokens} for i in range(24)]


def reference(llm: LLM, body: Body) -> list[int]:
    given = {key: value for key, value in body.items() if key != "prompt"}
    (found,) = llm.generate([{"prompt_token_ids": body["prompt"]}], SamplingParams(**given), use_tqdm=False)
    found.raise_for_error()
    return list(found.outputs[0].token_ids)


async def vanishing(address: tuple[str, int], body: Body, dice: random.Random) -> Reply:
    """A client that goes away in the middle."""
    reader, writer = await asyncio.open_connection(*address)
    data = request_bytes(COMPLETIONS, json.dumps(body).encode())
    part = dice.choice([len(data), len(data), dice.randrange(len(data))])
    writer.write(data[:part])
    if part == len(data):
        await asyncio.wait_for(reader.read(dice.randrange(1, 4000)), 10)
    writer.close()
    return Reply()


async def round_of(address: tuple[str, int], bodies: Sequence[Body], gone: int | None, dice: random.Random) -> Any:
    async def one(i: int) -> Reply:
        await asyncio.sleep(dice.random() * 0.02)
        body = {**bodies[i], "stream": i % 3 > 0, "return_token_ids": True}
        if i == gone:
            return await vanishing(address, body, dice)
        try:
            return parsed(await asyncio.wait_for(ask(address, COMPLETIONS, body), 20))
        except (TimeoutError, IndexError) as error:  # nothing came, or nothing more
            return Reply(status=-1, raw=repr(error).encode())

    return await asyncio.gather(*(one(i) for i in range(len(bodies))))


def judged(reply: Reply, wanted: Sequence[int]) -> str:
    """equal, told (an error, behind a beginning of the reference), or what is wrong."""
    if reply.status == 500:
        return "told" if reply.body["error"]["code"] == "decoding_failed" else f"500: {reply.body}"
    if reply.status != 200:
        return f"status {reply.status}: {reply.raw[-300:]!r}"
    events = reply.events or [reply.body]
    errors = [event for event in events if "error" in event]
    tokens = [token for event in events for one in event.get("choices", ()) for token in one["token_ids"]]
    if errors:
        return "told" if tokens == list(wanted[: len(tokens)]) else f"an error behind wrong tokens: {tokens}"
    return "equal" if tokens == list(wanted) else f"{tokens} in place of {wanted}"


def drained(llm: LLM) -> str:
    """What is left of ended requests, in words."""
    scheduler = llm.engine.scheduler
    left = {name: len(getattr(scheduler, name)) for name in ("waiting", "paused", "filling", "running")}
    return "" if not any(left.values()) else f"left over: {left}"


async def settled(llm: LLM) -> str:
    for _ in range(500):
        if not (why := drained(llm)):
            return ""
        await asyncio.sleep(0.01)
    return why


async def one_round(address: tuple[str, int], load: Load, found: Found, dice: random.Random, clients: int) -> None:
    """One fault, and what came of it."""
    kind, llm = dice.choice(FAULTS), load.llm
    picked = [dice.randrange(len(load.bodies)) for _ in range(clients)]
    if kind == "rule":
        picked[0] = CONSTRAINED
    leaves = kind == "client" or (kind == "remove" and dice.random() < 0.5)
    gone = dice.randrange(clients) if leaves else None
    before = faults_of(await get(address, "/health"))
    with injected(llm, kind, dice) as once:
        replies = await round_of(address, [load.bodies[i] for i in picked], gone, dice)
    found.rounds[kind] += 1
    found.happened[kind] += once.happened or kind == "client"
    wrong = [why] if (why := await settled(llm)) else []
    for number, (i, reply) in enumerate(zip(picked, replies, strict=True)):
        if number == gone:
            found.left += 1
            continue
        verdict = judged(reply, load.wanted[i])
        found.requests += 1
        found.equal += verdict == "equal"
        found.told += verdict == "told"
        met = kind in ENGINE or (kind == "rule" and "structured_outputs" in load.bodies[i])
        if verdict not in ("equal", "told") or (verdict == "told" and not (met and once.happened)):
            wrong.append(verdict)
    faults = faults_of(await get(address, "/health")) - before
    if faults != (kind in ENGINE and once.happened):
        wrong.append(f"/health counts {faults} faults")
    found.wrong += [f"{kind}: {why}" for why in wrong]


def faults_of(reply: Reply) -> int:
    assert reply.status == 200
    return int(reply.body["faults"])


async def all_rounds(address: tuple[str, int], load: Load, given: argparse.Namespace) -> Found:
    found, dice = Found(), random.Random(given.seed)
    for number in range(given.count):
        await one_round(address, load, found, dice, given.clients)
        if number % 100 == 99:
            print(
                number + 1, "rounds,", found.equal, "equal,", found.told, "told,", len(found.wrong), "wrong", flush=True
            )
        if len(found.wrong) > 20:
            break
    for body, wanted in zip(load.bodies, load.wanted, strict=True):  # and it goes on
        reply = parsed(await ask(address, COMPLETIONS, {**body, "return_token_ids": True}))
        if (verdict := judged(reply, wanted)) != "equal":
            found.wrong.append(f"in the end: {verdict}")
        if judged(reply, [*wanted[:-1], 1 + wanted[-1]]) == "equal":
            found.wrong.append("the control was not noticed")
    return found


def blocks_in_use(llm: LLM) -> int:
    llm.reset_prefix_cache()
    memory = llm.engine.scheduler.memory
    return int(memory.capacity - memory.spare())


def run(given: argparse.Namespace) -> tuple[Found, int]:
    """The rounds, and how many cache blocks they have lost."""
    method = {"method": ["ngram", "suffix"], "num_speculative_tokens": 6}
    llm = LLM(exactness="strict", profile=False, max_num_seqs=4, speculative_config=method)
    pool = bodies_of(llm, given.tokens)
    load = Load(llm, pool, [reference(llm, body) for body in pool])
    before = blocks_in_use(llm)
    with inside(AsyncLLM(llm)) as address:
        found = asyncio.run(all_rounds(address, load, given))
    return found, blocks_in_use(llm) - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--hold-ms", type=float, default=50.0)
    parser.add_argument("--folder", type=Path, default=RESULTS)
    given = parser.parse_args()
    found, lost = run(given)
    held = holds(AsyncLLM(LLM(profile=False, speculative_config=None))) if given.hold_ms else {}
    for name, one in held.items():
        if one["hold_ms"] > given.hold_ms or one["status"] >= 500:
            found.wrong.append(f"{name}: {one}")
    if lost:
        found.wrong.append(f"{lost} cache blocks are lost")
    kinds = {name: {"rounds": found.rounds[name], "happened": found.happened[name]} for name in FAULTS}
    counts = {"requests": found.requests, "equal": found.equal, "ended with an error that says so": found.told,
              "clients that left": found.left, "cache blocks lost": lost}  # fmt: skip
    more = {"bodies": held, "wrong": found.wrong[:20]}
    save("serving_faults", {"seed": given.seed, "faults": kinds, **counts, **more}, given.folder)
    print(kinds, counts, *found.wrong[:20], sep="\n")
    sys.exit(bool(found.wrong))


if __name__ == "__main__":
    main()
