"""How often drafts stand under every rule of verification, against the most that any exact rule could accept.

usage: acceptance_rules.py [--data DIR] [--prompts 8] [--places 2] [--temperatures 0.25,0.5,0.75,1] [--drafts 1,2,3,4,6,8]
                           [--plot-only]

The target of the bundled pair writes on held-out prompts at each temperature; at places spread over what it writes, p and q are the
two models' own distributions, and every rule's acceptance is worked out from them. DATA holds the prompt sets as `paceline bench
--workload` reads them; without it the prompts that ship with the package are taken. Neither model was trained on any of them.

Exits with 1 if a rule is above the optimum of its drafts or if draws without replacement are worse than draws with it. Writes
`results/acceptance_rules.json`, one figure per place, and `results/acceptance_rules.png`; prints acceptance by task and
temperature.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import RESULTS, pyplot, save
from self_speculation import FILES, prompts_of

from paceline import LLM, SamplingParams
from paceline.bench import workloads
from paceline.bench.acceptance_checks import REJECTION_WITH, REJECTION_WITHOUT, violations
from paceline.bench.acceptance_rules import RULES, WITH, WITHOUT, failures, rows_of
from paceline.llm import BUNDLED

NAME, WRITTEN, SHOWN = "acceptance_rules", 32, 4
GREEDY = "greedy_draft_sampling"
COLUMNS = {
    "optimum, with": WITH,
    "recursive, with": REJECTION_WITH,
    "k-SEQ": "k_seq",
    "optimum, without": WITHOUT,
    "recursive, without": REJECTION_WITHOUT,
    "greedy drafts": GREEDY,
}
"""Of the table: what it says, the rule."""


def prompts_by_task(llm: LLM, given: argparse.Namespace) -> dict[str, list[list[int]]]:
    """Task -> prompts as token ids."""
    if given.data is not None:
        return {task: prompts_of(llm, given.data / file, given.prompts) for task, file in FILES.items()}
    found: dict[str, list[list[int]]] = {}
    for one in workloads.bundled().conversations:
        found.setdefault(one.task, []).append(llm.chat_ids([{"role": "user", "content": one.turns[0]}]))
    return {task: prompts[: given.prompts] for task, prompts in found.items()}


def pairs(llm: LLM, draft: Any, prompts: Sequence[list[int]], temperature: float, places: int) -> Iterator[tuple[Any, Any]]:
    """(v,) p and q at places of what the target writes after each prompt."""
    params = SamplingParams(temperature=temperature, max_tokens=WRITTEN, ignore_eos=True, seed=0)
    size = llm.runner.info.vocab_size
    for ids, found in zip(prompts, llm.generate([{"prompt_token_ids": ids} for ids in prompts], params), strict=True):
        text = [*ids, *found.outputs[0].token_ids]
        p_tv, q_tv = (rows_of(runner, text, WRITTEN, temperature, size) for runner in (llm.runner, draft))
        for place in np.linspace(0, WRITTEN - 1, places + 2).astype(int)[1:-1]:
            yield p_tv[place], q_tv[place]


def measure(given: argparse.Namespace, temperatures: Sequence[float], drafts: Sequence[int]) -> dict[str, Any]:
    """Acceptance at every place by temperature, number of drafts and rule."""
    torch.set_num_threads(1)
    llm = LLM(speculative_config=None, threads=1, seed=0)
    draft, tasks, rng = llm.models.open(str(BUNDLED / "draft")), prompts_by_task(llm, given), np.random.default_rng(0)
    cells = []
    for temperature in temperatures:
        rows = [(task, *pair) for task, ids in tasks.items() for pair in pairs(llm, draft, ids, temperature, given.places)]
        for number in drafts:
            found: dict[str, list[float]] = {name: [rule(p, q, number) for _, p, q in rows] for name, rule in others()}
            sampled = [failures(p, q, number, rng) for _, p, q in rows]
            found[REJECTION_WITHOUT] = [1.0 - float(one.mean()) for one in sampled]
            errors = [float(one.std(ddof=1) / len(one) ** 0.5) if len(one) > 1 else 0.0 for one in sampled]
            cell = {"temperature": temperature, "drafts": number, "tasks": [task for task, *_ in rows], "acceptance": found}
            cells.append({**cell, "standard_errors": {REJECTION_WITHOUT: errors}})
            print(f"temperature {temperature:g}, {number} drafts: {len(rows)} places", file=sys.stderr)
    return {"model": "bundled", "data": "bundled prompts" if given.data is None else list(FILES), "cells": cells}


def others() -> list[tuple[str, Any]]:
    return [(name, rule) for name, rule in RULES.items() if name != REJECTION_WITHOUT]


def faults(cells: Sequence[Mapping[str, Any]]) -> list[str]:
    """What theory forbids."""
    found = []
    for cell in cells:
        values, errors = ({k: np.array(v) for k, v in cell[key].items()} for key in ("acceptance", "standard_errors"))
        where = f"temperature {cell['temperature']:g}, {cell['drafts']} drafts"
        found += [f"{where}: {text}" for text in violations(values, errors)]
    return found


def table(cells: Sequence[Mapping[str, Any]], number: int) -> str:
    """Acceptance by task and temperature at one number of drafts."""
    lines = [f"| {number} drafts | temperature | {' | '.join(COLUMNS)} |", "|---|---|" + "---|" * len(COLUMNS)]
    for task in [*dict.fromkeys(cells[0]["tasks"]), "all"]:
        for cell in (one for one in cells if one["drafts"] == number):
            here = [i for i, name in enumerate(cell["tasks"]) if task in (name, "all")]
            means = [np.array(cell["acceptance"][rule])[here].mean() for rule in COLUMNS.values()]
            lines.append(f"| {task} | {cell['temperature']:g} | {' | '.join(f'{mean:.3f}' for mean in means)} |")
    return "\n".join(lines)


STYLES: dict[str, tuple[str, str]] = {
    WITHOUT: ("#000000", "--"),
    WITH: ("#888888", "--"),
    REJECTION_WITHOUT: ("#d62728", "-"),
    GREEDY: ("#756bb1", "-"),
    "k_seq": ("#3182bd", "-"),
    REJECTION_WITH: ("#e6a01a", "-"),
    "likeliest tokens as points": ("#31a354", "-"),
    "typical_acceptance_sampler (approximate)": ("#bbbbbb", ":"),
}
"""Colour and dashes."""


def plot(cells: Sequence[Mapping[str, Any]], plt: Any) -> None:
    """Above, acceptance by drafts for each temperature; below, by temperature for numbers of drafts; `plt` is `pyplot`."""
    temperatures, drafts = (sorted({cell[key] for cell in cells}) for key in ("temperature", "drafts"))
    some = [number for number in drafts if number > 1][: len(temperatures)]
    figure, axes = plt.subplots(2, len(temperatures), figsize=(3.9 * len(temperatures), 7.6), layout="constrained", squeeze=False)
    mean = {(c["temperature"], c["drafts"], rule): np.mean(c["acceptance"][rule]) for c in cells for rule in STYLES}
    for column, temperature in enumerate(temperatures):
        for rule, (colour, dashes) in STYLES.items():
            values = [mean[temperature, number, rule] for number in drafts]
            axes[0][column].plot(drafts, values, marker="o", ms=3, color=colour, linestyle=dashes, label=rule)
        axes[0][column].set(title=f"temperature {temperature:g}", xlabel="drafts at one place", xticks=drafts)
    for column, number in enumerate(some):
        for rule, (colour, dashes) in STYLES.items():
            values = [mean[temperature, number, rule] for temperature in temperatures]
            axes[1][column].plot(temperatures, values, marker="o", ms=3, color=colour, linestyle=dashes)
        axes[1][column].set(title=f"{number} drafts", xlabel="temperature", xticks=temperatures)
    for axis in axes.flat:
        axis.set(ylim=(min(mean.values()) - 0.03, 1.0))
        axis.grid(color="#eeeeee")
    for row in axes:
        row[0].set_ylabel("acceptance")
    for axis in axes[1][len(some) :]:
        axis.set_visible(False)
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    figure.savefig(RESULTS / f"{NAME}.png", dpi=110)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=None)
    parser.add_argument("--prompts", type=int, default=8, help="of each task")
    parser.add_argument("--places", type=int, default=2, help="of each prompt")
    parser.add_argument("--temperatures", default="0.25,0.5,0.75,1")
    parser.add_argument("--drafts", default="1,2,3,4,6,8")
    parser.add_argument("--plot-only", action="store_true", help=f"check and draw again from results/{NAME}.json")
    given, plt = parser.parse_args(), pyplot()
    drafts = [int(one) for one in given.drafts.split(",")]
    if not given.plot_only:
        save(NAME, measure(given, [float(one) for one in given.temperatures.split(",")], drafts))
    cells = json.loads((RESULTS / f"{NAME}.json").read_text())["cells"]
    print(table(cells, SHOWN if SHOWN in drafts else drafts[-1]))
    plot(cells, plt)
    if wrong := faults(cells):
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main()
