"""SWIFT's search for the sub-layers to leave out: random sets, and every so often one that a Gaussian process expects
most of.

In: scores of sets that were tried. Out: the set to try next, the best one so far, whether to go on. Not here: how a set
is scored (`swift`), what a set means (`skip_sets`).

A search holds for many texts. Each measures the best set anew when it has a context of its own. Where that scores far
less than before, the texts are of another kind, and the search begins again, from the set that it has.

Source: SWIFT: On-the-Fly Self-Speculative Decoding for LLM Inference Acceleration (arXiv:2410.06916): process noise
0.01, upper bounds of 2.5 standard deviations, every 25th step. The kernel is Matern's of 5/2, as in the library that
its code uses.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from paceline.drafters.self.skip_sets import SubLayers, choices, first_set, random_set

Array = npt.NDArray[np.float64]
NOISE = 1e-2
KAPPA = 2.5
LENGTHS = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Length scales that the process chooses from by likelihood; sets that differ by one exchange are sqrt(2) apart."""
KNOWN = 128
"""Latest scores that the process looks at, which bounds its cost."""
POOL = 256
"""Sets that it chooses from, half of them one exchange away from the best."""
TRIES = 16
"""Draws to find a set that was not tried yet."""
SHIFT = 0.2
"""A fall of the best set's score by more than this, on another text, begins the search again."""


@dataclass(frozen=True, slots=True)
class SearchRules:
    """How long a search goes on, and how.

    Attributes:
        stop_score: it ends when the best set scores this. max_steps: sets that it tries at most.
        patience: it ends when so many sets in a row were no better. bayes_every: steps from one set of the process to
        the next.
    """

    stop_score: float = 0.95
    max_steps: int = 1000
    patience: int = 300
    bayes_every: int = 25


class SkipSearch:
    """One search over sets of `count` sub-layers.

    Args:
        seed: of its random sets.

    Attributes:
        best: the best set so far, at first every second layer. score: its score, below 0 before it was measured.
        steps: sets tried since the search began. idle: of these, those in a row that were no better. begun: times it
        began.
    """

    def __init__(self, layers: int, count: int, rules: SearchRules, seed: int = 0) -> None:
        self.layers, self.count, self.rules = layers, count, rules
        self.best, self.score = first_set(layers, count), -1.0
        self.steps, self.idle, self.begun = 0, 0, 1
        self._rng = np.random.default_rng((seed, layers, count))
        self._scores: dict[SubLayers, float] = {}
        self._all = math.comb(len(choices(layers)), count)

    @property
    def done(self) -> bool:
        """Whether to try no more sets on the texts at hand."""
        rules = self.rules
        spent = self.steps >= rules.max_steps or self.idle >= rules.patience or len(self._scores) >= self._all
        return spent or self.score >= rules.stop_score

    def next(self) -> SubLayers:
        """The set to try now, not tried yet if one is found."""
        due = self.steps > 0 and self.steps % self.rules.bayes_every == 0 and len(self._scores) > 1
        return self._promising() if due else self._new()

    def tell(self, skipped: SubLayers, score: float) -> None:
        """What a set that `next` gave scored, 0..1; kept if better."""
        self.steps += 1
        self.idle += 1
        self._note(skipped, score)
        if score > self.score:
            self.best, self.score, self.idle = skipped, score, 0

    def measured(self, score: float) -> None:
        """What the best set scores on another text."""
        if score < self.score - SHIFT:
            self.steps, self.idle, self.begun = 0, 0, self.begun + 1
            self._scores.clear()
        self.score = score
        self._note(self.best, score)

    def _note(self, skipped: SubLayers, score: float) -> None:
        self._scores.pop(skipped, None)
        self._scores[skipped] = score

    def _new(self) -> SubLayers:
        for _ in range(TRIES):
            found = random_set(self.layers, self.count, self._rng)
            if found not in self._scores:
                break
        return found

    def _promising(self) -> SubLayers:
        """The untried set with the highest upper bound."""
        near = [self._exchanged() for _ in range(POOL // 2)]
        far = [random_set(self.layers, self.count, self._rng) for _ in range(POOL // 2)]
        pool = [one for one in dict.fromkeys(near + far) if one not in self._scores]
        if not pool:
            return self._new()
        known = list(self._scores)[-KNOWN:]
        scores = np.array([self._scores[one] for one in known])
        bounds = upper_bounds(self._rows(known), scores, self._rows(pool))
        return pool[int(bounds.argmax())]

    def _exchanged(self) -> SubLayers:
        """The best set with one sub-layer exchanged for another."""
        inside = sorted(self.best)
        outside = sorted(set(choices(self.layers)) - self.best)
        if not outside:
            return self.best
        leaves, comes = inside[int(self._rng.integers(len(inside)))], outside[int(self._rng.integers(len(outside)))]
        return self.best - {leaves} | {comes}

    def _rows(self, sets: list[SubLayers]) -> Array:
        rows = np.zeros((len(sets), 2 * self.layers))
        for row, one in zip(rows, sets, strict=True):
            row[sorted(one)] = 1.0
        return rows


def upper_bounds(known: Array, scores: Array, asked: Array, *, noise: float = NOISE, kappa: float = KAPPA) -> Array:
    """Mean plus `kappa` standard deviations of a Gaussian process given scores.

    Args:
        known: (n, d) places. scores: (n,) there, n of 1 or more. asked: (m, d) places. noise: variance of a score, as a
            share of the scores' variance.
    Returns:
        (m,) bounds, in units of the scores.
    """
    mean, scale = float(scores.mean()), float(scores.std()) or 1.0
    y = (scores - mean) / scale
    between, across = _distances(known, known), _distances(asked, known)
    fits = [_fit(_matern(between / length) + noise * np.eye(len(y)), y) for length in LENGTHS]
    chosen = max(range(len(fits)), key=lambda i: fits[i][0])
    (_, root, half), length = fits[chosen], LENGTHS[chosen]
    weights = np.linalg.solve(root, _matern(across / length).T)
    spread = np.sqrt(np.maximum(1.0 - (weights**2).sum(0), 0.0))
    bounds: Array = mean + scale * (weights.T @ half + kappa * spread)
    return bounds


def _fit(covariance: Array, y: Array) -> tuple[float, Array, Array]:
    """Log likelihood of y up to a constant, the covariance's Cholesky factor, and y in its terms."""
    root = np.asarray(np.linalg.cholesky(covariance), np.float64)
    half = np.asarray(np.linalg.solve(root, y), np.float64)
    return -0.5 * float(half @ half) - float(np.log(np.diag(root)).sum()), root, half


def _distances(a: Array, b: Array) -> Array:
    """(n, m) Euclidean distances of rows of zeros and ones: roots of the numbers of places that differ."""
    differing = a.sum(1)[:, None] + b.sum(1) - 2.0 * a @ b.T
    found: Array = np.sqrt(np.maximum(differing, 0.0))
    return found


def _matern(distance: Array) -> Array:
    """Matern's kernel of 5/2 at distances in units of its length."""
    x = math.sqrt(5.0) * distance
    found: Array = (1.0 + x + x * x / 3.0) * np.exp(-x)
    return found
