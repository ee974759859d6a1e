"""Are the tokens, texts and logprobs that the server streams those of `LLM` with the same seeds, under every drafter?

usage: serving_equality.py [--tokens 32] [--prompts 4] [--clients 12] [--only METHODS]

The bundled model in strict mode. Plain `LLM` decodes every case of CASES with every prompt, one after the other. Then a
server for each drafter that needs no weights beside the target, and for `draft_model`, is asked for the same: alone,
and with --clients streams at once in a mixed order. All of it must be equal, bit for bit. Two controls must not be: the
references with one token changed, and other seeds. Exits with 1 where something is wrong.

Results: `results/serving_equality.json`.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common import RESULTS, save
from decoding import model_of
from served import COMPLETIONS, ask, inside, parsed
from strict_settings import NEED_A_PAIR, settings

from paceline import LLM, AsyncLLM, SamplingParams
from paceline.bench import bundled_prompts
from paceline.bench.run import dial_registered
from paceline.errors import ConfigError

CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0, "logprobs": 2},
    "sampled": {"temperature": 1.0, "seed": 3, "logprobs": 0},
    "two outputs": {"temperature": 0.8, "seed": 1, "n": 2},
    "nucleus": {"temperature": 0.9, "seed": 2, "top_p": 0.9, "top_k": 40, "min_p": 0.01},
    "penalties": {"temperature": 0.7, "seed": 5, "presence_penalty": 0.4, "frequency_penalty": 0.2,
                  "repetition_penalty": 1.1, "logit_bias": {"5": -3.0}, "logprobs": 1},
    "stop": {"temperature": 0.0, "stop": [".", "\n"], "include_stop_str_in_output": True},
    "constrained": {"temperature": 0.6, "seed": 4, "structured_outputs": {"regex": "[a-z]+ [0-9]{3}( [a-z]+){2,9}"}},
}  # fmt: skip
Job = tuple[str, list[int], dict[str, Any]]
Seen = list[tuple[Any, ...]]


def jobs_of(llm: LLM, prompts: int, tokens: int) -> list[Job]:
    texts = [llm.tokenizer.encode(one.prompt) for one in bundled_prompts()]
    return [(name, ids, {**given, "max_tokens": tokens}) for name, given in CASES.items() for ids in texts[:prompts]]


def offline(llm: LLM, job: Job) -> Seen:
    """What `LLM` gives."""
    _, ids, given = job
    (found,) = llm.generate([{"prompt_token_ids": ids}], SamplingParams(**given), use_tqdm=False)
    found.raise_for_error()
    rows = []
    for one in found.outputs:
        pairs = zip(one.token_ids, one.logprobs or [], strict=False)
        chosen = [max(table[token].logprob, -9999.0) for token, table in pairs]
        rows.append((one.text, list(one.token_ids), one.finish_reason, one.stop_reason, chosen))
    return rows


async def online(address: tuple[str, int], job: Job) -> Seen:
    """What the server streams, put together."""
    _, ids, given = job
    body = {"prompt": ids, **given, "stream": True, "return_token_ids": True}
    reply = parsed(await ask(address, COMPLETIONS, body))
    if reply.status != 200:
        raise SystemExit(f"{body} was answered {reply.raw!r}")
    parts: dict[int, list[Any]] = {}
    for event in reply.events:
        for choice in event["choices"]:
            one = parts.setdefault(choice["index"], ["", [], None, None, []])
            one[0] += choice["text"]
            one[1] += choice["token_ids"]
            one[2], one[3] = choice["finish_reason"], choice["stop_reason"]
            one[4] += (choice["logprobs"] or {}).get("token_logprobs", [])
    return [tuple(parts[index]) for index in sorted(parts)]


async def alone(address: tuple[str, int], jobs: Sequence[Job]) -> list[Seen]:
    return [await online(address, job) for job in jobs]


async def loaded(address: tuple[str, int], jobs: Sequence[Job], clients: int) -> list[Seen]:
    """The same with so many at once, in a mixed order."""
    order, found, room = list(range(len(jobs))), dict[int, Seen](), asyncio.Semaphore(clients)
    random.Random(0).shuffle(order)

    async def one(i: int) -> None:
        async with room:
            found[i] = await online(address, jobs[i])

    await asyncio.gather(*(one(i) for i in order))
    return [found[i] for i in range(len(jobs))]


def differing(jobs: Sequence[Job], wanted: Sequence[Seen], found: Sequence[Seen]) -> list[str]:
    """Cases, once for each request that is not equal."""
    return [job[0] for job, a, b in zip(jobs, wanted, found, strict=True) if a != b]


def changed(wanted: Sequence[Seen]) -> list[Seen]:
    """The same with the last token of each output one higher."""
    return [[(row[0], [*row[1][:-1], row[1][-1] + 1], *row[2:]) for row in rows] for rows in wanted]


def served(llm: LLM, jobs: Sequence[Job], clients: int) -> dict[str, list[Seen]]:
    with inside(AsyncLLM(llm)) as address:
        return {
            "alone": asyncio.run(alone(address, jobs)),
            f"{clients} at once": asyncio.run(loaded(address, jobs, clients)),
        }


def controls(llm: LLM, jobs: Sequence[Job], wanted: Sequence[Seen], clients: int) -> dict[str, int]:
    """How many of the requests that must differ do: all with a changed reference, all sampled ones with other seeds."""
    with inside(AsyncLLM(llm)) as address:
        same = asyncio.run(loaded(address, jobs, clients))
        seeds = [(name, ids, {**given, "seed": 1000 + given["seed"]}) for name, ids, given in jobs if "seed" in given]
        sampled = [rows for job, rows in zip(jobs, wanted, strict=True) if "seed" in job[2]]
        other = asyncio.run(loaded(address, seeds, clients))
    return {
        "requests": len(jobs),
        "changed references that differ": len(differing(jobs, changed(wanted), same)),
        "sampled requests": len(seeds),
        "other seeds that differ": len(differing(seeds, sampled, other)),
    }


def rows_of(llm: LLM, methods: Mapping[str, Any], jobs: Sequence[Job], wanted: Sequence[Seen], clients: int) -> Any:
    """What differs under each method, or why strict mode rejects it."""
    found: dict[str, Any] = {}
    for name, config in methods.items():
        try:
            drafting = llm.with_speculative_config(config)
        except ConfigError as error:
            found[name] = {"rejected": str(error)}
            print(name, found[name], flush=True)
            continue
        runs = served(drafting, jobs, clients)
        found[name] = {way: differing(jobs, wanted, seen) for way, seen in runs.items()}
        print(name, found[name], flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--clients", type=int, default=12)
    parser.add_argument("--only", help="methods, with commas between them")
    parser.add_argument("--folder", type=Path, default=RESULTS)
    given = parser.parse_args()
    model = model_of("bundled")
    llm = model.open(exactness="strict", max_num_seqs=8, profile=False, enable_prefix_caching=True)
    jobs = jobs_of(llm, given.prompts, given.tokens)
    wanted = [offline(llm, job) for job in jobs]
    greedy = SamplingParams(temperature=0.0, max_tokens=given.tokens)
    plain = llm.generate([{"prompt_token_ids": ids} for _, ids, _ in jobs], greedy, use_tqdm=False)
    with dial_registered():
        known = {"plain": None, **settings(plain, model)}
        left = [name for name in NEED_A_PAIR if name != "draft_model"]
        methods = {name: config for name, config in known.items() if name not in left}
        if given.only:
            methods = {name: methods[name] for name in given.only.split(",")}
        checked = controls(llm, jobs, wanted, given.clients)
        print(checked)
        found = rows_of(llm, methods, jobs, wanted, given.clients)
    wrong = sum(len(one) for row in found.values() for way, one in row.items() if way != "rejected")
    blind = checked["changed references that differ"] < checked["requests"] or not checked["other seeds that differ"]
    save("serving_equality", {"requests": len(jobs), "controls": checked, "differing": found}, given.folder)
    print(f"{wrong} requests differ" + ("; a control did not notice" if blind else ""))
    sys.exit(bool(wrong or blind))


if __name__ == "__main__":
    main()
