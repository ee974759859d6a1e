"""How often drafts stand under every rule of verification, against the most that any exact rule could accept.

usage: acceptance_rules.py [--model smollm2] [--data FOLDER] [--prompts 8] [--places 2]
                           [--temperatures 0.25,0.5,0.75,1] [--drafts 1,2,3,4,6,8] [--plot-only]

The target writes after prompts at each temperature; at places spread over what it writes, p and q are its distribution
and that of a draft model, and every rule's acceptance is worked out from them. SmolLM2's draft model is its own int4
copy, which is closer to it than a smaller model would be; look at `--model bundled` too. FOLDER holds published prompt
sets (`methods.py`); without it the prompts that ship with the package are taken.

Exits with 1 if a rule is above the optimum of its drafts or if draws without replacement are worse than draws with it.
Prints acceptance by task and temperature, and for the approximate rules, on one draft at a place, also departures (a
draft stands that the exact rule would not have kept) and the distance (half the summed difference) of the next token's
distribution from the target's. Results: `results/acceptance_rules_MODEL.json`, means over the places of a
task, and `.png`.
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
from decoding import Model, add_model, asked, model_of, published
from methods import FILES

from paceline import LLM, SamplingParams
from paceline.bench.acceptance import (
    REJECTION_WITH,
    REJECTION_WITHOUT,
    RULES,
    WITH,
    WITHOUT,
    failures,
    rows_of,
    violations,
)
from paceline.bench.run import bundled_workload
from paceline.verifiers import RelaxedThinking, TypicalAcceptance, top_entropy

WRITTEN, SHOWN, ALL = 32, 4, "all"
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


FLY_WINDOW, FLY_ENTROPY = 3, 0.3
"""A window that chains of usual lengths can fill; vLLM's threshold."""

THRESHOLD_ACC = 0.5
THINKING = RelaxedThinking(relaxed_topk=10, relaxed_delta=0.6)
"""As TensorRT-LLM's authors set it."""

RELAXED: dict[str, Any] = {}
"""Approximate rule -> its acceptance, departures and distance, from p and q; filled in by `relaxed_rule`."""


def relaxed_rule(name: str) -> Any:
    return lambda rule: RELAXED.setdefault(name, rule)


Judged = tuple[float, float, float]
"""Acceptance, departures, distance."""


def judged(p: Any, q: Any, stands_v: Any, exact_v: Any, law_v: Any) -> Judged:
    """Of one draft from q, which stands with chance `stands_v`, and with `exact_v` under the exact rule as well."""
    accepted = float((q * stands_v).sum())
    return accepted, accepted - float((q * exact_v).sum()), float(np.abs(law_v - p).sum()) / 2


def kept_exactly(p: Any, q: Any) -> Any:
    """(v,) chance that exact rejection keeps each token as a draft from q."""
    return np.minimum(1.0, np.divide(p, q, out=np.zeros_like(p), where=q > 0.0))


@relaxed_rule("typical_acceptance_sampler")
def typical(p: Any, q: Any) -> Judged:
    """The token after a rejection is drawn from p."""
    tokens, weights = np.arange(len(p), dtype=np.int32), torch.from_numpy(np.log(np.maximum(p, 1e-300)))[None]
    stands_v = np.array(TypicalAcceptance().plausible(weights, np.zeros(len(p), np.intp), tokens)[0], np.float64)
    return judged(p, q, stands_v, stands_v * kept_exactly(p, q), q * stands_v + (1.0 - (q * stands_v).sum()) * p)


@relaxed_rule("fly")
def fly(p: Any, q: Any) -> Judged:
    """The places after this one are taken to be like it."""
    exact_v = kept_exactly(p, q)
    agreed = float((q * exact_v).sum())
    deferring = agreed**FLY_WINDOW if top_entropy(torch.from_numpy(p)) >= FLY_ENTROPY else 0.0
    stands_v = exact_v + (1.0 - exact_v) * (p > 0.0) * deferring
    rest_v = np.maximum(p - q, 0.0)
    after_v = rest_v / rest_v.sum() if rest_v.sum() > 0.0 else p
    return judged(p, q, stands_v, exact_v, q * stands_v + (1.0 - (q * stands_v).sum()) * after_v)


@relaxed_rule("accept_thresholds")
def thresholds(p: Any, q: Any) -> Judged:
    """A draft that fails is kept out of the token after it."""
    stands_v = np.minimum(1.0, p / THRESHOLD_ACC)
    failed_v = q * (1.0 - stands_v) / np.maximum(1.0 - p, 1e-12)
    return judged(p, q, stands_v, p, q * stands_v + p * (failed_v.sum() - failed_v))


@relaxed_rule("relaxed_thinking (temperature 0)")
def thinking(p: Any, q: Any) -> Judged:
    """Of the likeliest token of q, against the likeliest of p."""
    draft = int(q.argmax())
    equal = draft == int(p.argmax())
    stands = equal or THINKING.plausible(torch.from_numpy(np.log(np.maximum(p, 1e-300))), draft, 0)
    return float(stands), float(stands and not equal), float(stands and not equal)


def relaxed_table(cells: Sequence[Mapping[str, Any]]) -> str:
    """Means over all places, by temperature."""
    lines = ["| temperature | rule | acceptance | departures | distance |", "|---|---|---|---|---|"]
    for cell in cells:
        for rule, figures in cell.get("relaxed", {}).items():
            lines.append(f"| {cell['temperature']:g} | {rule} | {' | '.join(f'{mean:.3f}' for mean in figures)} |")
    return "\n".join(lines)


def prompts_by_task(llm: LLM, given: argparse.Namespace) -> dict[str, list[list[int]]]:
    """Task -> prompts as token ids."""
    if given.data is not None:
        return {task: published(llm, given.data, task, given.prompts) for task in FILES}
    found: dict[str, list[list[int]]] = {}
    for one in bundled_workload().conversations:
        found.setdefault(one.task, []).append(asked(llm, one.turns[0]))
    return {task: prompts[: given.prompts] for task, prompts in found.items()}


def pairs(
    llm: LLM, draft: Any, prompts: Sequence[list[int]], temperature: float, places: int
) -> Iterator[tuple[Any, Any]]:
    """(v,) p and q at places of what the target writes after each prompt."""
    params = SamplingParams(temperature=temperature, max_tokens=WRITTEN, ignore_eos=True, seed=0)
    size = llm.runner.info.vocab_size
    for ids, found in zip(prompts, llm.generate([{"prompt_token_ids": ids} for ids in prompts], params), strict=True):
        text = [*ids, *found.outputs[0].token_ids]
        p_tv, q_tv = (rows_of(runner, text, WRITTEN, temperature, size) for runner in (llm.runner, draft))
        for place in np.linspace(0, WRITTEN - 1, places + 2).astype(int)[1:-1]:
            yield p_tv[place], q_tv[place]


def measure(
    given: argparse.Namespace, model: Model, temperatures: Sequence[float], drafts: Sequence[int]
) -> dict[str, Any]:
    """Acceptance at every place by temperature, number of drafts and rule."""
    llm = model.open(seed=0)
    models, options = llm.models, model.draft
    draft = models.open(options["model"]) if "model" in options else models.copy_of_target(options["quantization"])
    tasks, rng = prompts_by_task(llm, given), np.random.default_rng(0)
    cells = []
    for temperature in temperatures:
        rows = [
            (task, *pair) for task, ids in tasks.items() for pair in pairs(llm, draft, ids, temperature, given.places)
        ]
        for number in drafts:
            found: dict[str, list[float]] = {name: [rule(p, q, number) for _, p, q in rows] for name, rule in others()}
            sampled = [failures(p, q, number, rng) for _, p, q in rows]
            found[REJECTION_WITHOUT] = [1.0 - float(one.mean()) for one in sampled]
            errors = [float(one.std(ddof=1) / len(one) ** 0.5) if len(one) > 1 else 0.0 for one in sampled]
            cell = {
                "temperature": temperature,
                "drafts": number,
                "tasks": [task for task, *_ in rows],
                "acceptance": found,
            }
            if number == 1:
                cell["relaxed"] = {
                    name: np.mean([rule(p, q) for _, p, q in rows], axis=0).round(5).tolist()
                    for name, rule in RELAXED.items()
                }
            cells.append({**cell, "standard_errors": {REJECTION_WITHOUT: errors}})
            print(f"temperature {temperature:g}, {number} drafts: {len(rows)} places", file=sys.stderr)
    data = "shipped prompts" if given.data is None else list(FILES)
    return {"model": model.weights, "draft": model.draft["method"], "data": data, "cells": cells}


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


def means(cells: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Cells with means by task and rule in place of a figure for each place."""
    found = []
    for cell in cells:
        where = {
            task: [i for i, one in enumerate(cell["tasks"]) if task in (one, ALL)]
            for task in [*dict.fromkeys(cell["tasks"]), ALL]
        }
        values = {rule: np.array(each) for rule, each in cell["acceptance"].items()}
        made = {
            task: {rule: round(float(each[here].mean()), 5) for rule, each in values.items()}
            for task, here in where.items()
        }
        places = {task: len(here) for task, here in where.items()}
        relaxed = {"relaxed": cell["relaxed"]} if "relaxed" in cell else {}
        found.append(
            {"temperature": cell["temperature"], "drafts": cell["drafts"], "places": places, "acceptance": made}
            | relaxed
        )
    return found


def table(cells: Sequence[Mapping[str, Any]], number: int) -> str:
    """Acceptance by task and temperature at one number of drafts."""
    lines = [f"| {number} drafts | temperature | {' | '.join(COLUMNS)} |", "|---|---|" + "---|" * len(COLUMNS)]
    for task in cells[0]["acceptance"]:
        for cell in (one for one in cells if one["drafts"] == number):
            figures = [cell["acceptance"][task][rule] for rule in COLUMNS.values()]
            lines.append(f"| {task} | {cell['temperature']:g} | {' | '.join(f'{mean:.3f}' for mean in figures)} |")
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


def plot(cells: Sequence[Mapping[str, Any]], path: Path, plt: Any) -> None:
    """Above, acceptance by drafts for each temperature; below, by temperature for numbers of drafts; `plt` is
    `pyplot`.
    """
    temperatures, drafts = (sorted({cell[key] for cell in cells}) for key in ("temperature", "drafts"))
    some = [number for number in drafts if number > 1][: len(temperatures)]
    figure, axes = plt.subplots(
        2, len(temperatures), figsize=(3.9 * len(temperatures), 7.6), layout="constrained", squeeze=False
    )
    mean = {(c["temperature"], c["drafts"], rule): c["acceptance"][ALL][rule] for c in cells for rule in STYLES}
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
    figure.legend(
        *axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False, fontsize=9
    )
    figure.savefig(path, dpi=72)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model(parser)
    parser.add_argument("--data", type=Path, help="folder of published prompt sets; default: the shipped prompts")
    parser.add_argument("--prompts", type=int, default=8, help="of each task")
    parser.add_argument("--places", type=int, default=2, help="of each prompt")
    parser.add_argument("--temperatures", default="0.25,0.5,0.75,1")
    parser.add_argument("--drafts", default="1,2,3,4,6,8")
    parser.add_argument("--plot-only", action="store_true", help="draw again from the results")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=RESULTS)
    given, plt = parser.parse_args(), pyplot()
    torch.set_num_threads(given.threads)
    drafts = [int(one) for one in given.drafts.split(",")]
    model, wrong = model_of(given.model), list[str]()
    path = given.folder / f"acceptance_rules_{model.name}.json"
    if not given.plot_only:
        made = measure(given, model, [float(one) for one in given.temperatures.split(",")], drafts)
        wrong = faults(made["cells"])
        save(path.stem, made | {"cells": means(made["cells"])}, given.folder)
    cells = json.loads(path.read_text())["cells"]
    print(table(cells, SHOWN if SHOWN in drafts else drafts[-1]))
    print(relaxed_table(cells))
    plot(cells, path.with_suffix(".png"), plt)
    if wrong:
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main()
