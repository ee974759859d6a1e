"""No exact rule passes the optimum of its drafts; what does is named, as are draws apart that are worse."""

from __future__ import annotations

import numpy as np
import pytest
from tools.random_drafts import random_distribution

from paceline.bench.acceptance import REJECTION_WITH, REJECTION_WITHOUT, RULES, WITH, WITHOUT, failures, violations
from paceline.bench.acceptance.rules import BOUNDS, Array
from paceline.verifiers import RecursiveRejection

TYPICAL = "typical_acceptance_sampler (approximate)"


def measured(drafts: int, places: int = 12, size: int = 30) -> dict[str, Array]:
    rng = np.random.default_rng([drafts, 9])
    pairs = [(random_distribution(rng, size), random_distribution(rng, size)) for _ in range(places)]
    return {name: np.array([rule(p, q, drafts) for p, q in pairs]) for name, rule in RULES.items()}


@pytest.mark.parametrize("drafts", [1, 2, 3])
def test_no_rule_passes_the_optimum_of_its_drafts(drafts: int) -> None:
    assert violations(measured(drafts)) == []


def test_close_pairs_leave_no_rule_above_it() -> None:
    """p and q that nearly agree, where rules come close to the optimum."""
    rng = np.random.default_rng(2)
    pairs = []
    for _ in range(12):
        p = rng.dirichlet(np.full(20, 0.3))
        q = p * np.exp(rng.normal(size=20) * 0.05)
        pairs.append((p, q / q.sum()))
    assert violations({name: np.array([rule(p, q, 2) for p, q in pairs]) for name, rule in RULES.items()}) == []


@pytest.mark.parametrize("rule", [REJECTION_WITH, "k_seq", REJECTION_WITHOUT])
def test_a_rule_that_accepts_more_than_an_exact_one_can_is_named(rule: str) -> None:
    """The relaxed rule under the name of an exact one."""
    found = measured(2)
    assert (found[TYPICAL] > found[BOUNDS[rule]] + 0.01).any()
    assert any(f"{rule} is above {BOUNDS[rule]}" in text for text in violations(found | {rule: found[TYPICAL]}))


def test_one_place_is_enough() -> None:
    found = measured(2)
    found["k_seq"][7] = found[WITH][7] + 1e-4
    assert violations(found) == [f"k_seq is above {WITH} by 0.0001 at place 7"]


def test_draws_with_replacement_that_are_better_are_named() -> None:
    found = measured(3)
    swapped = found | {WITH: found[WITHOUT], WITHOUT: found[WITH]}
    assert any(text.startswith(f"{WITH} is above {WITHOUT}") for text in violations(swapped))
    swapped = found | {REJECTION_WITH: found[REJECTION_WITHOUT], REJECTION_WITHOUT: found[REJECTION_WITH]}
    assert any(text.startswith(f"{REJECTION_WITH} is above {REJECTION_WITHOUT}") for text in violations(swapped))


def test_a_weak_k_seq_is_named() -> None:
    found = measured(2)
    assert any("as a share of the optimum" in text for text in violations(found | {"k_seq": 0.5 * found["k_seq"]}))


def test_what_was_sampled_is_judged_by_its_mean_and_error() -> None:
    found = measured(2)
    noise = np.resize([0.3, -0.3], 12)
    errors = {REJECTION_WITHOUT: np.full(12, 0.3)}
    noisy = found | {REJECTION_WITHOUT: found[WITHOUT] + noise}
    assert violations(noisy), "as if it were exact"
    assert violations(noisy, errors) == []
    assert violations(found | {REJECTION_WITHOUT: found[WITHOUT] + 0.5}, errors) != []


def test_failures_are_exact_or_have_their_mean() -> None:
    rng = np.random.default_rng(4)
    p, q = random_distribution(rng, 8, zeros=0.0), random_distribution(rng, 8, zeros=0.0)
    (exact,) = failures(p, q, 2, rng)
    assert 1.0 - exact == pytest.approx(RULES[REJECTION_WITHOUT](p, q, 2))
    assert RecursiveRejection.name in REJECTION_WITHOUT
