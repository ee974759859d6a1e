"""Ways to grow a draft tree, side by side: tokens per pass and tokens per second at several node budgets.

usage: trees.py [--model smollm2] [--threads 2] [--repeats 3] [--prompts 4] [--tokens 64] [--nodes 4,8,16] [--plot-only]

Chains and every tree policy of a draft model (on SmolLM2 its own int4 copy, which is nearly always right, so that look
at `--model bundled` too) decode each prompt in turn with plain decoding, in an order drawn anew, so that every ratio
compares runs made next to each other. Greedy outputs must equal those of plain decoding, or differ first at a near tie
(counted); otherwise nothing is timed. "tokens per pass" is the mean acceptance length; above temperature 0 it is
counted only. The controller "ppd" chooses its size by itself. Trees on the acceptance dial: `dial.py --extra`. Results:
`results/trees_MODEL.json`, `.png`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from common import RESULTS, pyplot, save
from decoding import Ids, Model, add_model, counted, decode, differs, model_of, must_agree, prompts_of, run

from paceline import LLM, SamplingParams
from paceline.tree import PRIOR, best_shapes
from paceline.utils import Estimate, speedup, time_in_turn, tokens_per_second

PLAIN, CHAIN, PPD = "plain", "chain", "ppd controller"
POLICIES: dict[str, dict[str, Any]] = {
    CHAIN: {},
    "levels, width 3": {"tree_width": 3},
    "dyspec": {"tree_policy": "dyspec"},
    "dyspec_threshold": {"tree_policy": "dyspec_threshold"},
    "eagle2": {"tree_policy": "eagle2"},
    "static": {"tree_policy": "static"},
}


def settings_of(draft: Mapping[str, Any], nodes: Sequence[int]) -> dict[str, dict[str, Any]]:
    """Name of a setting -> its speculative_config; "static" has the best shape of each size by the chances of
    `PRIOR`.
    """
    found = {}
    for name, options in POLICIES.items():
        for number in nodes:
            config = {**draft, "controller": "fixed", "num_speculative_tokens": number, **options}
            if name == "static":
                config["speculative_token_tree"] = best_shapes(PRIOR, number).paths()
            found[f"{name} {number}"] = config
    return found | {PPD: {**draft, "controller": "ppd", "tree_policy": "ppd"}}


def one_by_one(llm: LLM, prompts: Sequence[Ids], params: SamplingParams) -> tuple[list[Ids], dict[str, float]]:
    """All outputs, and what was drafted for them."""
    everything = [run(llm, [prompt], params)[0] for prompt in prompts]
    return [one.outputs[0].token_ids for one in everything], counted(everything)


def measure(given: argparse.Namespace, model: Model, nodes: Sequence[int]) -> dict[str, Any]:
    """All settings, in turn."""
    plain = model.open(threads=given.threads)
    prompts = prompts_of(plain, given.prompts)
    greedy = SamplingParams(temperature=0.0, max_tokens=given.tokens, ignore_eos=True)
    warm = SamplingParams(temperature=1.0, max_tokens=given.tokens, ignore_eos=True)
    llms = {PLAIN: plain} | {
        name: plain.with_speculative_config(config) for name, config in settings_of(model.draft, nodes).items()
    }
    reference, _ = one_by_one(plain, prompts, greedy)
    found: dict[str, dict[str, Any]] = {}
    for name, llm in llms.items():
        outputs, drafting = one_by_one(llm, prompts, greedy)
        agreement = must_agree(plain, prompts, reference, outputs)
        found[name] = {
            "agreement": agreement,
            "greedy": drafting,
            "temperature 1": one_by_one(llm, prompts * 4, warm)[1],
        }
    seconds = time_in_turn(
        {name: lambda prompt, llm=llm: decode(llm, [prompt], greedy)[0] for name, llm in llms.items()},
        prompts,
        given.repeats,
        differs=differs(plain),
    )
    base_pr = seconds[PLAIN]
    tokens_pr = np.full_like(base_pr, given.tokens)
    for name, one in found.items():
        mine_pr = seconds[name]
        one["tokens_per_second"] = to_dict(tokens_per_second(tokens_pr, mine_pr))
        one["over_plain"] = to_dict(speedup(tokens_pr, base_pr, tokens_pr, mine_pr))
    fields = {key: getattr(given, key) for key in ("prompts", "tokens", "repeats")}
    return {"model": model.weights, "draft": model.draft["method"], **fields, "nodes": list(nodes), "settings": found}


def to_dict(estimate: Estimate | None) -> dict[str, Any]:
    if estimate is None:
        raise SystemExit("nothing was measured")
    return estimate.to_dict()


COLOURS = dict(zip(POLICIES, ("#777777", "#31a354", "#d62728", "#e6550d", "#3182bd", "#756bb1"), strict=True))


def plot(found: Mapping[str, Any], path: Path, plt: Any) -> None:
    """Tokens per pass, greedy and at temperature 1, and times plain decoding, by budget; `plt` is `pyplot`."""
    figure, axes = plt.subplots(1, 3, figsize=(15, 4.8), layout="constrained")
    nodes, settings = found["nodes"], found["settings"]
    for name, colour in COLOURS.items():
        rows = [settings[f"{name} {number}"] for number in nodes]
        for axis, key in zip(axes, ("greedy", "temperature 1"), strict=False):
            axis.plot(nodes, [row[key]["tokens_per_pass"] for row in rows], "o-", color=colour, label=name)
        value, low, high = ([row["over_plain"][key] for row in rows] for key in ("value", "low", "high"))
        axes[2].plot(nodes, value, "o-", color=colour, label=name)
        axes[2].fill_between(nodes, low, high, color=colour, alpha=0.12, linewidth=0)
    axes[2].axhline(settings[PPD]["over_plain"]["value"], color="#000000", linestyle=":", label=PPD)
    axes[2].axhline(1.0, color="#777777", linestyle="--", linewidth=1)
    for axis, title in zip(
        axes, ("Tokens per pass, greedy", "Tokens per pass, temperature 1", "Times plain, greedy"), strict=True
    ):
        axis.set(
            title=title, xlabel="nodes of the budget", xscale="log", xticks=nodes, xticklabels=nodes, ylim=(0, None)
        )
        axis.minorticks_off()
    axes[2].legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=80)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model(parser)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--nodes", default="4,8,16")
    parser.add_argument("--folder", type=Path, default=RESULTS)
    parser.add_argument("--plot-only", action="store_true", help="draw the plot again from the results")
    given, plt = parser.parse_args(), pyplot()
    model = model_of(given.model)
    path = given.folder / f"trees_{model.name}.json"
    if not given.plot_only:
        save(path.stem, measure(given, model, [int(one) for one in given.nodes.split(",")]), given.folder)
    found = json.loads(path.read_text())
    for name, one in found["settings"].items():
        over, lengths = one["over_plain"], [one[key]["tokens_per_pass"] for key in ("greedy", "temperature 1")]
        ratio = f"{over['value']:.2f} ({over['low']:.2f} to {over['high']:.2f}) times plain"
        rate = one["tokens_per_second"]["value"]
        print(
            f"{name:20s} {lengths[0]:.2f} tokens a pass, {lengths[1]:.2f} at temperature 1, {rate:.0f} tokens/s, "
            f"{ratio}"
        )
    plot(found, path.with_suffix(".png"), plt)


if __name__ == "__main__":
    main()
