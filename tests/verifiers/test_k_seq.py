"""k-SEQ: gamma to the digits, the target's distribution, what is refused; other trials as by recursive rejection."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import brentq
from tools.enumerate_draws import Choices, distance, output_distribution, target_distribution
from tools.random_drafts import RandomDrafter, random_distribution, random_target
from tools.toy_vector import P, Q, Weights, acceptance_rate, drawn, flat_error

from paceline.errors import ConfigError, NumericsError
from paceline.sampling import KeyedDraws
from paceline.tree import ROOT, GroupTrial, TokenTree, Trial, select_nodes
from paceline.verifiers import KSeq, k_seq, plan_k_seq

TOLERANCE, WRONG = 1e-9, 1e-3


def tensors(*distributions: Weights) -> list[torch.Tensor]:
    return [torch.from_numpy(distribution) for distribution in distributions]


def test_the_known_vector_is_reproduced_to_the_digits() -> None:
    made = plan_k_seq(*tensors(P, Q), 2)
    assert made.gamma == pytest.approx(1.45678, abs=5e-6)
    assert made.accepted == pytest.approx(0.79136, abs=5e-6)
    two = drawn(Q, 2, replacement=True, group=True)
    assert acceptance_rate(KSeq(), two) == pytest.approx(made.accepted, abs=1e-12)
    assert flat_error(KSeq(), two) < TOLERANCE


def test_one_draft_is_speculative_sampling_and_equal_distributions_accept_all() -> None:
    assert (plan_k_seq(*tensors(P, Q), 1).gamma, plan_k_seq(*tensors(P, Q), 1).accepted) == (1.0, pytest.approx(0.7))
    assert acceptance_rate(KSeq(), drawn(Q, 1, replacement=True, group=True)) == pytest.approx(0.7, abs=1e-12)
    for drafts in (1, 2, 5):
        assert plan_k_seq(*tensors(Q, Q), drafts).accepted == pytest.approx(1.0, abs=1e-12)
    assert acceptance_rate(KSeq(), drawn(Q, 3, replacement=True, group=True), Q) == pytest.approx(1.0, abs=1e-9)


def test_gamma_solves_its_equation_and_overdraws_nothing() -> None:
    """Against a root finder that knows nothing of sorting; p and q with many zeros and many sizes."""
    rng = np.random.default_rng(0)
    for _ in range(150):
        size, drafts = int(rng.integers(2, 40)), int(rng.integers(2, 8))
        p, q = random_distribution(rng, size), random_distribution(rng, size)

        def excess(gamma: float, p: Weights = p, q: Weights = q, drafts: int = drafts) -> float:
            beta = np.minimum(q, p / gamma).sum()
            return float(1 - (1 - beta) ** drafts - gamma * beta)

        made = plan_k_seq(*tensors(p, q), drafts)
        gamma = float(brentq(excess, 1.0, drafts, xtol=1e-13)) if excess(1.0) > 1e-12 else 1.0
        assert made.accepted == pytest.approx(1 - (1 - np.minimum(q, p / gamma).sum()) ** drafts, abs=1e-9)
        given = np.minimum(q, p / made.gamma) * (made.accepted / made.beta if made.beta else 0.0)
        assert (p - given).min() >= -1e-12


def test_a_gamma_that_overdraws_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"gamma must leave nothing of p overdrawn, got 1, which overdraws 0\.09"):
        plan_k_seq(*tensors(P, Q), 2, gamma=1.0)
    assert plan_k_seq(*tensors(P, Q), 2, gamma=1.9).accepted < plan_k_seq(*tensors(P, Q), 2).accepted


class Chains:
    """k independent chains whose q depends on the path; equal beginnings are shared, equal draws count apart."""

    def __init__(self, seed: int, vocabulary: int, chains: int, depth: int) -> None:
        self.seed, self.vocabulary, self.chains, self.depth = seed, vocabulary, chains, depth

    def __call__(self, choices: Choices) -> TokenTree:
        tokens: list[int] = []
        parents: list[int] = []
        trials: dict[int, list[Trial]] = {}
        paths: dict[int, tuple[int, ...]] = {ROOT: ()}
        front = [ROOT] * self.chains
        for _ in range(self.depth):
            rows = {
                at: random_distribution(np.random.default_rng([self.seed, 9, *paths[at]]), self.vocabulary)
                for at in set(front)
            }
            held = {at: torch.from_numpy(row) for at, row in rows.items()}
            ends = []
            for parent in front:
                token = choices.choose(list(rows[parent]))
                known = [t.node for t in trials.get(parent, []) if tokens[t.node] == token]
                if not known:
                    tokens.append(token)
                    parents.append(parent)
                    paths[len(tokens) - 1] = (*paths[parent], token)
                ends.append(known[0] if known else len(tokens) - 1)
                trials.setdefault(parent, []).append(GroupTrial(ends[-1], held[parent], group=front.count(parent)))
            front = ends
        return TokenTree.build(tokens, parents, trials=trials)


def errors(seeds: range) -> Iterator[float]:
    for seed in seeds:
        for chains, depth in ((2, 2), (3, 1)):
            target = random_target(seed, 3)
            distribution = output_distribution(KSeq(), Chains(seed, 3, chains, depth), target, depth + 1)
            yield distance(distribution, target_distribution(target, depth + 1))


def test_chains_keep_the_distribution() -> None:
    assert max(errors(range(5))) < TOLERANCE


def test_other_trials_keep_the_distribution() -> None:
    for seed in range(25):
        target = random_target(seed, 3)
        distribution = output_distribution(KSeq(), RandomDrafter(seed, 3, depth=2, draws=3), target, 3)
        assert distance(distribution, target_distribution(target, 3)) < TOLERANCE


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("kept", lambda p_v, q_v, gamma: torch.minimum(q_v, p_v)),
        ("residual", lambda r_v, kept_v: r_v),
        ("residual", lambda r_v, kept_v: (r_v - 0.5 * kept_v) / (r_v - 0.5 * kept_v).sum()),
    ],
    ids=["gamma forgotten", "p instead of the rest", "half of what one draft gives"],
)
def test_the_check_catches_a_wrong_rule(monkeypatch: pytest.MonkeyPatch, name: str, wrong: Any) -> None:
    monkeypatch.setattr(k_seq, name, wrong)
    assert any(error > WRONG for error in errors(range(4)))


def test_the_check_catches_equal_draws_counted_once() -> None:
    """Wrong: the second of two equal draws is forgotten."""

    def once(choices: Choices) -> TokenTree:
        tree = drawn(Q, 2, replacement=True, group=True)(choices)
        return tree if len(tree) == 2 else TokenTree.build(tree.tokens, [ROOT], trials={ROOT: tree.trials[ROOT][:1]})

    assert flat_error(KSeq(), once) > WRONG


def cut_error(propose: Any) -> float:
    return max(flat_error(KSeq(), lambda c, nodes=nodes: select_nodes(propose(c), nodes)) for nodes in (1, 2, 3))


def test_groups_that_were_cut_keep_the_distribution() -> None:
    """Of three draws the third fits into two nodes only where the first two are equal; gamma is that of three all the
    same.
    """
    assert cut_error(drawn(Q, 3, replacement=True, group=True)) < TOLERANCE


def test_the_check_catches_a_gamma_of_the_draws_that_are_left() -> None:
    three = drawn(Q, 3, replacement=True, group=True)

    def told(choices: Choices) -> TokenTree:
        tree = select_nodes(three(choices), 2)
        trials = tree.trials[ROOT]
        return tree.replace(trials={ROOT: tuple(GroupTrial(t.node, t.row, group=len(trials)) for t in trials)})

    assert flat_error(KSeq(), told) > WRONG


def test_points_beside_a_group_keep_the_distribution() -> None:
    def beside(choices: Choices) -> TokenTree:
        tree = drawn(Q, 2, replacement=True, group=True)(choices)
        if 1 in tree.tokens or tree.tokens[0] == 0:
            return tree
        tokens = [*tree.tokens.tolist(), 1]
        return TokenTree.build(
            tokens, [ROOT] * len(tokens), trials={ROOT: [*tree.trials[ROOT], Trial(len(tokens) - 1)]}
        )

    assert flat_error(KSeq(), beside) < TOLERANCE


@pytest.mark.parametrize("row", [[0.0, 0.5, 0.5], [float("nan")] * 3, [0.0] * 3])
def test_draws_that_their_own_row_calls_impossible_are_passed_over(row: list[float]) -> None:
    held = torch.tensor(row, dtype=torch.float64)
    tree = TokenTree.build([0], [ROOT], trials={ROOT: [GroupTrial(0, held, group=2)] * 2})
    assert flat_error(KSeq(), lambda choices: tree) < TOLERANCE


def test_a_bad_row_ends_its_own_sequence_alone() -> None:
    row = torch.tensor([0.5, 0.5])
    tree = TokenTree.build([0], [ROOT], trials={ROOT: [GroupTrial(0, row, group=2)] * 2})
    good, bad = torch.zeros(2, 2), torch.full((2, 2), torch.nan)
    found = KSeq().verify([tree] * 3, [good, bad, good], [KeyedDraws(1, 5)] * 3)
    assert [isinstance(one, NumericsError) for one in found] == [False, True, False]
