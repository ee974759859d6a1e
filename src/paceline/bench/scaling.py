"""Laws of scaling, fitted to trainings of a drafter: how many tokens a pass gives by the data and the size that it was
trained with, what the next training will give, and from where on more data is hardly worth it; and how many tokens to
draft as batches grow.

    tokens per pass = a + b log10(tokens of training) + c log10(parameters)

A term whose factor is the same in all trainings is left out. Fitted by least squares; first without the trainings with
the most data, and how far the largest of these is from what the others predict is the law's own error. A
logarithm never ends: each doubling adds as many tokens per pass, to ever more of them, so that it is worth less and
less; where the held-out training stays below the 95 % interval of its prediction, and more data brought less than half
of what it should have, the law has ended earlier.

Sources: Scaling Laws for Speculative Decoding (arXiv:2505.07858); a chain of drafts with equal chances gives (1 -
chance^(n + 1)) / (1 - chance) tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from paceline.bench.drawing import pyplot
from paceline.errors import ConfigError
from paceline.utils import need

Floats = npt.NDArray[np.float64]

LEAST_TRAININGS: Final = 4
"""Three to fit a line and its scatter, and one that is held out."""

DOUBLED: Final = float(np.log10(2))

MOST_DRAFTS: Final = 32

STUDENT: Final = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""97.5 % points of Student's distribution with 1, 2, .. degrees of freedom; more have the last."""


@dataclass(frozen=True, slots=True)
class TrainingPoint:
    """One training.

    Attributes:
        name: of its folder. tokens: it has learned, those of later epochs included, up to the state that was kept.
        parameters: of what was trained. tokens_per_pass: on texts that it has not seen.
        speed: over plain decoding, where it was timed.
    """

    name: str
    tokens: float
    parameters: float
    tokens_per_pass: float
    speed: float | None = None


@dataclass(frozen=True, slots=True)
class ScalingLaw:
    """What was fitted.

    Attributes:
        start, data, size: a, b and c of the law; 0 for a term that is left out.
        r_squared: share of the variance that the law explains. scatter: standard deviation of what it leaves.
    """

    start: float
    data: float
    size: float
    r_squared: float
    scatter: float

    def predict(self, tokens: float, parameters: float) -> float:
        """Tokens per pass."""
        return self.start + self.data * float(np.log10(tokens)) + self.size * float(np.log10(parameters))

    def worth_until(self, parameters: float, least_gain: float) -> float | None:
        """Tokens from which on a doubling of the data gives less than a share of `least_gain` more tokens per pass;
        None where no doubling gives that; at most 1e300.
        """
        gain = self.data * DOUBLED
        if gain <= 0:
            return None
        length = gain / least_gain
        exponent = (length - self.start - self.size * float(np.log10(parameters))) / self.data
        return float(10 ** min(exponent, 300.0))


@dataclass(frozen=True, slots=True)
class ScalingAnalysis:
    """All findings.

    Attributes:
        law: of all trainings. held_out: the largest of those with the most data, `predicted`: what those with less said
            of it.
        ended: it stayed below the 95 % interval of that, and more data brought less than half of what it should have.
        next_tokens, next_length: twice the most data, and what the law says of it; `error`: how far the held-out
            training was from its prediction, or half of the 95 % interval if that is more.
        worth_until: see `ScalingLaw`, for the size of the held-out training, and for `least_gain`.
    """

    points: Sequence[TrainingPoint]
    law: ScalingLaw
    held_out: TrainingPoint
    predicted: float
    ended: bool
    next_tokens: float
    next_length: float
    error: float
    least_gain: float
    worth_until: float | None

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)


def read_training(path: Path) -> TrainingPoint:
    """A training by its `report.json`, or the folder that it lies in.

    Raises:
        ConfigError: no report of a drafter, or nothing beside it whose size could be read.
    """
    file = path / "report.json" if path.is_dir() else path
    hint = "give the folders that `paceline train` has written"
    try:
        report = json.loads(file.read_text(encoding="utf-8"))
        curve = [one for one in report["curve"] if one["step"] == report["steps"]]
        tokens, length = float(curve[-1]["tokens"]), float(report["tokens_per_pass"])
        timed = (report.get("speed") or {}).get("chain", {}).get("over_plain")
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        why = error.strerror if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
        raise ConfigError(f"{str(file)!r} is no report of a drafter's training ({why}); {hint}") from None
    need(tokens > 0, str(file), "be of a training that has learned something", tokens)
    speed = None if timed is None else float(timed["value"])
    return TrainingPoint(file.parent.name, tokens, _parameters(file.parent), length, speed)


def _parameters(folder: Path) -> float:
    """Numbers in the safetensors files of a folder, by their headers."""
    from safetensors import safe_open

    total = 0
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "np") as opened:
            total += sum(int(np.prod(opened.get_slice(key).get_shape())) for key in list(opened.keys()))
    if not total:
        raise ConfigError(f"there are no weights in {str(folder)!r}, whose size is needed; keep them with report.json")
    return float(total)


def fit_law(points: Sequence[TrainingPoint]) -> ScalingLaw:
    """The law of some trainings.

    Raises:
        ConfigError: neither data nor size varies, or there are no more trainings than terms.
    """
    columns, varies = _columns(points)
    need(len(points) > columns.shape[1], "trainings", f"be more than {columns.shape[1]} to fit", len(points))
    lengths = np.array([point.tokens_per_pass for point in points])
    found, _, rank, _ = np.linalg.lstsq(columns, lengths, rcond=None)
    if rank < columns.shape[1]:
        raise ConfigError("data and size grow together in all trainings, so that none can be told from the other")
    left = lengths - columns @ found
    slopes = np.zeros(2)
    slopes[varies] = found[1:]
    data, size = map(float, slopes)
    total, free = float(((lengths - lengths.mean()) ** 2).sum()), len(points) - columns.shape[1]
    explained = 1 - float((left**2).sum()) / total if total > 0 else 1.0
    return ScalingLaw(float(found[0]), data, size, explained, float(np.sqrt((left**2).sum() / free)))


def _columns(points: Sequence[TrainingPoint]) -> tuple[Floats, npt.NDArray[np.bool_]]:
    """(points, terms) factors of the terms, and which of data and size vary.

    Raises:
        ConfigError: neither does.
    """
    factors = np.log10([[point.tokens, point.parameters] for point in points])
    varies = np.ptp(factors, axis=0) > 1e-3
    if not varies.any():
        raise ConfigError("the trainings differ in neither data nor size; give some that do")
    return np.column_stack([np.ones(len(points)), factors[:, varies]]), varies


def half_interval(points: Sequence[TrainingPoint], law: ScalingLaw, tokens: float, parameters: float) -> float:
    """Half of the 95 % interval of a new training by the law of some, which is wider the farther away it is."""
    columns, varies = _columns(points)
    at = np.concatenate([[1.0], np.log10([tokens, parameters])[varies]])
    free = len(points) - columns.shape[1]
    leverage = float(at @ np.linalg.inv(columns.T @ columns) @ at)
    return STUDENT[min(free, len(STUDENT)) - 1] * law.scatter * float(np.sqrt(1 + leverage))


def analyze_scaling(points: Sequence[TrainingPoint], least_gain: float = 0.01) -> ScalingAnalysis:
    """Fit, hold out, predict.

    Args:
        least_gain: share of tokens per pass that a doubling of the data must add to be worth it.
    Raises:
        ConfigError: too few trainings, or ones that nothing can be learned from.
    """
    need(len(points) >= LEAST_TRAININGS, "trainings", f"be {LEAST_TRAININGS} or more", len(points))
    terms = _columns(points)[0].shape[1]
    need(len(points) >= terms + 2, "trainings", f"be {terms + 2} or more, since both data and size vary", len(points))
    rising = sorted(points, key=lambda point: (point.tokens, point.parameters))
    last, others = rising[-1], _before(rising)
    before, law = fit_law(others), fit_law(rising)
    predicted = before.predict(last.tokens, last.parameters)
    return ScalingAnalysis(
        points=rising,
        law=law,
        held_out=last,
        predicted=predicted,
        ended=_ended(others, before, last, predicted),
        next_tokens=2 * last.tokens,
        next_length=law.predict(2 * last.tokens, last.parameters),
        error=max(abs(predicted - last.tokens_per_pass), half_interval(rising, law, 2 * last.tokens, last.parameters)),
        least_gain=least_gain,
        worth_until=law.worth_until(last.parameters, least_gain),
    )


def _before(rising: Sequence[TrainingPoint]) -> list[TrainingPoint]:
    """Those with less data than the last; where that leaves too few, all but the last."""
    less = [point for point in rising if point.tokens < rising[-1].tokens]
    return less if len(less) >= LEAST_TRAININGS else list(rising[:-1])


def _ended(others: Sequence[TrainingPoint], before: ScalingLaw, last: TrainingPoint, predicted: float) -> bool:
    """See `ScalingAnalysis.ended`."""
    promised = predicted - before.predict(max(point.tokens for point in others), last.parameters)
    missing = predicted - last.tokens_per_pass
    return missing > max(half_interval(others, before, last.tokens, last.parameters), promised / 2)


def best_drafts(
    seconds_by_rows: Mapping[int, float], acceptance: float, batches: Sequence[int], draft_seconds: float = 0.0
) -> dict[int, int]:
    """Batch size -> drafted tokens of each sequence that give the most tokens per second.

    Args:
        seconds_by_rows: of a pass of the target by its rows; between and beyond them on straight lines.
        acceptance: chance of a draft that all before it are right. draft_seconds: of one drafted token of a batch.
    """
    rows = np.array(sorted(seconds_by_rows), np.float64)
    seconds = np.array([seconds_by_rows[int(row)] for row in rows])
    lengths = np.arange(MOST_DRAFTS + 1)
    tokens = np.cumsum(acceptance**lengths)
    best = {}
    for batch in batches:
        wanted = batch * (lengths + 1.0)
        taken = np.interp(wanted, rows, seconds)
        beyond = wanted > rows[-1]
        slope = (seconds[-1] - seconds[-2]) / (rows[-1] - rows[-2])
        taken[beyond] = seconds[-1] + slope * (wanted[beyond] - rows[-1])
        best[batch] = int(np.argmax(tokens / (taken + draft_seconds * lengths)))
    return best


def draw_scaling(analysis: ScalingAnalysis, path: Path) -> None:
    """Draw the trainings and the law over the data, a colour for each size, to a PNG, SVG or PDF file.

    Raises:
        ConfigError: what draws is not installed.
    """
    plt = pyplot()
    figure, axis = plt.subplots(figsize=(7, 4), layout="constrained")
    tokens = np.geomspace(min(point.tokens for point in analysis.points), analysis.next_tokens, 50)
    for size in sorted({point.parameters for point in analysis.points}):
        chosen = [point for point in analysis.points if point.parameters == size]
        made = axis.plot(
            [point.tokens for point in chosen], [point.tokens_per_pass for point in chosen], "o",
            label=f"{size / 1e6:.3g}M parameters",
        )  # fmt: skip
        axis.plot(tokens, [analysis.law.predict(one, size) for one in tokens], color=made[0].get_color())
    axis.errorbar(
        [analysis.next_tokens], [analysis.next_length], [analysis.error], fmt="D", color="#777777", label="predicted"
    )
    axis.set(xscale="log", xlabel="tokens of training", ylabel="tokens per pass")
    axis.grid(color="#eeeeee")
    axis.legend(fontsize=8)
    figure.savefig(path, dpi=120)
    plt.close(figure)
