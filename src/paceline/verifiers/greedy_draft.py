"""The rule of greedy draft sampling: all drafts of a position but one are its likeliest tokens, and one test decides.
Exact.

With T the points and q' the distribution of the draw y, which q' keeps out of T: y is accepted with probability min(1,
p(y) / q'(y)). If it does not, the token is drawn from what that leaves of p, and where it is one of T the path goes on
there. That accepts p(T) plus the mass of min(p, q') outside T, which is the most that any rule can make of these
drafts.

At a position with several draws these are tried in their order by recursive rejection, and all points are looked up
with the token drawn in the end. Nothing else may differ by how many draws there are: a cut lets that depend on the
tokens that came up.

Source: Towards optimal multi-draft speculative decoding (arXiv:2502.18779), section 5.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from paceline.tree import Trial
from paceline.verifiers.recursive_rejection import PlaceByPlace, acceptance, probabilities_of, proposal, residual

if TYPE_CHECKING:
    from paceline.verifiers.base import Draws


def decide(
    trials: Sequence[Trial], tokens: Sequence[int], weights_v: torch.Tensor, draws: Draws, depth: int
) -> tuple[int | None, int]:
    """The test of each draw, then a draw from what is left: (the accepted child or None, the token).

    Draws that their own row calls impossible are passed over.

    Raises:
        NumericsError: the row holds NaN, +infinity or nothing but -inf.
    """
    r_v = probabilities_of(weights_v, depth)
    for number, (trial, token) in enumerate(zip(trials, tokens, strict=True)):
        if not trial.drawn:
            continue
        q_v = proposal(trial, token, r_v)
        r_x, q_x = torch.stack((r_v[token], q_v[token])).tolist()
        if not q_x > 0.0:
            continue
        if draws.bernoulli(depth, number, acceptance(r_x, q_x)):
            return trial.node, token
        r_v = residual(r_v, q_v)
    token = draws.categorical(depth, r_v)
    return (trials[tokens.index(token)].node if token in tokens else None), token


class GreedyDraftSampling(PlaceByPlace):
    """Exact verification of the likeliest tokens and one draw beside them."""

    name = "greedy_draft_sampling"
    decide = staticmethod(decide)
