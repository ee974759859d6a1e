"""`auto` against plain decoding and every fixed length along the acceptance dial, by batch size, in turn, in one run.

usage: dial.py [--model smollm2] [--threads 2] [--screening 2] [--repeats 5] [--batches 1,4,16]
               [--acceptance 0,0.5,0.8,0.95] [--spread 0] [--fixed 1,2,4,8,15] [--extra NAME=JSON ...] [--tokens 64]
               [--requests 4] [--plot-only]

The drafter knows the true continuation and gets each token wrong with a chosen probability; at acceptance 0 it is
always wrong and always sure, the worst drafter there is. With `--spread 1` the probability differs from node to node,
evenly around the chosen one. Every cell is a batch size and an acceptance: plain decoding, `auto` and the fixed lengths
decode the same requests, batch after batch, each in an order drawn anew, after warming up. `--extra` adds a setting, as
trees: `--extra 'dyspec 16={"controller": "fixed", "num_speculative_tokens": 16, "tree_policy": "dyspec"}'`.

Outputs must equal those of plain decoding, or differ first at a near tie (counted); otherwise nothing is timed. After a
few turns (`--screening`) plain decoding, `auto` and the settings within 15 % of the fastest go on by themselves for
`--repeats` further turns, and ratios are taken of those alone: so the time goes where it decides something, and the
fastest fixed setting (plain decoding counts as length 0), by its median, did not win by its luck among many. Ratios are
paired, with 95 % bootstrap intervals. A cell whose batch is smaller decodes `--requests`. Every cell is written when it
is done, and a run that is stopped goes on where it was. Results: `results/dial_MODEL.json`, `.png`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import Any

from common import RESULTS, kept, pyplot, ratio, save
from decoding import Ids, Model, add_model, counted, decode, model_of, must_agree, prompts_of, run

from paceline import LLM, SamplingParams
from paceline.bench.run import dial_registered
from paceline.utils import in_turn

REQUESTS = 4
"""Requests of a cell whose batch is smaller, one after the other."""

CONTENDER = 1.15
"""A fixed length that takes at most so many times what the fastest one takes goes on after the screening."""

WARM_UP = 4
ALWAYS_WRONG = {"acceptance": 0.0, "confidence": 0.97}


class Dial:
    """One model, its requests, and what plain decoding says to them.

    Args:
        most: the largest batch. requests: of a cell whose batch is smaller.
    """

    requests = REQUESTS

    def __init__(self, model: Model, threads: int, most: int, tokens: int, *, requests: int = REQUESTS) -> None:
        self.plain = model.open(threads=threads, max_num_seqs=most)
        self.params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        self.requests = requests
        self.prompts = prompts_of(self.plain, max(most, requests))
        self.reference = [decode(self.plain, [prompt], self.params)[0] for prompt in self.prompts]
        self.records = {tuple(ids): made for ids, made in zip(self.prompts, self.reference, strict=True)}

    def cell(
        self,
        batch: int,
        acceptance: float,
        fixed: list[int],
        repeats: int,
        screening: int = 0,
        *,
        spread: float = 0.0,
        extra: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Seconds of every setting at one batch size and acceptance; after `screening` turns, if any, of the contenders
        alone.
        """
        settings = self._settings(acceptance, fixed, spread, extra or {})
        groups = [self.prompts[first : first + batch] for first in range(0, max(batch, self.requests), batch)]
        drafting = {name: self._check(llm, groups) for name, llm in settings.items()}
        for _ in range(WARM_UP):
            decode(settings["auto"], groups[0], self.params)
        first = self.turns(settings, groups, screening)
        left = contenders(first) if screening else list(settings)
        seconds = self.turns({name: settings[name] for name in left}, groups, repeats)
        made = max(batch, self.requests) // batch * batch * self.params.max_tokens
        fastest = min((name for name in seconds if name != "auto"), key=lambda name: median(seconds[name]))
        return {
            "batch": batch,
            "acceptance": acceptance,
            "tokens_per_second": {name: made / median(values) for name, values in (first | seconds).items()},
            "fastest fixed": fastest,
            "auto over plain": ratio(seconds["plain"], seconds["auto"]),
            "auto over the fastest fixed": ratio(seconds[fastest], seconds["auto"]),
            "drafting": drafting,
            "screening": first,
            "seconds": seconds,
        }

    def _settings(self, acceptance: float, fixed: list[int], spread: float, extra: Mapping[str, Any]) -> dict[str, LLM]:
        oracle: dict[str, Any] = {"method": "corrupted_oracle", "continuations": self.records, "acceptance": acceptance}
        oracle |= {"spread": spread} | (ALWAYS_WRONG if acceptance == 0.0 else {})
        named = {"plain": None, "auto": {"controller": "auto", **oracle}}
        named |= {
            f"fixed {number}": {"controller": "fixed", "num_speculative_tokens": number, **oracle} for number in fixed
        }
        named |= {name: {**oracle, **options} for name, options in extra.items()}
        return {name: self.plain.with_speculative_config(config) for name, config in named.items()}

    def turns(self, settings: dict[str, LLM], groups: list[list[Ids]], repeats: int) -> dict[str, list[float]]:
        """Seconds of every setting in turn, a number a repeat."""
        seconds = {name: [0.0] * repeats for name in settings}
        runs = {name: lambda group, _, llm=llm: decode(llm, group, self.params) for name, llm in settings.items()}
        for turn in in_turn(runs, groups, repeats):
            for name, taken in turn.seconds.items():
                seconds[name][turn.repeat] += taken
        return seconds

    def _check(self, llm: LLM, groups: list[list[Ids]]) -> dict[str, Any]:
        found = [one for group in groups for one in run(llm, group, self.params)]
        made = [one.outputs[0].token_ids for one in found]
        return must_agree(self.plain, self.prompts[: len(made)], self.reference[: len(made)], made) | counted(found)


def contenders(seconds: dict[str, list[float]]) -> list[str]:
    """Plain decoding, `auto`, and what may be the fastest fixed length."""
    middle = {name: median(values) for name, values in seconds.items()}
    least = min(value for name, value in middle.items() if name != "auto")
    return [name for name, value in middle.items() if name in ("plain", "auto") or value <= CONTENDER * least]


def words(cell: dict[str, Any]) -> str:
    """One line on a cell."""
    over, fixed = cell["auto over plain"], cell["auto over the fastest fixed"]
    rates = ", ".join(f"{name} {rate:.0f}" for name, rate in cell["tokens_per_second"].items())
    return (
        f"batch {cell['batch']:2d}, acceptance {cell['acceptance']:g}: tokens/s {rates}; auto / plain "
        f"{over['median']:.2f} ({over['low']:.2f} to {over['high']:.2f}), auto / {cell['fastest fixed']} "
        f"{fixed['median']:.2f} ({fixed['low']:.2f} to {fixed['high']:.2f})"
    )


def plot(found: dict[str, Any], path: Path) -> None:
    """Tokens per second over acceptance, a column a batch size; below, times plain decoding, paired."""
    plt = pyplot()
    sizes = sorted({cell["batch"] for cell in found["cells"]})
    figure, panels = plt.subplots(2, len(sizes), figsize=(5.2 * len(sizes), 8.4), layout="constrained", squeeze=False)
    for column, size in enumerate(sizes):
        cells = sorted((cell for cell in found["cells"] if cell["batch"] == size), key=lambda cell: cell["acceptance"])
        _lines(panels[0][column], [(cell["acceptance"], cell["tokens_per_second"]) for cell in cells])
        _lines(panels[1][column], [(cell["acceptance"], _over_plain(cell)) for cell in cells])
        panels[0][column].set(title=f"batch {size}")
        panels[1][column].set(xlabel="acceptance of a drafted token")
    panels[0][0].set_ylabel("tokens/s, each acceptance in its own minute")
    panels[1][0].set_ylabel("times plain decoding, paired")
    panels[0][0].legend(frameon=False)
    figure.savefig(path, dpi=72)
    plt.close(figure)


def _over_plain(cell: dict[str, Any]) -> dict[str, float]:
    stages = [cell[stage] for stage in ("screening", "seconds") if any(cell.get(stage, {}).values())]
    return {name: ratio(stage["plain"], values)["median"] for stage in stages for name, values in stage.items()}


def _lines(axes: Any, points: list[tuple[float, dict[str, float]]]) -> None:
    """A line a setting through its values at each acceptance."""
    shades = cycle(pyplot().get_cmap("Blues")([0.35 + 0.13 * i for i in range(6)]))
    for name in points[0][1]:
        look = {
            "auto": {"color": "#d62728", "linewidth": 2.6, "marker": "o"},
            "plain": {"color": "#777777", "linestyle": "--"},
        }
        style = look.get(name) or {"color": next(shades), "marker": "s", "markersize": 4}
        axes.plot([x for x, _ in points], [values[name] for _, values in points], label=name, **style)
    axes.set(ylim=(0, None))


@dial_registered()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model(parser)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--screening", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--batches", default="1,4,16")
    parser.add_argument("--acceptance", default="0,0.5,0.8,0.95")
    parser.add_argument("--spread", type=float, default=0.0)
    parser.add_argument("--fixed", default="1,2,4,8,15")
    parser.add_argument("--extra", action="append", default=[], help="NAME=JSON, a further setting of the drafter")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--requests", type=int, default=REQUESTS)
    parser.add_argument("--folder", type=Path, default=RESULTS)
    parser.add_argument("--plot-only", action="store_true", help="draw the plot again from the results")
    given = parser.parse_args()
    if not given.plot_only:
        measure(given)
    path = given.folder / f"dial_{given.model if '/' not in given.model else Path(given.model).resolve().name}.json"
    plot(json.loads(path.read_text()), path.with_suffix(".png"))


def measure(given: argparse.Namespace) -> None:
    """All cells that are missing; each is written when it is done."""
    batches, model = [int(batch) for batch in given.batches.split(",")], model_of(given.model)
    fixed = [int(number) for number in given.fixed.split(",")]
    extra = {name: json.loads(text) for name, _, text in (one.partition("=") for one in given.extra)}
    name, dial = f"dial_{model.name}", Dial(model, given.threads, max(batches), given.tokens, requests=given.requests)
    asked = {"repeats": given.repeats, "tokens": given.tokens, "spread": given.spread, "extra": extra}
    for batch in batches:
        for acceptance in map(float, given.acceptance.split(",")):
            known = kept(name, given.folder).get("cells", [])
            place = {"batch": batch, "acceptance": acceptance}
            if any((place | asked).items() <= old.items() for old in known):
                continue
            cell = asked | dial.cell(
                batch, acceptance, fixed, given.repeats, given.screening, spread=given.spread, extra=extra
            )
            cells = [old for old in known if not place.items() <= old.items()] + [cell]
            part = f"batch {batch}, acceptance {acceptance:g}"
            save(name, {"model": model.weights, "cells": cells}, given.folder, parts=[part])
            print(words(cell), flush=True)


if __name__ == "__main__":
    main()
