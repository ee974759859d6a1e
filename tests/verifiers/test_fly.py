"""FLy: equal to its definition, to the exact rule where nothing can be deferred, and bounded where something is."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from tools.enumerate_draws import rows_of
from tools.random_drafts import random_target

from paceline.errors import CapabilityError, NumericsError
from paceline.sampling import KeyedDraws
from paceline.tree import ROOT, Scores, TokenTree, Trial, Verdict
from paceline.verifiers import GreedyVerifier, RecursiveRejection
from paceline.verifiers import fly as module
from paceline.verifiers.fly import Fly

VOCAB, DRAFTS = 4, 8


def chain(seed: int, target, *, drawn: bool = False) -> TokenTree:
    """Drafts of which most are the target's likeliest tokens, some others."""
    rng, tokens = torch.Generator().manual_seed(seed), []
    trials = {}
    for place in range(DRAFTS):
        p = torch.from_numpy(target(tuple(tokens)))
        q = (0.5 * p + 0.5 / VOCAB).float()
        likely = torch.rand((), generator=rng) < 0.7 and not drawn
        tokens.append(int(p.argmax()) if likely else int(torch.multinomial(q, 1, generator=rng)))
        trials[place - 1] = (Trial(place, q),)
    return TokenTree.chain(tokens).replace(trials=trials if drawn else {})


def pairs(drawn: bool = False, count: int = 60):
    for seed in range(count):
        target = random_target(seed, VOCAB, zeros=0.0)
        tree = chain(seed, target, drawn=drawn)
        yield seed, tree, rows_of(tree, target)


def judged(rule, tree: TokenTree, rows: torch.Tensor, seed: int) -> Verdict:
    (verdict,) = rule.verify([tree], [rows], [KeyedDraws(seed, 0)])
    assert isinstance(verdict, Verdict)
    return verdict


def at_zero(rule: Fly, tree: TokenTree, rows: torch.Tensor) -> Verdict:
    zero = rule.at_zero()
    (verdict,) = zero.verify_scores([tree], Scores(rows, (0, len(rows))))
    assert [verdict] == zero.verify([tree], [rows], ())
    return verdict


def defined(tree: TokenTree, rows: torch.Tensor, window: int, theta: float) -> tuple[int, tuple[int, ...]]:
    """At temperature 0, read off the rule: how many drafts are kept, and which of them are deferred."""
    drafts, best = tree.tokens.tolist(), rows.argmax(-1).tolist()
    deferred = []
    for i, draft in enumerate(drafts):
        if draft == best[i]:
            continue
        top = sorted(torch.softmax(rows[i], -1).tolist())[-3:]
        unsure = -sum(p * math.log(p) for p in top) >= theta
        if not (unsure and i + window < len(drafts) and drafts[i + 1 : i + 1 + window] == best[i + 1 : i + 1 + window]):
            return i, tuple(deferred)
        deferred.append(i)
    return len(drafts), tuple(deferred)


def misjudged(window: int = 2, theta: float = 0.3) -> int:
    """In how many cases the rule is not its definition."""
    found = [(at_zero(Fly(window, theta), tree, rows), defined(tree, rows, window, theta)) for _, tree, rows in pairs()]
    assert sum(len(deferred) for _, (_, deferred) in found) > 10
    return sum((len(verdict.path), verdict.departures) != wanted for verdict, wanted in found)


def test_at_temperature_0_it_is_its_definition() -> None:
    assert misjudged() == 0


def test_the_definition_catches_another_entropy_and_a_shorter_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LIKELIEST", 2)
    assert misjudged(theta=0.6) > 0
    monkeypatch.undo()
    monkeypatch.setattr(Fly, "defers", lambda *_: True)
    assert misjudged() > 0


@pytest.mark.parametrize("drawn", [False, True])
def test_it_is_the_exact_rule_where_nothing_can_be_deferred(drawn: bool) -> None:
    exact, greedy, differing = RecursiveRejection(), GreedyVerifier(), 0
    for seed, tree, rows in pairs(drawn):
        wanted, best = judged(exact, tree, rows, seed), greedy.verify([tree], [rows])[0]
        for rule in (Fly(fly_entropy_threshold=math.inf), Fly(fly_window_size=DRAFTS)):
            assert judged(rule, tree, rows, seed) == wanted
            assert at_zero(rule, tree, rows) == best
        relaxed = judged(Fly(1, 0.0), tree, rows, seed)
        differing += relaxed != wanted
        assert bool(relaxed.departures) == (relaxed != wanted)
    assert differing > 10


def test_a_target_that_is_sure_never_defers() -> None:
    for seed, tree, rows in pairs():
        sure = torch.full_like(rows, -torch.inf).scatter(1, rows.argmax(1, keepdim=True), 0.0)
        assert judged(Fly(1, 0.0), tree, sure, seed) == GreedyVerifier().verify([tree], [sure])[0]


def closest(window: int) -> int:
    """Fewest places from one deferred draft to the next; there are some."""
    gaps = [
        later - place
        for seed, tree, rows in pairs(count=150)
        for verdict in [judged(Fly(window, 0.0), tree, rows, seed)]
        for place, later in zip(verdict.departures, verdict.departures[1:], strict=False)
    ]
    assert len(gaps) > 2
    return min(gaps)


def test_two_mismatches_within_the_window_are_never_both_deferred(monkeypatch: pytest.MonkeyPatch) -> None:
    assert closest(2) == 3
    monkeypatch.setattr(Fly, "defers", lambda *_: True)
    assert closest(2) == 1


def test_a_draft_without_a_chance_is_not_deferred() -> None:
    tree, rows = TokenTree.chain([3, 0, 0]), torch.zeros(4, VOCAB)
    rows[:, 0] = 1.0
    assert at_zero(Fly(2, 0.3), tree, rows).departures == (0,)
    rows[0, 3] = -torch.inf
    assert at_zero(Fly(2, 0.3), tree, rows) == Verdict((), (), 0)


def test_a_tree_is_an_error_that_names_the_field() -> None:
    tree = TokenTree.build([0, 1], [ROOT, ROOT])
    with pytest.raises(CapabilityError, match="acceptance_method 'fly' judges chains, got a tree with 2 proposals"):
        Fly().verify([tree], [torch.zeros(3, VOCAB)], [KeyedDraws(0, 0)])


def test_rows_that_hold_no_distribution_end_the_path_and_bad_roots_their_own_sequence() -> None:
    tree, rows = TokenTree.chain([3, 0, 0, 0]), torch.zeros(5, VOCAB)
    rows[:, 0] = 1.0
    bad, behind = rows.clone(), rows.clone()
    bad[0, 1] = behind[3, 1] = torch.nan
    zero = Fly(2, 0.3).at_zero()
    good, failed, ended = zero.verify([tree] * 3, [rows, bad, behind], ())
    assert good == Verdict((0, 1, 2, 3), (3, 0, 0, 0), 0, (0,))
    assert isinstance(failed, NumericsError)
    assert ended == Verdict((0, 1), (3, 0), 0, (0,))
    window_is_bad = rows.clone()
    window_is_bad[2, 1] = torch.nan
    assert at_zero(Fly(2, 0.3), tree, window_is_bad) == Verdict((), (), 0)


def test_departures_alone_differ_from_the_exact_verdict() -> None:
    """Without deferring, the verdict is the exact one up to the first departure."""
    for seed, tree, rows in pairs():
        relaxed, exact = judged(Fly(2, 0.3), tree, rows, seed), judged(RecursiveRejection(), tree, rows, seed)
        if relaxed.departures:
            assert len(exact.path) == relaxed.departures[0]
        else:
            assert replace(relaxed, departures=()) == exact
