"""Trained accelerators of the bundled diffusion model: exact match and model calls, before and after.

usage: accelerators.py [--model NAME=FOLDER ...] [--method NAME_OR_JSON ...] [--count 40]
                       [--part scores|others|plot|all]

scores  held-out prompts of six queue tasks with one right answer, decoded by each method into canvases of the same
        length
others  fewer prompts of all other tasks, some of which were not learned or leave a choice: what an accelerator did to
        them
plot    exact match against calls, from what is stored

The model named `original` is the bundled one, measured where no model is given; its static baseline is what all are
compared with, prompt by prompt. Each NAME is a part of `results/diffusion_accelerators.json`, measured under the same
options or refused. `--method` measures these lines only and adds them to those stored. A line with weights of its own,
as a trained filter, belongs under a name of its own, even if its FOLDER is the bundled one. All in float32 on the CPU;
no clock decides.

The recipes report on test prompts of seed 0; the prompts here are drawn with another seed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, kept, pyplot, save

from lab.diffusion import TASKS, DiffusionBench, DiffusionLine, DiffusionOptions, Sample, parse_lines, summarize_samples
from paceline.checkpoints import Tokenizer
from paceline.llm import BUNDLED
from paceline.models import load_denoiser

RESULT, ORIGINAL, SLACK = "diffusion_accelerators", "original", 0.01
MAIN = ("copy", "reverse", "remove_index", "replace_index", "insert_index", "sort")
THRESHOLDS = (0.95, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2)
NATS = (0.1, 0.25, 0.5, 1.0, 1.5)
Config = dict[str, Any]


def defaults() -> list[Config | str]:
    """Training-free methods as published, and curves of the rules that accelerators are decoded with."""
    curves: list[Config | str] = [{"method": "threshold", "confidence_threshold": value} for value in THRESHOLDS]
    curves += [{"method": "dparallel", "entropy_threshold": value} for value in NATS]
    curves += ["cad", *({"method": "cad", "eos_bar": 0.0, "confidence_threshold": value} for value in (0.95, 0.7, 0.5))]
    leaps = [{"method": "local_leap", "relaxed_threshold": value} for value in (0.75, 0.5, 0.3)]
    return [*curves, *leaps, "ete", {"method": "ete", "confidence_threshold": 0.7}, "factor", "ccd_ds", "prophet"]


def lines_of(given: argparse.Namespace) -> list[DiffusionLine]:
    """What is asked for, or the static baseline and all others."""
    if given.method:
        found = parse_lines(given.method, given.block_length)
        return found if "static" in given.method else found[1:]
    return [DiffusionLine.of(config, given.block_length) for config in ("static", *defaults())]


def bench_of(folder: Path, given: argparse.Namespace, tasks: Sequence[str], count: int) -> DiffusionBench:
    denoiser, tokenizer = load_denoiser(folder, dtype="float32", device="cpu"), Tokenizer.load(folder)
    size = given.block_length
    options = DiffusionOptions(
        tasks=tuple(tasks), count=count, timed=0, length=given.length, block_length=size, seed=given.seed
    )
    return DiffusionBench(denoiser, tokenizer, options, dtype="float32")


def decoded(bench: DiffusionBench, line: DiffusionLine, name: str) -> list[Sample]:
    print(f"  {name}: {line.name}", file=sys.stderr, flush=True)
    return [bench.sample(line.recipe, item) for item in bench.asked]


def measured(
    bench: DiffusionBench, lines: Sequence[DiffusionLine], name: str, baseline: Sequence[Sample]
) -> dict[str, Any]:
    """Figures of each line; differences and ratios are to `baseline`."""
    made = {
        line.name: {"config": dict(line.config), **summarize_samples(decoded(bench, line, name), baseline)}
        for line in lines
    }
    return {line: one if (name, line) == (ORIGINAL, "static") else brief(one) for line, one in made.items()}


def brief(line: dict[str, Any]) -> dict[str, Any]:
    """A line with its score of each task; what each prompt brought is kept of the baseline alone (`restored`)."""
    return line | {"tasks": {task: {"score": one["score"]} for task, one in line["tasks"].items()}}


def best(lines: Mapping[str, Any], least: float) -> dict[str, Any] | None:
    """The line of fewest calls whose exact match is at least `least`; the higher one of equals."""
    fine = [
        (one["calls"], -one["score"]["value"], name)
        for name, one in lines.items()
        if one["score"]["value"] >= least - 1e-9
    ]
    if not fine:
        return None
    calls, score, name = min(fine)
    return {"line": name, "calls": calls, "score": -score, "difference": lines[name]["difference"]}


def conclusions(models: Mapping[str, Any]) -> dict[str, Any]:
    """Of each model the best line within SLACK of the original's static baseline, and the original's calls over its
    calls.
    """
    least = models[ORIGINAL]["lines"]["static"]["score"]["value"] - SLACK
    found = {name: best(one["lines"], least) for name, one in models.items()}
    free = found[ORIGINAL]
    assert free is not None
    ratios = {
        name: one and {**one, "fewer_calls_than_training_free": free["calls"] / one["calls"]}
        for name, one in found.items()
    }
    return {"least_score": least, "best": ratios}


def run_of(given: argparse.Namespace, count: int, tasks: Sequence[str]) -> dict[str, Any]:
    """What must be equal for models to be compared."""
    return {
        "tasks": list(tasks),
        "count": count,
        "length": given.length,
        "block_length": given.block_length,
        "seed": given.seed,
    }


def known(given: argparse.Namespace, part: str, run: Mapping[str, Any]) -> dict[str, Any]:
    """What is stored under these options."""
    found: dict[str, Any] = kept(RESULT, given.results).get(part, {})
    if found and found["options"] != run:
        sys.exit(
            f"{RESULT}.json was measured with {found['options']}, not {dict(run)}: give the same options, or --fresh"
        )
    return dict(found.get("models", {}))


def baseline_of(given: argparse.Namespace, models: Mapping[str, Any], tasks: Sequence[str], count: int) -> list[Sample]:
    """The original's static baseline: as stored, where it is, or decoded now."""
    line = models.get(ORIGINAL, {"lines": {}})["lines"].get("static")
    if line is None:
        bench = bench_of(BUNDLED / "diffusion", given, tasks, count)
        return decoded(bench, DiffusionLine.of("static", given.block_length), f"{ORIGINAL}, baseline")
    return [sample for task, raw in line["tasks"].items() for sample in restored(task, raw)]


def restored(task: str, raw: Mapping[str, str]) -> list[Sample]:
    """What the record of a task holds of its texts: whether each is right, its calls and tokens; nothing else is
    compared.
    """
    each = zip(raw["right"], raw["calls"].split(), raw["tokens"].split(), strict=True)
    return [
        Sample(task, right == "1", int(tokens), 0, int(calls), 0, 0, 0.0, 0.0, 0.0, ()) for right, calls, tokens in each
    ]


def scores(
    given: argparse.Namespace, part: str, tasks: Sequence[str], count: int, lines: Sequence[DiffusionLine]
) -> None:
    run = run_of(given, count, tasks)
    baseline = baseline_of(given, known(given, part, run), tasks, count)
    for name, folder in given.model:
        found = measured(bench_of(folder, given, tasks, count), lines, name, baseline)
        models = known(given, part, run)  # as they are now: another run may have added some
        stored = models.get(name, {"lines": {}})
        models[name] = {"weights": folder.name, "lines": stored["lines"] | found}
        document: dict[str, Any] = {"options": run, "models": models}
        if ORIGINAL in models:
            document["conclusions"] = conclusions(models)
        made = kept(RESULT, given.results) | {part: document}
        save(RESULT, made, given.results, parts=[f"{part} {name}"])


def shown(lines: Mapping[str, Any], method: str) -> list[tuple[float, float]]:
    """(calls, percent) of the lines of one rule, by calls."""
    rule = [one for one in lines.values() if curve_of(one["config"]) == method]
    return sorted((one["calls"], 100 * one["score"]["value"]) for one in rule)


def curve_of(config: Mapping[str, Any]) -> str:
    """Which curve of the plot a line belongs to."""
    known = {"entropy": "entropy", "dparallel": "entropy", "threshold": "threshold"}
    return known.get(str(config["method"]), "other")


def draw(document: Mapping[str, Any], path: Path, plt: Any) -> None:
    """A panel for thresholds on the probability and all other methods, one for thresholds on the entropy."""
    models, options, least = document["models"], document["options"], 100 * document["conclusions"]["least_score"]
    figure, panels = plt.subplots(1, 2, figsize=(13, 6), sharey=True, layout="constrained")
    for axes, curve, label in zip(panels, ("threshold", "entropy"), ("probability", "entropy"), strict=True):
        _panel(axes, models, curve)
        axes.axhline(least, ls="--", color="#999999", lw=1)
        axes.set(xlabel="model calls per text", title=f"thresholds on the {label}")
        axes.grid(alpha=0.25)
    panels[0].set_title("thresholds on the probability; x: other methods, as far as they fit")
    panels[0].set_ylabel("exact match, %")
    panels[0].legend(title=f"dashed: static baseline of {ORIGINAL} less 1 point", loc="lower right")
    total = options["count"] * len(options["tasks"])
    figure.suptitle(f"{total} held-out prompts of {len(options['tasks'])} tasks, canvases of {options['length']} slots")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _panel(axes: Any, models: Mapping[str, Any], curve: str) -> None:
    """A curve for each model, and crosses for its other methods, but those that need more calls than any threshold."""
    found = {name: shown(one["lines"], curve) for name, one in models.items()}
    most = max((point[0] for points in found.values() for point in points), default=1.0)
    for number, (name, points) in enumerate(found.items()):
        if points:
            axes.plot(*zip(*points, strict=True), "o-", color=f"C{number}", label=name, ms=4, alpha=0.85)
        others = [point for point in shown(models[name]["lines"], "other") if point[0] <= 1.05 * most]
        if curve == "threshold" and others:
            axes.scatter(*zip(*others, strict=True), marker="x", color=f"C{number}", s=30)


def pair(text: str) -> tuple[str, Path]:
    name, _, folder = text.partition("=")
    if not name or not folder:
        raise argparse.ArgumentTypeError(f"must be NAME=FOLDER, got {text!r}")
    return name, Path(folder)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", type=pair, action="append", help="NAME=FOLDER; the bundled one, as original, by default"
    )
    parser.add_argument("--method", action="append", help="a name or a JSON object: these lines only")
    parser.add_argument("--part", choices=["scores", "others", "plot", "all"], default="all")
    parser.add_argument("--count", type=int, default=40, help="prompts of each task (%(default)s)")
    parser.add_argument("--other-count", type=int, default=20, help="prompts of each other task (%(default)s)")
    parser.add_argument("--length", type=int, default=32, help="slots of a text (%(default)s)")
    parser.add_argument("--block-length", type=int, default=32, help="(%(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the prompts (%(default)s)")
    parser.add_argument("--fresh", action="store_true", help="drop what is stored")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the record and the plot")
    given = parser.parse_args()
    given.model = given.model or [(ORIGINAL, BUNDLED / "diffusion")]
    return given


def main() -> None:
    given, plt = arguments(), pyplot()
    torch.set_num_threads(given.threads)
    lines = lines_of(given)
    if given.fresh:
        save(RESULT, {}, given.results)
    if given.part in ("scores", "all"):
        scores(given, "scores", MAIN, given.count, lines)
    if given.part in ("others", "all"):
        few = parse_lines(["threshold", '{"method": "threshold", "confidence_threshold": 0.5}'], given.block_length)
        scores(given, "others", [task for task in TASKS if task not in MAIN], given.other_count, few)
    document = kept(RESULT, given.results).get("scores", {})
    if ORIGINAL in document.get("models", {}):
        draw(document, given.results / f"{RESULT}.png", plt)


if __name__ == "__main__":
    main()
