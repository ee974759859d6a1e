"""The exact verifier: its output distribution is the target's, by enumeration and by keyed draws."""

from __future__ import annotations

from collections.abc import Iterator

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
from tools.random_drafts import RandomDrafter, random_target

from paceline.errors import NumericsError
from paceline.sampling import KeyedDraws
from paceline.tree import EMPTY_TREE, ROOT, TokenTree, Trial, Verdict
from paceline.verifiers import RecursiveRejection, recursive_rejection, residual

P = np.array([0.5, 0.3, 0.2])
Q = np.array([0.2, 0.3, 0.5])
Q_ROW = torch.from_numpy(Q)
TOLERANCE = 1e-9
WRONG = 1e-3
"""Every wrong variant is off by more than this; right ones by less than TOLERANCE."""


def error_of(propose, target: Target, length: int) -> float:
    """Distance of the verifier's output distribution from the target's."""
    return distance(
        output_distribution(RecursiveRejection(), propose, target, length), target_distribution(target, length)
    )


def errors(seeds: range, *, vocabulary: int = 3, depth: int = 3, draws: int = 3) -> Iterator[float]:
    for seed in seeds:
        drafter = RandomDrafter(seed, vocabulary, depth=depth, draws=draws)
        yield error_of(drafter, random_target(seed, vocabulary), depth + 1)


def draw_two(*, replace: bool, q: np.ndarray = Q):
    """Two draws from q at the root."""
    row = torch.from_numpy(q)

    def propose(choices: Choices) -> TokenTree:
        first = choices.choose(list(q))
        rest = q.copy()
        if not replace:
            rest[first] = 0.0
        second = choices.choose(list(rest / rest.sum()))
        tokens = list(dict.fromkeys([first, second]))
        removed = () if replace else (first,)
        trials = [Trial(0, row), Trial(tokens.index(second), row, removed)]
        return TokenTree.build(tokens, [ROOT] * len(tokens), trials={ROOT: trials})

    return propose


def draw_one(choices: Choices) -> TokenTree:
    return TokenTree.build([choices.choose(list(Q))], [ROOT], trials={ROOT: [Trial(0, Q_ROW)]})


def top_two(choices: Choices) -> TokenTree:
    return TokenTree.build([2, 1], [ROOT, ROOT])


def flat(path: tuple[int, ...]) -> np.ndarray:
    return P


def acceptance_rate(propose) -> float:
    """Chance that a child of the root stands."""

    def stands(choices: Choices) -> bool:
        tree = propose(choices)
        (verdict,) = RecursiveRejection().verify([tree], [rows_of(tree, flat)], [EnumeratingDraws(choices)])
        return bool(verdict.path)

    return enumerate_distribution(stands)[True]


@pytest.mark.parametrize(
    ("propose", "rate"),
    [(draw_one, 0.70), (draw_two(replace=True), 0.76), (draw_two(replace=False), 0.82), (top_two, 0.50)],
    ids=["one draft", "two with replacement", "two without replacement", "top two of q"],
)
def test_the_known_vector_is_reproduced_to_the_digits(propose, rate):
    assert acceptance_rate(propose) == pytest.approx(rate, abs=1e-12)
    assert error_of(propose, flat, 2) < TOLERANCE


def test_two_tokens_drawn_without_replacement_are_always_accepted():
    p, q = np.array([0.9, 0.1]), np.array([0.25, 0.75])

    def propose(choices: Choices) -> TokenTree:
        first = choices.choose(list(q))
        trials = [Trial(0, torch.from_numpy(q)), Trial(1, torch.from_numpy(q), (first,))]
        return TokenTree.build([first, 1 - first], [ROOT, ROOT], trials={ROOT: trials})

    def stands(choices: Choices) -> bool:
        tree = propose(choices)
        (verdict,) = RecursiveRejection().verify([tree], [rows_of(tree, lambda path: p)], [EnumeratingDraws(choices)])
        return bool(verdict.path)

    assert enumerate_distribution(stands) == {True: pytest.approx(1.0)}


def test_random_trees_of_mixed_trials_keep_the_distribution():
    assert max(errors(range(40), draws=4)) < TOLERANCE


def test_larger_vocabularies_keep_the_distribution():
    assert max(errors(range(200, 206), vocabulary=5, depth=2, draws=3)) < TOLERANCE
    assert max(errors(range(220, 228), vocabulary=6, depth=2, draws=2)) < TOLERANCE


def test_the_random_trees_hold_what_they_should():
    seen = set()
    for seed in range(60):
        tree = RandomDrafter(seed, 3, draws=3)(Choices([]))
        for trials in tree.trials.values():
            nodes = [trial.node for trial in trials]
            seen |= {"mixed"} if any(not trial.drawn for trial in trials) else set()
            seen |= {"removed"} if any(trial.removed for trial in trials) else set()
            seen |= {"equal"} if len(set(nodes)) < len(nodes) else set()
        seen |= {"probe"} if tree.kinds.any() else set()
        seen |= {"points"} if len(tree) and ROOT not in tree.trials else set()
        seen |= {f"depth {tree.max_depth}"}
        seen |= {"chain"} if len(tree) > 1 and tree.is_chain else set()
    assert seen >= {"mixed", "removed", "equal", "probe", "points", "chain", "depth 1", "depth 2", "depth 3"}


# ------------------------------------------------------------------------------------------------ wrong variants must
# fail


PROPOSAL = recursive_rejection.proposal


def without_removal(trial: Trial, token: int, like_v: torch.Tensor) -> torch.Tensor:
    return PROPOSAL(Trial(trial.node, trial.row), token, like_v)


def not_normalised(trial: Trial, token: int, like_v: torch.Tensor) -> torch.Tensor:
    q_v = without_removal(trial, token, like_v)
    q_v[list(trial.removed)] = 0.0
    return q_v


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("acceptance", lambda r_x, q_x: r_x),
        ("residual", lambda r_v, q_v: r_v),
        ("residual", lambda r_v, q_v: (r_v - q_v).clamp(min=0.0)),
        ("proposal", without_removal),
        ("proposal", not_normalised),
    ],
    ids=["p instead of p / q", "resampling from p", "residual not normalised", "removed forgotten", "q not normalised"],
)
def test_the_check_catches_a_wrong_rule(monkeypatch, name, wrong):
    monkeypatch.setattr(recursive_rejection, name, wrong)
    assert any(error > WRONG for error in errors(range(0, 30)))


def test_points_chosen_at_random_are_still_points():
    """Treating a draw as a point is exact (the shape does not look at the target's noise), only slower."""

    def propose(choices: Choices) -> TokenTree:
        return TokenTree.build([choices.choose(list(Q))], [ROOT])

    assert error_of(propose, flat, 2) < TOLERANCE


# ------------------------------------------------------------------------------------------------ the trap


P_4 = np.array([0.4, 0.35, 0.15, 0.1])
Q_4 = np.array([0.1, 0.2, 0.3, 0.4])
ROW_4 = torch.from_numpy(Q_4)


def cut_by_its_token(choices: Choices) -> TokenTree:
    """Wrong: keeps the draw only where the drafter is confident of it."""
    token = choices.choose(list(Q_4))
    return TokenTree.build([token], [ROOT], trials={ROOT: [Trial(0, ROW_4)]}) if Q_4[token] >= 0.2 else EMPTY_TREE


def second_cut_by_its_token(choices: Choices) -> TokenTree:
    """Wrong: the same for the second of two draws."""
    tree = draw_two(replace=True, q=Q_4)(choices)
    first, second = tree.trials[ROOT]
    keep = Q_4[tree.tokens[second.node]] >= 0.2
    return tree if keep else TokenTree.build(tree.tokens[:1], [ROOT], trials={ROOT: [first]})


def sorted_by_token(choices: Choices) -> TokenTree:
    """Wrong: tries the likelier of two draws without replacement first."""
    tree = draw_two(replace=False, q=Q_4)(choices)
    first, second = sorted(tree.tokens.tolist(), key=lambda token: -Q_4[token])
    return TokenTree.build([first, second], [ROOT] * 2, trials={ROOT: [Trial(0, ROW_4), Trial(1, ROW_4, (first,))]})


def merged_by_its_token(choices: Choices) -> TokenTree:
    """Wrong: the second of two equal draws is thrown away instead of counting apart, and drawn anew if it differs."""
    tree = draw_two(replace=True, q=Q_4)(choices)
    return tree if len(tree) == 2 else TokenTree.build(tree.tokens, [ROOT], trials={ROOT: tree.trials[ROOT][:1]})


def point_beside(first: bool):
    """A point that is chosen by the token of a drawn sibling: tried before it (wrong) or after it (right)."""

    def propose(choices: Choices) -> TokenTree:
        token = choices.choose(list(Q_4))
        point, drawn = Trial(1), Trial(0, ROW_4)
        trials = [point, drawn] if first else [drawn, point]
        return TokenTree.build([token, (token + 1) % 4], [ROOT, ROOT], trials={ROOT: trials})

    return propose


def cut_by_an_earlier_draw(choices: Choices) -> TokenTree:
    """Right: whether there is a second draw depends on the first one's token."""
    first = choices.choose(list(Q_4))
    if first != 2:
        return TokenTree.build([first], [ROOT], trials={ROOT: [Trial(0, ROW_4)]})
    second = choices.choose(list(Q_4))
    tokens = list(dict.fromkeys([first, second]))
    trials = [Trial(0, ROW_4), Trial(tokens.index(second), ROW_4)]
    return TokenTree.build(tokens, [ROOT] * len(tokens), trials={ROOT: trials})


TRAPS = [cut_by_its_token, second_cut_by_its_token, sorted_by_token, merged_by_its_token, point_beside(first=True)]


@pytest.mark.parametrize("propose", TRAPS)
def test_the_check_catches_the_trap(propose):
    assert error_of(propose, lambda path: P_4, 2) > WRONG


@pytest.mark.parametrize("propose", [cut_by_an_earlier_draw, point_beside(first=False)])
def test_what_depends_on_earlier_draws_alone_is_no_trap(propose):
    assert error_of(propose, lambda path: P_4, 2) < TOLERANCE


# ------------------------------------------------------------------------------------------------ numerics and errors


def test_a_residual_without_mass_is_the_distribution_before():
    r_v = torch.tensor([0.25, 0.75])
    assert residual(r_v, r_v.clone()) is r_v
    assert residual(r_v, torch.tensor([0.5, 0.5])).tolist() == [0.0, 1.0]


def test_equal_p_and_q_in_float32_never_give_a_forbidden_token():
    weights_v = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    weights_v[::2] = -torch.inf
    row = torch.softmax(weights_v, 0) * 0.7
    for position in range(200):
        token = KeyedDraws(9, position).categorical(0, row)
        tree = TokenTree.build([token], [ROOT], trials={ROOT: [Trial(0, row)] * 3})
        (verdict,) = RecursiveRejection().verify([tree], [weights_v.repeat(2, 1)], [KeyedDraws(7, position)])
        assert isinstance(verdict, Verdict)
        assert all(token % 2 for token in verdict.tokens)


@pytest.mark.parametrize("row", [[0.0, 0.5, 0.5], [float("nan")] * 3, [0.0] * 3])
def test_a_draw_that_its_own_row_calls_impossible_is_passed_over(row):
    tree = TokenTree.build([0], [ROOT], trials={ROOT: [Trial(0, torch.tensor(row, dtype=torch.float64))]})
    assert error_of(lambda choices: tree, flat, 2) < TOLERANCE


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("drawn", [False, True])
def test_a_bad_row_ends_its_own_sequence_alone(bad, drawn):
    trials = {ROOT: [Trial(0, torch.tensor([0.5, 0.5]))]} if drawn else None
    tree = TokenTree.build([0], [ROOT], trials=trials)
    good, broken = torch.zeros(2, 2), torch.zeros(2, 2)
    broken[0] = torch.tensor([bad, -torch.inf])
    verdicts = RecursiveRejection().verify([tree] * 3, [good, broken, good], [KeyedDraws(1, 5)] * 3)
    assert isinstance(verdicts[1], NumericsError)
    assert verdicts[0] == verdicts[2]
    assert isinstance(verdicts[0], Verdict)


@pytest.mark.parametrize("drawn", [False, True])
def test_tokens_accepted_before_a_bad_row_stand(drawn):
    row = torch.tensor([1.0, 0.0])
    trials = {ROOT: [Trial(0, row)], 0: [Trial(1, row)]} if drawn else None
    tree = TokenTree.build([0, 0], [ROOT, 0], trials=trials)
    rows = torch.tensor([[0.0, -torch.inf], [0.0, -torch.inf], [torch.nan, 0.0]])
    assert RecursiveRejection().verify([tree], [rows], [KeyedDraws(1, 5)]) == [Verdict((0,), (0,), 0)]


KEYED_P = torch.tensor([0.35, 0.3, 0.2, 0.1, 0.05])
KEYED_Q = torch.tensor([0.1, 0.1, 0.2, 0.3, 0.3])


def p_value(samples: int = 2400) -> float:
    """G-test of the first token over positions, with two drawn trials without replacement and a point between them."""
    counts, rng = np.zeros(5), np.random.default_rng(0)
    for position in range(samples):
        first, second = rng.choice(
            5, size=2, replace=False, p=KEYED_Q.double().numpy() / KEYED_Q.double().numpy().sum()
        ).tolist()
        tokens = list(dict.fromkeys([first, 1, second]))
        trials = [Trial(0, KEYED_Q), Trial(tokens.index(1)), Trial(tokens.index(second), KEYED_Q, (first,))]
        tree = TokenTree.build(tokens, [ROOT] * len(tokens), trials={ROOT: trials})
        (verdict,) = RecursiveRejection().verify(
            [tree], [KEYED_P.log().repeat(1 + len(tokens), 1)], [KeyedDraws(3, position)]
        )
        assert isinstance(verdict, Verdict)
        counts[verdict.tokens[0]] += 1
    return g_test(counts, KEYED_P.double().numpy() / KEYED_P.double().numpy().sum())


def test_draws_follow_the_target():
    assert p_value() > ERROR


@pytest.mark.parametrize(("name", "wrong"), [("acceptance", lambda r_x, q_x: r_x), ("residual", lambda r_v, q_v: r_v)])
def test_the_check_catches_a_wrong_rule_with_keyed_draws(monkeypatch, name, wrong):
    monkeypatch.setattr(recursive_rejection, name, wrong)
    assert p_value() < ERROR


# ------------------------------------------------------------------------------------------------ the same tokens as
# plain decoding


VOCABULARY = 12


def toy_logits(text: list[int]) -> torch.Tensor:
    """float32 logits that depend on the last three tokens."""
    rng = np.random.default_rng([17, *text[-3:]])
    return torch.from_numpy((rng.normal(size=VOCABULARY) * 2).astype(np.float32))


def guess(text: list[int], rng: np.random.Generator) -> TokenTree:
    """A random tree of points, drawn with a bias to what the target finds likely."""
    tokens, parents, texts = [], [], {ROOT: text}
    for _ in range(int(rng.integers(0, 9))):
        parent = int(rng.integers(-1, len(tokens)))
        token = int(toy_logits(texts[parent]).topk(3).indices[rng.integers(3)])
        if (parent, token) not in set(zip(parents, tokens, strict=True)):
            parents.append(parent)
            tokens.append(token)
            texts[len(tokens) - 1] = [*texts[parent], token]
    return TokenTree.build(tokens, parents)


def decode(seed: int, length: int, *, drafts: bool, key_by_step: bool = False) -> tuple[list[int], int]:
    """(tokens, steps) of decoding with or without drafts."""
    text, steps, rng = [0, 0, 0], 0, np.random.default_rng(seed)
    while len(text) < length + 3:
        tree = guess(text, rng) if drafts else EMPTY_TREE
        rows = torch.stack(
            [toy_logits(text + [int(tree.tokens[i]) for i in tree.path(node)]) for node in range(-1, len(tree))]
        )
        draws = KeyedDraws(seed, steps if key_by_step else len(text))
        (verdict,) = RecursiveRejection().verify([tree], [rows], [draws])
        assert isinstance(verdict, Verdict)
        text += verdict.tokens
        steps += 1
    return text[3 : length + 3], steps


@pytest.mark.parametrize("seed", range(4))
def test_points_give_the_tokens_of_plain_decoding(seed):
    plain, steps = decode(seed, 300, drafts=False)
    drafted, fewer = decode(seed, 300, drafts=True)
    assert drafted == plain
    assert fewer < 0.8 * steps


def test_the_check_catches_noise_keyed_by_step():
    assert decode(0, 300, drafts=True, key_by_step=True)[0] != decode(0, 300, drafts=False, key_by_step=True)[0]
