"""k-SEQ, SpecTr's rule: independent drafts of one position, each tried against the same scaled-down target. Exact.

With k draws from q at a position, draw x is accepted with probability min(1, p(x) / (gamma q(x))), whichever it is of
the k; beta is the chance of that. A draw that fails leaves norm(p - min(q, p / gamma)) of the target, and so on; if
none is, the token comes from what is left. Any gamma is exact for which nothing of p is overdrawn; the smallest with 1
- (1 - beta)^k = gamma beta accepts the most, and at least 1 - 1/e of what the best rule accepts. Below an accepted
token go on the chains that drew it, so that k shrinks along the path. One draw has gamma 1: speculative sampling.

gamma follows from the number of draws that was planned (`GroupTrial`), not from what a cut has left of them. Other
drawn trials at a position are tried by recursive rejection; its points are looked up with the token drawn in the end.

Source: SpecTr: fast speculative decoding via optimal transport (arXiv:2310.15141), algorithm 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from paceline.errors import ConfigError
from paceline.tree import GroupTrial, Trial
from paceline.verifiers.recursive_rejection import PlaceByPlace, probabilities_of, proposal, residual

if TYPE_CHECKING:
    from paceline.verifiers.base import Draws

STEPS = 60
"""Halvings when gamma is looked for: to the last bit of float64."""


@dataclass(frozen=True, slots=True)
class KSeqPlan:
    """How k draws from q are tried.

    Attributes:
        gamma: what the target is scaled down by, in 1..k.
        beta: chance that one draw is accepted; accepted: chance that any of the k does.
    """

    gamma: float
    beta: float
    accepted: float


def plan_k_seq(p_v: torch.Tensor, q_v: torch.Tensor, draws: int, gamma: float | None = None) -> KSeqPlan:
    """The best gamma, or a given one, for `draws` draws.

    Args:
        p_v, q_v: (v,) probabilities of one floating dtype, on one device.
    Raises:
        ConfigError: with the given gamma, tokens would come more often than under p.
    """
    if draws == 1 and gamma is None:
        return _planned(1.0, float(torch.minimum(p_v, q_v).sum()), 1)
    if gamma is None:
        return best_plan(p_v, q_v, draws)
    made = _planned(gamma, float(torch.minimum(q_v, p_v / gamma).sum()), draws)
    least = float((p_v - _given(p_v, q_v, made)).min())
    if least < -1e-6:
        raise ConfigError(
            f"gamma must leave nothing of p overdrawn, got {gamma:g}, which overdraws {-least:.3g}; leave it out"
        )
    return made


def best_plan(p_v: torch.Tensor, q_v: torch.Tensor, draws: int) -> KSeqPlan:
    """The smallest gamma with 1 - (1 - beta)^k <= gamma beta, in O(v log v).

    Between two neighbouring ratios p / q, beta is a constant plus another over gamma: the interval is found for all
    tokens at once, gamma within it by halving.
    """
    p_s, q_s = p_v.double(), q_v.double()
    ratio_s, order = torch.where(q_s > 0, p_s / q_s, torch.inf).clamp(1e-30, 2.0 * draws).sort()
    below_s = p_s[order].cumsum(0)  # of tokens up to and with s, whose draws are cut to p / gamma
    above_s = q_s.sum() - q_s[order].cumsum(0)  # of the tokens beyond, all of whose draws are accepted
    excess_s = _excess(ratio_s, above_s + below_s / ratio_s, draws)
    position = int(torch.as_tensor(excess_s > 0).sum())
    at = torch.stack((ratio_s[max(position - 1, 0)], ratio_s[min(position, len(p_s) - 1)]))
    sums = (
        torch.stack((below_s[position - 1], above_s[position - 1]))
        if position
        else torch.stack((below_s[0] * 0.0, q_s.sum()))
    )
    low, high, below, above = torch.cat((at, sums)).tolist()
    low, high = (
        (max(low, 1.0) if position else 1.0),
        (min(max(high, 1.0), draws) if position < len(p_s) else float(draws)),
    )
    for _ in range(STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if _excess(middle, above + below / middle, draws) > 0 else (low, middle)
    return _planned(high, above + below / high, draws)


def _excess(gamma: torch.Tensor | float, beta: torch.Tensor | float, draws: int) -> torch.Tensor | float:
    """How much more is accepted than gamma allows; it falls with gamma."""
    return 1.0 - (1.0 - beta) ** draws - gamma * beta


def _planned(gamma: float, beta: float, draws: int) -> KSeqPlan:
    beta = min(beta, 1.0)
    return KSeqPlan(gamma, beta, 1.0 - (1.0 - beta) ** draws)


def _given(p_v: torch.Tensor, q_v: torch.Tensor, made: KSeqPlan) -> torch.Tensor:
    """(v,) chance of each token to come from an accepted draw."""
    share = made.accepted / made.beta if made.beta > 0.0 else 0.0
    return torch.minimum(q_v, p_v / made.gamma) * share


class _Group:
    """The draws of one group, as they are tried.

    Args:
        r_v: (v,) what is left of the target before the first of them. q_v: (v,) their distribution.
    """

    def __init__(self, trial: GroupTrial, r_v: torch.Tensor, q_v: torch.Tensor) -> None:
        self.trial, self.left = trial, trial.group
        self.gamma = plan_k_seq(r_v, q_v, trial.group).gamma
        self.kept_v = kept(r_v, q_v, self.gamma)

    def holds(self, trial: GroupTrial) -> bool:
        """Whether a trial is one of these."""
        return self.left > 0 and trial.row is self.trial.row and trial.removed == self.trial.removed


def kept(p_v: torch.Tensor, q_v: torch.Tensor, gamma: float) -> torch.Tensor:
    """(v,) chance that one draw is each token and accepted."""
    return torch.minimum(q_v, p_v / gamma)


def decide(
    trials: Sequence[Trial], tokens: Sequence[int], weights_v: torch.Tensor, draws: Draws, depth: int
) -> tuple[int | None, int]:
    """The drawn trials one after the other, then a draw from what is left: (the accepted child or None, the token).

    Draws that their own row calls impossible are passed over.

    Raises:
        NumericsError: the row holds NaN, +infinity or nothing but -inf.
    """
    r_v = probabilities_of(weights_v, depth)
    group: _Group | None = None
    for number, (trial, token) in enumerate(zip(trials, tokens, strict=True)):
        if not trial.drawn:
            continue
        q_v = proposal(trial, token, r_v)
        if not float(q_v[token]) > 0.0:
            continue
        kept_v = torch.minimum(r_v, q_v)
        if isinstance(trial, GroupTrial):
            group = group if group is not None and group.holds(trial) else _Group(trial, r_v, q_v)
            group.left -= 1
            kept_v = group.kept_v
        kept_x, q_x = torch.stack((kept_v[token], q_v[token])).tolist()
        if draws.bernoulli(depth, number, min(1.0, kept_x / q_x)):
            return trial.node, token
        r_v = residual(r_v, kept_v)
    token = draws.categorical(depth, r_v)
    return (trials[tokens.index(token)].node if token in tokens else None), token


class KSeq(PlaceByPlace):
    """Exact verification of independent drafts, by SpecTr's rule."""

    name = "k_seq"
    decide = staticmethod(decide)
