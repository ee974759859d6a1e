"""Lexical units: what the drafter was sure of stands, the exact rule decides on the rest; steps are the units of a
text.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tools.enumerate_draws import rows_of
from tools.random_drafts import random_target

from paceline.errors import CapabilityError, NumericsError
from paceline.sampling import KeyedDraws
from paceline.training.lud import units_of
from paceline.tree import ROOT, Scores, TokenTree, Trial, Verdict
from paceline.verifiers import GreedyVerifier, RecursiveRejection
from paceline.verifiers.lexical_units import LexicalUnits

VOCAB, DRAFTS = 4, 6


def pairs(*, drawn: bool = False, count: int = 40) -> Any:
    """Chains of random drafts, each with a confidence of its own, and the target's rows."""
    for seed in range(count):
        target, rng = random_target(seed, VOCAB, zeros=0.0), torch.Generator().manual_seed(seed)
        tokens = torch.randint(VOCAB, (DRAFTS,), generator=rng).tolist()
        q = torch.full((VOCAB,), 1 / VOCAB)
        trials = {place - 1: (Trial(place, q),) for place in range(DRAFTS)} if drawn else {}
        tree = TokenTree.chain(tokens, confidence=torch.rand(DRAFTS, generator=rng).tolist()).replace(trials=trials)
        yield seed, tree, rows_of(tree, target)


def judged(rule: Any, tree: TokenTree, rows: torch.Tensor, seed: int) -> Verdict:
    (verdict,) = rule.verify([tree], [rows], [KeyedDraws(seed, 0)])
    assert isinstance(verdict, Verdict)
    return verdict


def at_zero(rule: LexicalUnits, tree: TokenTree, rows: torch.Tensor) -> Verdict:
    zero = rule.at_zero()
    (verdict,) = zero.verify_scores([tree], Scores(rows, (0, len(rows))))
    assert [verdict] == zero.verify([tree], [rows], ())
    assert isinstance(verdict, Verdict)
    return verdict


def defined(tree: TokenTree, rows: torch.Tensor, beta: float) -> Verdict:
    """At temperature 0, read off the rule."""
    kept, departures = 0, []
    for place, (token, sure) in enumerate(zip(tree.tokens.tolist(), tree.confidence.tolist(), strict=True)):
        if token != int(rows[place].argmax()):
            if sure < beta:
                break
            departures.append(place)
        kept += 1
    return Verdict(tuple(range(kept)), tuple(tree.tokens.tolist()[:kept]), int(rows[kept].argmax()), tuple(departures))


@pytest.mark.parametrize("beta", [0.0, 0.3, 0.7])
def test_at_temperature_0_it_is_its_definition(beta: float) -> None:
    """Negative control: of another beta it is not."""
    found = [(at_zero(LexicalUnits(beta), tree, rows), tree, rows) for _, tree, rows in pairs()]
    assert all(verdict == defined(tree, rows, beta) for verdict, tree, rows in found)
    assert sum(len(verdict.departures) for verdict, *_ in found) > 10
    assert any(verdict != defined(tree, rows, beta + 0.2) for verdict, tree, rows in found)


@pytest.mark.parametrize("drawn", [False, True])
def test_a_beta_above_1_is_the_exact_rule(drawn: bool) -> None:
    """Negative control: one below it is not."""
    exact, greedy, differing = RecursiveRejection(), GreedyVerifier(), 0
    for seed, tree, rows in pairs(drawn=drawn):
        wanted, best = judged(exact, tree, rows, seed), greedy.verify([tree], [rows])[0]
        assert judged(LexicalUnits(1.01), tree, rows, seed) == wanted
        assert at_zero(LexicalUnits(math.inf), tree, rows) == best
        relaxed = judged(LexicalUnits(0.4), tree, rows, seed)
        differing += relaxed != wanted
        assert bool(relaxed.departures) == (relaxed != wanted)
    assert differing > 10


def steps_of(sure: list[float], beta: float, longest: int, *, each: bool = False) -> list[int]:
    """Tokens of each step of a text whose model has these probabilities, and guesses with the least one from the step's
    first token on; `each`: wrong, with that of the token alone.
    """
    steps, place = [], 0
    other = torch.tensor([0.0, 1.0])  # the target itself says another token than the text, which has a chance
    while place < len(sure):
        drafts = sure[place + 1 : place + longest]
        guesses = drafts if each else [min(sure[place : place + 2 + i]) for i in range(len(drafts))]
        tree = TokenTree.chain([0] * len(drafts), confidence=guesses) if drafts else TokenTree.chain([])
        rows = other.expand(1 + len(drafts), -1)
        steps.append(1 + len(judged_at(LexicalUnits(beta), tree, rows).path))
        place += steps[-1]
    return steps


def judged_at(rule: LexicalUnits, tree: TokenTree, rows: torch.Tensor) -> Verdict:
    (verdict,) = rule.at_zero().verify([tree], [rows], ())
    assert isinstance(verdict, Verdict)
    return verdict


def test_steps_on_a_text_are_its_lexical_units() -> None:
    """As many tokens, one unit after the other, where a model guesses what it learned from. Negative controls: another
    threshold, and guesses that know nothing of the unit's first token.
    """
    torch.manual_seed(0)
    sure, alpha, longest = torch.rand(300), 0.3, 4
    one = torch.zeros(1, 300, dtype=torch.int64)
    places = units_of(sure[None] >= alpha, one == 0, one, longest)[0].tolist()
    begins = [i for i, place in enumerate(places) if place == 0]
    lengths = [end - start for start, end in zip(begins, [*begins[1:], len(places)], strict=True)]
    assert {1, 2, 3, 4} == set(lengths)
    assert steps_of(sure.tolist(), alpha, longest) == lengths
    assert steps_of(sure.tolist(), alpha + 0.2, longest) != lengths
    assert steps_of(sure.tolist(), alpha, longest, each=True) != lengths


def test_a_draft_without_a_chance_does_not_stand() -> None:
    tree, rows = TokenTree.chain([3, 0], confidence=[1.0, 1.0]), torch.zeros(3, VOCAB)
    rows[:, 1] = 1.0
    assert at_zero(LexicalUnits(0.5), tree, rows) == Verdict((0, 1), (3, 0), 1, (0, 1))
    rows[0, 3] = -torch.inf
    assert at_zero(LexicalUnits(0.5), tree, rows) == Verdict((), (), 1)


def test_a_tree_and_rows_that_hold_no_distribution_are_errors() -> None:
    branching = TokenTree.build([0, 1], [ROOT, ROOT])
    with pytest.raises(CapabilityError, match="acceptance_method 'lexical_units' judges chains"):
        LexicalUnits().verify([branching], [torch.zeros(3, VOCAB)], [KeyedDraws(0, 0)])
    tree, rows = TokenTree.chain([3, 3], confidence=[1.0, 1.0]), torch.zeros(3, VOCAB)
    rows[:, 0] = 1.0
    bad, behind = rows.clone(), rows.clone()
    bad[0, 1] = behind[2, 1] = torch.nan
    failed, ended = LexicalUnits().at_zero().verify([tree] * 2, [bad, behind], ())
    assert isinstance(failed, NumericsError)
    assert ended == Verdict((0,), (3,), 3, (0, 1))
