"""Prefix caching: requests that share a long beginning, with and without it, in turn, in one run.

usage: prefix.py [--model smollm2] [--requests 8] [--prefix 1000] [--own 12] [--tokens 32] [--repeats 3] [--threads 2]

The beginning is made of the shipped prompts; each request ends with tokens of its own. *together*: all requests in one
call; *one by one*: a call for each, as in a chat. Kept prefixes are given up before every run, so that the first
request of each run computes everything. Outputs with and without must be equal to the bit of every logprob, otherwise
nothing is timed. Results: `results/prefix_MODEL.json`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from common import RESULTS, alternate, ratio, save
from decoding import add_model, model_of

from paceline import LLM, RequestOutput, SamplingParams
from paceline.bench import bundled_prompts
from paceline.models import memory_of


def prompts_of(llm: LLM, requests: int, prefix: int, own: int) -> list[list[int]]:
    """Token ids: `prefix` tokens that all have, and `own` that only one has."""
    text = llm.tokenizer.encode("\n\n".join(prompt.prompt for prompt in bundled_prompts()))
    while len(text) < prefix + requests * own:
        text = text + text
    ends = text[prefix : prefix + requests * own]
    return [[*text[:prefix], *ends[i * own : (i + 1) * own]] for i in range(requests)]


class Way:
    """One setting and one way of asking; keeps the times to the first token of every run."""

    def __init__(self, llm: LLM, prompts: Sequence[list[int]], tokens: int, *, together: bool) -> None:
        self.llm, self.together = llm, together
        self.prompts = [{"prompt_token_ids": ids} for ids in prompts]
        self.params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        self.first: list[list[float]] = []
        self.cached: list[int | None] = []

    def __call__(self, **changes: Any) -> list[RequestOutput]:
        memory = memory_of(self.llm.runner)
        assert memory is not None
        memory.forget()
        params = SamplingParams(temperature=0.0, max_tokens=self.params.max_tokens, ignore_eos=True, **changes)
        if self.together:
            found = self.llm.generate(self.prompts, params)
        else:
            found = [self.llm.generate([prompt], params)[0] for prompt in self.prompts]
        self.first.append([one.metrics.time_to_first_token or 0.0 for one in found])
        self.cached = [one.num_cached_tokens for one in found]
        return found


def must_agree(ways: dict[str, Way]) -> None:
    """Tokens and logprobs of all ways are equal; anything else ends the benchmark."""
    found = {name: [one.outputs for one in way(logprobs=0)] for name, way in ways.items()}
    for name, outputs in found.items():
        if outputs != found["off"]:
            raise SystemExit(f"outputs differ ({name} against off), nothing is timed")


def measure(
    on: LLM, off: LLM, prompts: Sequence[list[int]], tokens: int, repeats: int, *, together: bool
) -> dict[str, Any]:
    """Seconds of every run and to every first token, and the ratios without / with."""
    ways = {"on": Way(on, prompts, tokens, together=together), "off": Way(off, prompts, tokens, together=together)}
    must_agree(ways)
    for way in ways.values():
        way.first.clear()
    seconds = alternate(dict(ways), repeats)
    first = {name: way.first[1:] for name, way in ways.items()}  # alternate warms up with one run
    middle = {name: [median(run) for run in runs] for name, runs in first.items()}
    found = {
        "cached_tokens": {name: way.cached for name, way in ways.items()},
        "total_off_over_on": ratio(seconds["off"], seconds["on"]),
        "median_time_to_first_token_off_over_on": ratio(middle["off"], middle["on"]),
        "median_seconds_to_first_token": {name: median(runs) for name, runs in middle.items()},
        "median_seconds": {name: median(runs) for name, runs in seconds.items()},
        "seconds": seconds,
    }
    print("together" if together else "one by one", {name: found[name] for name in list(found)[1:5]}, flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model(parser)
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--prefix", type=int, default=1000)
    parser.add_argument("--own", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=RESULTS)
    given = parser.parse_args()
    model = model_of(given.model)
    on, off = (model.open(enable_prefix_caching=cached, threads=given.threads) for cached in (True, False))
    prompts = prompts_of(on, given.requests, given.prefix, given.own)
    found = {
        name: measure(on, off, prompts, given.tokens, given.repeats, together=name == "together")
        for name in ("together", "one by one")
    }
    sizes = {"requests": given.requests, "prefix": given.prefix, "own": given.own, "tokens": given.tokens}
    made = {"model": model.weights, "exactness": str(on.exactness), **sizes, **found}
    save(f"prefix_{model.name}", made, given.folder)


if __name__ == "__main__":
    main()
