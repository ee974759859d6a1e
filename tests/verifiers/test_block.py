"""Block verification: the target's distribution, never fewer accepted tokens than one by one, refused where draws
branch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from tools.enumerate_draws import (
    Choices,
    EnumeratingDraws,
    Target,
    distance,
    enumerate_distribution,
    output_distribution,
    rows_of,
    target_distribution,
)
from tools.gtest import ERROR, g_test
from tools.random_drafts import RandomDrafter, random_distribution, random_target
from toys import ToyRunner

from paceline.assembly import build_parts
from paceline.config import SpeculativeConfig
from paceline.errors import CapabilityError, ConfigError, NumericsError
from paceline.sampling import KeyedDraws, draw_seed
from paceline.tree import ROOT, TokenTree, Trial, Verdict
from paceline.verifiers import BlockVerification, RecursiveRejection, block

TOLERANCE = 1e-9
WRONG = 1e-3


class Chain:
    """A drawn chain whose q depends on the path. `stops`: whether it goes on depends on the tokens so far; `points`:
    some of its places are points.
    """

    def __init__(self, seed: int, vocabulary: int, depth: int, *, stops: bool = False, points: bool = False) -> None:
        self.seed, self.vocabulary, self.depth, self.stops, self.points = seed, vocabulary, depth, stops, points

    def __call__(self, choices: Choices) -> TokenTree:
        tokens: list[int] = []
        trials: dict[int, list[Trial]] = {}
        for depth in range(self.depth):
            rng = np.random.default_rng([self.seed, 7, *tokens])
            q = random_distribution(rng, self.vocabulary)
            if self.stops and tokens and rng.random() < 0.4:
                break
            if self.points and rng.random() < 0.4:
                tokens.append(int(q.argmax()))
                continue
            tokens.append(choices.choose(list(q)))
            trials[depth - 1] = [Trial(depth, torch.from_numpy(q))]
        return TokenTree.build(tokens, range(-1, len(tokens) - 1), trials=trials)


def errors(verifier: Any = None, seeds: Sequence[int] = range(25), depth: int = 3, **options: Any) -> Iterator[float]:
    for seed in seeds:
        target, drafts = random_target(seed, 3), Chain(seed, 3, depth, **options)
        distribution = output_distribution(verifier or BlockVerification(), drafts, target, depth + 1)
        yield distance(distribution, target_distribution(target, depth + 1))


@pytest.mark.parametrize("options", [{}, {"stops": True}, {"points": True}, {"points": True, "stops": True}])
def test_the_distribution_is_the_targets(options: dict[str, bool]) -> None:
    assert max(errors(**options)) < TOLERANCE


def mean_accepted(verifier: Any, propose: Callable[[Choices], TokenTree], target: Target) -> float:
    def step(choices: Choices) -> int:
        tree = propose(choices)
        (verdict,) = verifier.verify([tree], [rows_of(tree, target)], [EnumeratingDraws(choices)])
        assert isinstance(verdict, Verdict)
        return len(verdict.path)

    return sum(length * chance for length, chance in enumerate_distribution(step).items())


def test_no_fewer_tokens_are_accepted_than_one_by_one() -> None:
    gains = []
    for seed in range(25):
        target, propose = random_target(seed, 3), Chain(seed, 3, 3)
        gains.append(
            mean_accepted(BlockVerification(), propose, target) - mean_accepted(RecursiveRejection(), propose, target)
        )
    assert min(gains) > -1e-12
    assert max(gains) > 0.02


def test_the_papers_example() -> None:
    """Target (1/3, 2/3), drafter (2/3, 1/3), two tokens: 10/9 accepted one by one, 11/9 as a block (section 2 of the
    paper).
    """
    p, q = np.array([1, 2]) / 3, np.array([2, 1]) / 3
    row = torch.from_numpy(q)

    def propose(choices: Choices) -> TokenTree:
        tokens = [choices.choose(list(q)), choices.choose(list(q))]
        return TokenTree.build(tokens, [ROOT, 0], trials={ROOT: [Trial(0, row)], 0: [Trial(1, row)]})

    assert mean_accepted(RecursiveRejection(), propose, lambda path: p) == pytest.approx(10 / 9, abs=1e-12)
    assert mean_accepted(BlockVerification(), propose, lambda path: p) == pytest.approx(11 / 9, abs=1e-12)


def test_one_token_is_speculative_sampling() -> None:
    p, q = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.3, 0.5])

    def propose(choices: Choices) -> TokenTree:
        return TokenTree.build([choices.choose(list(q))], [ROOT], trials={ROOT: [Trial(0, torch.from_numpy(q))]})

    assert mean_accepted(BlockVerification(), propose, lambda path: p) == pytest.approx(0.70, abs=1e-12)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("stop_chance", lambda rest, reached: reached),
        ("stop_chance", lambda rest, reached: 0.0),
        ("rest_of", lambda p_v, q_v, reached: (p_v - q_v).clamp(min=0.0)),
        ("reach", lambda before, p_x, q_x: before * min(1.0, p_x / q_x)),
    ],
    ids=["p_i before the end too", "never stops", "the rest of one token", "one by one"],
)
def test_the_check_catches_a_wrong_rule(monkeypatch: pytest.MonkeyPatch, name: str, wrong: Any) -> None:
    monkeypatch.setattr(block, name, wrong)
    assert any(error > WRONG for error in errors())


def test_trees_of_points_are_verified_as_by_rejection() -> None:
    for seed in range(40):
        tree, target = RandomDrafter(seed, 4, depth=3, draws=0)(Choices([])), random_target(seed, 4)
        rows, draws = [rows_of(tree, target)], [KeyedDraws(seed, 5)]
        assert BlockVerification().verify([tree], rows, draws) == RecursiveRejection().verify([tree], rows, draws)


def test_draws_that_branch_are_rejected() -> None:
    row = torch.tensor([0.5, 0.5])
    for trials in ([Trial(0, row), Trial(1, row, (0,))], [Trial(0), Trial(1, row)]):
        tree = TokenTree.build([0, 1], [ROOT, ROOT], trials={ROOT: trials})
        with pytest.raises(
            CapabilityError, match="chains of drawn drafts, got a tree with 2 proposals below its root; draft chains"
        ):
            BlockVerification().verify([tree], [torch.zeros(3, 2)], [KeyedDraws(1, 1)])


# ------------------------------------------------------------------------------------------------ step after step, with
# real noise

LENGTH = 3
FLAT_P, FLAT_Q = np.array([0.5, 0.5]), np.array([0.9, 0.1])


class EachItsPlace(KeyedDraws):
    """Wrong: the coin of a place is that of its position, which the next step flips again."""

    def bernoulli(self, depth: int, trial: int, probability: float) -> bool:
        return super().bernoulli(depth + trial - 1, 0, probability)


def steps_p_value(draws: type[KeyedDraws], outputs: int = 1500) -> float:
    """G-test of texts of three tokens that are written by chains of two drafts each, the target being without
    memory.
    """
    counts = np.zeros(2**LENGTH)
    row, weights = torch.from_numpy(FLAT_Q).float(), torch.from_numpy(FLAT_P).float().log()
    for output in range(outputs):
        text: list[int] = []
        rng = np.random.default_rng([5, output])
        while len(text) < LENGTH:
            tokens = rng.choice(2, size=2, p=FLAT_Q).tolist()
            tree = TokenTree.build(tokens, [ROOT, 0], trials={i - 1: [Trial(i, row)] for i in range(2)})
            noise = draws(draw_seed(11, output), len(text))
            (verdict,) = BlockVerification().verify([tree], [weights.repeat(3, 1)], [noise])
            assert isinstance(verdict, Verdict)
            text += verdict.tokens
        counts[text[0] * 4 + text[1] * 2 + text[2]] += 1
    return g_test(counts, np.einsum("i,j,k->ijk", FLAT_P, FLAT_P, FLAT_P).ravel())


def test_steps_do_not_share_their_luck() -> None:
    assert steps_p_value(KeyedDraws) > ERROR


def test_the_check_catches_luck_that_is_used_again() -> None:
    assert steps_p_value(EachItsPlace) < ERROR


# ------------------------------------------------------------------------------------------------ numerics and errors


def test_equal_p_and_q_accept_everything_and_never_give_a_forbidden_token() -> None:
    weights = torch.randn(500, generator=torch.Generator().manual_seed(0))
    weights[::2] = -torch.inf
    row = torch.softmax(weights, 0) * 0.7
    for position in range(100):
        tokens = [KeyedDraws(9, position).categorical(i, torch.softmax(weights, 0)) for i in range(3)]
        tree = TokenTree.build(tokens, [ROOT, 0, 1], trials={i - 1: [Trial(i, row)] for i in range(3)})
        (verdict,) = BlockVerification().verify([tree], [weights.repeat(4, 1)], [KeyedDraws(7, position)])
        assert isinstance(verdict, Verdict)
        assert all(token % 2 for token in verdict.tokens)
        assert len(verdict.path) == 3


@pytest.mark.parametrize("bad", [[0.0, 0.5, 0.5], [float("nan")] * 3, [0.0] * 3])
def test_a_draw_that_its_own_row_calls_impossible_is_passed_over(bad: list[float]) -> None:
    p = np.array([0.5, 0.3, 0.2])

    def propose(choices: Choices) -> TokenTree:
        rows = [torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64), torch.tensor(bad, dtype=torch.float64)]
        first = choices.choose([0.2, 0.3, 0.5])
        return TokenTree.build([first, 0], [ROOT, 0], trials={ROOT: [Trial(0, rows[0])], 0: [Trial(1, rows[1])]})

    distribution = output_distribution(BlockVerification(), propose, lambda path: p, 3)
    assert distance(distribution, target_distribution(lambda path: p, 3)) < TOLERANCE


def test_a_bad_row_ends_the_path_before_it_or_its_own_sequence_alone() -> None:
    row = torch.tensor([1.0, 0.0])
    tree = TokenTree.build([0, 0], [ROOT, 0], trials={ROOT: [Trial(0, row)], 0: [Trial(1, row)]})
    rows = torch.tensor([[0.0, -torch.inf]] * 3)
    broken = [rows.clone() for _ in range(3)]
    for index in range(3):
        broken[index][index, 1] = torch.nan
    found = BlockVerification().verify([tree] * 4, [*broken, rows], [KeyedDraws(1, 5)] * 4)
    assert isinstance(found[0], NumericsError)
    assert found[1:] == [Verdict((), (), 0), Verdict((0,), (0,), 0), Verdict((0, 1), (0, 0), 0)]


def test_bad_rows_leave_the_distribution_of_what_comes_before_them() -> None:
    """The row after token 0 is bad, of which the run is not told before it has drawn that token."""
    target = random_target(4, 3, zeros=0.0)

    def broken(path: tuple[int, ...]) -> Any:
        return np.full(3, np.nan) if path[:1] == (0,) else target(path)

    def first(choices: Choices) -> int:
        tree = Chain(4, 3, 3)(choices)
        (verdict,) = BlockVerification().verify([tree], [rows_of(tree, broken)], [EnumeratingDraws(choices)])
        assert isinstance(verdict, Verdict)
        return verdict.tokens[0]

    distribution = enumerate_distribution(first)
    assert [distribution.get(token, 0.0) for token in range(3)] == pytest.approx(list(target(())), abs=1e-12)


def parts(**config: object) -> object:
    runner = ToyRunner(5, order=None)
    return build_parts(
        runner, SpeculativeConfig(acceptance_method="block_verification", **config), load=lambda name: ToyRunner(5)
    )  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "config",
    [
        {"method": "draft_model", "model": "toy", "options": {"tree_policy": "dyspec"}},
        {"method": "draft_model", "model": "toy", "options": {"tree_width": 2}},
        {"method": (SpeculativeConfig(method="ngram"), SpeculativeConfig(method="draft_model", model="toy"))},
        {"method": "auto", "model": "toy"},
    ],
)
def test_what_may_put_a_draft_beside_a_drawn_one_is_rejected_before_anything_runs(config: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="block_verification judges each chain"):
        parts(**config)


@pytest.mark.parametrize(
    "config",
    [
        {"method": "draft_model", "model": "toy"},
        {"method": "draft_model", "model": "toy", "options": {"tree_policy": "eagle2"}},
        {
            "method": "draft_model",
            "model": "toy",
            "options": {"tree_policy": "dyspec", "draft_sample_method": "greedy"},
        },
        {"method": (SpeculativeConfig(method="ngram"), SpeculativeConfig(method="suffix"))},
    ],
)
def test_drawn_chains_and_points_are_not(config: dict[str, object]) -> None:
    parts(**config)
