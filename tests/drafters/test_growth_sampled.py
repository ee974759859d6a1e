"""Policies that say how tokens are drawn: the output distribution stands, beams are draws of whole texts, chains agree
and count apart.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from drafters.test_draft_model import PROMPT, begin, confident, drafter_of, enumerable, propose
from tools.enumerate_draws import Choices, distance, output_distribution, target_distribution
from tools.gtest import ERROR, g_test
from tools.random_drafts import random_target
from tools.toy_vector import Q, acceptance_rate
from toys import ToyRunner

from paceline.drafters.growth import sampled
from paceline.drafters.growth.sampled import later
from paceline.tree import ROOT, TokenTree, always_go_on, merge, select_nodes
from paceline.verifiers import GreedyDraftSampling, KSeq, RecursiveRejection

POLICIES = ["rsd_c", "rsd_s", "spectr", "greedy_draft"]
VERIFIERS = {"spectr": KSeq(), "greedy_draft": GreedyDraftSampling()}
WRONG = 1e-3


def error(policy: str, program: Any, target: Any, length: int) -> float:
    found = [RecursiveRejection(), VERIFIERS.get(policy, RecursiveRejection())]
    return max(
        distance(output_distribution(one, program, target, length), target_distribution(target, length))
        for one in found
    )


def program_of(
    monkeypatch: pytest.MonkeyPatch, policy: str, width: Any, nodes: int, depth: int, go_on: Any = always_go_on
) -> Any:
    drafter = drafter_of(ToyRunner(3, order=None, sharpness=1.0), 3, tree_policy=policy, tree_width=width)
    return enumerable(monkeypatch, drafter, nodes, depth, go_on)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    ("width", "nodes", "depth", "go_on"), [(2, 4, 2, always_go_on), (2, 3, 2, confident), (3, 3, 1, always_go_on)]
)
def test_drawn_trees_keep_the_output_distribution(
    monkeypatch: pytest.MonkeyPatch, policy: str, width: int, nodes: int, depth: int, go_on: Any
) -> None:
    """Alone, cut afterwards, and merged behind a point drafter and cut: exact by enumeration, under both verifiers."""
    program, target = program_of(monkeypatch, policy, width, nodes, depth, go_on), random_target(nodes, 3)
    points = TokenTree.build([1, 0, 2], [ROOT, 0, 0], confidence=[0.4, 0.3, 0.3])
    assert error(policy, program, target, depth + 1) < 1e-6, "float32 rows"
    assert error(policy, lambda c: select_nodes(program(c), 2), target, depth + 1) < 1e-6
    assert error(policy, lambda c: select_nodes(merge([points, program(c)]), 3), target, depth + 1) < 1e-6


@pytest.mark.parametrize(("factors", "nodes"), [([2, 1], 4), ([1, 2], 3)])
def test_factors_by_level_keep_the_output_distribution(
    monkeypatch: pytest.MonkeyPatch, factors: list[int], nodes: int
) -> None:
    program, target = program_of(monkeypatch, "rsd_c", factors, nodes, 9), random_target(nodes, 3)
    assert error("rsd_c", program, target, 3) < 1e-6
    assert error("rsd_c", lambda c: select_nodes(program(c), 2), target, 3) < 1e-6


@pytest.mark.parametrize("policy", ["rsd_c", "rsd_s", "greedy_draft"])
def test_the_distribution_check_catches_raw_rows_instead_of_what_was_left(
    monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    program = program_of(monkeypatch, policy, 2, 4, 2)

    def forgetful(choices: Choices) -> TokenTree:
        tree = program(choices)
        return tree.replace(trials={p: tuple(replace(t, removed=()) for t in ts) for p, ts in tree.trials.items()})

    assert any(error(policy, forgetful, random_target(seed, 3), 3) > WRONG for seed in range(3))


def test_the_distribution_check_catches_chains_whose_equal_draws_are_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    program = program_of(monkeypatch, "spectr", 2, 4, 2)

    def joined(choices: Choices) -> TokenTree:
        tree = program(choices)
        return tree.replace(trials={p: tuple({t.node: t for t in ts}.values()) for p, ts in tree.trials.items()})

    assert any(error("spectr", joined, random_target(seed, 3), 3) > WRONG for seed in range(3))


@pytest.mark.parametrize("seed", range(3))
def test_the_shapes(seed: int) -> None:
    def grown(policy: str, nodes: int, depth: int = 3) -> TokenTree:
        drafter = drafter_of(ToyRunner(8, order=None, sharpness=0.5), 8, tree_policy=policy, tree_width=2)
        return propose(drafter, begin(drafter, PROMPT[:2], temperature=1.0, seed=seed), nodes, depth)

    constant, beam, greedy = grown("rsd_c", 14), grown("rsd_s", 14), grown("greedy_draft", 14)
    assert Counter(constant.depths.tolist()) == {1: 2, 2: 4, 3: 8}
    assert Counter(beam.depths.tolist()) == {1: 2, 2: 2, 3: 2}
    assert len(grown("rsd_s", 5)) == 5
    assert all([t.drawn for t in greedy.trials_of(parent)] == [False, True] for parent in greedy.trials)
    chains = grown("spectr", 14)
    for parent, trials in chains.trials.items():
        above = 2 if parent == ROOT else sum(t.node == parent for t in chains.trials[int(chains.parents[parent])])
        assert len(trials) == above == trials[0].group
        assert all(trial.row is trials[0].row for trial in trials)


@pytest.mark.parametrize(
    ("factors", "nodes", "levels"),
    [
        ([3, 2, 1], 99, [3, 6, 6]),
        ([1, 1, 4], 99, [1, 1, 4]),
        ([3, 2, 1], 7, [3, 4]),
        ([4], 99, [4]),
        ([8, 2], 99, [8, 16]),
    ],
)
def test_factors_say_the_children_of_each_level(factors: list[int], nodes: int, levels: list[int]) -> None:
    """The first nodes of a level get theirs where the budget ends; the last factor ends the tree, at temperature 0 as
    well.
    """
    drafter = drafter_of(ToyRunner(8, order=None, sharpness=0.5), 8, tree_policy="rsd_c", tree_width=factors)
    tree = propose(drafter, begin(drafter, PROMPT[:2], temperature=1.0), nodes, 9)
    assert Counter(tree.depths.tolist()) == dict(enumerate(levels, 1))
    for parent, trials in tree.trials.items():
        depth = 0 if parent == ROOT else int(tree.depths[parent])
        assert len(trials) == factors[depth] or nodes == len(tree)
        assert [trial.removed for trial in trials] == [
            tuple(int(tree.tokens[t.node]) for t in trials[:i]) for i in range(len(trials))
        ]
    greedy = propose(drafter, begin(drafter, PROMPT[:2]), nodes, 9)
    assert greedy.depths.max() <= len(factors)


@pytest.mark.parametrize("policy", POLICIES)
def test_one_draft_is_a_chain_of_speculative_sampling(policy: str) -> None:
    """With one draft every policy draws one child of each node, from all of q; for greedy drafts no token is excluded
    then.
    """
    drafter = drafter_of(ToyRunner(8, order=None), 8, tree_policy=policy, tree_width=1)
    tree = propose(drafter, begin(drafter, temperature=1.0), 4, 4)
    assert tree.is_chain
    assert len(tree) == 4
    assert [[trial.removed for trial in trials] for trials in tree.trials.values()] == [[()]] * 4


class Fixed(ToyRunner):
    """One distribution after every text."""

    distribution = Q

    def logits(self, text: Any) -> torch.Tensor:
        return torch.from_numpy(self.distribution).log().float()


@pytest.mark.parametrize(
    ("policy", "rate"),
    [("levels", 0.82), ("rsd_c", 0.82), ("rsd_s", 0.82), ("spectr", 0.79136), ("greedy_draft", 0.90)],
)
def test_drafted_trees_reproduce_the_known_vector(monkeypatch: pytest.MonkeyPatch, policy: str, rate: float) -> None:
    drafter = drafter_of(Fixed(3), 3, tree_policy=policy, tree_width=2)
    two = enumerable(monkeypatch, drafter, 2, 1, always_go_on)
    assert acceptance_rate(VERIFIERS.get(policy, RecursiveRejection()), two) == pytest.approx(rate, abs=5e-6)


@pytest.mark.parametrize(("policy", "always"), [("rsd_c", True), ("rsd_s", True), ("spectr", False)])
def test_the_only_two_tokens_always_stand(monkeypatch: pytest.MonkeyPatch, policy: str, always: bool) -> None:
    """Without replacement; the same number of draws with replacement does not reach it."""
    monkeypatch.setattr(Fixed, "distribution", np.array([0.25, 0.75, 0.0]))
    program = enumerable(monkeypatch, drafter_of(Fixed(3), 3, tree_policy=policy, tree_width=2), 2, 1, always_go_on)
    rate = acceptance_rate(RecursiveRejection(), program, np.array([0.9, 0.1, 0.0]))
    assert (rate > 1 - 1e-6) == always
    assert always or rate < 0.9


def test_without_draws_they_are_levels() -> None:
    trees = []
    for policy in ("levels", *POLICIES):
        drafter = drafter_of(ToyRunner(8, order=None), 8, tree_policy=policy, tree_width=3)
        trees.append(propose(drafter, begin(drafter), 9))
        assert not trees[-1].trials
    assert all(tree.tokens.tolist() == trees[0].tokens.tolist() for tree in trees)


# ------------------------------------------------------------------------------------------------ stochastic beam
# search

SIZE = 3


def beams_p_value(samples: int = 750) -> float:
    """G-test of the two texts at the end of a beam: draws of texts without replacement, in their order."""
    runner = ToyRunner(SIZE, order=None, sharpness=1.0)
    drafter = drafter_of(runner, SIZE, tree_policy="rsd_s", tree_width=2)
    seen: Counter[Any] = Counter()
    for seed in range(samples):
        state = begin(drafter, PROMPT[:2], temperature=1.0, seed=seed * 7919)
        tree = propose(drafter, state, 4, 2)
        seen[tuple(tuple(int(tree.tokens[i]) for i in tree.path(leaf)) for leaf in (2, 3))] += 1
        drafter.end([state])
    rows = {(): runner.logits(PROMPT[:2]).double().softmax(0)}
    rows |= {(a,): runner.logits([*PROMPT[:2], a]).double().softmax(0) for a in range(SIZE)}
    chance = {(a, b): float(rows[()][a] * rows[(a,)][b]) for a in range(SIZE) for b in range(SIZE)}
    pairs = list(itertools.permutations(chance, 2))
    return g_test([seen[pair] for pair in pairs], [chance[a] * chance[b] / (1 - chance[a]) for a, b in pairs])


def test_beams_are_texts_drawn_without_replacement() -> None:
    assert beams_p_value() > ERROR


def test_the_check_catches_scores_that_forget_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampled, "later", lambda score, rate, luck: later(score, 1.0, luck))
    assert beams_p_value() < ERROR


def test_a_best_child_has_its_parents_score_and_siblings_follow() -> None:
    drafter = drafter_of(ToyRunner(8, order=None), 8, tree_policy="rsd_s", tree_width=4)
    state = begin(drafter, temperature=1.0)
    state.confirm(drafter.runner)
    draft = sampled.BeamDraft(state, 12, 3, always_go_on, True, width=4)
    from paceline.drafters.growth.base import grow, model_scores

    (tree,) = grow(model_scores(drafter.runner, [draft], 8), [draft], 0)
    for parent, trials in tree.trials.items():
        scores = [draft.scores[trial.node] for trial in trials]
        assert scores[0] == (0.0 if parent == ROOT else draft.scores[parent])
        assert scores == sorted(scores, reverse=True)
    assert len(tree) == 12


@pytest.mark.parametrize("score", [-700.0, 0.0, 700.0])
def test_scores_stay_finite(score: float) -> None:
    for rate, luck in itertools.product((1e-300, 1e-9, 1.0), (0.0, 0.5, 1 - 2**-53)):
        found = later(score, rate, luck)
        assert math.isfinite(found)
        assert found <= score
