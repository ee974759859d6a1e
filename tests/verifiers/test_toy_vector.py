"""The known vector, p = (.5, .3, .2) and q = (.2, .3, .5): every rule on every way to draft, to the digits, and p as
its distribution.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tools.toy_vector import P, Propose, Q, acceptance_rate, drawn, flat_error

from paceline import registry
from paceline.bench.acceptance.optimum import greedy_draft_acceptance, optimal_acceptance
from paceline.errors import CapabilityError
from paceline.tree import ROOT, TokenTree
from paceline.verifiers import recursive_rejection

ONE, WITH, GROUP, WITHOUT, GREEDY, TOP = "one", "two with", "two with, as a group", "two without", "greedy", "top two"
DRAFTS: dict[str, Propose] = {
    ONE: drawn(Q, 1, replacement=True),
    WITH: drawn(Q, 2, replacement=True),
    GROUP: drawn(Q, 2, replacement=True, group=True),
    WITHOUT: drawn(Q, 2, replacement=False),
    GREEDY: drawn(Q, 1, replacement=False, points=(2,)),
    TOP: lambda choices: TokenTree.build([2, 1], [ROOT, ROOT]),
}
RATES: dict[str, dict[str, float]] = {
    "rejection_sampler": {ONE: 0.70, WITH: 0.76, GROUP: 0.76, WITHOUT: 0.82, GREEDY: 0.82, TOP: 0.50},
    "block_verification": {ONE: 0.70, TOP: 0.50},
    "k_seq": {ONE: 0.70, WITH: 0.76, GROUP: 0.79136, WITHOUT: 0.82, GREEDY: 0.90, TOP: 0.50},
    "greedy_draft_sampling": {ONE: 0.70, WITH: 0.76, GROUP: 0.76, WITHOUT: 0.82, GREEDY: 0.90, TOP: 0.50},
}
"""Verifier -> drafts -> chance that one of them stands; drafts that are not there are refused."""
RATES["relaxed_thinking"] = RATES["rejection_sampler"]  # it relaxes at temperature 0 alone

BOUND = {ONE: 0.70, WITH: 0.86, GROUP: 0.86, WITHOUT: 0.985714, GREEDY: 0.90, TOP: 0.50}
PAIRS = [(name, drafts) for name in RATES for drafts in DRAFTS]


def verifier(name: str) -> Any:
    return registry.load("verifiers", name)()


@pytest.mark.parametrize(("name", "drafts"), PAIRS)
def test_every_rule_to_the_digits(name: str, drafts: str) -> None:
    if drafts not in RATES[name]:
        with pytest.raises(CapabilityError, match="chains of drawn drafts"):
            acceptance_rate(verifier(name), DRAFTS[drafts])
        return
    assert acceptance_rate(verifier(name), DRAFTS[drafts]) == pytest.approx(RATES[name][drafts], abs=5e-6)
    assert flat_error(verifier(name), DRAFTS[drafts]) < 1e-9


def test_the_table_has_every_exact_rule() -> None:
    exact = {name for name, entry in registry.VERIFIERS.items() if entry.exactness[1] != "approximate"}
    assert set(RATES) == exact - {"greedy"}, "greedy is for temperature 0"


def test_no_rule_passes_the_bound_of_its_drafts() -> None:
    for name, rates in RATES.items():
        for drafts, rate in rates.items():
            assert rate <= BOUND[drafts] + 1e-6, (name, drafts)


def test_the_relaxed_rule_passes_it_and_is_not_exact() -> None:
    """What the two checks above would catch: all three tokens are typical of p, so every draft stands."""
    relaxed = verifier("typical_acceptance_sampler")
    assert acceptance_rate(relaxed, DRAFTS[WITH]) > BOUND[WITH] + 0.1
    assert flat_error(relaxed, DRAFTS[WITH]) > 1e-2


@pytest.mark.parametrize("name", ["rejection_sampler", "k_seq", "greedy_draft_sampling"])
def test_the_table_catches_a_rule_without_residual(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    module = __import__(registry.VERIFIERS[name].target.split(":")[0], fromlist=["residual"])
    for one in (module, recursive_rejection):
        monkeypatch.setattr(one, "residual", lambda r_v, kept_v: torch.as_tensor(r_v))
    assert abs(acceptance_rate(verifier(name), DRAFTS[WITHOUT]) - RATES[name][WITHOUT]) > 1e-3
    assert flat_error(verifier(name), DRAFTS[WITHOUT]) > 1e-2


@pytest.mark.parametrize(
    ("drafts", "best"),
    [
        (ONE, lambda p: optimal_acceptance(p, Q, 1, replacement=True)),
        (WITH, lambda p: optimal_acceptance(p, Q, 2, replacement=True)),
        (WITHOUT, lambda p: optimal_acceptance(p, Q, 2, replacement=False)),
        (GREEDY, lambda p: greedy_draft_acceptance(p, Q, 2)),
    ],
)
def test_the_best_acceptance_to_the_digits(drafts: str, best: Callable[[Any], float]) -> None:
    assert best(P) == pytest.approx(BOUND[drafts], abs=5e-7)
    assert best(P[::-1].copy()) != pytest.approx(BOUND[drafts], abs=1e-3)
