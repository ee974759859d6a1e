"""Cache policies of diffusion decoding against no cache: what they change, what they save.

In: a `Bench`. Out: a JSON-ready record. Not here: how a deviation is measured (`diffusion.cache_deviation`), tables.

A model with full attention is measured under prefix, dual and window caches, which are approximate; a block-causal one
under the block cache, which claims to be exact: in float32 its canvases and its logits must be those of no cache, bit
for bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from paceline.bench.diffusion.harness import DiffusionBench, Progress
from paceline.bench.diffusion.intervals import timed
from paceline.bench.diffusion.lines import DiffusionLine
from paceline.diffusion import Deviation, deviation, options_of, part, pooled

APPROXIMATE: Mapping[str, Mapping[str, Any]] = {
    "prefix": {"cache": "prefix"},
    "dual": {"cache": "dual"},
    "dual, renewed every 4 rounds": {"cache": "dual", "refresh_period": 4},
    "window": {"cache": "window", "schedule": "sliding", "active_slots": 8, "window_slots": 16, "refresh_period": 8},
}
EXACT: Mapping[str, Mapping[str, Any]] = {"block": {"cache": "block"}}
RULES = ("static", "threshold")


def measure_caches(bench: DiffusionBench, progress: Progress) -> dict[str, Any]:
    """Every policy under the static baseline and under the threshold rule.

    Returns:
        By "RULE, POLICY": its deviation from no cache over all prompts, right answers with and without; `exact` says
        whether a policy claims to be exact, `kept` whether it is.
    """
    policies, exact = (EXACT, True) if bench.denoiser.attention == "block" else (APPROXIMATE, False)
    found = {}
    for rule in RULES:
        for name, policy in policies.items():
            line = DiffusionLine.of({"method": rule, **policy}, bench.options.block_length)
            found[f"{rule}, {name}"] = _one(bench, line, exact, progress)
    return found


def _one(bench: DiffusionBench, line: DiffusionLine, exact: bool, progress: Progress) -> dict[str, Any]:
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
    """The record with seconds on the prompts that are timed, without and with each policy in turn; none where a claim
    is broken.
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
    plain = without(line)
    theirs: list[list[float]] = [[] for _ in bench.to_time]
    ours: list[list[float]] = [[] for _ in bench.to_time]
    for recipe in (plain.recipe, line.recipe):
        bench.decode(recipe, bench.to_time[0].prompt)
    for _ in range(bench.options.repeats):
        for number, item in enumerate(bench.to_time):
            theirs[number].append(bench.decode(plain.recipe, item.prompt)[1])
            ours[number].append(bench.decode(line.recipe, item.prompt)[1])
    return timed(theirs, ours)
