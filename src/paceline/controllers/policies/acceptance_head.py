"""SpecDec++'s acceptance head, learned on the fly: the chance that the target accepts a drafted token.

In: what is known of a drafted token, and, later, whether it stood. Out: probabilities. Not here: when to stop
(`specdec_pp`).

The published head is a small network on the drafter's hidden state, trained beforehand. This one is a logistic
regression on what every drafter gives (its confidence in the token and in the path, the depth) and on how the sequence
has gone lately, with the drafter's entropy and margin where it passes them. It begins as the drafter's own confidence
and takes Newton steps on the observed verdicts (recursive least squares of the weighted log-likelihood), older ones
weighing less.

Rejections weigh `weight` times as much as acceptances, as published. That alone makes a head that foretells `weight`
times the odds of a rejection (`raw`); `chance` takes the factor out again, so that it is a probability.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
Features = tuple[float, ...]

EXTRAS: Final = ("entropy", "margin")
"""Numbers that a drafter may pass beside its confidence: entropy of its distribution in nats, the lead of its best
token.
"""

SIZE: Final = 6 + len(EXTRAS)
_NOTHING: Final = (0.0,) * (1 + len(EXTRAS))
DECAY: Final = 0.9995
EVERY: Final = 16
_PRIOR: Final = 4.0
_EDGE: Final = 1e-4
_CERTAIN: Final = 1e-6
_FARTHEST: Final = 30.0


def features_of(depth: int, confidence: float, reach: float, recent: float, given: object) -> Features:
    """(f,) what the head sees of a token.

    Args:
        depth: from 1 on.
        confidence: the drafter's, of this token; reach: of the path up to it.
        recent: share of this sequence's tokens accepted lately, among those whose fate was seen.
        given: what the drafter passed beside it: a mapping with numbers of `EXTRAS`, or None.
    """
    own = min(max(confidence, _EDGE), 1.0 - _EDGE)
    path = math.log(max(reach, _EDGE))
    known = (1.0, *(float(given.get(name, 0.0)) for name in EXTRAS)) if isinstance(given, Mapping) else _NOTHING
    return 1.0, math.log(own / (1.0 - own)), path, math.log(depth), recent - 0.5, *known


class AcceptHead:
    """A logistic regression that learns while it is used.

    Args:
        weight: of a rejection, as many times that of an acceptance.
    Attributes:
        seen: outcomes so far.
    """

    def __init__(self, weight: float = 6.0) -> None:
        self.weight, self.seen = weight, 0
        self._shift = math.log(weight)
        self._weights = [0.0, 1.0] + [0.0] * (SIZE - 2)
        self._curvature = np.eye(SIZE) * _PRIOR
        self._waiting: list[tuple[Features, bool]] = []

    def chance(self, features: Features) -> float:
        """P(the token stands, given that those before it do); never quite 0 or 1."""
        return _sigmoid(self._score(features))

    def raw(self, features: Features) -> float:
        """The prediction that the weighted loss asks for: `weight` times the odds of a rejection."""
        return _sigmoid(self._score(features) - self._shift)

    def learn(self, features: Features, accepted: bool) -> None:
        """One more outcome; every `EVERY` of them the weights move."""
        self._waiting.append((features, accepted))
        if len(self._waiting) >= EVERY:
            self._step()

    def _score(self, features: Features) -> float:
        return sum(map(float.__mul__, self._weights, features))

    def _step(self) -> None:
        """One Newton step on what has come in (n outcomes, f features)."""
        x_nf = np.array([features for features, _ in self._waiting])
        accepted_n = np.array([accepted for _, accepted in self._waiting], np.float64)
        self._waiting.clear()
        self.seen += len(x_nf)
        weight_n = np.where(accepted_n > 0.0, 1.0, self.weight)
        foreseen_n = 1.0 / (1.0 + np.exp(np.clip(self._shift - x_nf @ np.array(self._weights), -_FARTHEST, _FARTHEST)))
        slope_f = x_nf.T @ (weight_n * (accepted_n - foreseen_n))
        prior_ff = np.eye(SIZE) * _PRIOR
        self._curvature = prior_ff + DECAY ** len(x_nf) * (self._curvature - prior_ff)
        self._curvature += (x_nf.T * (weight_n * foreseen_n * (1.0 - foreseen_n))) @ x_nf
        self._weights = (np.array(self._weights) + np.linalg.solve(self._curvature, slope_f)).tolist()


def _sigmoid(score: float) -> float:
    value = 1.0 / (1.0 + math.exp(-min(max(score, -_FARTHEST), _FARTHEST)))
    return min(max(value, _CERTAIN), 1.0 - _CERTAIN)
