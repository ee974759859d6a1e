"""The most that any exact rule can accept of n drafts of one place: by duality in near-linear time, and by linear
programming.

A rule is a coupling of the drafts' distribution Q with p, and accepts where its token is among the drafts. By duality
the best accepts 1 + min over sets H of tokens of p(H) - Q(all drafts in H). A minimising H is a beginning of the tokens
sorted by q / p, largest first, if drafts are drawn with replacement (Q(H) = q(H)^n) or without; so v sets are looked at
instead of 2^v.

Without replacement draws come in the order in which independent clocks ring, token x at rate q(x). All n lie in H if n
of its tokens ring before the first outside, whose time is exponential with rate 1 - q(H): an integral over that time of
the chance that at least n of H have rung, a recursion over the tokens at every time of a quadrature.

Source: Towards optimal multi-draft speculative decoding (arXiv:2502.18779); the transport plan: SpecTr
(arXiv:2310.15141).
Axes: v = vocabulary, t = times, j = tokens that have rung.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from numba import njit

from paceline.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

Array = npt.NDArray[np.float64]
Tuples = dict[tuple[int, ...], float]

MAX_VARIABLES = 20_000
"""Of the linear programme: tuples of drafts times their tokens."""

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
    found = _rung(q / q.sum(), outside, times, widths, drafts)
    found[-1] = 1.0
    found[: drafts - 1] = 0.0
    return np.asarray(np.clip(found, 0.0, 1.0))


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
    found = np.zeros(len(q))
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
                found[x] += widths[t] * outside[x] * np.exp(-late) * many
    return found


# ------------------------------------------------------------------------------------------------ by linear programming


@dataclass(frozen=True, slots=True)
class TransportPlan:
    """The best rule for given drafts, as a table.

    Attributes:
        tuples: drafts in their order -> their chance.
        tokens: drafts -> (v,) distribution of the token that the rule answers with.
        acceptance: chance that this token is among the drafts.
    """

    tuples: Tuples
    tokens: dict[tuple[int, ...], Array]
    acceptance: float

    def distribution(self) -> Array:
        """(v,) distribution of the token, over all drafts: p."""
        return np.asarray(sum(chance * self.tokens[drafts] for drafts, chance in self.tuples.items()))


def draft_tuples(q: Array, drafts: int, *, replacement: bool) -> Tuples:
    """Every outcome of `drafts` draws from q, in their order, with its chance."""
    found: Tuples = {}
    for drawn in product(np.flatnonzero(q).tolist(), repeat=drafts):
        chance, left = 1.0, q.copy()
        for token in drawn:
            chance *= left[token] / left.sum() if left[token] > 0 else 0.0
            left[token] *= float(replacement)
        if chance > 0.0:
            found[drawn] = float(chance)
    return found


def greedy_tuples(q: Array, drafts: int) -> Tuples:
    """The same where all drafts but one are the likeliest tokens and one is drawn from the others."""
    top = tuple(np.argsort(-q, kind="stable")[: drafts - 1].tolist())
    left = float(q.sum() - q[list(top)].sum())
    return {(*top, int(token)): float(q[token] / left) for token in np.flatnonzero(q) if token not in top}


def transport_plan(p: Array, tuples: Tuples) -> TransportPlan:
    """The optimal transport of the drafts' distribution to p, to the solver's tolerance, for small vocabularies.

    Args:
        p: (v,) probabilities. tuples: as from `draft_tuples`.
    Raises:
        ConfigError: too many variables, or SciPy is not installed.
    """
    keys = list(tuples)
    moves = list(_moves(keys))
    if len(moves) > MAX_VARIABLES:
        raise ConfigError(
            f"a transport plan must have at most {MAX_VARIABLES} variables, got {len(moves)}; use fewer tokens or "
            "drafts"
        )
    matched = _solve(p, [tuples[key] for key in keys], moves)
    tokens = {key: np.zeros(len(p)) for key in keys}
    for (row, token), mass in zip(moves, matched, strict=True):
        tokens[keys[row]][token] += mass
    left = np.maximum(p - sum(tokens.values()), 0.0)
    for key in keys:
        missing = max(tuples[key] - float(tokens[key].sum()), 0.0)
        if left.sum() > 0:
            tokens[key] += missing * left / left.sum()
        tokens[key] /= tokens[key].sum() if tokens[key].any() else 1.0
    return TransportPlan(tuples, tokens, float(matched.sum()))


def _moves(keys: list[tuple[int, ...]]) -> Iterator[tuple[int, int]]:
    """(drafts, token among them): what may be matched; all else costs the same, and needs no variables."""
    for row, key in enumerate(keys):
        for token in dict.fromkeys(key):
            yield row, token


def _solve(p: Array, chances: list[float], moves: list[tuple[int, int]]) -> Array:
    """Masses of the moves that match the most, where none is overdrawn."""
    linprog, csr = _scipy()
    column = np.arange(len(moves))
    rows, tokens = np.array(moves).T
    shape = (len(chances) + len(p), len(moves))
    ones = np.ones(2 * len(moves))
    table = csr((ones, (np.concatenate([rows, len(chances) + tokens]), np.concatenate([column, column]))), shape=shape)
    found = linprog(-np.ones(len(moves)), A_ub=table, b_ub=np.concatenate([chances, p]), method="highs")
    if not found.success:
        raise ConfigError(
            f"p and q must be probabilities, but the transport between them has no solution ({found.message})"
        )
    return np.asarray(found.x)


def _scipy() -> tuple[Callable[..., Any], Callable[..., Any]]:
    try:
        from scipy.optimize import linprog  # type: ignore[import-untyped]
        from scipy.sparse import csr_matrix  # type: ignore[import-untyped]
    except ImportError:
        raise ConfigError("a transport plan needs SciPy, which is not installed; pip install scipy") from None
    return linprog, csr_matrix
