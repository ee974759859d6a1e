"""Layers of a draft model at once against one after the other: what a level takes, on the threads of one CPU.

usage: easyspec.py [--threads 2] [--repeats 40] [--model-dir DIR]

A level is one drafted token behind a text of 200 tokens, through the whole model, batch 1, bfloat16; exact and fuzzy passes take
turns, for groups of 2 and 4 layers on as many workers as threads; beside them the compiled pass that `draft_model` drafts with.
Two models: the bundled target (6 layers, 256 wide) and 291M random weights (24 layers, 1024 wide). For the bundled target also the
share of drafted tokens that stand where it drafts for itself, by group size; that is a count, not a time.

Stored in results/easyspec.json; ratios are medians of pairs with 95 % bootstrap intervals.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from common import alternate, random_llama, ratio, save

from paceline import LLM, SamplingParams
from paceline.bench.demo import BUNDLED_TARGET, bundled_prompts
from paceline.models.layer_parallel import LayerGroups
from paceline.models.load import load_runner
from paceline.tree.token_tree import EMPTY_TREE, TokenTree

SIZES = (2, 4)
CONTEXT, LEVELS = 200, 4
TEXT = [(31 * i) % 6000 + 4 for i in range(CONTEXT)]


def levels(runner: Any, *, fuzzy: bool) -> Callable[[], None]:
    """A draft: the root exactly, then a level behind each token before."""
    cache, chain = runner.open(), TEXT[:LEVELS]
    runner.extend([cache], [TEXT])

    def draft() -> None:
        runner.fuzzy = fuzzy
        runner.score([cache], [7], [EMPTY_TREE])
        for depth in range(1, LEVELS + 1):
            runner.score([cache], [7], [TokenTree.chain(chain[:depth])], computed=[depth])
        runner.truncate(cache, CONTEXT)

    return draft


def costs(folder: Path, threads: int, repeats: int) -> dict[str, Any]:
    """Milliseconds of a level of every kind, the root's pass included, and what fuzzy ones save."""
    runs = {"draft_model": levels(load_runner(folder, dtype="bfloat16"), fuzzy=False)}
    for size in SIZES:
        runner = load_runner(folder, dtype="bfloat16", layer_groups=LayerGroups(size, ("cpu",) * threads))
        for fuzzy in (False, True):
            runs[f"{'at once' if fuzzy else 'in order'}, groups of {size}"] = levels(runner, fuzzy=fuzzy)
    seconds = alternate(runs, repeats, progress=False)
    found: dict[str, Any] = {name: {"ms_per_level": 1e3 * median(took) / (1 + LEVELS)} for name, took in seconds.items()}
    for size in SIZES:
        own = found[f"at once, groups of {size}"]
        own["over_in_order"] = ratio(seconds[f"in order, groups of {size}"], seconds[f"at once, groups of {size}"])
        own["over_draft_model"] = ratio(seconds["draft_model"], seconds[f"at once, groups of {size}"])
    return found


def shares(tokens: int) -> dict[str, float]:
    """Share of drafted tokens that stand, the bundled target drafting for itself, by layers of a group."""
    plain, found = LLM(speculative_config=None, dtype="bfloat16", seed=1), {}
    prompts = [{"prompt_token_ids": plain.chat_ids([{"role": "user", "content": p.prompt}])} for p in bundled_prompts()[::3]]
    for size in (1, *SIZES):
        options = {"layer_group_size": size, "overlap": True, "num_speculative_tokens": 4}
        fast = plain.with_speculative_config({"method": "easyspec", "model": str(BUNDLED_TARGET), **options})
        metrics = [one.metrics for one in fast.generate(prompts, SamplingParams(temperature=0.0, max_tokens=tokens))]
        found[str(size)] = sum(one.num_accepted_tokens for one in metrics) / sum(one.num_draft_tokens for one in metrics)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--model-dir", type=Path, default=Path(tempfile.gettempdir()) / "paceline-291m")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    models = {"bundled": BUNDLED_TARGET, "291m": random_llama(given.model_dir)}
    found: dict[str, Any] = {name: costs(Path(folder), given.threads, given.repeats) for name, folder in models.items()}
    for name, one in found.items():
        for way, row in one.items():
            over = "".join(f", {key} {r['median']:.2f} [{r['low']:.2f}, {r['high']:.2f}]" for key, r in list(row.items())[1:])
            print(f"{name:8s} {way:24s} {row['ms_per_level']:.2f} ms{over}")
    found["acceptance"] = shares(given.tokens)
    print("acceptance by layers of a group:", ", ".join(f"{size}: {share:.2f}" for size, share in found["acceptance"].items()))
    save("easyspec", found | {"threads": given.threads})


if __name__ == "__main__":
    main()
