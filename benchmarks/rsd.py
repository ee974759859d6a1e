"""Recursive speculative decoding against SpecTr and a single chain at equal target budget, above temperature 0.

usage: rsd.py --data FOLDER --part counts|times|plot [--model smollm2] [--temperatures 0.5,0.75,1] [--prompts 24]
              [--budgets 6,14,30] [--tokens 64] [--seconds 45] [--threads 2]

At every budget of target rows a pass (draft tokens that are verified at once) each method has the shapes that use it
up: one chain (SD), k independent chains of one length (SpecTr, verified by k-SEQ), constant branching factors by level
(RSD-C) and stochastic beams (RSD-S), both verified by recursive rejection. Chains that agree share their rows: "SpecTr,
longer" goes on until these are used up as well. FOLDER holds the published prompt sets (`methods.py`). SmolLM2's draft
model is its own int4 copy, which is nearly always right; look at `--model bundled` too.

"counts" decodes all prompts together and counts tokens per target pass. "times" decodes them one by one, plain decoding
and every shape in turn; after --seconds no further prompt is begun. All rules are exact in distribution, so outputs
differ from run to run and are not compared here: the tests of the rules enumerate their distributions. A run leaves
what other runs put into `results/rsd_MODEL.json`: estimates with 95 % intervals over prompts, and the raw figures of
every prompt. The plot beside it shows, for each method and budget, the best of its shapes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np
from common import RESULTS, estimated, kept, pyplot, save
from decoding import Model, add_model, model_of, published
from methods import FILES

from paceline import LLM, SamplingParams
from paceline.utils import in_turn, speedup, tokens_per_second

PLAIN = "plain"
CHAIN, SPECTR, LONGER, RSD_C, RSD_S = "chain", "SpecTr", "SpecTr, longer", "RSD-C", "RSD-S"
SHAPES: dict[int, dict[str, list[tuple[int, ...]]]] = {
    6: {CHAIN: [(6,)], RSD_C: [(2, 1, 1), (2, 2), (3, 1)], RSD_S: [(2, 3), (3, 2)]},
    14: {CHAIN: [(14,)], RSD_C: [(2, 2, 2), (2, 1, 1, 1, 1, 1, 1)], RSD_S: [(2, 7), (7, 2)]},
    30: {CHAIN: [(30,)], RSD_C: [(2, 2, 2, 2), (3, 3, 1, 1), (6, 1, 1, 1, 1)], RSD_S: [(5, 6), (6, 5)]},
}
"""Budget -> method -> shapes: length; factors by level; beam and length. SpecTr has the shapes of beams: chains and
length.
"""

for _shapes in SHAPES.values():
    _shapes |= {SPECTR: _shapes[RSD_S], LONGER: _shapes[RSD_S]}
POLICIES = {SPECTR: "spectr", LONGER: "spectr", RSD_C: "rsd_c", RSD_S: "rsd_s"}
KEYS = ("num_draft_tokens", "num_accepted_tokens", "num_steps")


def config_of(draft: Mapping[str, Any], method: str, shape: Sequence[int], budget: int) -> dict[str, Any]:
    """speculative_config of a shape; a limit inside the entry is one of levels, beside the list one of rows."""
    entry: dict[str, Any] = {**draft, "draft_sample_method": "probabilistic"}
    if method != CHAIN:
        entry |= {"tree_policy": POLICIES[method], "tree_width": list(shape) if method == RSD_C else shape[0]}
    if method == SPECTR:
        entry["num_speculative_tokens"] = shape[1]
    rule = "k_seq" if method in (SPECTR, LONGER) else "rejection_sampler"
    return {"method": [entry], "num_speculative_tokens": budget, "controller": "fixed", "acceptance_method": rule}


def settings(budgets: Sequence[int]) -> dict[str, tuple[int, str, tuple[int, ...]]]:
    """Name -> budget, method, shape."""
    return {
        f"{method} {'x'.join(map(str, shape))}, {budget} rows": (budget, method, shape)
        for budget in budgets
        for method, shapes in SHAPES[budget].items()
        for shape in shapes
    }


def engines(given: argparse.Namespace, model: Model) -> tuple[dict[str, LLM], list[list[int]]]:
    """Every setting's engine, and prompts spread over the sets."""
    plain = model.open(threads=given.threads, seed=0)
    each = -(-given.prompts // len(FILES))
    prompts = [ids for name in FILES for ids in published(plain, given.data, name, each, longest=256)]
    made = {
        name: plain.with_speculative_config(config_of(model.draft, method, shape, budget))
        for name, (budget, method, shape) in settings(given.budgets).items()
    }
    return {PLAIN: plain, **made}, prompts


def params_of(given: argparse.Namespace, temperature: float, number: int) -> SamplingParams:
    return SamplingParams(temperature=temperature, max_tokens=given.tokens, ignore_eos=True, seed=number)


def counts(
    given: argparse.Namespace, temperature: float, llms: Mapping[str, LLM], prompts: list[list[int]]
) -> dict[str, Any]:
    """Tokens and rows a pass of every setting; raw figures by prompt."""
    found, params = {}, [params_of(given, temperature, number) for number in range(len(prompts))]
    for name, llm in llms.items():
        if name != PLAIN:
            each = [one.metrics for one in llm.generate([{"prompt_token_ids": ids} for ids in prompts], params)]
            drafted, accepted, steps = (np.array([getattr(one, key) for one in each]) for key in KEYS)
            found[name] = {
                "tokens_per_pass": spread(accepted + steps, steps),
                "rows_per_pass": float(drafted.sum() / steps.sum()),
                "raw": {"accepted": accepted.tolist(), "passes": steps.tolist()},
            }
    return found


def times(
    given: argparse.Namespace, temperature: float, llms: Mapping[str, LLM], prompts: list[list[int]]
) -> dict[str, Any]:
    """Seconds of every setting by prompt."""
    deadline = monotonic() + given.seconds

    def decode(llm: LLM, number: int, _: int = 0) -> None:
        llm.generate([{"prompt_token_ids": prompts[number]}], params_of(given, temperature, number))

    for llm in llms.values():
        decode(llm, 0)
    raw: dict[str, list[list[float]]] = {name: [] for name in llms}
    for turn in in_turn({name: partial(decode, llm) for name, llm in llms.items()}, range(len(prompts)), 1):
        for name, taken in turn.seconds.items():
            raw[name].append([taken])
        if monotonic() > deadline:
            break
    return {name: rates(given.tokens, raw[PLAIN], own) for name, own in raw.items()}


def rates(tokens: int, plain: Sequence[Sequence[float]], own: Sequence[Sequence[float]]) -> dict[str, Any]:
    base_pr, own_pr = np.array(plain), np.array(own)
    count_pr = np.full_like(own_pr, tokens)
    rate, over = tokens_per_second(count_pr, own_pr), speedup(count_pr, base_pr, count_pr, own_pr)
    if rate is None or over is None:
        raise SystemExit("too few prompts were decoded; give more --seconds")
    return {"tokens_per_second": rate.to_dict(), "over_plain": over.to_dict(), "raw": own_pr[:, 0].tolist()}


def per_pass(tokens_pr: Any, steps_pr: Any) -> Any:
    """Tokens per pass; (..., prompts, 1) -> (...)."""
    return tokens_pr.sum((-2, -1)) / steps_pr.sum((-2, -1))


def spread(tokens_p: Any, steps_p: Any) -> dict[str, float]:
    """Tokens per pass with its 95 % bootstrap interval over prompts."""
    return estimated([tokens_p[:, None].astype(float), steps_p[:, None].astype(float)], per_pass)


COLOURS = {CHAIN: "#777777", SPECTR: "#3182bd", LONGER: "#9ecae1", RSD_C: "#e6a01a", RSD_S: "#d62728"}


PARTS = {"counts": ("tokens_per_pass", "tokens per target pass"), "times": ("tokens_per_second", "tokens/s")}
Best = dict[tuple[int, str], tuple[str, Mapping[str, float]]]


def best(found: Mapping[str, Any], budgets: Sequence[int], part: str) -> Best:
    """(budget, method) -> the best of its shapes and its estimate."""
    chosen: Best = {}
    for name, (budget, method, _) in settings(budgets).items():
        one = found[part][name][PARTS[part][0]]
        if (budget, method) not in chosen or one["value"] > chosen[budget, method][1]["value"]:
            chosen[budget, method] = (name, one)
    return chosen


def against(found: Mapping[str, Any], one: str, other: str) -> dict[str, float]:
    """Tokens per pass of a setting over those of another, with the 95 % interval of the pairs."""
    rows = [found["counts"][name]["raw"] for name in (one, other)]
    passes = [np.array(row["passes"], float)[:, None] for row in rows]
    tokens = [np.array(row["accepted"])[:, None] + steps for row, steps in zip(rows, passes, strict=True)]
    return estimated([*tokens, *passes], lambda a, b, a_steps, b_steps: per_pass(a, a_steps) / per_pass(b, b_steps))


def words(estimate: Mapping[str, float], digits: int = 2) -> str:
    return f"{estimate['value']:.{digits}f} ({estimate['low']:.{digits}f} to {estimate['high']:.{digits}f})"


def show(found: Mapping[str, Any], budgets: Sequence[int]) -> None:
    """Figures of every method's best shapes as text, and RSD-S against the others."""
    for part in (name for name in PARTS if name in found):
        chosen = best(found, budgets, part)
        for method in COLOURS:
            rows = [chosen[budget, method] for budget in budgets]
            print(
                f"  {PARTS[part][1]}: " + "; ".join(f"{n}: {words(e, 2 if part == 'counts' else 0)}" for n, e in rows)
            )
        for other in (CHAIN, SPECTR, LONGER) if part == "counts" else ():
            over = [words(against(found, chosen[b, RSD_S][0], chosen[b, other][0])) for b in budgets]
            print(f"  RSD-S over {other}: {'; '.join(over)}")
    if "times" in found:
        print(f"  plain: {found['times'][PLAIN]['tokens_per_second']['value']:.0f} tokens/s")


def plot(by_temperature: Mapping[str, Any], budgets: Sequence[int], path: Path) -> None:
    """Above tokens per pass, below tokens per second, by budget, a panel a temperature."""
    plt, temperatures = pyplot(), sorted(by_temperature, key=float)
    size = (4.4 * len(temperatures), 7)
    figure, axes = plt.subplots(2, len(temperatures), figsize=size, layout="constrained", squeeze=False, sharey="row")
    for column, temperature in enumerate(temperatures):
        found = by_temperature[temperature]
        for axis, (part, (_, label)) in zip(axes[:, column], PARTS.items(), strict=True):
            chosen = best(found, budgets, part) if part in found else {}
            for method, colour in COLOURS.items() if chosen else ():
                value, low, high = (
                    [chosen[budget, method][1][key] for budget in budgets] for key in ("value", "low", "high")
                )
                axis.plot(budgets, value, "o-", color=colour, label=method)
                axis.fill_between(budgets, low, high, color=colour, alpha=0.12, linewidth=0)
            axis.set(title=f"temperature {temperature}", xlabel="target rows a pass", xticks=budgets)
            axis.set_ylabel(label if column == 0 else "")
            axis.grid(color="#eeeeee")
        if "times" in found:
            plain = found["times"][PLAIN]["tokens_per_second"]["value"]
            axes[1][column].axhline(plain, color="#000000", linestyle=":", label=PLAIN)
    axes[1][0].set_ylim(0, None)
    figure.legend(*axes[1][0].get_legend_handles_labels(), loc="outside lower center", ncols=6, frameon=False)
    figure.savefig(path, dpi=80)
    plt.close(figure)


def keep(given: argparse.Namespace, model: Model, temperature: float, found: Mapping[str, Any]) -> None:
    """Put one temperature's part into the results, beside what is there by now.

    Raises:
        SystemExit: the results are of other budgets.
    """
    file = f"rsd_{model.name}"
    result = {"model": model.weights, "budgets": given.budgets, "temperatures": {}} | kept(file, given.folder)
    if result["budgets"] != given.budgets:
        raise SystemExit(
            f"{given.folder / file}.json holds budgets {result['budgets']}; move it away, or measure these"
        )
    result["temperatures"].setdefault(f"{temperature:g}", {})[given.part] = found
    name = f"{given.part}, temperature {temperature:g}"
    save(file, result | {"tokens": result.get("tokens", {}) | {name: given.tokens}}, given.folder, parts=[name])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model(parser)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--folder", type=Path, default=RESULTS)
    parser.add_argument("--part", choices=("counts", "times", "plot"), required=True)
    parser.add_argument(
        "--temperatures", type=lambda text: [float(one) for one in text.split(",")], default=[0.5, 0.75, 1.0]
    )
    parser.add_argument("--budgets", type=lambda text: [int(one) for one in text.split(",")], default=list(SHAPES))
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=45.0, help="of timing, at each temperature")
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    model = model_of(given.model)
    if given.part != "plot":
        llms, prompts = engines(given, model)
        for temperature in given.temperatures:
            found = {"counts": counts, "times": times}[given.part](given, temperature, llms, prompts)
            print(f"{given.part}, temperature {temperature:g}", file=sys.stderr)
            keep(given, model, temperature, found)
    path = given.folder / f"rsd_{model.name}.png"
    result = kept(path.stem, given.folder)
    for temperature, found in result["temperatures"].items():
        print(f"temperature {temperature}")
        show(found, given.budgets)
    plot(result["temperatures"], given.budgets, path)


if __name__ == "__main__":
    main()
