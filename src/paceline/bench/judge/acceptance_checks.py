"""What theory says of any analysis of acceptance: no exact rule passes the optimum of its drafts, and draws apart are
never worse.

In: acceptance by rule and place, standard errors of what was sampled. Out: sentences about what theory forbids; none
where all is
well. Not here: the figures themselves (`bench.acceptance_rules`, `bench.optimal_acceptance`).

Sources: arXiv:2502.18779 (the optimum), 2310.15141 (k-SEQ is within 1 - 1/e of it). Axes: t = places.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

import numpy as np

from paceline.bench.judge.acceptance_rules import WITH, WITHOUT, Array

REJECTION_WITH: Final = "rejection_sampler, with replacement"
REJECTION_WITHOUT: Final = "rejection_sampler, without replacement"
BOUNDS: Final[Mapping[str, str]] = {REJECTION_WITH: WITH, "k_seq": WITH, REJECTION_WITHOUT: WITHOUT, WITH: WITHOUT}
"""Rule -> what it cannot pass. Greedy drafts and points are not drawn in these ways; the relaxed rule has no bound."""

ROUNDING: Final = 1e-7
SIGMAS: Final = 4.0
"""Standard errors by which a sampled mean may be beyond its bound."""


def violations(acceptance: Mapping[str, Array], errors: Mapping[str, Array] | None = None) -> list[str]:
    """What cannot be, if these are the acceptance rates of one number of drafts.

    Args:
        acceptance: rule -> (t,) chance that a draft stands.
        errors: rule -> (t,) standard errors, of those that were sampled; these are judged by their mean, others at
        every place.
    """
    errors = errors or {}
    found = [_beyond(rule, bound, acceptance, errors) for rule, bound in BOUNDS.items() if rule in acceptance]
    weaker = {"k_seq, as a share of the optimum": (1.0 - 1.0 / math.e) * acceptance[WITH], "k_seq": acceptance["k_seq"]}
    found.append(_beyond("k_seq, as a share of the optimum", "k_seq", weaker, {}))
    means = {REJECTION_WITH: acceptance[REJECTION_WITH].mean(keepdims=True)}
    means[REJECTION_WITHOUT] = acceptance[REJECTION_WITHOUT].mean(keepdims=True) + SIGMAS * _error(
        errors.get(REJECTION_WITHOUT)
    )
    found.append(_beyond(REJECTION_WITH, REJECTION_WITHOUT, means, {}))
    return [text for text in found if text]


def _error(of_t: Array | None) -> float:
    """Standard error of the mean over places."""
    return 0.0 if of_t is None else float(np.sqrt(np.square(of_t).sum()) / len(of_t))


def _beyond(rule: str, bound: str, acceptance: Mapping[str, Array], errors: Mapping[str, Array]) -> str:
    """A sentence where a rule is beyond its bound, else nothing."""
    excess_t = acceptance[rule] - acceptance[bound]
    margin = ROUNDING
    if rule in errors and errors[rule].any():
        excess_t, margin = excess_t.mean(keepdims=True), ROUNDING + SIGMAS * _error(errors[rule])
    worst = int(excess_t.argmax())
    if not excess_t[worst] > margin:
        return ""
    where = f"at place {worst}" if len(excess_t) > 1 else "in the mean"
    return f"{rule} is above {bound} by {excess_t[worst]:.3g} {where}"
