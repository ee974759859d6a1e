"""Throughput by batch size: `auto` against plain decoding on the bundled model with the shipped prompts, in turn, in one run.

usage: batches.py [--threads 2] [--repeats 15] [--tokens 64] [--requests 32] [--batches 1,2,4,8,16,32] [--model DIR]

Every batch size decodes the same requests with both settings, after warming both up, in groups as large as the batch: each group
with one and then the other, the second one first in every second repeat. Outputs must be equal, or differ first at a near tie
(counted); otherwise nothing is timed.
"""

from __future__ import annotations

import argparse
from itertools import count
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from common import ratio, save

from paceline import LLM, SamplingParams
from paceline.bench.compare import first_difference
from paceline.bench.demo import BUNDLED_TARGET, bundled_prompts

WARM_UP = 3
RUNS = count()


def prompts_of(llm: LLM, requests: int) -> list[list[int]]:
    """So many of the shipped prompts as token ids, in an order that mixes the tasks, from the first again if there are too few."""
    messages = [prompt.prompt for prompt in bundled_prompts()]
    mixed = [messages[5 * i % len(messages)] for i in range(requests)]
    chat = llm.tokenizer.has_chat_template
    return [llm.chat_ids([{"role": "user", "content": text}]) if chat else llm.tokenizer.encode(text) for text in mixed]


def decode(llm: LLM, prompts: list[list[int]], params: SamplingParams, batch: int | None = None) -> list[list[int]]:
    """Group by group, or all at once; under a name of its own each time, so that no drafter profits from its earlier answers."""
    turn = f"run {next(RUNS)}"
    given = [{"prompt_token_ids": ids, "cache_salt": turn} for ids in prompts]
    size = batch or len(given)
    groups = [llm.generate(given[i : i + size], params) for i in range(0, len(given), size)]
    return [one.outputs[0].token_ids for found in groups for one in found]


def must_agree(plain: LLM, prompts: list[list[int]], a: list[list[int]], b: list[list[int]]) -> dict[str, int]:
    """Equal, or first different at a near tie; anything else ends the benchmark."""
    differences = [first_difference(plain.runner, p, x, y) for p, x, y in zip(prompts, a, b, strict=True)]
    wrong = [d for d in differences if d is not None and not d.near_tie]
    if wrong:
        raise SystemExit(f"outputs differ outside near ties, nothing is timed: {wrong[:3]}")
    return {"prompts": len(prompts), "identical": sum(d is None for d in differences)}


def measure(llms: dict[str, LLM], batch: int, requests: int, tokens: int, repeats: int) -> dict[str, Any]:
    """One batch size: seconds of every run, rates, and the ratio auto / plain with its interval."""
    plain, auto = llms["plain"], llms["auto"]
    prompts, params = prompts_of(plain, requests), SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    agreement = must_agree(plain, prompts, decode(plain, prompts, params, batch), decode(auto, prompts, params, batch))
    for _ in range(WARM_UP):
        decode(auto, prompts, params, batch)
    groups = [prompts[i : i + batch] for i in range(0, len(prompts), batch)]
    seconds: dict[str, list[float]] = {name: [] for name in llms}
    for turn in range(repeats):
        took = dict.fromkeys(llms, 0.0)
        for group in groups:
            for name in list(llms)[:: -1 if turn % 2 else 1]:
                start = perf_counter()
                decode(llms[name], group, params)
                took[name] += perf_counter() - start
        for name, one in took.items():
            seconds[name].append(one)
    made = requests * tokens
    rates = {name: made / median(times) for name, times in seconds.items()}
    found = {"batch": batch, "tokens": made, "agreement": agreement, "tokens_per_second": rates, "seconds": seconds}
    found["auto_over_plain"] = ratio(seconds["plain"], seconds["auto"])
    words = ", ".join(f"{name} {rate:.0f} tokens/s" for name, rate in rates.items())
    print(f"batch {batch:2d}: {words}; auto / plain {found['auto_over_plain']}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--batches", default="1,2,4,8,16,32")
    parser.add_argument("--model", type=Path, default=None)
    parser.add_argument("--name", default="batches")
    given = parser.parse_args()
    sizes = [int(size) for size in given.batches.split(",")]
    words = BUNDLED_TARGET if given.model is not None else None
    plain = LLM(
        given.model,
        speculative_config=None,
        threads=given.threads,
        max_num_seqs=max(sizes),
        tokenizer=words,
        enable_prefix_caching=False,
    )
    auto = plain.with_speculative_config({"method": "auto"})
    llms = {"plain": plain, "auto": auto}
    results = [measure(llms, size, given.requests, given.tokens, given.repeats) for size in sizes]
    save(given.name, {"model": str(given.model or "bundled"), "sizes": results})


if __name__ == "__main__":
    main()
