"""Tree policies along the acceptance dial: tokens per second and tokens per pass, by batch size, in turn, in one run.

usage: dial_trees.py [--model bundled|291m] [--threads 2] [--repeats 7] [--batches 1,4] [--acceptance 0.3,0.5,0.7,0.9]
                     [--spread 0] [--nodes 8,16] [--chains 1,2,4,8,15] [--requests 4] [--tokens 128] [--model-dir DIR]
                     [--count | --plot-only]

The drafter of `dial.py` proposes trees here: a node's first candidate is right with the chosen probability, the second with that
probability of the rest, and so on, and it says so. With `--spread 1` the probability differs from node to node, evenly around the
chosen one, up to 0 or 1, whichever is nearer; only then is there something for policies that look at it. Every policy has the trees
of 8 and 16 nodes; "static" has the best shape of that size for the chosen probability, "ppd" the one for what draft models usually
reach. "ppd controller" learns its shape and chooses its size, "auto" chooses how much of trees by "dyspec" to draft, "auto, chains"
the same of chains. The best chain and the best tree are those with the best median.

Every cell is a batch size, an acceptance and a spread; cells are measured, compared with plain decoding, written and taken up again
as in `dial.py`. `--count` measures no time: it counts tokens per pass at batch 1. Where all nodes have the same chances, growing a
tree takes some 30 microseconds, since one is grown for all steps; with a spread it takes PyTorch and Python half a millisecond,
which says nothing about draft models: look at the counts there, or at models whose steps are long. Results:
`results/dial_trees_MODEL.json`, `.png`.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import torch
from batches import must_agree
from common import RESULTS, pyplot, ratio, save
from dial import WARM_UP, Dial

from paceline import LLM
from paceline.bench.settings import dial_registered
from paceline.tree.static_shapes import best_shapes

PLAIN, AUTO, AUTO_CHAINS, PPD = "plain", "auto", "auto, chains", "ppd controller"
POLICIES: dict[str, dict[str, Any]] = {
    "levels": {"tree_width": 3},
    "dyspec": {"tree_policy": "dyspec"},
    "dyspec_threshold": {"tree_policy": "dyspec_threshold"},
    "eagle2": {"tree_policy": "eagle2"},
    "static": {"tree_policy": "static"},
    "ppd": {"tree_policy": "ppd"},
}
LEARNING: dict[str, dict[str, Any]] = {
    PPD: {"controller": "ppd", "tree_policy": "ppd"},
    AUTO: {"controller": "auto", "tree_policy": "dyspec"},
    AUTO_CHAINS: {"controller": "auto"},
}
RANKS = 8


def settings_of(acceptance: float, nodes: list[int], chains: list[int]) -> dict[str, dict[str, Any]]:
    """Name of a setting -> its options beside those of the dial."""
    found = {f"chain {number}": {"controller": "fixed", "num_speculative_tokens": number} for number in chains}
    for policy, options in POLICIES.items():
        for number in nodes:
            found[f"{policy} {number}"] = {"controller": "fixed", "num_speculative_tokens": number, **options}
            if policy == "static":
                chances = [acceptance * (1 - acceptance) ** rank for rank in range(RANKS)]
                found[f"{policy} {number}"]["speculative_token_tree"] = best_shapes(chances, number).paths()
    return found


class TreeDial(Dial):
    """One model on the dial, with trees.

    Args:
        requests: of a cell whose batch is smaller, one after the other.
    """

    def __init__(self, given: argparse.Namespace, batches: list[int]) -> None:
        self.requests = given.requests
        super().__init__(given.model, given.model_dir, given.threads, max(*batches, given.requests), given.tokens)

    def llms(self, acceptance: float, spread: float, named: dict[str, dict[str, Any]]) -> dict[str, LLM]:
        """Plain decoding and the settings."""
        oracle = {"method": "corrupted_oracle", "continuations": self.records, "acceptance": acceptance, "spread": spread}
        made = {name: self.plain.with_speculative_config({**oracle, **options}) for name, options in named.items()}
        return {PLAIN: self.plain, **made}

    def groups(self, batch: int) -> list[list[list[int]]]:
        """The requests of a cell, by those that run together."""
        return [self.prompts[first : first + batch] for first in range(0, max(batch, self.requests), batch)]

    def counted(self, llm: LLM, groups: list[list[list[int]]]) -> dict[str, Any]:
        """How outputs agree with plain decoding's, and what was drafted for them."""
        found = [one for group in groups for one in llm.generate([{"prompt_token_ids": ids} for ids in group], self.params)]
        made = [one.outputs[0].token_ids for one in found]
        accepted, steps, drafted = (
            sum(getattr(one.metrics, key) for one in found) for key in ("num_accepted_tokens", "num_steps", "num_draft_tokens")
        )
        return {
            "agreement": must_agree(self.plain, self.prompts[: len(made)], self.reference[: len(made)], made),
            "tokens_per_pass": 1 + accepted / max(steps, 1),
            "nodes_per_pass": drafted / max(steps, 1),
        }

    def trees(self, batch: int, acceptance: float, spread: float, named: dict[str, dict[str, Any]], repeats: int) -> dict[str, Any]:
        """Seconds of every setting in one cell."""
        llms, groups = self.llms(acceptance, spread, named | LEARNING), self.groups(batch)
        drafting = {name: self.counted(llm, groups) for name, llm in llms.items()}
        for name in LEARNING:
            for _ in range(WARM_UP):
                self._run(llms[name], groups)
        seconds = self.turns(llms, groups, repeats)
        made = sum(map(len, groups)) * self.params.max_tokens
        middle = {name: median(values) for name, values in seconds.items()}
        chain = min((name for name in seconds if name.startswith("chain ")), key=middle.__getitem__)
        tree = min((name for name in named if not name.startswith("chain ")), key=middle.__getitem__)
        best = min((PLAIN, chain, tree), key=middle.__getitem__)
        return {
            "tokens_per_second": {name: made / value for name, value in middle.items()},
            "over plain": {name: ratio(seconds[PLAIN], values) for name, values in seconds.items()},
            "best chain": chain,
            "best tree": tree,
            "best fixed": best,
            "best tree over the best chain": ratio(seconds[chain], seconds[tree]),
            "auto over the best fixed": ratio(seconds[best], seconds[AUTO]),
            "words": {name: llms[name].engine.parts.controller.explain() for name in LEARNING},  # type: ignore[attr-defined]
            "drafting": drafting,
            "seconds": seconds,
        }

    def count(self, acceptance: float, spread: float, named: dict[str, dict[str, Any]]) -> dict[str, Any]:
        """Tokens and nodes per pass of every setting at batch 1."""
        groups = self.groups(1)
        return {name: self.counted(llm, groups) for name, llm in self.llms(acceptance, spread, named).items()}


def words(cell: dict[str, Any]) -> str:
    """A few lines on a cell."""
    rates, over = cell["tokens_per_second"], cell["over plain"]
    lines = [
        f"batch {cell['batch']}, acceptance {cell['acceptance']:g}, spread {cell['spread']:g}: plain {rates[PLAIN]:.0f} tokens/s"
    ]
    lines += [
        f"  {name:20s} {rates[name]:6.0f} tokens/s, {one['median']:.2f} ({one['low']:.2f} to {one['high']:.2f}) times plain, "
        f"{cell['drafting'][name]['tokens_per_pass']:.2f} tokens a pass"
        for name, one in over.items()
        if name != PLAIN
    ]
    tree, auto = cell["best tree over the best chain"], cell["auto over the best fixed"]
    lines.append(f"  {cell['best tree']} / {cell['best chain']} {tree['median']:.2f} ({tree['low']:.2f} to {tree['high']:.2f})")
    lines.append(f"  auto / {cell['best fixed']} {auto['median']:.2f} ({auto['low']:.2f} to {auto['high']:.2f})")
    return "\n".join(lines)


COLOURS = dict(zip(POLICIES, ("#31a354", "#3182bd", "#e6550d", "#9e9ac8", "#8c6d31", "#e377c2"), strict=True))
STYLES: dict[str, dict[str, Any]] = {
    PLAIN: {"color": "#777777", "linestyle": "--"},
    "best chain": {"color": "#000000", "linewidth": 2},
    PPD: {"color": "#e377c2", "linestyle": ":", "linewidth": 2.2},
    AUTO: {"color": "#d62728", "linewidth": 2.6, "marker": "o"},
    AUTO_CHAINS: {"color": "#d62728", "linewidth": 1.4, "linestyle": "--"},
}


def plot(found: dict[str, Any], path: Path) -> None:
    """Tokens per second over acceptance and below it times plain, a column a batch size and spread; then tokens per pass."""
    plt = pyplot()
    columns = sorted({(cell["spread"], cell["batch"]) for cell in found["cells"]})
    counts = sorted({one["spread"] for one in found["counts"]})[:2]
    wide = len(columns) + (len(counts) > 0)
    figure, axes = plt.subplots(2, wide, figsize=(5.2 * wide, 9.4), layout="constrained", squeeze=False)
    for (spread, batch), (above, below) in zip(columns, axes.T, strict=False):
        cells = [cell for cell in found["cells"] if (cell["spread"], cell["batch"]) == (spread, batch)]
        lines(above, {cell["acceptance"]: cell["tokens_per_second"] for cell in cells})
        lines(below, {cell["acceptance"]: {n: one["median"] for n, one in cell["over plain"].items()} for cell in cells})
        above.set(title=f"tokens/s, batch {batch}, spread {spread:g}")
        below.set(title=f"times plain, paired, batch {batch}, spread {spread:g}")
    for spread, axis in zip(counts, axes[:, -1], strict=False):
        rows = [one for one in found["counts"] if one["spread"] == spread]
        lines(axis, {row["acceptance"]: {n: one["tokens_per_pass"] for n, one in row["settings"].items()} for row in rows})
        axis.set(title=f"tokens per pass, spread {spread:g}")
    labels = {label: handle for axis in axes.flat for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    figure.legend(labels.values(), labels, frameon=False, loc="outside lower center", ncols=3 * wide, fontsize=8)
    figure.savefig(path, dpi=100)
    plt.close(figure)


def lines(axis: Any, table: dict[float, dict[str, float]]) -> None:
    """One line a setting; of the chains the best at each acceptance."""
    dial = sorted(table)
    for name in table[dial[0]]:
        policy, _, number = name.rpartition(" ")
        if policy in POLICIES and number.isdigit():
            line = {"linestyle": "-" if number == "16" else "--", "marker": "s", "markersize": 3.5, "linewidth": 1.3}
            axis.plot(dial, [table[one][name] for one in dial], label=name, color=COLOURS[policy], **line)
    chains = [max(value for name, value in table[one].items() if name.startswith("chain ")) for one in dial]
    for name, style in STYLES.items():
        if name in table[dial[0]] or name == "best chain":
            axis.plot(dial, chains if name == "best chain" else [table[one][name] for one in dial], label=name, **style)
    axis.set(xlabel="acceptance of a first candidate", ylim=(0, None))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=["bundled", "291m"], default="bundled")
    for name, value in (("threads", 2), ("repeats", 7), ("requests", 4), ("tokens", 128)):
        parser.add_argument(f"--{name}", type=int, default=value)
    lists = {"batches": "1,4", "acceptance": "0.3,0.5,0.7,0.9", "spread": "0", "nodes": "8,16", "chains": "1,2,4,8,15"}
    for name, text in lists.items():
        parser.add_argument(f"--{name}", default=text)
    parser.add_argument("--model-dir", type=Path, default=Path(tempfile.gettempdir()) / "paceline-291m")
    parser.add_argument("--count", action="store_true", help="count tokens per pass, and time nothing")
    parser.add_argument("--plot-only", action="store_true", help="draw the plot again from the results")
    return parser.parse_args()


def key(one: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(one[name] for name in ("batch", "acceptance", "spread", "repeats", "requests", "tokens") if name in one)


def measure(given: argparse.Namespace, found: dict[str, Any], name: str) -> None:
    """All cells that are missing; each is written when it is done."""
    batches, nodes, chains = ([int(one) for one in text.split(",")] for text in (given.batches, given.nodes, given.chains))
    dial, kind = TreeDial(given, batches), "counts" if given.count else "cells"
    for spread in map(float, given.spread.split(",")):
        for batch in [1] if given.count else batches:
            for acceptance in map(float, given.acceptance.split(",")):
                place = {"batch": batch, "acceptance": acceptance, "spread": spread}
                cell: dict[str, Any] = place | ({} if given.count else {"repeats": given.repeats})
                cell |= {"requests": given.requests, "tokens": given.tokens}
                if key(cell) in set(map(key, found[kind])):
                    continue
                named = settings_of(acceptance, nodes, chains)
                if given.count:
                    cell["settings"] = dial.count(acceptance, spread, named)
                else:
                    cell |= dial.trees(batch, acceptance, spread, named, given.repeats)
                    print(words(cell), flush=True)
                found[kind] = [old for old in found[kind] if any(old[one] != place[one] for one in place)] + [cell]
                part = f"{kind}, batch {batch}, acceptance {acceptance:g}, spread {spread:g}"
                save(name, {"model": given.model, **found}, parts=[part])


@dial_registered()
def main() -> None:
    given = arguments()
    torch.set_num_threads(given.threads)
    name = f"dial_trees_{given.model}"
    path = RESULTS / f"{name}.json"
    known = json.loads(path.read_text()) if path.exists() else {"cells": [], "counts": []}
    found = {kind: known[kind] for kind in ("cells", "counts")}
    if not given.plot_only:
        measure(given, found, name)
    plot(found, path.with_suffix(".png"))


if __name__ == "__main__":
    main()
