"""Drafting while the target scores against drafting before it: PEARL and the sequential pair on the same threads.

usage: pearl.py [--model bundled --draft bundled] [--threads 2] [--repeats 5] [--tokens 64] [--windows 2,4,6]
                [--batches 1,4]

Greedy: `draft_model` (one after the other) and `pearl` with overlap, for windows of the same lengths, `pearl` left to
choose, and plain decoding. It takes a pair of checkpoints, of which only the bundled one ships; give two folders for
another. Settings take turns. Tokens are compared with plain decoding's before anything is timed. Ratios are medians of
pairs with 95 % bootstrap
intervals. Results: `results/pearl_MODEL.json`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from common import RESULTS, alternate, ratio, save
from decoding import Model, add_model, counted, model_of, must_agree, prompts_of, run

from paceline import LLM, SamplingParams
from paceline.bench import BUNDLED_DRAFT

PLAIN, PROMPTS = "plain", 4


def settings(draft: str, windows: list[int]) -> dict[str, dict[str, Any]]:
    """Name -> speculative_config."""
    found: dict[str, dict[str, Any]] = {}
    for window in windows:
        base = {"model": draft, "num_speculative_tokens": window}
        found[f"draft_model, {window}"] = base | {"method": "draft_model"}
        found[f"pearl, {window}"] = base | {"method": "pearl", "overlap": True}
        found[f"pearl, {window}, left to choose"] = base | {"method": "pearl"}
    return found


def measure(model: Model, batch: int, given: argparse.Namespace) -> dict[str, Any]:
    """Speed of every setting over plain decoding and over the sequential pair with its window."""
    plain = model.open(threads=given.threads)
    prompts, windows = prompts_of(plain, PROMPTS), [int(one) for one in given.windows.split(",")]
    groups = [prompts[i : i + batch] for i in range(0, PROMPTS, batch)]
    params = SamplingParams(temperature=0.0, max_tokens=given.tokens, ignore_eos=True)
    named = settings(str(given.draft), windows)
    llms = {PLAIN: plain} | {name: plain.with_speculative_config(config) for name, config in named.items()}

    def runs(llm: LLM) -> Callable[[], list[Any]]:
        return lambda: [one for group in groups for one in run(llm, group, params)]

    results = {name: runs(llm)() for name, llm in llms.items()}
    outputs = {name: [one.outputs[0].token_ids for one in made] for name, made in results.items()}
    found: dict[str, Any] = {
        name: {"agreement": must_agree(plain, prompts, outputs[PLAIN], outputs[name]), **counted(made)}
        for name, made in results.items()
    }
    seconds = alternate({name: runs(llm) for name, llm in llms.items()}, given.repeats)
    for name, took in seconds.items():
        found[name] |= {
            "tokens_per_second": PROMPTS * given.tokens / median(took),
            "over_plain": ratio(seconds[PLAIN], took),
        }
        if name.startswith("pearl"):
            found[name]["over_the_sequential_pair"] = ratio(seconds[f"draft_model, {name.split(', ')[1]}"], took)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model(parser, "bundled")
    parser.add_argument("--draft", type=Path, default=BUNDLED_DRAFT, help="folder of its draft model (the bundled one)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--windows", default="2,4,6")
    parser.add_argument("--batches", default="1,4")
    parser.add_argument("--folder", type=Path, default=RESULTS)
    given = parser.parse_args()
    model, found = model_of(given.model), dict[str, Any]()
    for batch in map(int, given.batches.split(",")):
        found[f"batch {batch}"] = measure(model, batch, given)
        for name, row in found[f"batch {batch}"].items():
            over = row["over_plain"]
            print(f"batch {batch} {name:26s} {row['tokens_per_second']:.0f} tokens/s, {over['median']:.2f} times plain")
    save(f"pearl_{model.name}", {"model": model.weights, "threads": given.threads, **found}, given.folder)


if __name__ == "__main__":
    main()
