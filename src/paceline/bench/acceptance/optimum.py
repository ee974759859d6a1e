"""The most that any exact rule can accept of n drafts of one place: by duality, in near-linear time.

A rule is a coupling of the drafts' distribution Q with p, and accepts where its token is among the drafts. By duality
the best accepts 1 + min over sets H of tokens of p(H) - Q(all drafts in H). A minimising H is a beginning of the tokens
sorted by q / p, largest first, if drafts are drawn with replacement (Q(H) = q(H)^n) or without; so v sets are looked at
instead of 2^v.

Without replacement draws come in the order in which independent clocks ring, token x at rate q(x). All n lie in H if n
of its tokens ring before the first outside, whose time is exponential with rate 1 - q(H): an integral over that time of
the chance that at least n of H have rung, a recursion over the tokens at every time of a quadrature.

Source: Towards optimal multi-draft speculative decoding (arXiv:2502.18779).
Axes: v = vocabulary, t = times, j = tokens that have rung.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import njit

Array = npt.NDArray[np.float64]

STEP = 0.15
"""Of the quadrature, in logarithms of time; smaller ones change results by less than 1e-12."""

SLOWEST = 1e-30
"""Least rate at which the quadrature looks."""

LINEAR, NEVER = 1e-17, 745.0
"""Below the first, 1 - exp(-x) is x to the last bit; beyond the second, exp(-x) is 0."""


def optimal_acceptance(p: Array, q: Array, drafts: int, *, replacement: bool) -> float:
    """The highest acceptance that an exact rule can have.

    Args:
        p, q: (v,) probabilities. drafts: draws from q at one place; without replacement at most the tokens that q can
            give.
    """
    possible = np.flatnonzero(q)
    order = possible[np.argsort(p[possible] / q[possible], kind="stable")]
    p_h, q_h = np.cumsum(p[order]), np.cumsum(q[order])
    inside = q_h**drafts if replacement else without_replacement(q[order], min(drafts, len(order)))
    return float(min(1.0, 1.0 + min(0.0, float((p_h - inside).min()))))


def greedy_draft_acceptance(p: Array, q: Array, drafts: int) -> float:
    """The highest acceptance where all drafts but one are the likeliest tokens of q and one is drawn from the others.

    Ties are broken by the lower token.
    """
    top = np.argsort(-q, kind="stable")[: drafts - 1]
    rest = q.copy()
    rest[top] = 0.0
    mass = float(rest.sum())
    beside = p.copy()
    beside[top] = 0.0
    return float(p[top].sum() + (np.minimum(beside, rest / mass).sum() if mass > 0 else 0.0))


def without_replacement(q: Array, drafts: int) -> Array:
    """(v,) chance that all of `drafts` draws without replacement are among the first 1, 2, ..., v tokens.

    Args:
        q: (v,) positive probabilities, in the order of the sets.
    """
    if drafts == 1:
        return np.asarray(np.cumsum(q) / q.sum())
    outside = np.append(np.cumsum(q[::-1])[::-1][1:], 0.0) / q.sum()  # not 1 - ..., which loses small ones
    times, widths = _times(float(np.min(outside[:-1], initial=1.0)))
    chances = _rung(q / q.sum(), outside, times, widths, drafts)
    chances[-1] = 1.0
    chances[: drafts - 1] = 0.0
    return np.asarray(np.clip(chances, 0.0, 1.0))


def _times(slowest: float) -> tuple[Array, Array]:
    """Times and weights that integrate over 0..infinity whatever decays at a rate in slowest..1: the trapezoidal rule
    after t = exp(x - exp(-x)), wide enough for both ends.
    """
    x = np.arange(-4.0, np.log(45.0 / max(slowest, SLOWEST)), STEP)
    times = np.exp(x - np.exp(-x))
    return times, times * (1.0 + np.exp(-x)) * STEP


@njit(cache=True)
def _rung(q: Array, outside: Array, times: Array, widths: Array, drafts: int) -> Array:  # pragma: no cover - compiled
    """(v,) sum over times of the chance that at least `drafts` of the first tokens have rung, when one outside rings
    first.
    """
    chances = np.zeros(len(q))
    for t in range(len(times)):
        few = np.zeros(drafts)  # chance that exactly j < drafts tokens have rung
        few[0] = 1.0
        many, left = 0.0, 1.0
        for x in range(len(q)):
            if left > 0.0:
                due = q[x] * times[t]
                rung = -np.expm1(-due) if due > LINEAR else due
                many += few[drafts - 1] * rung
                for j in range(drafts - 1, 0, -1):
                    few[j] += rung * (few[j - 1] - few[j])
                few[0] -= rung * few[0]
                left = few.sum()
            late = outside[x] * times[t]
            if late < NEVER:
                chances[x] += widths[t] * outside[x] * np.exp(-late) * many
    return chances
