"""Relaxed acceptance in thoughts: its definition, what is strict, and the phase, which may change within a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tools.enumerate_draws import rows_of
from tools.random_drafts import random_target

from paceline.errors import CapabilityError, NumericsError
from paceline.tree import ROOT, Scores, TokenTree, Verdict
from paceline.verifiers import GreedyVerifier, RecursiveRejection
from paceline.verifiers.relaxed_thinking import RelaxedThinking

VOCAB, BEGIN, END = 6, 4, 5
MARKS = {"begin_thinking_phase_token": BEGIN, "end_thinking_phase_token": END}
THINKING, ANSWERING = [1, BEGIN, 2], [BEGIN, 2, END, 1]


def judged(rule: RelaxedThinking, text: Sequence[int], tree: TokenTree, rows: torch.Tensor) -> Any:
    """Its verdict behind a text, which is the same beside another sequence."""
    zero = rule.at_zero()
    assert zero.reads_text
    verdict, beside = zero.after([text, ANSWERING]).verify([tree, tree], [rows, rows], ())
    scores = Scores(torch.cat((rows, rows)), (0, len(rows), 2 * len(rows)))
    assert zero.after([text, ANSWERING]).verify_scores([tree, tree], scores) == [verdict, beside]
    assert [beside] == zero.after([ANSWERING]).verify([tree], [rows], ())
    return verdict


def judged_strictly(tree: TokenTree, rows: torch.Tensor) -> Any:
    return GreedyVerifier().verify([tree], [rows])[0]


def drafts(count: int = 60):
    """Trees with drafts that are the likeliest token or another one, and rows."""
    for seed in range(count):
        target, rng = random_target(seed, VOCAB, zeros=0.2), torch.Generator().manual_seed(seed)
        tokens: list[int] = []
        for _ in range(6):
            ranked = target(tuple(tokens)).argsort()[::-1]
            tokens.append(int(ranked[min(int(torch.rand((), generator=rng) * 2.6), VOCAB - 1)]))
        tree = TokenTree.chain(tokens)
        yield tree, rows_of(tree, target)


def defined(text: Sequence[int], tree: TokenTree, rows: torch.Tensor, most: int, delta: float) -> tuple[int, ...]:
    """The tokens of a step, read off the rule."""
    written: list[int] = []
    for draft, row in zip(tree.tokens.tolist(), rows, strict=False):
        p, best = torch.softmax(row, -1), int(row.argmax())
        marks = [token for token in [*text, *written] if token in (BEGIN, END)]
        near = draft in p.topk(most).indices.tolist() and p[draft] >= p.max() - delta and p[draft] > 0
        relaxed = marks[-1:] == [BEGIN] and draft not in (BEGIN, END) and near
        if draft != best and not relaxed:
            return (*written, best)
        written.append(draft)
    return (*written, int(rows[-1].argmax()))


def wrong(rule: RelaxedThinking, text: Sequence[int]) -> int:
    """Verdicts that are not the definition's, of cases that are not all strict."""
    found = [
        (judged(rule, text, tree, rows), defined(text, tree, rows, rule.relaxed_topk, rule.relaxed_delta))
        for tree, rows in drafts()
    ]
    return sum(verdict.tokens != wanted for verdict, wanted in found)


@pytest.mark.parametrize("text", [THINKING, ANSWERING])
@pytest.mark.parametrize(("most", "delta"), [(2, 0.3), (3, 1.0), (6, 0.1)])
def test_it_is_its_definition(text: list[int], most: int, delta: float) -> None:
    assert wrong(RelaxedThinking(most, delta, **MARKS), text) == 0


def test_the_definition_catches_a_phase_that_is_looked_at_once_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    rule, real = RelaxedThinking(3, 1.0, **MARKS), RelaxedThinking.thinking_after
    monkeypatch.setattr(
        RelaxedThinking,
        "thinking_after",
        lambda self, text, before=False: before if len(text) == 1 else real(self, text, before),
    )
    assert wrong(rule, THINKING) > 0


def test_one_token_or_no_difference_is_equal_or_reject() -> None:
    relaxed = 0
    for tree, rows in drafts():
        strict = judged_strictly(tree, rows)
        assert judged(RelaxedThinking(1, 1.0, **MARKS), THINKING, tree, rows) == strict
        assert judged(RelaxedThinking(6, 0.0, **MARKS), THINKING, tree, rows) == strict
        verdict = judged(RelaxedThinking(6, 1.0, **MARKS), THINKING, tree, rows)
        assert bool(verdict.departures) == (verdict != strict)
        relaxed += verdict != strict
    assert relaxed > 20


def test_the_phase_changes_at_the_marks_within_a_step() -> None:
    """Drafts of the second likeliest token stand in thoughts alone; the marks are the likeliest where they stand."""
    tokens = [1, END, 1, 1]
    rows = torch.tensor([[0.6, 0.4, 0.0, 0.0, 0.0, 0.0]] * 5).log()
    rows[1] = torch.tensor([0.1, 0.0, 0.0, 0.0, 0.0, 0.9]).log()
    rule = RelaxedThinking(2, 1.0, **MARKS)
    assert judged(rule, THINKING, TokenTree.chain(tokens), rows) == Verdict((0, 1), (1, END), 0, (0,))
    rows[1] = torch.tensor([0.1, 0.0, 0.0, 0.0, 0.9, 0.0]).log()
    opened = judged(rule, ANSWERING, TokenTree.chain([0, BEGIN, 1, 1]), rows)
    assert opened == Verdict((0, 1, 2, 3), (0, BEGIN, 1, 1), 0, (2, 3))


@pytest.mark.parametrize("mark", [BEGIN, END])
def test_the_marks_are_judged_strictly(mark: int) -> None:
    rows = torch.full((2, VOCAB), -1.0)
    rows[:, 0] = 0.0
    assert judged(RelaxedThinking(6, 1.0, **MARKS), THINKING, TokenTree.chain([mark]), rows).path == ()
    assert judged(RelaxedThinking(6, 1.0, **MARKS), THINKING, TokenTree.chain([1]), rows).path == (0,)


def test_above_temperature_0_it_is_exact_rejection() -> None:
    assert RelaxedThinking.verify is RecursiveRejection.verify
    assert RelaxedThinking.decide is RecursiveRejection.decide


def test_trees_are_errors_and_bad_rows_end_paths() -> None:
    zero = RelaxedThinking(2, 1.0, **MARKS).at_zero().after([THINKING, THINKING])
    tree, rows = TokenTree.chain([1, 1, 1]), torch.tensor([[1.0, 0.5, 0.0, 0.0, 0.0, 0.0]] * 4)
    bad, late = rows.clone(), rows.clone()
    bad[0, 2] = late[2, 2] = torch.nan
    failed, ended = zero.verify([tree, tree], [bad, late], ())
    assert isinstance(failed, NumericsError)
    assert ended == Verdict((0,), (1,), 1, (0, 1))
    with pytest.raises(CapabilityError, match="acceptance_method 'relaxed_thinking' judges chains"):
        zero.verify([TokenTree.build([0, 1], [ROOT, ROOT])] * 2, [rows[:3]] * 2, ())
