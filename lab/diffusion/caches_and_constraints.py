"""The other parts of the diffusion benchmark: cache policies against no cache, and constrained decoding."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import jsonschema
import numpy as np

from lab.diffusion.cache_deviation import Deviation, deviation, pooled
from lab.diffusion.harness import DiffusionBench, Progress, timing_figures
from lab.diffusion.lines import DiffusionLine
from lab.diffusion.tasks import TASKS, Item, items
from paceline.diffusion import CanvasMethod, FinishedCanvas, options_of, part
from paceline.utils import FloatArray, bootstrap, in_turn, median_ratio, time_in_turn, wilson

APPROXIMATE: Mapping[str, Mapping[str, Any]] = {
    "prefix": {"cache": "prefix"},
    "dual": {"cache": "dual"},
    "dual, renewed every 4 rounds": {"cache": "dual", "refresh_period": 4},
    "window": {"cache": "window", "schedule": "sliding", "active_slots": 8, "window_slots": 16, "refresh_period": 8},
}
EXACT: Mapping[str, Mapping[str, Any]] = {"block": {"cache": "block"}}
RULES = ("static", "threshold")
CACHE_ROWS = {"full": len(RULES) * len(APPROXIMATE), "block": len(RULES) * len(EXACT)}
"""By attention of the model."""


def measure_caches(bench: DiffusionBench, progress: Progress) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every policy under the static baseline and under the threshold rule.

    Yields:
        "RULE, POLICY" with its deviation from no cache over all prompts, right answers with and without; `exact` says
        whether a policy claims to be exact, `kept` whether it is.
    """
    policies, exact = (EXACT, True) if bench.denoiser.attention == "block" else (APPROXIMATE, False)
    pairs = [(rule, name) for rule in RULES for name in policies]
    for number, (rule, name) in enumerate(pairs):
        line = DiffusionLine.of({"method": rule, **policies[name]}, bench.options.block_length)
        yield f"{rule}, {name}", _cache_row(bench, line, exact, _part(progress, number, len(pairs)))


def _part(progress: Progress, number: int, parts: int) -> Progress:
    """Of all parts, where each tells how much of itself is done."""
    return lambda stage, done, total: progress(stage, number * total + done, parts * total)


def _cache_row(bench: DiffusionBench, line: DiffusionLine, exact: bool, progress: Progress) -> dict[str, Any]:
    parts: list[Deviation] = []
    right = [0, 0]
    for number, item in enumerate(bench.asked):
        progress(line.name, number, len(bench.asked))
        parts.append(deviation(bench.denoiser, bench.canvas(item.prompt), line.config, seed=bench.options.seed))
        for which, recipe in enumerate((line.recipe, without(line).recipe)):
            right[which] += bench.sample(recipe, item).right
    total, n = pooled(parts), len(parts)
    kept = total.different == 0 and total.largest == 0.0 if exact else None
    return {
        "config": dict(line.config),
        "exact": exact,
        "kept": kept,
        "prompts": n,
        "right": right[0],
        "right_without": right[1],
        **asdict(total),
        "fraction": total.fraction,
        "times": None,
    }


def with_cache_times(bench: DiffusionBench, found: Mapping[str, Any], progress: Progress) -> dict[str, Any]:
    """The record with seconds on the prompts that are timed, without and with each policy in turn.

    None where a claim is broken.
    """
    made = {}
    for name, one in found.items():
        progress(name, 0, len(bench.to_time))
        timed_too = one["kept"] is not False and bool(bench.to_time)
        made[name] = {**one, "times": _times(bench, DiffusionLine.of(one["config"])) if timed_too else None}
    return made


def without(line: DiffusionLine) -> DiffusionLine:
    """The same rules without a cache."""
    own = (
        options_of(part("cache", line.recipe.names["cache"])).keys()
        - options_of(part("schedule", line.recipe.names["schedule"])).keys()
    )
    return DiffusionLine.of({key: value for key, value in line.config.items() if key not in own} | {"cache": "none"})


def _times(bench: DiffusionBench, line: DiffusionLine) -> dict[str, Any]:
    """Without and with the cache, in turn; `static` in the record is the run without."""
    recipes = {"without": without(line).recipe, "with": line.recipe}
    runs = {name: lambda item, recipe=recipe: bench.decode(recipe, item.prompt) for name, recipe in recipes.items()}
    seconds = time_in_turn(runs, bench.to_time, bench.options.repeats)
    return timing_figures(seconds["without"], seconds["with"])


QUEUE = r" ?[A-Z][a-z]+(, [A-Z][a-z]+)*"
GRID = r" ?[1-4] [1-4] [1-4] [1-4]( / [1-4] [1-4] [1-4] [1-4]){3}"
SENTENCE = r" ?[A-Z][a-z]+ (has|gave [A-Z][a-z]+) a [a-z]+ [a-z]+\."
PERSON = {
    "type": "object",
    "properties": {"name": {"enum": ["Bill", "Mary", "Sam"]}, "age": {"type": "integer", "minimum": 0, "maximum": 120}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
LIST = {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 4}


@dataclass(frozen=True, slots=True)
class Case:
    """A constraint, as an option of a method; the tasks whose prompts it is put to; whether a text keeps it."""

    config: Mapping[str, Any]
    tasks: tuple[str, ...]
    keeps: Callable[[str], bool]


def _json(schema: Mapping[str, Any]) -> Callable[[str], bool]:
    def keeps(text: str) -> bool:
        try:
            jsonschema.validate(json.loads(text), schema)
        except (json.JSONDecodeError, jsonschema.ValidationError):
            return False
        return True

    return keeps


def _regex(pattern: str) -> Callable[[str], bool]:
    return lambda text: re.fullmatch(pattern, text) is not None


QUEUES = ("copy", "reverse", "sort", "insert_index", "remove_index", "shuffle")
CASES: Mapping[str, Case] = {
    "a queue (regex)": Case({"regex": QUEUE}, QUEUES, _regex(QUEUE)),
    "a grid (regex)": Case({"regex": GRID}, ("latin", "sudoku"), _regex(GRID)),
    "a sentence (regex)": Case({"regex": SENTENCE}, ("sentence",), _regex(SENTENCE)),
    "an object (JSON schema)": Case({"json_schema": PERSON}, tuple(TASKS), _json(PERSON)),
    "a list (JSON schema)": Case({"json_schema": LIST}, tuple(TASKS), _json(LIST)),
}


def measure_constrained(
    bench: DiffusionBench, progress: Progress, *, prompts: int
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every case, `prompts` prompts each.

    Yields:
        A case with its figures: shares that parse and that are right, with the constraint and without; milliseconds of
        a round with and without, what the constraint adds (median over prompts with its 95 % interval), tests and
        rejections a round.
    """
    for number, (name, case) in enumerate(CASES.items()):
        each = -(-prompts // len(case.tasks))
        asked = [item for task in case.tasks for item in items(task, split="test", count=each, seed=bench.options.seed)]
        yield name, _one(bench, name, case, asked[:prompts], _part(progress, number, len(CASES)))


def _one(bench: DiffusionBench, name: str, case: Case, asked: list[Item], progress: Progress) -> dict[str, Any]:
    plain = DiffusionLine.of("static", bench.options.block_length)
    line = DiffusionLine.of({**plain.config, **case.config})
    recipes = {"without": plain.recipe, "with": line.recipe}
    calls = {
        key: lambda item, _, recipe=recipe: bench.decode_with_parts(recipe, item.prompt)
        for key, recipe in recipes.items()
    }
    runs: list[tuple[_Run, _Run]] = []
    calls["with"](asked[0], 0)  # makes the tables
    for turn in in_turn(calls, asked, 1):
        free, held = (_judged(bench, case, asked[turn.item], turn.seconds[key], turn.outputs[key]) for key in recipes)
        runs.append((free, held))
        progress(name, len(runs), len(asked))
    n, rounds = len(runs), sum(held.rounds for _, held in runs)
    ms = 1e3 * np.array([[run.seconds / run.rounds for run in pair] for pair in runs])
    return {
        "config": dict(line.config),
        "parses": wilson(sum(held.keeps for _, held in runs), n),
        "parses_without": wilson(sum(free.keeps for free, _ in runs), n),
        "right": wilson(sum(held.right for _, held in runs), n),
        "right_without": wilson(sum(free.right for free, _ in runs), n),
        "ms_per_round": float(np.median(ms[:, 1])),
        "ms_per_round_without": float(np.median(ms[:, 0])),
        "added_ms_per_round": _median(ms[:, 1] - ms[:, 0]),
        "tests_per_round": sum(held.tests for _, held in runs) / rounds,
        "rejections_per_round": sum(held.rejections for _, held in runs) / rounds,
        "completed_tokens": sum(held.completed for _, held in runs) / n,
        "raw": {"ms_per_round": [f"{without:.3f} {with_:.3f}" for without, with_ in ms]},
    }


@dataclass(frozen=True, slots=True)
class _Run:
    keeps: bool
    right: bool
    seconds: float
    rounds: int
    tests: int = 0
    rejections: int = 0
    completed: int = 0


def _judged(
    bench: DiffusionBench, case: Case, item: Item, seconds: float, made: tuple[FinishedCanvas, CanvasMethod]
) -> _Run:
    outcome, parts = made
    text = bench.tokenizer.decode(bench.written(outcome))
    check: Any = parts.transition.check
    counts = (0, 0, 0) if check is None else (check.checks, check.rejections, check.completions)
    return _Run(case.keeps(text), item.right(text), seconds, len(outcome.trajectory.rounds), *counts)


def _median(values: FloatArray) -> dict[str, Any] | None:
    found = bootstrap([values[:, None]], median_ratio)
    return None if found is None else found.to_dict()


def broken_constrained(found: Mapping[str, Any]) -> list[str]:
    """Cases with a text that does not parse."""
    return [name for name, one in found.items() if one["parses"]["right"] < one["parses"]["n"]]
