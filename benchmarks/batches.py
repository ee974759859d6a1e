"""Throughput by batch size: `auto` against plain decoding on the shipped prompts, in turn, in one run.

usage: batches.py [--model smollm2] [--threads 2] [--repeats 5] [--tokens 64] [--requests 16] [--batches 1,2,4,8,16]

Every batch size decodes the same requests with both settings, after warming both up, in groups as large as the batch:
each group with one and then the other, the second one first in every second repeat. Outputs must be equal, or differ
first at a near tie (counted); otherwise nothing is timed. Results: `results/batches_MODEL.json`.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import median
from typing import Any

from common import RESULTS, ratio, save
from decoding import Ids, add_model, decode, model_of, must_agree, prompts_of

from paceline import LLM, SamplingParams
from paceline.utils import time_in_turn

WARM_UP = 3


def measure(llms: dict[str, LLM], batch: int, requests: int, tokens: int, repeats: int) -> dict[str, Any]:
    """One batch size: rates, and the ratio auto / plain with its interval."""
    plain, auto = llms["plain"], llms["auto"]
    prompts, params = prompts_of(plain, requests), SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    groups = [prompts[i : i + batch] for i in range(0, len(prompts), batch)]

    def outputs(llm: LLM) -> list[Ids]:
        return [tokens for group in groups for tokens in decode(llm, group, params)]

    agreement = must_agree(plain, prompts, outputs(plain), outputs(auto))
    for _ in range(WARM_UP):
        decode(auto, groups[0], params)
    calls = {name: lambda group, llm=llm: decode(llm, group, params) for name, llm in llms.items()}
    seconds = {name: one.sum(axis=0).tolist() for name, one in time_in_turn(calls, groups, repeats).items()}
    made = requests * tokens
    rates = {name: made / median(times) for name, times in seconds.items()}
    found = {"batch": batch, "tokens": made, "agreement": agreement, "tokens_per_second": rates, "seconds": seconds}
    found["auto_over_plain"] = ratio(seconds["plain"], seconds["auto"])
    words = ", ".join(f"{name} {rate:.0f} tokens/s" for name, rate in rates.items())
    print(f"batch {batch:2d}: {words}; auto / plain {found['auto_over_plain']}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model(parser)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--batches", default="1,2,4,8,16")
    parser.add_argument("--folder", type=Path, default=RESULTS)
    given = parser.parse_args()
    sizes, model = [int(size) for size in given.batches.split(",")], model_of(given.model)
    plain = model.open(threads=given.threads, max_num_seqs=max(sizes))
    llms = {"plain": plain, "auto": plain.with_speculative_config({"method": "auto"})}
    results = [measure(llms, size, given.requests, given.tokens, given.repeats) for size in sizes]
    save(f"batches_{model.name}", {"model": model.weights, "sizes": results}, given.folder)


if __name__ == "__main__":
    main()
