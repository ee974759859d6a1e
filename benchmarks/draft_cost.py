"""What one drafted token costs next to one step of the target, on the bundled pair: T_draft / T_target.

usage: draft_cost.py [--threads 2] [--repeats 200]
"""

from __future__ import annotations

import argparse
from statistics import median
from time import perf_counter

import torch
from common import save

from paceline.bench.demo import BUNDLED_DRAFT, BUNDLED_TARGET
from paceline.models.load import load_runner
from paceline.tree.token_tree import EMPTY_TREE

CONTEXT, LEVELS = 200, 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=200)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    target, draft = load_runner(BUNDLED_TARGET), load_runner(BUNDLED_DRAFT, draft=True)
    text = [(31 * i) % 6000 + 4 for i in range(CONTEXT)]
    caches = target.open(), draft.open()
    target.extend([caches[0]], [text])
    draft.extend([caches[1]], [text])
    steps, levels = [], []
    for _ in range(given.repeats):
        start = perf_counter()
        target.score([caches[0]], [7], [EMPTY_TREE]).logits.argmax()
        middle = perf_counter()
        draft.draft_chains([caches[1]], [[7]], [LEVELS], [lambda depth, reach: False])  # type: ignore[attr-defined]
        levels.append((perf_counter() - middle) / LEVELS)
        steps.append(middle - start)
        draft.truncate(caches[1], CONTEXT)
    result = {"target_step_seconds": median(steps), "draft_level_seconds": median(levels), "least": [min(steps), min(levels)]}
    result["ratio"] = median(level / step for level, step in zip(levels, steps, strict=True))
    print(result)
    save("draft_cost", result)


if __name__ == "__main__":
    main()
