"""What a level of drafts costs next to one step of the target, on the bundled pair: T_draft / T_target, for chains and for trees.

usage: draft_cost.py [--threads 2] [--repeats 200]

A chain level is a fifth of a chain of five tokens drafted by the runner. A tree level is what the whole of `draft_model.propose`
takes over the passes of the draft model in it: host work, growing, the tree itself. "static w" has w nodes on every level; the
others choose their nodes by themselves. "drawn" trees are those of requests above temperature 0 without further rules.
Each setting takes turns with steps of the target, so that both find the caches as decoding leaves them.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import Any

import torch
from common import save

from paceline.bench.demo import BUNDLED_DRAFT, BUNDLED_TARGET
from paceline.drafters.base import Context, DrafterArgs
from paceline.drafters.draft_model import DraftModelDrafter
from paceline.models.load import load_runner
from paceline.tree.token_tree import EMPTY_TREE
from paceline.tree.types import Budget

CONTEXT, LEVELS = 200, 5


def wide(width: int) -> list[list[int]]:
    """The paths of a tree of LEVELS levels with `width` nodes each."""
    return [[rank, *[0] * below] for below in range(LEVELS) for rank in range(width)]


TREES: dict[str, tuple[int, float, dict[str, Any]]] = {
    "static 1": (LEVELS, 0.0, {"speculative_token_tree": wide(1)}),
    "static 4": (4 * LEVELS, 0.0, {"speculative_token_tree": wide(4)}),
    "static 8": (8 * LEVELS, 0.0, {"speculative_token_tree": wide(8)}),
    "levels 4": (16, 0.0, {"tree_width": 4}),
    "eagle2": (16, 0.0, {"tree_policy": "eagle2"}),
    "dyspec": (16, 0.0, {"tree_policy": "dyspec"}),
    "dyspec_threshold": (16, 0.0, {"tree_policy": "dyspec_threshold"}),
    "levels 4, drawn": (16, 1.0, {"tree_width": 4}),
    "dyspec, drawn": (16, 1.0, {"tree_policy": "dyspec"}),
    "chain, drawn": (LEVELS, 1.0, {}),
}
"""Nodes, temperature, options of `draft_model`."""


class Tree:
    """One way to draft, with a sequence of its own."""

    def __init__(self, runner: Any, text: list[int], nodes: int, temperature: float, options: dict[str, Any]) -> None:
        args = DrafterArgs(
            vocab_size=runner.info.vocab_size, index=0, max_context=runner.info.max_context, load_runner=lambda name: runner
        )
        self.drafter, self.budget = DraftModelDrafter(args, model="bundled", **options), Budget(nodes, 2 * LEVELS)
        (self.state,) = self.drafter.begin([Context("r", list(text), len(text), temperature=temperature)])

    def draft(self) -> tuple[float, int]:
        """Seconds, and passes of the draft model."""
        start = perf_counter()
        (tree,) = self.drafter.propose([self.state], [self.budget], [EMPTY_TREE])
        seconds = perf_counter() - start
        depths: list[int] = []
        for parent in self.state.fed_parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        passes = max(depths) if depths else len(tree)
        self.state.settle(self.drafter.runner)
        return seconds, passes


def measure(repeats: int) -> dict[str, Any]:
    """Seconds of every setting, each in turn with steps of the target, as a decoder that drafts so has them."""
    target, draft = load_runner(BUNDLED_TARGET), load_runner(BUNDLED_DRAFT, draft=True)
    text = [(31 * i) % 6000 + 4 for i in range(CONTEXT)]
    caches = target.open(), draft.open()
    target.extend([caches[0]], [text])
    draft.extend([caches[1]], [text])

    def chain() -> tuple[float, int]:
        start = perf_counter()
        draft.draft_chains([caches[1]], [[7]], [LEVELS], [None])  # type: ignore[attr-defined]
        seconds = perf_counter() - start
        draft.truncate(caches[1], CONTEXT)
        return seconds, LEVELS

    ways: dict[str, Callable[[], tuple[float, int]]] = {"chain": chain}
    ways |= {name: Tree(draft, text, *each).draft for name, each in TREES.items()}
    found: dict[str, Any] = {}
    for name, way in ways.items():
        way()
        steps, levels, passes = [], [], 0
        for _ in range(repeats):
            start = perf_counter()
            target.score([caches[0]], [7], [EMPTY_TREE])
            steps.append(perf_counter() - start)
            seconds, passes = way()
            levels.append(seconds / passes)
        found[name] = report(steps, levels, passes)
    return found


def report(steps: list[float], levels: list[float], passes: int) -> dict[str, Any]:
    ratio = median(level / step for level, step in zip(levels, steps, strict=True))
    return {
        "target_step_seconds": median(steps), "draft_level_seconds": median(levels), "least": [min(steps), min(levels)],
        "ratio": ratio, "passes": passes,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=200)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    result = measure(given.repeats)
    for name, one in result.items():
        step, level = 1e6 * one["target_step_seconds"], 1e6 * one["draft_level_seconds"]
        print(f"{name:18s} {level:7.1f} us a level, {one['ratio']:.3f} of a step of {step:.0f} us, {one['passes']} passes")
    save("draft_cost", {"levels": result})


if __name__ == "__main__":
    main()
