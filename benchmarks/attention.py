"""What attention costs as the context grows: plain steps, chains and trees, form against form.

Forms alternate in one process on the same cache of random keys and values. On the CPU, in PyTorch's operators: `dense`
(one masked call) and `invariant` (chunks, with sums in the order of positions). `compiled`, the passes that the library
takes where it can, is to be timed in a process of its own, since the two keep each other's threads waiting. On CUDA, as
captured graphs: `dense` and `apart` (prefix and tree apart, merged). Every form is compared with `dense` before
anything is timed.

usage: attention.py [--model 291m] [--contexts 256 1024 4096 8192] [--rows 8 16 32] [--batch 1 4] [--repeats 5]
       [--threads 2] [--device cpu] [--forms dense invariant] [--name attention]
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from common import RESULTS, alternate, ratio, read_bandwidth, save
from decoding import add_model, model_of

from paceline.checkpoints import Checkpoint, load_weights, read_config, spec_from_config
from paceline.models import load_runner
from paceline.models.attention import Masks
from paceline.models.cuda import CHUNK
from paceline.models.layers import Decoder
from paceline.models.passes import EagerPasses, Passes, ScoringGraphs, graphs
from paceline.models.runners import NativeRunner
from paceline.tree import EMPTY_TREE, TokenTree

FORMS = ("dense", "invariant", "compiled", "apart")
DEFAULT = {"cpu": ["dense", "invariant"], "cuda": ["dense", "apart"]}
NEVER = 2**40
ROOT, TOLERANCE = 7, 0.1
"""Tolerance: root mean square difference of logits in units of their standard deviation; in bfloat16 every form is 0.02
to 0.035 away from float32 on this model, since 24 layers round.
"""


def passes_of(runner: NativeRunner, folder: Path) -> dict[str, Passes]:
    """All forms over the cache of one runner; `compiled` is left out where the runner itself runs in PyTorch."""
    dtype, device = runner.info.dtype, runner.info.device
    spec = spec_from_config(read_config(folder))
    decoder = Decoder(spec, load_weights(Checkpoint(folder), spec, device=device, dtype=dtype))
    masks = {
        "dense": Masks(dtype, device),
        "invariant": Masks(dtype, device, row_invariant=True),
    }
    found: dict[str, Passes] = {form: EagerPasses(decoder, runner.rotary, own) for form, own in masks.items()}
    return found if isinstance(runner.passes, EagerPasses) else found | {"compiled": runner.passes}


def graphs_of(runner: NativeRunner) -> dict[str, Callable[[], None]]:
    """On CUDA: what sets a runner to a form; graphs are captured at their first use."""
    assert isinstance(runner.passes, EagerPasses)
    decoder = runner.passes.decoder

    def setter(slots: int) -> Callable[[], None]:
        own = ScoringGraphs(decoder, runner.rotary, runner.arena, capture=True)

        def use() -> None:
            runner.graphs, graphs.LONG_CONTEXT = own, slots

        return use

    return {"dense": setter(NEVER), "apart": setter(CHUNK)}


def passes_setters(runner: NativeRunner, folder: Path) -> dict[str, Callable[[], None]]:
    """On the CPU: what sets a runner to a form."""
    passes = passes_of(runner, folder)
    return {form: functools.partial(setattr, runner, "passes", own) for form, own in passes.items()}


def tree_of(nodes: int) -> TokenTree:
    """A random tree of moderate depth."""
    rng = np.random.default_rng(0)
    parents = [-1, *(int(rng.integers(max(-1, i // 2 - 2), i)) for i in range(1, nodes))]
    return TokenTree.build(list(range(10, 10 + nodes)), parents)


class Case:
    """Sequences of ragged lengths around one context, with random keys and values."""

    def __init__(self, runner: NativeRunner, use: dict[str, Callable[[], None]], context: int, batch: int) -> None:
        self.runner, self.use = runner, use
        self.caches = []
        for i in range(batch):
            cache = runner.open()
            length = context - i * context // (2 * batch)
            cache.reserve(length + 80)
            cache.length = length
            self.caches.append(cache)
        with torch.inference_mode():
            runner.arena.kv.normal_()

    def scorer(self, form: str, tree: TokenTree) -> Callable[[], torch.Tensor]:
        use, roots, trees = self.use[form], [ROOT] * len(self.caches), [tree] * len(self.caches)

        def score() -> torch.Tensor:
            use()
            logits = self.runner.score(self.caches, roots, trees).logits
            if logits.is_cuda:
                torch.cuda.synchronize()
            return logits

        return score

    def close(self) -> None:
        for cache in self.caches:
            self.runner.release(cache)


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """Root mean square difference of logits in units of their standard deviation."""
    return float((a.float() - b.float()).square().mean().sqrt() / b.float().std())


def measure(case: Case, forms: list[str], rows: list[int], repeats: int) -> dict[str, Any]:
    """Seconds of every form and tree, and the ratios that matter."""
    trees = {"plain": EMPTY_TREE}
    for n in rows:
        trees |= {f"chain {n}": TokenTree.chain(list(range(10, 10 + n))), f"tree {n}": tree_of(n)}
    runs: dict[str, Callable[[], torch.Tensor]] = {}
    apart = 0.0
    for name, tree in trees.items():
        scorers = {form: case.scorer(form, tree) for form in forms}
        dense = case.scorer("dense", tree)().clone()
        apart = max(apart, *(difference(scorer(), dense) for scorer in scorers.values()))
        runs |= {f"{form} {name}": scorer for form, scorer in scorers.items()}
    if apart > TOLERANCE:
        sys.exit(
            f"outputs differ by {apart:.3f} standard deviations of the logits, {TOLERANCE} are allowed; nothing was "
            f"timed"
        )
    seconds = alternate(runs, repeats)
    against = {
        f"dense_over_{form}": {name: ratio(seconds[f"dense {name}"], seconds[f"{form} {name}"]) for name in trees}
        for form in forms
        if "dense" in forms and form != "dense"
    }
    return {
        "seconds": seconds,
        "difference": apart,
        **against,
        "tree_over_chain": {
            f"{form} {n}": ratio(seconds[f"{form} tree {n}"], seconds[f"{form} chain {n}"])
            for form in forms
            for n in rows
        },
    }


def show(context: int, batch: int, found: dict[str, Any]) -> None:
    names = list(dict.fromkeys(name.split(" ", 1)[1] for name in found["seconds"]))
    print(f"context {context}, batch {batch} (milliseconds; difference {found['difference']:.4f})")
    for form in [form for form in FORMS if f"{form} plain" in found["seconds"]]:
        print(
            f"  {form:10}"
            + "".join(f"{name} {1e3 * median(found['seconds'][f'{form} {name}']):.1f}   " for name in names)
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", type=int, nargs="+", default=[256, 1024, 4096, 8192])
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 16, 32])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", choices=list(DEFAULT), default="cpu")
    parser.add_argument("--forms", nargs="+", choices=FORMS, help="time `compiled` in a run of its own")
    parser.add_argument("--threads", type=int, default=2)
    add_model(parser, "291m")
    parser.add_argument("--folder", type=Path, default=RESULTS)
    parser.add_argument("--name", default="attention", help="results/NAME.json is written")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    forms = given.forms or DEFAULT[given.device]
    folder = model_of(given.model).folder
    runner = load_runner(folder, device=given.device)
    if not isinstance(runner, NativeRunner):
        sys.exit("this model is not run by the native decoder")
    use = graphs_of(runner) if given.device == "cuda" else passes_setters(runner, folder)
    cases = []
    for context in given.contexts:
        for batch in given.batch:
            case = Case(runner, use, context, batch)
            found = measure(case, forms, given.rows, given.repeats)
            case.close()
            show(context, batch, found)
            cases.append({"context": context, "batch": batch, **found})
    save(
        given.name,
        {
            "bytes_per_second": read_bandwidth(device=given.device),
            "weight_bytes": runner.info.weight_bytes,
            "cases": cases,
        },
        given.folder,
    )


if __name__ == "__main__":
    main()
