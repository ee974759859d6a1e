"""Medians with bootstrap intervals, paired by prompt and by repeat.

Axes in this file: p = prompts (or groups of a batch), r = repeats, d = bootstrap draws.

Every figure resamples prompts with replacement and, within each drawn prompt, its repeats: prompts differ from each
other and repeats from noise, and both make a figure uncertain. A ratio is always of two measurements of the same prompt
in the same repeat, which were made next to each other, so that a machine that slows down hits both alike. A failure
delivers no token: its time per token is infinite, its ratio 0; nothing is dropped from a median.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import sqrt
from statistics import NormalDist
from typing import Any

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]

DRAWS = 2000
LEVEL = 0.95
ENOUGH = 6
"""Fewer independent units than this prove no difference: five all lie on one side by chance in 1 of 16 cases."""


def no_interval(units: str = "prompts") -> str:
    """Say why a figure has no interval."""
    return f"{ENOUGH} {units} or more are needed for an interval"


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure with its interval; `n` counts the independent units behind it."""

    value: float
    low: float
    high: float
    n: int
    level: float = LEVEL

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)


def rates_differ(value: float, low: float, high: float, n: int, **_: Any) -> bool:
    """Whether an estimate of a ratio, given by its fields, shows a difference.

    An interval without 1, of enough units.
    """
    return n >= ENOUGH and not low <= 1.0 <= high


def shown_faster(ratio: Mapping[str, Any] | None) -> bool:
    """Whether an estimate of a ratio, as fields, shows more than 1; without measurements nothing is shown."""
    return ratio is not None and ratio["value"] > 1.0 and rates_differ(**ratio)


def resampled(
    columns: Sequence[FloatArray], statistic: Callable[..., FloatArray], *, draws: int = DRAWS, seed: int = 0
) -> FloatArray:
    """(d,) the statistic of resampled measurements: prompts with replacement, then repeats of each drawn prompt.

    Args:
        columns: paired arrays (p, r), resampled alike; rows of fewer repeats end in NaN.
        statistic: of arrays (..., p, r), gives (...).
    """
    p, r = columns[0].shape
    rng = np.random.default_rng(seed)
    sizes = np.isfinite(columns[0]).sum(axis=1) if np.isnan(columns[0]).any() else np.full(p, r)
    picked = rng.integers(0, p, (draws, p, 1))
    repeats = rng.integers(0, np.broadcast_to(sizes[picked], (draws, p, r)))
    drawn = [column[picked, repeats] for column in columns]
    if (sizes < r).any():
        drawn = [np.where(np.arange(r) < sizes[picked], values, np.nan) for values in drawn]
    return np.asarray(statistic(*drawn))


def bootstrap(
    columns: Sequence[FloatArray],
    statistic: Callable[..., FloatArray],
    *,
    level: float = LEVEL,
    draws: int = DRAWS,
    seed: int = 0,
) -> Estimate | None:
    """A statistic of paired measurements (`resampled`) with its percentile interval; None without any measurement."""
    p, r = columns[0].shape
    if p == 0 or r == 0:
        return None
    value = float(statistic(*columns))
    drawn = resampled(columns, statistic, draws=draws, seed=seed)
    low, high = quantiles_of(drawn[np.isfinite(drawn)] if np.isfinite(drawn).any() else np.array([value]), level)
    return Estimate(value, low, high, p if p > 1 else r, level)


def quantiles_of(drawn: FloatArray, level: float = LEVEL) -> tuple[float, float]:
    """Compute the percentile interval of resampled figures."""
    tail = (1 - level) / 2
    low, high = np.quantile(drawn, [tail, 1 - tail])
    return float(low), float(high)


def interval_apart(samples: Sequence[FloatArray], statistic: Callable[..., FloatArray]) -> tuple[float, float]:
    """The interval of a statistic of samples that are not paired: each is resampled by itself.

    Args:
        samples: arrays (n, ...), each with its own n.
        statistic: of arrays (d, n, ...), gives (d,).
    """
    rng = np.random.default_rng(0)
    return quantiles_of(statistic(*(values[rng.integers(0, len(values), (DRAWS, len(values)))] for values in samples)))


def median_rate(tokens_pr: FloatArray, seconds_pr: FloatArray) -> FloatArray:
    """Median over repeats of delivered tokens over all seconds; (..., p, r) -> (...)."""
    return np.asarray(np.median(tokens_pr.sum(-2) / seconds_pr.sum(-2), axis=-1))


def median_ratio(ratios_pr: FloatArray) -> FloatArray:
    """Median over prompts of the median over repeats; (..., p, r) -> (...)."""
    return np.asarray(np.median(np.median(ratios_pr, axis=-1), axis=-1))


def total_ratio(
    base_tokens: FloatArray, base_seconds: FloatArray, tokens: FloatArray, seconds: FloatArray
) -> FloatArray:
    """Median over repeats of the ratio of the totals' rates; (..., p, r) -> (...)."""
    base = base_tokens.sum(-2) / base_seconds.sum(-2)
    return np.asarray(np.median(tokens.sum(-2) / seconds.sum(-2) / base, axis=-1))


def paired_ratios(
    base_tokens: FloatArray, base_seconds: FloatArray, tokens: FloatArray, seconds: FloatArray
) -> FloatArray:
    """(p, r) ratios of tokens per second, setting / baseline; 0 where the setting delivered nothing.

    Prompts that the baseline never decoded have no ratio and are left out; they are counted as failures of the
    baseline.
    """
    kept = (base_tokens > 0).all(axis=1)
    return np.asarray((tokens[kept] / seconds[kept]) / (base_tokens[kept] / base_seconds[kept]))


def tokens_per_second(tokens_pr: FloatArray, seconds_pr: FloatArray, **options: Any) -> Estimate | None:
    """Compute throughput with its interval."""
    return bootstrap([tokens_pr, seconds_pr], median_rate, **options)


def speedup(
    base_tokens: FloatArray, base_seconds: FloatArray, tokens: FloatArray, seconds: FloatArray, **options: Any
) -> Estimate | None:
    """Median paired ratio with its interval: how many times faster than the baseline a prompt is."""
    return bootstrap([paired_ratios(base_tokens, base_seconds, tokens, seconds)], median_ratio, **options)


def speedup_total(
    base_tokens: FloatArray, base_seconds: FloatArray, tokens: FloatArray, seconds: FloatArray, **options: Any
) -> Estimate | None:
    """Ratio of the totals with its interval."""
    if not (base_tokens.sum(axis=0) > 0).all():
        return None
    return bootstrap([base_tokens, base_seconds, tokens, seconds], total_ratio, **options)


def wilson(right: int, n: int) -> dict[str, Any]:
    """A share with its 95 % interval (Wilson's score interval): value, low, high, right, n.

    Raises:
        ZeroDivisionError: nothing was asked.
    """
    share, z = right / n, NormalDist().inv_cdf((1 + LEVEL) / 2)
    middle = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return {"value": share, "low": max(0.0, middle - half), "high": min(1.0, middle + half), "right": right, "n": n}
