"""Every rule's figure is what its verifier accepts by enumeration; none passes the optimum; budgets by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tools.random_drafts import random_distribution
from tools.toy_vector import P, Propose, Q, Weights, acceptance_rate, drawn
from toys import ToyRunner

from paceline.bench.acceptance import RULES, WITH, WITHOUT, analyze_acceptance, rows_of
from paceline.bench.acceptance import rules as acceptance_rules
from paceline.bench.acceptance.rules import BLOCK, block_tokens, tokens_within
from paceline.errors import ConfigError
from paceline.tree import ROOT, TokenTree
from paceline.verifiers import GreedyDraftSampling, KSeq, RecursiveRejection

KNOWN = {
    "rejection_sampler, with replacement": 0.76,
    "rejection_sampler, without replacement": 0.82,
    "k_seq": 0.79136,
    "greedy_draft_sampling": 0.90,
    "likeliest tokens as points": 0.50,
    WITH: 0.86,
    WITHOUT: 0.985714,
}


@pytest.mark.parametrize("name", KNOWN)
def test_the_known_vector_is_reproduced_to_the_digits(name: str) -> None:
    assert RULES[name](P, Q, 2) == pytest.approx(KNOWN[name], abs=5e-6)
    assert RULES[name](P, Q, 1) == pytest.approx(0.2 if "points" in name else 0.70, abs=1e-9)


def points(q: Weights, number: int) -> Propose:
    tokens = np.argsort(-q, kind="stable")[:number].tolist()
    return lambda choices: TokenTree.build(tokens, [ROOT] * len(tokens))


VERIFIED: dict[str, tuple[Any, Callable[[Weights, int], Propose]]] = {
    "rejection_sampler, with replacement": (RecursiveRejection(), lambda q, n: drawn(q, n, replacement=True)),
    "rejection_sampler, without replacement": (RecursiveRejection(), lambda q, n: drawn(q, n, replacement=False)),
    "k_seq": (KSeq(), lambda q, n: drawn(q, n, replacement=True, group=True)),
    "greedy_draft_sampling": (
        GreedyDraftSampling(),
        lambda q, n: drawn(q, 1, replacement=False, points=tuple(np.argsort(-q, kind="stable")[: n - 1].tolist())),
    ),
    "likeliest tokens as points": (RecursiveRejection(), points),
}


def furthest(name: str, rule: Any) -> float:
    """Largest difference between a figure and what the verifier accepts."""
    verifier, propose = VERIFIED[name]
    found = 0.0
    for seed in range(8):
        rng = np.random.default_rng([seed, 8])
        p, q, number = random_distribution(rng, 4), random_distribution(rng, 4, zeros=0.0), int(rng.integers(1, 4))
        found = max(found, abs(rule(p, q, number) - acceptance_rate(verifier, propose(q, number), p)))
    return found


@pytest.mark.parametrize("name", VERIFIED)
def test_a_figure_is_what_the_verifier_accepts(name: str) -> None:
    assert furthest(name, RULES[name]) < 1e-9


@pytest.mark.parametrize("name", list(VERIFIED)[:4])
def test_the_comparison_catches_another_rule(name: str) -> None:
    assert furthest(name, RULES["likeliest tokens as points"]) > 1e-3


def test_sampled_failures_agree_with_enumerated_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(3)
    p, q = random_distribution(rng, 12, zeros=0.0), random_distribution(rng, 12, zeros=0.0)
    exact = acceptance_rules.without_replacement(p, q, 3)
    monkeypatch.setattr(acceptance_rules, "ENUMERATED", 0)
    monkeypatch.setattr(acceptance_rules, "SAMPLES", 1500)
    assert acceptance_rules.without_replacement(p, q, 3) == pytest.approx(exact, abs=0.01)


def test_many_drafts_of_a_large_vocabulary_are_sampled() -> None:
    """Eight of thousands of tokens are more sequences than a fixed-width integer counts."""
    p, q = np.random.default_rng(5).dirichlet(np.ones(6144), 2)
    assert len(acceptance_rules.failures(p, q, 8, np.random.default_rng(0))) == acceptance_rules.SAMPLES


def test_tokens_within_a_budget_by_hand() -> None:
    assert tokens_within({1: 0.5}, 3) == 1 + 0.5 + 0.25 + 0.125
    assert tokens_within({2: 0.8}, 6) == pytest.approx(1 + 0.8 + 0.64)
    assert tokens_within({2: 0.8}, 5) == pytest.approx(1.8)
    assert tokens_within({1: 0.5, 2: 0.8}, 5) == pytest.approx(max(1.96875, 1.8))


def test_block_tokens_are_the_papers() -> None:
    """Target (1/3, 2/3), drafter (2/3, 1/3), two tokens: 11/9 accepted."""
    p, q = np.array([[1, 2]]) / 3, np.array([[2, 1]]) / 3
    one, two = block_tokens(p, q, (1, 2))
    assert (one, two) == (pytest.approx(1 + 2 / 3, abs=0.02), pytest.approx(1 + 11 / 9, abs=0.03))


def test_an_analysis_has_every_rule_and_number() -> None:
    found = analyze_acceptance(np.stack([P, Q]), np.stack([Q, Q]), (1, 2), (2, 4))
    assert found.positions == 2
    assert found.acceptance["k_seq"] == pytest.approx([(0.7 + 1) / 2, (0.79136 + 1) / 2], abs=5e-6)
    assert set(found.acceptance) == set(RULES)
    assert all(len(values) == 2 for values in [*found.acceptance.values(), *found.tokens.values()])
    assert found.tokens[BLOCK][1] > found.tokens["one chain, token by token"][1]


@pytest.mark.parametrize(
    ("p", "q", "text"),
    [
        ([0.5, 0.6], [0.5, 0.5], "p must have rows that sum to 1, got 1.1"),
        ([0.5, 0.5], [-0.5, 1.5], "q must hold probabilities of 0 or more, got -0.5"),
        ([0.5, 0.5], [0.2, 0.3, 0.5], "p and q must have as many rows of as many probabilities, got 1 of 2 and 1 of 3"),
        ([[[1.0]]], [1.0], "p must be one row of probabilities, or a list of rows"),
        ([float("nan"), 1.0], [0.5, 0.5], "p must hold probabilities"),
        ([], [], "p must be one row"),
    ],
)
def test_what_is_no_distribution_is_rejected(p: Any, q: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        analyze_acceptance(p, q, (1,), (1,))


def test_rows_of_a_model_are_those_after_the_last_tokens() -> None:
    runner = ToyRunner(8, order=None, pad=2)
    rows = rows_of(runner, [1, 2, 3, 4], 2, 0.5, 8)
    assert rows.shape == (2, 8)
    expected = (runner.logits([1, 2, 3])[:8].double() / 0.5).softmax(0).numpy()
    assert rows[0] == pytest.approx(expected)
    assert runner.open_caches == 0
