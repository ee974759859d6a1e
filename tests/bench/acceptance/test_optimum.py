"""The bound: by sets in a row equal to all sets, for every way of drawing."""

from __future__ import annotations

from itertools import combinations, product

import numpy as np
import pytest
from tools.random_drafts import random_distribution
from tools.toy_vector import P, Q, Weights

from paceline.bench.acceptance import optimum as module
from paceline.bench.acceptance.optimum import greedy_draft_acceptance, optimal_acceptance, without_replacement

Tuples = dict[tuple[int, ...], float]


def draft_tuples(q: Weights, drafts: int, *, replacement: bool) -> Tuples:
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


def greedy_tuples(q: Weights, drafts: int) -> Tuples:
    """The same where all drafts but one are the likeliest tokens and one is drawn from the others."""
    top = tuple(np.argsort(-q, kind="stable")[: drafts - 1].tolist())
    left = float(q.sum() - q[list(top)].sum())
    return {(*top, int(token)): float(q[token] / left) for token in np.flatnonzero(q) if token not in top}


def test_the_known_vector_is_reproduced_to_the_digits() -> None:
    assert optimal_acceptance(P, Q, 1, replacement=True) == pytest.approx(0.70, abs=1e-12)
    assert optimal_acceptance(P, Q, 2, replacement=True) == pytest.approx(0.86, abs=1e-12)
    assert optimal_acceptance(P, Q, 2, replacement=False) == pytest.approx(0.985714, abs=5e-7)
    assert greedy_draft_acceptance(P, Q, 2) == pytest.approx(0.90, abs=1e-12)


def plans(seed: int) -> tuple[Weights, Weights, int]:
    rng = np.random.default_rng([seed, 4])
    size = int(rng.integers(3, 7))
    return random_distribution(rng, size), random_distribution(rng, size), int(rng.integers(1, 4))


def over_all_sets(p: Weights, tuples: Tuples) -> float:
    best = 0.0
    for size in range(1, len(p) + 1):
        for tokens in combinations(range(len(p)), size):
            inside = sum(chance for drafts, chance in tuples.items() if set(drafts) <= set(tokens))
            best = min(best, float(p[list(tokens)].sum()) - inside)
    return 1.0 + best


@pytest.mark.parametrize("replacement", [True, False])
def test_sets_in_a_row_are_as_good_as_all_sets(replacement: bool) -> None:
    for size, seed in ((8, 0), (9, 1), (7, 2), (10, 3)):
        rng = np.random.default_rng([seed, 5])
        p, q = random_distribution(rng, size), random_distribution(rng, size, zeros=0.0)
        tuples = draft_tuples(q, 3 if size < 9 else 2, replacement=replacement)
        found = optimal_acceptance(p, q, len(next(iter(tuples))), replacement=replacement)
        assert found == pytest.approx(over_all_sets(p, tuples), abs=1e-9)


def test_the_comparison_catches_sets_in_another_order() -> None:
    """Wrong: tokens sorted by q alone."""
    order = np.argsort(-Q, kind="stable")
    p, q = np.array([0.05, 0.35, 0.6]), Q
    inside = np.cumsum(q[order])
    wrong = 1.0 + min(0.0, float((np.cumsum(p[order]) - inside).min()))
    assert abs(wrong - over_all_sets(p, draft_tuples(q, 1, replacement=True))) > 1e-3


def test_greedy_drafts_reach_their_own_bound() -> None:
    for seed in range(30):
        p, q, drafts = plans(seed)
        drafts = min(drafts, int((q > 0).sum()))
        best = over_all_sets(p, greedy_tuples(q, drafts))
        assert greedy_draft_acceptance(p, q, drafts) == pytest.approx(best, abs=1e-9)


@pytest.mark.parametrize("drafts", [2, 3, 4])
def test_draws_without_replacement_stay_inside(drafts: int) -> None:
    """The integral over times against the sum over all draws, with rates down to 1e-15."""
    for seed in range(12):
        q = np.random.default_rng([seed, 6]).dirichlet(np.full(6, [0.05, 0.3, 3.0][seed % 3])) + 1e-18
        q /= q.sum()
        tuples = draft_tuples(q, drafts, replacement=False)
        summed = [sum(chance for drawn, chance in tuples.items() if max(drawn) <= last) for last in range(6)]
        assert without_replacement(q, drafts) == pytest.approx(summed, abs=1e-11)


def test_the_comparison_catches_a_coarse_integral(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STEP", 2.0)
    q = np.array([0.2, 0.3, 0.1, 0.4])
    tuples = draft_tuples(q, 2, replacement=False)
    summed = [sum(chance for drawn, chance in tuples.items() if max(drawn) <= last) for last in range(4)]
    assert np.abs(without_replacement(q, 2) - summed).max() > 1e-4


def test_a_vocabulary_of_thousands() -> None:
    """More drafts help, none is worse without replacement, all lie above what a single draft accepts."""
    rng = np.random.default_rng(7)
    p, q = (rng.dirichlet(np.full(5000, 0.02)) + 1e-12 for _ in range(2))
    p, q = p / p.sum(), q / q.sum()
    before = float(np.minimum(p, q).sum())
    for drafts in (1, 2, 4, 8):
        drawn = optimal_acceptance(p, q, drafts, replacement=True)
        apart = optimal_acceptance(p, q, drafts, replacement=False)
        assert before - 1e-9 <= drawn <= apart + 1e-9 <= 1.0 + 1e-9
        before = drawn
