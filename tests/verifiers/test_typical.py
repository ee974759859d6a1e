"""Typical acceptance: equal to its definition, not exact (and the check sees that), greedy at temperature 0."""

from __future__ import annotations

import math
from collections import defaultdict

import numpy as np
import pytest
import torch
from tools.enumerate_draws import (
    Choices,
    Distribution,
    Tokens,
    distance,
    output_distribution,
    paths_of,
    rows_of,
    target_distribution,
)
from tools.random_drafts import RandomDrafter, random_target

from paceline.errors import NumericsError
from paceline.sampling import KeyedDraws
from paceline.tree import CANDIDATE, EMPTY_TREE, PROBE, ROOT, TokenTree, Verdict
from paceline.verifiers import GreedyVerifier
from paceline.verifiers.typical import TypicalAcceptance

THRESHOLDS = [(0.09, 0.3), (0.3, 0.9), (0.0, 0.3), (1.0, 100.0)]


def defined_path(tree: TokenTree, target, epsilon: float, delta: float) -> Tokens:
    """Medusa's rule read off the paper, over all nodes one by one."""
    best: tuple[int, float, int, Tokens] = (0, 0.0, 0, ())
    for node, tokens in enumerate(paths_of(tree)[1:]):
        if any(tree.kinds[i] != CANDIDATE for i in tree.path(node)):
            continue
        distributions = [target(tokens[:i]) for i in range(len(tokens))]
        chances = [distribution[token] for distribution, token in zip(distributions, tokens, strict=True)]
        entropies = [-sum(p * math.log(p) for p in distribution if p > 0) for distribution in distributions]
        if all(p > min(epsilon, delta * math.exp(-h)) for p, h in zip(chances, entropies, strict=True)):
            best = max(best, (len(tokens), float(np.log(chances).sum()), -node, tokens))
    return best[3]


def defined_distribution(tree: TokenTree, target, length: int, epsilon: float, delta: float) -> Distribution:
    return target_distribution(target, length, defined_path(tree, target, epsilon, delta)[:length])


@pytest.mark.parametrize(("epsilon", "delta"), THRESHOLDS)
def test_its_distribution_is_its_definition(epsilon, delta):
    for seed in range(40):
        target = random_target(seed, 4)
        tree = RandomDrafter(seed, 4, depth=3, draws=0)(Choices([]))
        distribution: defaultdict[Tokens, float] = defaultdict(
            float, output_distribution(TypicalAcceptance(epsilon, delta), lambda _, t=tree: t, target, 4)
        )
        assert distance(distribution, defined_distribution(tree, target, 4, epsilon, delta)) < 1e-9


def test_it_is_not_exact_and_the_check_sees_it():
    target = random_target(0, 4, zeros=0.0)
    tree = TokenTree.build([int(target(()).argmax())], [ROOT])
    distribution = output_distribution(TypicalAcceptance(), lambda _: tree, target, 2)
    assert distance(distribution, target_distribution(target, 2)) > 0.01


def test_without_drafts_the_distribution_is_the_targets():
    target = random_target(1, 4)
    assert (
        distance(
            output_distribution(TypicalAcceptance(), lambda _: EMPTY_TREE, target, 2), target_distribution(target, 2)
        )
        < 1e-12
    )


def test_the_check_catches_the_entropy_of_another_row():
    wrong = 0
    for seed in range(40):
        target = random_target(seed, 4)
        tree = RandomDrafter(seed, 4, depth=3, draws=0)(Choices([]))
        mistaken = rows_of(tree, target).roll(1, 0)
        (verdict,) = TypicalAcceptance().verify([tree], [mistaken.nan_to_num(0.0)], [KeyedDraws(0, 0)])
        assert isinstance(verdict, Verdict)
        wrong += verdict.accepted != defined_path(tree, target, 0.09, 0.3)
    assert wrong > 5


def test_all_weight_on_the_argmax_is_greedy():
    for seed in range(60):
        target = random_target(seed, 4, zeros=0.0)
        tree = RandomDrafter(seed, 4, depth=3, draws=2)(Choices([]))
        logits = rows_of(tree, target).nan_to_num(0.0)
        cold = torch.full_like(logits, -torch.inf).scatter(1, logits.argmax(1, keepdim=True), 0.0)
        assert TypicalAcceptance().verify([tree], [cold], [KeyedDraws(0, seed)]) == GreedyVerifier().verify(
            [tree], [logits]
        )


def test_the_likelier_of_two_paths_of_one_length_is_taken():
    rows = torch.log(torch.tensor([[0.3, 0.5, 0.2]] * 3))
    tree = TokenTree.build([0, 1], [ROOT, ROOT])
    (verdict,) = TypicalAcceptance().verify([tree], [rows], [KeyedDraws(0, 0)])
    assert isinstance(verdict, Verdict)
    assert verdict.accepted == (1,)


def test_a_probe_never_stands():
    tree = TokenTree.build([1, 1], [ROOT, 0], kinds=[PROBE, PROBE])
    (verdict,) = TypicalAcceptance().verify([tree], [torch.zeros(3, 2)], [KeyedDraws(0, 0)])
    assert isinstance(verdict, Verdict)
    assert verdict.path == ()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_bad_row_ends_its_own_sequence_alone(dtype):
    tree, good = TokenTree.build([0], [ROOT]), torch.zeros(2, 2, dtype=dtype)
    bad = good.clone()
    bad[0, 1] = torch.nan
    verdicts = TypicalAcceptance().verify([tree] * 3, [good, bad, good], [KeyedDraws(1, 1)] * 3)
    assert [isinstance(verdict, NumericsError) for verdict in verdicts] == [False, True, False]
