"""Constrained diffusion decoding on a real model: how many texts parse, what a round costs more.

In: a `Bench` with the text of tokens. Out: a JSON-ready record. Not here: constraints themselves
(`paceline.constraints`), tables.

Each case decodes prompts with the constraint and without, in turn. A text parses if another parser says so (json with
jsonschema, re), the constraint's own machinery having no say.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jsonschema
import numpy as np

from paceline.bench.diffusion.harness import DiffusionBench, Progress
from paceline.bench.diffusion.intervals import wilson
from paceline.bench.diffusion.lines import DiffusionLine
from paceline.bench.diffusion.tasks import TASKS, Item, items
from paceline.diffusion import Recipe

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


def measure_constrained(bench: DiffusionBench, progress: Progress, *, prompts: int) -> dict[str, Any]:
    """Every case, `prompts` prompts each.

    Returns:
        By case: shares that parse and that are right, with the constraint and without; milliseconds of a round with and
        without, what the constraint adds (median over prompts with its 95 % interval), tests and rejections a round.
    """
    found = {}
    for name, case in CASES.items():
        each = -(-prompts // len(case.tasks))
        asked = [item for task in case.tasks for item in items(task, split="test", count=each, seed=bench.options.seed)]
        found[name] = _one(bench, name, case, asked[:prompts], progress)
    return found


def _one(bench: DiffusionBench, name: str, case: Case, asked: list[Item], progress: Progress) -> dict[str, Any]:
    plain = DiffusionLine.of("static", bench.options.block_length)
    line = DiffusionLine.of({**plain.config, **case.config})
    runs: list[tuple[_Run, _Run]] = []
    _run(bench, line.recipe, case, asked[0])  # makes the tables
    for number, item in enumerate(asked):
        progress(name, number, len(asked))
        free = _run(bench, plain.recipe, case, item)
        runs.append((free, _run(bench, line.recipe, case, item)))
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


def _run(bench: DiffusionBench, recipe: Recipe, case: Case, item: Item) -> _Run:
    outcome, seconds, parts = bench.decode_with_parts(recipe, item.prompt)
    text = bench.tokenizer.decode(bench.written(outcome))
    check: Any = parts.transition.check
    counts = (0, 0, 0) if check is None else (check.checks, check.rejections, check.completions)
    return _Run(case.keeps(text), item.right(text), seconds, len(outcome.trajectory.rounds), *counts)


def _median(values: Any, draws: int = 2000) -> dict[str, float]:
    rng = np.random.default_rng(0)
    medians = np.median(rng.choice(values, (draws, len(values))), axis=1)
    low, high = np.quantile(medians, (0.025, 0.975))
    return {"value": float(np.median(values)), "low": float(low), "high": float(high), "n": len(values)}


def broken_constrained(found: Mapping[str, Any]) -> list[str]:
    """Cases with a text that does not parse."""
    return [name for name, one in found.items() if one["parses"]["right"] < one["parses"]["n"]]
