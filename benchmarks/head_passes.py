"""What a drafted token of a head with a decoder layer costs beside a pass of its target: one row each, in turn, behind
a text of so many tokens.

usage: head_passes.py [--methods eagle,eagle3,mtp] [--model smollm2] [--context 512] [--tokens 8192] [--repeats 200]
                      [--threads 2]

Heads have random weights, which take as long as trained ones, and draft the first `--tokens` tokens; method `own` is
the module for multi-token prediction in the target's files, which drafts all. Figures are printed, and written to
`results/head_passes_MODEL.json`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from common import alternate, ratio, save
from decoding import add_model, model_of
from stand_ins import random_head

from paceline import LLM
from paceline.models.runners import FeatureHead, load_mtp_head
from paceline.tree import EMPTY_TREE, TokenTree

TARGET = "target"


def heads_of(llm: LLM, given: argparse.Namespace) -> dict[str, FeatureHead]:
    """Name -> head."""
    runner, spec = llm.runner, llm.runner.spec  # type: ignore[attr-defined]  # of native runners
    tokens = min(given.tokens, runner.info.vocab_size)
    found = {}
    for method in given.methods.split(","):
        if method == "own":
            found[method] = load_mtp_head(llm.folder, runner)
            continue
        folder = random_head(method, spec.hidden_size, runner.info.vocab_size, heads=spec.num_heads, tokens=tokens)
        found[method] = load_mtp_head(folder, runner) if method == "mtp" else FeatureHead.load(folder, runner, [method])
    return found


def row_of(head: FeatureHead, context: int, llm: LLM) -> Callable[[], Any]:
    """A pass of one drafted token behind a text of so many."""
    info, cache = llm.runner.info, head.open()
    states = head.joined(torch.randn(context, len(head.taps) * info.hidden_size).to(info.device, info.dtype))
    known: dict[str, Any] = {"tokens": [5] * context, "states": states, "picked": ()}
    head.step([cache], [TokenTree.chain([0] * (context - 1))], [0], **known)
    head.commit([cache], [range(context - 1)])
    return lambda: (
        head.step([cache], [EMPTY_TREE], [0], tokens=[7], states=states[:1], picked=[0]).logits.argmax().item()
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", default="eagle,eagle3,mtp")
    add_model(parser)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    model = model_of(given.model)
    llm = model.open(threads=given.threads)
    cache = llm.runner.open()
    llm.runner.extend([cache], [[5] * given.context])
    runs: dict[str, Callable[[], Any]] = {
        TARGET: lambda: llm.runner.score([cache], [7], [EMPTY_TREE]).logits.argmax().item()
    }
    runs |= {name: row_of(head, given.context, llm) for name, head in heads_of(llm, given).items()}
    seconds = alternate(runs, given.repeats)
    found = {}
    for name, each in seconds.items():
        share = ratio(each, seconds[TARGET])
        found[name] = {"seconds": float(np.median(each)), "of_target": share}
        print(
            f"{name:8s} {1e3 * found[name]['seconds']:.3f} ms, {share['median']:.3f} of the target's pass", flush=True
        )
    fields = {"context": given.context, "tokens": given.tokens, "repeats": given.repeats, "threads": given.threads}
    save(f"head_passes_{model.name}", {"model": model.weights, **fields, "passes": found})


if __name__ == "__main__":
    main()
