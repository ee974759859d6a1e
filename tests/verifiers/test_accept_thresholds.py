"""Thresholds on the target's probability: exact at 1, the stated chances below, departures where the coin was bent."""

from __future__ import annotations

import math
from itertools import accumulate, pairwise

import pytest
import torch
from tools.enumerate_draws import Choices, distance, output_distribution, rows_of, target_distribution
from tools.gtest import ERROR, g_test
from tools.random_drafts import RandomDrafter, random_target

from paceline.errors import NumericsError
from paceline.sampling import KeyedDraws
from paceline.tree import PROBE, ROOT, TokenTree, Verdict
from paceline.verifiers.accept_thresholds import AcceptThresholds

P = [0.1, 0.25, 0.05, 0.3, 0.2, 0.1]
TREE = TokenTree.build([1, 4, 0], [ROOT, ROOT, ROOT])
ROWS = torch.tensor([P] * 4).log()


def judged(rule: AcceptThresholds, seed: int, tree: TokenTree = TREE, rows: torch.Tensor = ROWS) -> Verdict:
    (verdict,) = rule.verify([tree], [rows], [KeyedDraws(seed, 0)])
    assert isinstance(verdict, Verdict)
    return verdict


@pytest.mark.parametrize("draws", [0, 2])
def test_at_thresholds_of_1_the_distribution_is_the_targets(draws: int) -> None:
    for seed in range(12):
        target, drafter = random_target(seed, 4), RandomDrafter(seed, 4, depth=2, draws=draws)
        assert (
            distance(output_distribution(AcceptThresholds(), drafter, target, 2), target_distribution(target, 2)) < 1e-6
        )


def first_tokens(draws: type[KeyedDraws], count: int = 4000) -> float:
    """p-value of the first token."""
    found = [0] * len(P)
    for seed in range(count):
        (verdict,) = AcceptThresholds().verify([TREE], [ROWS], [draws(seed, 0)])
        assert isinstance(verdict, Verdict)
        assert not verdict.departures
        found[verdict.tokens[0]] += 1
    return g_test(found, P)


class CoinForTheRest(KeyedDraws):
    """Draws the rest by the coin that has failed, which is large."""

    def categorical(self, depth: int, probabilities_v: torch.Tensor) -> int:
        sums = list(accumulate(probabilities_v.tolist()))
        return next((i for i, total in enumerate(sums) if self.bernoulli(depth, 0, min(total, 1.0))), len(sums) - 1)


def test_the_first_token_follows_the_target_and_the_test_catches_a_coin_that_is_used_twice() -> None:
    assert first_tokens(KeyedDraws) > ERROR
    assert first_tokens(CoinForTheRest) < ERROR


def test_each_child_has_the_stated_chance() -> None:
    for acc in (0.3, 0.5, 0.9):
        rule, sums = AcceptThresholds(1.0, acc), [0.0, 0.25, 0.45, 0.55]
        chances = [min(1.0, after / acc) - min(1.0, before / acc) for before, after in pairwise(sums)]
        found = output_distribution(rule, lambda _: TREE, lambda _: torch.tensor(P).double().numpy(), 1)
        left = 1.0 - sum(chances)
        rest = 1.0 - sums[-1]
        wanted = [chances[[1, 4, 0].index(x)] if x in (1, 4, 0) else left * p / rest for x, p in enumerate(P)]
        assert [found.get((x,), 0.0) for x in range(len(P))] == pytest.approx(wanted, abs=1e-6)


def test_a_threshold_near_0_takes_the_first_child() -> None:
    assert {judged(AcceptThresholds(1.0, 0.0), seed).path for seed in range(50)} == {(0,)}
    assert {judged(AcceptThresholds(1.0, 1.0), seed).path for seed in range(50)} == {(), (0,), (1,), (2,)}


def test_a_likely_child_is_taken_wherever_the_coin_fell() -> None:
    assert {judged(AcceptThresholds(0.2, 1.0), seed).path for seed in range(50)} == {(0,)}
    swapped = TokenTree.build([2, 4], [ROOT, ROOT])
    found = {judged(AcceptThresholds(0.15, 1.0), seed, swapped, ROWS[:3]).path for seed in range(200)}
    assert found == {(0,), (1,)}


def test_departures_are_where_the_coin_alone_would_not_have_gone() -> None:
    departed = 0
    for seed in range(300):
        target = random_target(seed, 4)
        tree = RandomDrafter(seed, 4, depth=3, draws=0)(Choices([]))
        rows = rows_of(tree, target).nan_to_num(0.0)
        relaxed, lenient = (judged(AcceptThresholds(0.9, acc), seed, tree, rows) for acc in (0.6, 1.0))
        strict = judged(AcceptThresholds(), seed, tree, rows)
        assert not strict.departures
        for verdict in (relaxed, lenient):
            agreed = next(
                (i for i, (a, b) in enumerate(zip(verdict.path, strict.path, strict=False)) if a != b),
                min(len(verdict.path), len(strict.path)),
            )
            assert verdict.departures[:1] == ((agreed,) if agreed < len(verdict.path) else ())
        departed += bool(relaxed.departures)
    assert departed > 20


def test_what_is_forbidden_or_a_probe_is_not_accepted_and_bad_rows_end_paths() -> None:
    rows = ROWS.clone()
    rows[0, 1] = -math.inf
    assert {judged(AcceptThresholds(0.0, 0.0), seed, TREE, rows).path for seed in range(20)} == {(1,)}
    probe = TokenTree.build([1], [ROOT], kinds=[PROBE])
    assert judged(AcceptThresholds(0.0, 0.0), 1, probe, ROWS[:2]).path == ()
    bad, late = ROWS[:3].clone(), ROWS[:3].clone()
    bad[0, 1] = late[2, 1] = torch.nan
    chain = TokenTree.chain([1, 1])
    failed, ended = AcceptThresholds(0.2).verify([chain] * 2, [bad, late], [KeyedDraws(0, 0)] * 2)
    assert isinstance(failed, NumericsError)
    assert isinstance(ended, Verdict)
    assert (ended.path, ended.tokens) == ((0,), (1, 1))
