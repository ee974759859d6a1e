"""Learn2PD's filter, coupled-GRPO and CJ-GRPO on the bundled diffusion model: exact match and model calls, before and
after.

usage: diffusion_rl.py [--model NAME=FOLDER ...] [--filter OUT_OF_LEARN2PD] [--count 40]

Each NAME is measured under fast decoding (one, two and four calls, ascending steps with and without EOSER, thresholds)
and under the static baseline of a slot a call, and is kept as a part of `results/diffusion_rl.json`; `original`, the
bundled model, is measured where no model and no filter are given, and must be there before others, whose differences
are to it, prompt by prompt. `--filter` adds the filter at several thresholds and its own facts. FOLDERs are written by
`recipes/bundled_diffusion/write.py`.

Prompts are of the test split, with another seed than the recipes' reports. All in float32 on the CPU; no clock decides.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import RESULTS, estimated, kept, save

from lab.diffusion import Item, items
from paceline.checkpoints import Tokenizer
from paceline.diffusion import Canvas, ConfiguredMethod, decode
from paceline.llm import BUNDLED
from paceline.models import load_denoiser

RESULT, ORIGINAL = "diffusion_rl", "original"
ONE_ANSWER = ("copy", "reverse", "remove_index", "replace_index", "insert_index", "sort")
SEVERAL = ("remove_random", "replace_random", "insert_random", "shuffle")
FAST: Mapping[str, dict[str, Any]] = {
    "static 1": {"method": "static", "denoising_steps": 1},
    "static 2": {"method": "static", "denoising_steps": 2},
    "static 4": {"method": "static", "denoising_steps": 4},
    "ass": {"method": "ass"},
    "eoser_ass": {"method": "eoser_ass"},
    "threshold 0.5": {"method": "threshold", "confidence_threshold": 0.5},
    "threshold 0.7": {"method": "threshold", "confidence_threshold": 0.7},
    "threshold 0.9": {"method": "threshold", "confidence_threshold": 0.9},
    "static": {"method": "static"},
}
TAUS = (0.3, 0.5, 0.7, 0.9, 0.96)


class Model:
    """A model folder and the questions it is asked."""

    def __init__(self, folder: Path, count: int, length: int, seed: int) -> None:
        self.denoiser, self.tokenizer = load_denoiser(folder, dtype="float32", device="cpu"), Tokenizer.load(folder)
        self.length = length
        self.asked = {task: items(task, split="test", count=count, seed=seed) for task in (*ONE_ANSWER, *SEVERAL)}

    def answered(self, recipe: ConfiguredMethod, item: Item) -> tuple[bool, int]:
        """Whether an item is answered rightly, and the calls that it took."""
        ends, mask = self.denoiser.eos_token_ids, self.denoiser.mask_token_id
        canvas = Canvas.of(self.tokenizer.encode(item.prompt), self.length, mask_token_id=mask, eos_token_ids=ends)
        [outcome] = decode([canvas], self.denoiser, [recipe.parts(self.denoiser, canvas)])
        if outcome.error is not None:
            raise outcome.error
        output = outcome.canvas.output
        size = next((i for i, token in enumerate(output) if token in ends), len(output))
        return item.right(self.tokenizer.decode(output[:size])), outcome.trajectory.calls

    def line(self, config: dict[str, Any]) -> dict[str, Any]:
        """Right answers (a digit for each item) and calls of each task."""
        recipe = ConfiguredMethod(config)
        found = {task: [self.answered(recipe, item) for item in asked] for task, asked in self.asked.items()}
        right = {task: "".join(str(int(one)) for one, _ in rows) for task, rows in found.items()}
        calls = {task: round(float(np.mean([calls for _, calls in rows])), 3) for task, rows in found.items()}
        return {"config": config, "right": right, "calls_of": calls} | summed(right, calls)


def bits(right: Mapping[str, str], tasks: tuple[str, ...]) -> np.ndarray[Any, np.dtype[np.float64]]:
    return np.array([float(digit) for task in tasks for digit in right[task]])


def summed(right: Mapping[str, str], calls: Mapping[str, float]) -> dict[str, Any]:
    """Exact match of each task, of those with one right answer and of those with several; mean calls."""
    exact = {task: round(digits.count("1") / len(digits), 4) for task, digits in right.items()}
    means = {
        name: round(float(bits(right, tasks).mean()), 4)
        for name, tasks in (("one_answer", ONE_ANSWER), ("several", SEVERAL))
    }
    return {"exact": exact, **means, "calls": round(float(np.mean(list(calls.values()))), 3)}


def difference(after: Mapping[str, str], before: Mapping[str, str]) -> dict[str, Any]:
    """Mean gain over all prompts, in shares of right answers, with its 95 % bootstrap interval over prompts."""
    tasks = (*ONE_ANSWER, *SEVERAL)
    gain = bits(after, tasks) - bits(before, tasks)
    found = estimated([gain[:, None].astype(float)], lambda values: values.mean((-2, -1)))
    return {key: round(found[name], 4) for key, name in (("gain", "value"), ("low", "low"), ("high", "high"))}


def measured(
    model: Model, lines: Mapping[str, dict[str, Any]], name: str, before: Mapping[str, Any] | None
) -> dict[str, Any]:
    """All lines of a model; with `before`, the gain over the same line of the original, or over its static baseline."""
    found = {}
    for line, config in lines.items():
        found[line] = one = model.line(config)
        if before is not None:
            one["to"] = line if line in before else "static"
            one |= difference(one["right"], before[one["to"]]["right"])
        figures = {key: one[key] for key in ("one_answer", "several", "calls", "gain", "low", "high") if key in one}
        print(f"{name}  {line}  {json.dumps(figures)}", file=sys.stderr, flush=True)
    return found


def filtered(folder: Path) -> dict[str, dict[str, Any]]:
    path = folder / "filter.safetensors"
    return {f"learn2pd {tau}": {"method": "learn2pd", "filter": str(path), "filter_threshold": tau} for tau in TAUS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", default=[], metavar="NAME=FOLDER")
    parser.add_argument("--filter", type=Path, help="OUT of learn2pd.py, for the bundled model")
    parser.add_argument("--count", type=int, default=40, help="prompts of each task (%(default)s)")
    parser.add_argument("--length", type=int, default=16, help="slots of a canvas after the prompt (%(default)s)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the record")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    options = {"count": given.count, "length": given.length, "seed": given.seed}
    known = kept(RESULT, given.results)
    if known.get("options", options) != options:
        sys.exit(f"the record was made with {known['options']}; use the same, or another --results")
    jobs = [(*pair.split("=", 1), FAST) for pair in given.model]
    jobs += [("learn2pd", str(BUNDLED / "diffusion"), filtered(given.filter))] if given.filter else []
    for name, folder, lines in jobs or [(ORIGINAL, str(BUNDLED / "diffusion"), FAST)]:
        before = None if name == ORIGINAL else known.get(ORIGINAL, {}).get("lines")
        if name != ORIGINAL and before is None:
            sys.exit("the original is not measured yet; run this without --model and --filter first")
        part = {"lines": measured(Model(Path(folder), **options), lines, name, before)}
        if name == "learn2pd":
            part["facts"] = json.loads((given.filter / "facts.json").read_text())
            for one in part["lines"].values():
                one["config"]["filter"] = "filter.safetensors"
        known = known | {"options": options, name: part}
        save(RESULT, known, given.results, parts=[name])


if __name__ == "__main__":
    main()
