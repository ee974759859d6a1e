"""Decoding methods of the bundled diffusion models: score against calls and wall time; caches; constraints.

usage: diffusion.py [--part scores|caches|times|constrained|plot|all] [--models diffusion,block_diffusion]
                    [--count 20] [--timed 13] [--only ass,eoser_ass]

scores       exact answers on held-out prompts, model calls, slots, length, information: no clock decides them
caches       prefix, dual and window caches against none: deviation; the exact block cache: none at all
times        seconds of each method in turn with the static baseline, of each cache in turn with none, on some of the
             prompts
constrained  JSON schemas and regular expressions: share of texts that parse, cost of a round
plot         score against calls and against time, from what is stored

All in float32; only times and constrained want a calm machine. Every part is stored by itself in
`results/diffusion.json`, with the command and machine that made it, so that one can be made anew;
`results/diffusion.png` and `results/block_diffusion.png` are the plots. A line that claims to be lossless must write
the canvas of the static baseline on every prompt, a constrained text must parse, and the block cache must be bit-equal:
otherwise nothing is stored.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, kept, save

from lab.diffusion import (
    DiffusionBench,
    DiffusionLine,
    DiffusionOptions,
    broken_constrained,
    broken_methods,
    default_lines,
    draw_methods,
    measure_caches,
    measure_constrained,
    score_methods,
    time_methods,
    with_cache_times,
    with_method_times,
)
from paceline.bench import pyplot
from paceline.checkpoints import Tokenizer
from paceline.diffusion import TokenTexts
from paceline.llm import BUNDLED
from paceline.models import load_denoiser

PARTS = ("scores", "caches", "times", "constrained", "plot")


def progress(stage: str, done: int, total: int) -> None:
    if done == 0:
        print(f"  {stage}: {total}", file=sys.stderr)


def bench_of(folder: Path, given: argparse.Namespace, count: int) -> DiffusionBench:
    denoiser, tokenizer = load_denoiser(folder, dtype="float32", device="cpu"), Tokenizer.load(folder)
    size = given.block_length if denoiser.attention == "full" else None
    sizes = {"count": count, "timed": given.timed, "repeats": given.repeats, "length": given.length}
    options = DiffusionOptions(**sizes, block_length=size)
    return DiffusionBench(denoiser, tokenizer, options, dtype="float32", token_text=TokenTexts(tokenizer))


def lines_of(bench: DiffusionBench) -> tuple[list[DiffusionLine], list[dict[str, str]]]:
    return default_lines(bench.denoiser, bench.canvas(bench.asked[0].prompt), bench.options.block_length)


def refuse(wrong: list[str]) -> None:
    if wrong:
        sys.exit(f"not stored: {', '.join(wrong)} failed or broke a claim")


def scores(folder: Path, given: argparse.Namespace, found: dict[str, Any]) -> dict[str, Any]:
    bench = bench_of(folder, given, given.count)
    lines, skipped = lines_of(bench)
    document = score_methods(bench, asked(lines, given), progress) | {"skipped": skipped}
    refuse(broken_methods(document))
    document["lines"] = {name: brief(line) for name, line in document["lines"].items()}
    return found | {
        "methods": merged(found["methods"], document, [line.name for line in lines]) if given.only else document
    }


def brief(line: dict[str, Any]) -> dict[str, Any]:
    """A line with its score of each task, without what each prompt brought."""
    return line | {"tasks": {task: {"score": one["score"]} for task, one in line["tasks"].items()}}


def asked(lines: list[DiffusionLine], given: argparse.Namespace) -> list[DiffusionLine]:
    """All lines, or the baseline and those of `--only`."""
    return [line for line in lines if not given.only or line is lines[0] or line.name in given.only.split(",")]


def merged(old: dict[str, Any], new: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """The old record with new lines but their baseline, without lines that are not among `names` any more."""
    fresh = {name: line for name, line in new["lines"].items() if name != new["baseline"]}
    stay = {name: line for name, line in old["lines"].items() if name in names}
    return old | {"skipped": new["skipped"], "lines": stay | fresh}


def times(folder: Path, given: argparse.Namespace, found: dict[str, Any]) -> dict[str, Any]:
    if "methods" not in found:
        sys.exit("no scores are stored; run --part scores first")
    bench = bench_of(folder, given, given.count)
    known = found["methods"]["lines"]
    lines = [line for line in asked(lines_of(bench)[0], given) if line.name in known]
    measured, _ = time_methods(bench, lines, progress)
    measured = {
        name: one and {key: value for key, value in one.items() if key != "raw"} for name, one in measured.items()
    }
    if given.only:
        before = {name: line.get("times") for name, line in known.items()}
        measured = before | {name: one for name, one in measured.items() if name != lines[0].name}
    made = {"methods": with_method_times(found["methods"], measured)}
    return (
        found | made
        if given.only
        else found | made | {"caches": with_cache_times(bench, found.get("caches", {}), progress)}
    )


def cached(folder: Path, given: argparse.Namespace, found: dict[str, Any]) -> dict[str, Any]:
    made = dict(measure_caches(bench_of(folder, given, given.cache_count), progress))
    refuse([name for name, one in made.items() if one["kept"] is False])
    return found | {"caches": made}


def constrained(folder: Path, given: argparse.Namespace, found: dict[str, Any]) -> dict[str, Any]:
    made = dict(measure_constrained(bench_of(folder, given, given.count), progress, prompts=given.constrained_count))
    refuse(broken_constrained(made))
    return found | {"constrained": made}


MAKE = {"scores": scores, "times": times, "caches": cached, "constrained": constrained}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=[*PARTS, "all"], default="all")
    parser.add_argument(
        "--models", default="diffusion,block_diffusion", help="bundled, or folders, between commas (%(default)s)"
    )
    parser.add_argument("--count", type=int, default=20, help="prompts of each task (%(default)s)")
    parser.add_argument("--only", default="", help="scores or times of these lines alone, into a record that is there")
    parser.add_argument("--timed", type=int, default=13, help="of all prompts, how many are timed (%(default)s)")
    parser.add_argument("--repeats", type=int, default=1, help="timed runs of each (%(default)s)")
    parser.add_argument("--cache-count", type=int, default=2, help="prompts of each task for caches (%(default)s)")
    parser.add_argument("--constrained-count", type=int, default=12, help="prompts of each constraint (%(default)s)")
    parser.add_argument("--length", type=int, default=32, help="slots of a text (%(default)s)")
    parser.add_argument("--block-length", type=int, default=16, help="of the model with full attention (%(default)s)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the record and plots")
    given = parser.parse_args()
    plt = pyplot()
    torch.set_num_threads(given.threads)
    for name in given.models.split(","):
        folder = BUNDLED / name if "/" not in name else Path(name)
        for part in PARTS[:-1] if given.part == "all" else [given.part]:
            mine = kept("diffusion", given.results).get(folder.name, {})
            if part in MAKE:
                mine = MAKE[part](folder, given, mine)
                known = kept("diffusion", given.results) | {folder.name: mine}
                which = f" of {given.only}" if part in ("scores", "times") and given.only else ""
                save("diffusion", known, given.results, parts=[f"{folder.name}, {part}{which}"])
        if "methods" in mine:
            draw_methods(mine["methods"], given.results / f"{folder.name}.png", folder.name, plt)


if __name__ == "__main__":
    main()
