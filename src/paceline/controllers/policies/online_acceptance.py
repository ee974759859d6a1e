"""Draft until a rejection somewhere in the draft is too likely, by a predictor that learns from the verdicts.

With c_i the chance that drafted token i is accepted if those before it are, drafting stops when 1 - c_1 c_2 ... c_i >
`stop_threshold`, within `bound`, as SpecDec++ does (`policies.specdec_pp`), whose head reads the hidden state of a
draft model and is trained beforehand. This one needs no training and serves any drafter: it is a logistic regression on
what every drafter gives (its confidence in the token and in the path, the depth) and on how the sequence has gone
lately, with the drafter's entropy and margin where it passes them. It begins as the drafter's own confidence and takes
Newton steps on the observed verdicts (recursive least squares of the weighted log-likelihood), older ones weighing
less. Rejections weigh `weight` times as much as acceptances, as in SpecDec++. That alone makes a head that foretells
`weight` times the odds of a rejection (`raw`); `chance` takes the factor out again, so that it is a probability: here
`stop_threshold` is compared with the true chance (0.3 stops about where 0.7 does there). The token that crosses it is
the last one.

Source: SpecDec++: Boosting Speculative Decoding via Adaptive Candidate Lengths (arXiv:2405.19715).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from paceline.controllers.explanations import count
from paceline.controllers.policies.base import RejectionController, Token, tokens_of
from paceline.utils import number

if TYPE_CHECKING:
    from paceline.controllers.policies.base import PolicyState
    from paceline.tree import TokenTree, Verdict

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


def features_of(depth: int, confidence: float, reach: float, recent: float, features: object) -> Features:
    """(f,) what the head sees of a token.

    Args:
        depth: from 1 on.
        confidence: the drafter's, of this token; reach: of the path up to it.
        recent: share of this sequence's tokens accepted lately, among those whose fate was seen.
        features: what the drafter passed beside it: a mapping with numbers of `EXTRAS`, or None.
    """
    clipped = min(max(confidence, _EDGE), 1.0 - _EDGE)
    path = math.log(max(reach, _EDGE))
    known = (1.0, *(float(features.get(name, 0.0)) for name in EXTRAS)) if isinstance(features, Mapping) else _NOTHING
    return 1.0, math.log(clipped / (1.0 - clipped)), path, math.log(depth), recent - 0.5, *known


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
        """P(the token is accepted, given that those before it are); never quite 0 or 1."""
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


_RECENT = 0.05


class _Recent:
    """What one sequence remembers: the head that serves it, the share of its tokens accepted lately."""

    __slots__ = ("head", "share")

    def __init__(self, head: AcceptHead) -> None:
        self.head, self.share = head, 0.5


class OnlineAcceptanceController(RejectionController[_Recent]):
    """Stops when the chance of any rejection exceeds a threshold; the token that crosses it is still verified.

    The chance comes from a predictor that learns from the verdicts while decoding, one for temperature 0 and one above
    it.

    Args:
        stop_threshold: 0..1; 0 drafts the least, 1 the most that `bound` allows.
        bound: least and most tokens of a draft, both included.
        weight_mismatch: weight of a rejection in the predictor's loss, that of an acceptance being 1.
        num_speculative_tokens: most nodes of a step's tree, below `bound` too; None sets no further limit.
        disable_by_batch_size: no drafts at or above this number of sequences.
    Raises:
        ConfigError: a value outside its range.
    Source: the rule of SpecDec++ (arXiv:2405.19715).
    """

    name = "online_acceptance"

    def __init__(
        self,
        *,
        stop_threshold: float = 0.3,
        bound: Sequence[int] = (2, 20),
        weight_mismatch: float = 6.0,
        num_speculative_tokens: int | None = None,
        disable_by_batch_size: int | None = None,
    ) -> None:
        number("weight_mismatch", weight_mismatch, 0.0, 1e6, "be above 0", open_low=True)
        super().__init__(stop_threshold, bound, num_speculative_tokens, disable_by_batch_size)
        self.heads = {greedy: AcceptHead(weight_mismatch) for greedy in (True, False)}

    def _remember(self, greedy: bool) -> _Recent:
        return _Recent(self.heads[greedy])

    def _chance(self, memory: _Recent, token: Token) -> float:
        return memory.head.chance(_features(memory, token))

    def _learn(self, state: PolicyState[_Recent], tree: TokenTree, verdict: Verdict) -> None:
        """Nodes below accepted ones are evidence; those below rejected ones say nothing."""
        memory, path, chain = state.memory, set(verdict.path), tree.is_chain
        known: list[tuple[Features, bool]] = []
        rows = zip(tree.parents.tolist(), tree.kinds.tolist(), tokens_of(state, tree), strict=True)
        for node, (parent, kind, token) in enumerate(rows):
            if parent >= 0 and parent not in path:
                if chain:
                    break
            elif not kind:
                known.append((_features(memory, token), node in path))
        for features, accepted in known:
            memory.head.learn(features, accepted)
            memory.share += _RECENT * (accepted - memory.share)

    def _why(self, state: PolicyState[_Recent]) -> str:
        return f"{super()._why(state)[:-1]}; it has learned from {count(state.memory.head.seen, 'token')}."


def _features(memory: _Recent, token: Token) -> Features:
    return features_of(token.depth, token.confidence, token.reach, memory.share, token.features)
