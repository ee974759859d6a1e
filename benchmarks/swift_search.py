"""What SWIFT's search costs, what it earns, and after how many tokens it is paid back.

usage: swift_search.py --data FOLDER [--model smollm2] [--task gsm8k] [--prompts 4] [--tokens 128] [--repeats 2]
                       [--threads 2] [--ratio 0.45]

A stream of prompts is decoded plainly, by SWIFT that searches, by SWIFT that keeps its first set, and by SWIFT that
begins with the set that a search found, in turn; every repeat searches anew. Noted are the seconds of each stream, the
seconds that replays and proposals of sets took within it, how many sets were tried, and the matchness of the first and
of the best one. What the search earns is the difference between a stream with the first set and one with the found set;
a search that found nothing better is never paid back, and one that costs more than a whole stream earns is paid back
only later. Outputs must equal those of plain decoding, or differ first at a near tie (counted). FOLDER holds the
published prompt sets (`methods.py`). Results: `results/swift_search_MODEL.json`.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from common import RESULTS, save
from decoding import add_model, model_of, must_agree, published
from methods import FILES

from paceline import LLM, SamplingParams
from paceline.drafters.self import SwiftDrafter
from paceline.utils import timed

PLAIN, SEARCHES, FIRST, FOUND = "plain", "searches", "first set", "found set"


class Watched:
    """A SWIFT engine whose searching is timed."""

    def __init__(self, plain: LLM, ratio: float, *, steps: int) -> None:
        self.llm = plain.with_speculative_config(
            {"method": "swift", "skip_ratio": ratio, "max_search_steps": steps, "controller": "swift"}
        )
        (self.drafter,) = self.llm.engine.parts.drafter_set.drafters
        self.seconds, self._tries = 0.0, self.drafter._try
        self.drafter._try = self._timed

    def _timed(self, state: Any) -> None:
        self.seconds += timed(lambda: self._tries(state))[1]


def stream(
    llm: LLM, prompts: list[list[int]], params: SamplingParams, salt: str
) -> tuple[list[list[int]], list[float], list[int]]:
    """Outputs, seconds and steps of each prompt, one after the other."""
    outputs, seconds, steps = [], [], []
    for prompt in prompts:
        asked = [{"prompt_token_ids": prompt, "cache_salt": salt}]
        (found,), taken = timed(partial(llm.generate, asked, params))
        seconds.append(taken)
        outputs.append(found.outputs[0].token_ids)
        steps.append(found.metrics.num_steps)
    return outputs, seconds, steps


def once(
    plain: LLM, engines: dict[str, Watched], prompts: list[list[int]], params: SamplingParams, salt: str
) -> dict[str, Any]:
    """All streams once, in this order, since the last one begins with what the search found in the same turn."""
    reference, plain_seconds, _ = stream(plain, prompts, params, salt)
    found: dict[str, Any] = {PLAIN: {"seconds": plain_seconds}}
    for name in (SEARCHES, FIRST, FOUND):
        drafter: SwiftDrafter = engines[name].drafter
        search = drafter.search_of(salt)
        if name == FOUND:
            search.best = engines[SEARCHES].drafter.search_of(salt).best
        before = engines[name].seconds
        outputs, seconds, steps = stream(engines[name].llm, prompts, params, salt)
        agreement = must_agree(plain, prompts, reference, outputs)
        search = drafter.search_of(salt)
        own = {"seconds": seconds, "steps": steps, "agreement": agreement, "searching": engines[name].seconds - before}
        scores = list(search._scores.values())
        if name == SEARCHES and not scores:
            sys.exit("the texts ended before SWIFT tried a set of layers; give more --tokens or --prompts")
        tried = (
            {"tried": len(scores), "first_matchness": scores[0], "matchness": search.score} if name == SEARCHES else {}
        )
        found[name] = own | tried | {"left_out": sorted(search.best)}
    return found


def figures(runs: list[dict[str, Any]], tokens: int) -> dict[str, Any]:
    """Medians over the repeats: microseconds a token, the search's share of its stream, tokens until it is paid
    back.
    """
    per_token = {name: float(np.median([sum(run[name]["seconds"]) for run in runs])) / tokens for name in runs[0]}
    cost = float(np.median([run[SEARCHES]["searching"] for run in runs]))
    earned = per_token[FIRST] - per_token[FOUND]
    return {
        "microseconds_a_token": {name: round(1e6 * value, 1) for name, value in per_token.items()},
        "search_milliseconds": round(1e3 * cost, 2),
        "search_share_of_its_stream": round(cost / (per_token[SEARCHES] * tokens), 4),
        "sets_tried": int(np.median([run[SEARCHES]["tried"] for run in runs])),
        "matchness_of_first_and_best": [
            round(float(np.median([run[SEARCHES][key] for run in runs])), 3) for key in MATCHNESS
        ],
        "earned_microseconds_a_token": round(1e6 * earned, 2),
        "paid_back_after_tokens": round(cost / earned) if earned > 0 else None,
        "times_plain": {name: round(per_token[PLAIN] / per_token[name], 3) for name in per_token},
    }


MATCHNESS = ("first_matchness", "matchness")


def run(given: argparse.Namespace) -> None:
    model = model_of(given.model)
    plain = model.open(threads=given.threads)
    prompts = published(plain, given.data, given.task, given.prompts)
    params = SamplingParams(temperature=0.0, max_tokens=given.tokens, ignore_eos=True)
    engines = {
        name: Watched(plain, given.ratio, steps=1000 if name == SEARCHES else 0) for name in (SEARCHES, FIRST, FOUND)
    }
    once(plain, engines, prompts[:1], params, "warm-up")
    runs = [once(plain, engines, prompts, params, f"turn {repeat}") for repeat in range(given.repeats)]
    asked = {key: getattr(given, key) for key in ("task", "prompts", "tokens", "repeats", "threads", "ratio")}
    found = figures(runs, given.tokens * len(prompts))
    save(
        f"swift_search_{model.name}",
        {"asked": asked, "model": model.weights, "figures": found, "runs": runs},
        given.folder,
    )
    for name, value in found.items():
        print(f"{name}: {value}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model(parser)
    parser.add_argument("--folder", type=Path, default=RESULTS)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--task", choices=list(FILES), default="gsm8k")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--ratio", type=float, default=0.45)
    run(parser.parse_args())


if __name__ == "__main__":
    main()
