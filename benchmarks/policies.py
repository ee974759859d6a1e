"""Policies of drafting length side by side: on a draft model, on prompt lookup, and along the acceptance dial, in one
run.

usage: policies.py [--model smollm2] [--threads 2] [--repeats 3] [--prompts 4] [--tokens 64] [--dial 0.5,0.8,0.95]
                   [--plot-only]

Every drafter is a group of its own, in which plain decoding and all policies decode each prompt in turn. Outputs must
equal those of plain decoding, or differ first at a near tie (counted); otherwise nothing is timed. All policies have
their published defaults; "fixed" has 4 and 8 tokens. "oracle length" knows how much of each draft will be accepted
(`oracle_length.py`). Results: `results/policies_MODEL.json`, `.png`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from common import RESULTS, pyplot, save
from decoding import Ids, Model, add_model, counted, model_of, must_agree, prompts_of, run
from oracle_length import LengthRecorder, Lengths, OracleLength

from paceline import LLM, SamplingParams
from paceline.bench.run import dial_registered
from paceline.utils import Estimate, speedup, time_in_turn, tokens_per_second

POLICIES: dict[str, dict[str, Any]] = {
    "auto": {"controller": "auto"},
    "fixed 4": {"controller": "fixed", "num_speculative_tokens": 4},
    "fixed 8": {"controller": "fixed", "num_speculative_tokens": 8},
    **{name: {"controller": name} for name in ("heuristic", "online_acceptance", "kangaroo", "swift", "diffuspec")},
}
PLAIN, ORACLE = "plain", "oracle length"


class Group:
    """One drafter under every policy, and plain decoding.

    Args:
        drafter: its speculative_config.
        reference: what plain decoding says to each prompt.
    Attributes:
        seconds: per setting, (prompts, repeats).
        agreement: how many outputs were the same as plain decoding's.
    """

    def __init__(
        self, plain: LLM, drafter: Mapping[str, Any], prompts: list[Ids], reference: list[Ids], tokens: int
    ) -> None:
        self.plain, self.prompts, self.reference = plain, prompts, reference
        self.params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        self.settings = {PLAIN: plain} | {
            name: plain.with_speculative_config({**drafter, **p}) for name, p in POLICIES.items()
        }
        self.oracle = OracleLength()
        self.settings[ORACLE] = _controlled(plain.with_speculative_config(dict(drafter)), self.oracle)
        self.lengths = self._record(_controlled(plain.with_speculative_config(dict(drafter)), LengthRecorder(48)))
        self.seconds: dict[str, Any] = {}
        self.agreement: dict[str, dict[str, int]] = {}
        self.drafting: dict[str, dict[str, float]] = {}

    def _record(self, llm: LLM) -> list[Lengths]:
        found = []
        for prompt in self.prompts:
            made = self._decode(llm, prompt).outputs[0].token_ids
            found.append(llm.engine.parts.controller.lengths(len(prompt) + len(made), made))  # type: ignore[attr-defined]
        return found

    def _decode(self, llm: LLM, prompt: Ids) -> Any:
        return run(llm, [prompt], self.params)[0]

    def run(self, name: str, number: int) -> Any:
        """One setting on one prompt."""
        if name == ORACLE:
            self.oracle.told = [self.lengths[number]]
        return self._decode(self.settings[name], self.prompts[number])

    def check(self) -> None:
        """Every setting on all prompts: to warm up and to compare; what it drafts is noted."""
        for name in self.settings:
            everything = [self.run(name, number) for number in range(len(self.prompts))]
            outputs = [found.outputs[0].token_ids for found in everything]
            self.agreement[name] = must_agree(self.plain, self.prompts, self.reference, outputs)
            self.drafting[name] = counted(everything)

    def time(self, repeats: int) -> None:
        """Every setting on every prompt, in turn."""
        self.seconds = time_in_turn(
            {name: partial(self.run, name) for name in self.settings}, range(len(self.prompts)), repeats
        )

    def to_dict(self, tokens: int) -> dict[str, Any]:
        """Tokens/s and the paired ratio over plain decoding, with their 95 % intervals."""
        found = {}
        base_pr = self.seconds[PLAIN]
        tokens_pr = np.full_like(base_pr, tokens)
        for name, seconds_pr in self.seconds.items():
            found[name] = {
                "tokens_per_second": _dict(tokens_per_second(tokens_pr, seconds_pr)),
                "over_plain": _dict(speedup(tokens_pr, base_pr, tokens_pr, seconds_pr)),
                "drafting": self.drafting[name],
                "agreement": self.agreement[name],
            }
        return found


def _controlled(llm: LLM, controller: Any) -> LLM:
    """The same engine under another controller."""
    llm.engine.use_controller(controller)
    return llm


def _dict(estimate: Estimate | None) -> dict[str, Any]:
    if estimate is None:
        raise SystemExit("nothing was measured")
    return estimate.to_dict()


def measure(given: argparse.Namespace, model: Model, dial: Sequence[float]) -> dict[str, Any]:
    """All groups, in turn."""
    plain = model.open(threads=given.threads)
    prompts = prompts_of(plain, given.prompts)
    params = SamplingParams(temperature=0.0, max_tokens=given.tokens, ignore_eos=True)
    reference = [plain.generate([{"prompt_token_ids": ids}], params)[0].outputs[0].token_ids for ids in prompts]
    records = {tuple(ids): made for ids, made in zip(prompts, reference, strict=True)}
    drafters: dict[str, dict[str, Any]] = {"draft model": model.draft, "ngram": {"method": "ngram"}}
    for acceptance in dial:
        drafters[f"dial {acceptance:g}"] = {
            "method": "corrupted_oracle",
            "acceptance": acceptance,
            "continuations": records,
        }
    groups = {name: Group(plain, drafter, prompts, reference, given.tokens) for name, drafter in drafters.items()}
    for group in groups.values():
        group.check()
    for group in groups.values():
        group.time(given.repeats)
    return {
        "model": model.weights,
        "draft": model.draft["method"],
        "prompts": given.prompts,
        "tokens": given.tokens,
        "repeats": given.repeats,
        "dial": list(dial),
        "groups": {name: group.to_dict(given.tokens) for name, group in groups.items()},
    }


STYLE = {
    PLAIN: ("#777777", "--", ""),
    ORACLE: ("#000000", ":", ""),
    "auto": ("#d62728", "-", "o"),
    "fixed 4": ("#9ecae1", "-", "s"),
    "fixed 8": ("#3182bd", "-", "s"),
    "heuristic": ("#31a354", "-", "^"),
    "online_acceptance": ("#756bb1", "-", "D"),
    "kangaroo": ("#e6550d", "-", "v"),
    "swift": ("#e7ba52", "-", "P"),
    "diffuspec": ("#8c6d31", "-", "X"),
}


def plot(found: Mapping[str, Any], path: Path, plt: Any) -> None:
    """Tokens per second along the dial, the same over plain decoding, and the two real drafters."""
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(16, 5.5), width_ratios=(5, 5, 4), layout="constrained")
    lines(left, found, "tokens_per_second")
    left.set(ylabel="tokens/s, batch 1", title="Acceptance dial (drafting takes next to no time)")
    left.legend(ncols=2, frameon=False)
    lines(middle, found, "over_plain")
    middle.set(ylabel="times plain decoding, paired", title="The same over plain (bands: 95 % intervals)")
    bars(right, found["groups"])
    figure.savefig(path, dpi=80)
    plt.close(figure)


def lines(axes: Any, found: Mapping[str, Any], figures: str) -> None:
    """One line a policy along the dial; intervals of `auto` and of the oracle."""
    for name, (colour, line, marker) in STYLE.items():
        estimates = [found["groups"][f"dial {acceptance:g}"][name][figures] for acceptance in found["dial"]]
        value, low, high = ([one[key] for one in estimates] for key in ("value", "low", "high"))
        width = 2.6 if name == "auto" else 1.5
        axes.plot(
            found["dial"], value, line, color=colour, marker=marker or None, label=name, linewidth=width, markersize=5
        )
        if name in ("auto", ORACLE):
            axes.fill_between(found["dial"], low, high, color=colour, alpha=0.10, linewidth=0)
    axes.set(xlabel="acceptance: chance that the next drafted token is right", ylim=(0, None))


def bars(axes: Any, groups: Mapping[str, Any]) -> None:
    """Times plain decoding under the draft model and, hatched, under prompt lookup."""
    names = [name for name in STYLE if name != PLAIN]
    for offset, (drafter, hatch) in enumerate((("draft model", ""), ("ngram", "///"))):
        table = np.array(
            [[groups[drafter][name]["over_plain"][key] for key in ("value", "low", "high")] for name in names]
        )
        errors = np.abs(table[:, 1:] - table[:, :1]).T
        colours = [STYLE[name][0] for name in names]
        places = np.arange(len(names)) + 0.4 * offset
        axes.barh(places, table[:, 0], 0.38, xerr=errors, color=colours, hatch=hatch, edgecolor="white", alpha=0.9)
    axes.axvline(1.0, color=STYLE[PLAIN][0], linestyle="--")
    axes.set_yticks(np.arange(len(names)) + 0.2, names)
    axes.invert_yaxis()
    axes.set(xlabel="times plain decoding (95 % intervals)", title="Draft model; prompt lookup (hatched)")


@dial_registered()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model(parser)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--dial", default="0.5,0.8,0.95")
    parser.add_argument("--folder", type=Path, default=RESULTS)
    parser.add_argument("--plot-only", action="store_true", help="draw the plot again from the results")
    given, plt = parser.parse_args(), pyplot()
    model = model_of(given.model)
    path = given.folder / f"policies_{model.name}.json"
    if not given.plot_only:
        save(path.stem, measure(given, model, [float(one) for one in given.dial.split(",")]), given.folder)
    found = json.loads(path.read_text())
    for drafter, group in found["groups"].items():
        for name, one in group.items():
            rate, over, drafting = one["tokens_per_second"]["value"], one["over_plain"], one["drafting"]
            interval = f"{over['value']:.2f} ({over['low']:.2f} to {over['high']:.2f}) times plain"
            print(
                f"{drafter:12s} {name:14s} {rate:6.0f} tokens/s, {interval}, {drafting['tokens_per_pass']:.2f} tokens "
                f"a pass"
            )
    plot(found, path.with_suffix(".png"), plt)


if __name__ == "__main__":
    main()
