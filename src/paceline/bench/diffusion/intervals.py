"""What is made of the record of a diffusion benchmark: shares with intervals, means, paired ratios.

In: samples, seconds. Out: JSON-ready figures with the raw values they rest on. Not here: measuring (`bench.diffusion`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import NormalDist
from typing import Any

import numpy as np

from paceline.bench import stats
from paceline.bench.diffusion.tasks import TASKS

Z = NormalDist().inv_cdf(0.975)


@dataclass(frozen=True, slots=True)
class Sample:
    """One text.

    Attributes:
        task: its name.
        right: whether the answer is right.
        tokens: before the end of the text.
        filled: slots written, those after the end included.
        calls: passes of the model.
        slots: computed in them.
        rounds: that wrote something.
        nats: of the text along its path.
        local, global_: AR-ness of its order, Local@1 and Global@1.
        output: the canvas after the prompt.
    """

    task: str
    right: bool
    tokens: int
    filled: int
    calls: int
    slots: int
    rounds: int
    nats: float
    local: float
    global_: float
    output: tuple[int, ...]


def wilson(right: int, n: int) -> dict[str, Any]:
    """A share with its 95 % interval (Wilson's score interval).

    Raises:
        ZeroDivisionError: nothing was asked.
    """
    share = right / n
    middle = (share + Z * Z / (2 * n)) / (1 + Z * Z / n)
    half = Z / (1 + Z * Z / n) * sqrt(share * (1 - share) / n + Z * Z / (4 * n * n))
    return {"value": share, "low": max(0.0, middle - half), "high": min(1.0, middle + half), "right": right, "n": n}


def summarize_samples(samples: Sequence[Sample], baseline: Sequence[Sample]) -> dict[str, Any]:
    """A line's figures; `baseline` is the static baseline on the same prompts."""
    n, calls, rounds = len(samples), sum(s.calls for s in samples), sum(s.rounds for s in samples)
    tokens = sum(s.tokens for s in samples)
    return {
        "score": _share(samples),
        "determined": _share([s for s in samples if TASKS[s.task].determined]),
        "choice": _share([s for s in samples if not TASKS[s.task].determined]),
        "difference": difference(samples, baseline),
        "calls": calls / n,
        "fewer_calls": sum(s.calls for s in baseline) / calls,
        "slots_computed": sum(s.slots for s in samples) / n,
        "tokens_per_call": tokens / calls,
        "filled_per_call": sum(s.filled for s in samples) / calls,
        "length": tokens / n,
        "nats_per_round": sum(s.nats for s in samples) / max(1, rounds),
        "local_at_1": sum(s.local for s in samples) / n,
        "global_at_1": sum(s.global_ for s in samples) / n,
        "tasks": {
            task: _raw([s for s in samples if s.task == task]) for task in dict.fromkeys(s.task for s in samples)
        },
    }


def _share(samples: Sequence[Sample]) -> dict[str, Any] | None:
    return wilson(sum(s.right for s in samples), len(samples)) if samples else None


def _raw(samples: Sequence[Sample]) -> dict[str, Any]:
    """Of one task: the share of right answers, and prompt by prompt a digit for right, calls, tokens."""
    return {
        "score": sum(s.right for s in samples) / len(samples),
        "right": "".join(str(int(s.right)) for s in samples),
        "calls": " ".join(str(s.calls) for s in samples),
        "tokens": " ".join(str(s.tokens) for s in samples),
    }


def difference(samples: Sequence[Sample], baseline: Sequence[Sample]) -> dict[str, Any] | None:
    """Score less the baseline's, on the same prompts, with its 95 % bootstrap interval."""
    apart = np.array(
        [[float(ours.right) - float(theirs.right)] for ours, theirs in zip(samples, baseline, strict=True)]
    )
    found = stats.bootstrap([apart], lambda values: np.asarray(values.mean((-2, -1))))
    return None if found is None else found.to_dict()


def timed(baseline: list[list[float]], seconds: list[list[float]]) -> dict[str, Any]:
    """Seconds of a text, from those of prompts x repeats.

    Returns:
        The mean over prompts of the median over repeats; the ratio of the totals and the median of the ratios, baseline
        over line, with their intervals; all seconds.
    """
    theirs, ours = np.array(baseline), np.array(seconds)
    total = stats.speedup_total(np.ones_like(theirs), theirs, np.ones_like(ours), ours)
    middle = stats.speedup(np.ones_like(theirs), theirs, np.ones_like(ours), ours)
    return {
        "seconds": float(np.median(ours, axis=1).mean()),
        "over_static": None if total is None else total.to_dict(),
        "median_over_static": None if middle is None else middle.to_dict(),
        "raw": {"static": _rows(theirs), "line": _rows(ours)},
    }


def _rows(values: stats.FloatArray) -> list[str]:
    """A line of seconds for each prompt, one for each repeat."""
    return [" ".join(f"{value:.5f}" for value in row) for row in values]
