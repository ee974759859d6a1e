"""Greedy draft sampling: its optimum by one test, the target's distribution, other trials as by recursive rejection."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tools.enumerate_draws import Choices, distance, output_distribution, target_distribution
from tools.random_drafts import RandomDrafter, random_distribution, random_target
from tools.toy_vector import P, Q, acceptance_rate, drawn, flat_error

from paceline.bench.acceptance.optimum import greedy_draft_acceptance
from paceline.errors import NumericsError
from paceline.sampling import KeyedDraws
from paceline.tree import ROOT, TokenTree, Trial
from paceline.verifiers import GreedyDraftSampling, RecursiveRejection, greedy_draft, proposal

TOLERANCE, WRONG = 1e-9, 1e-3


def top(q: Any, number: int) -> tuple[int, ...]:
    return tuple(np.argsort(-q, kind="stable")[:number].tolist())


def test_the_known_vector_is_reproduced_to_the_digits() -> None:
    two = drawn(Q, 1, replacement=False, points=top(Q, 1))
    assert acceptance_rate(GreedyDraftSampling(), two) == pytest.approx(0.90, abs=1e-12)
    assert flat_error(GreedyDraftSampling(), two) < TOLERANCE
    assert acceptance_rate(RecursiveRejection(), two) < 0.89


def test_it_reaches_its_optimum_with_the_targets_distribution() -> None:
    rng = np.random.default_rng(1)
    for _ in range(40):
        size, drafts = int(rng.integers(3, 8)), int(rng.integers(1, 4))
        p, q = random_distribution(rng, size), random_distribution(rng, size, zeros=0.0)
        propose = drawn(q, 1, replacement=False, points=top(q, drafts - 1))
        assert acceptance_rate(GreedyDraftSampling(), propose, p) == pytest.approx(
            greedy_draft_acceptance(p, q, drafts), abs=1e-9
        )
        assert flat_error(GreedyDraftSampling(), propose, p) < TOLERANCE


def worst(seeds: range) -> float:
    found = 0.0
    for seed in seeds:
        target = random_target(seed, 3)
        distribution = output_distribution(GreedyDraftSampling(), RandomDrafter(seed, 3, depth=2, draws=3), target, 3)
        found = max(found, distance(distribution, target_distribution(target, 3)))
    return found


def test_trees_of_all_kinds_keep_the_distribution() -> None:
    assert worst(range(30)) < TOLERANCE


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("acceptance", lambda r_x, q_x: r_x),
        ("residual", lambda r_v, q_v: r_v),
        ("proposal", lambda trial, token, like_v: proposal(Trial(trial.node, trial.row), token, like_v)),
    ],
    ids=["p instead of p / q", "resampling from p", "q instead of q'"],
)
def test_the_check_catches_a_wrong_rule(monkeypatch: pytest.MonkeyPatch, name: str, wrong: Any) -> None:
    monkeypatch.setattr(greedy_draft, name, wrong)
    assert flat_error(GreedyDraftSampling(), drawn(Q, 1, replacement=False, points=top(Q, 1))) > WRONG


def test_the_check_catches_a_draw_cut_by_its_token() -> None:
    """Wrong: the draw is kept only where it fell on a token that q finds likely."""

    def cut(choices: Choices) -> TokenTree:
        tree = drawn(Q, 1, replacement=True, points=(0,))(choices)
        return tree if tree.tokens[-1] == 2 else TokenTree.build([0], [ROOT])

    assert flat_error(GreedyDraftSampling(), cut) > WRONG


def test_a_second_draw_that_depends_on_the_first_keeps_the_distribution() -> None:
    """So does a point that was chosen by looking at a draw."""

    def propose(choices: Choices) -> TokenTree:
        first = choices.choose(list(Q))
        if first == 2:
            return TokenTree.build([1, 2], [ROOT, ROOT], trials={ROOT: [Trial(0), Trial(1, torch.from_numpy(Q))]})
        second = choices.choose(list(Q))
        tokens = list(dict.fromkeys([first, second]))
        trials = [Trial(0, torch.from_numpy(Q)), Trial(tokens.index(second), torch.from_numpy(Q))]
        return TokenTree.build(tokens, [ROOT] * len(tokens), trials={ROOT: trials})

    assert flat_error(GreedyDraftSampling(), propose) < TOLERANCE


@pytest.mark.parametrize("row", [[0.0, 0.5, 0.5], [float("nan")] * 3, [0.0] * 3])
def test_a_draw_that_its_own_row_calls_impossible_is_passed_over(row: list[float]) -> None:
    tree = TokenTree.build(
        [1, 0], [ROOT, ROOT], trials={ROOT: [Trial(0), Trial(1, torch.tensor(row, dtype=torch.float64))]}
    )
    assert flat_error(GreedyDraftSampling(), lambda choices: tree, P) < TOLERANCE


def test_a_bad_row_ends_its_own_sequence_alone() -> None:
    tree = TokenTree.build([1, 0], [ROOT, ROOT], trials={ROOT: [Trial(0), Trial(1, torch.tensor([0.5, 0.5]), (1,))]})
    good, bad = torch.zeros(3, 2), torch.full((3, 2), torch.inf)
    found = GreedyDraftSampling().verify([tree] * 3, [good, bad, good], [KeyedDraws(1, 5)] * 3)
    assert [isinstance(one, NumericsError) for one in found] == [False, True, False]
