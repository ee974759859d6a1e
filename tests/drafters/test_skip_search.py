"""SWIFT's search finds a planted set, spends no more than it may, and its process is a Gaussian one."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from paceline.drafters.self import SearchRules, SkipSearch, SubLayers, first_set, random_set, swift, upper_bounds

LAYERS, COUNT = 10, 6
PLANTED = random_set(LAYERS, COUNT, np.random.default_rng(5))
"""One of 8008."""
NEVER = 10**6


def overlap(skipped: SubLayers) -> float:
    """Share of the planted set that was hit: 1 for it alone."""
    return len(skipped & PLANTED) / COUNT


def searched(rules: SearchRules, score: Callable[[SubLayers], float] = overlap, seed: int = 0) -> SkipSearch:
    search = SkipSearch(LAYERS, COUNT, rules, seed)
    search.measured(score(search.best))
    while not search.done:
        skipped = search.next()
        search.tell(skipped, score(skipped))
    return search


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_planted_set_is_found_by_the_process_and_not_by_chance(seed: int) -> None:
    """With as many tries, random sets alone do not (negative control)."""
    found = searched(SearchRules(stop_score=1.0, max_steps=80, bayes_every=2), seed=seed)
    assert found.best == PLANTED
    assert found.score == 1.0
    assert found.steps < 80
    chance = searched(SearchRules(stop_score=1.0, max_steps=80, bayes_every=NEVER), seed=seed)
    assert chance.best != PLANTED
    assert chance.steps == 80


def test_every_set_is_tried_once_where_there_are_few() -> None:
    search = SkipSearch(5, 2, SearchRules(stop_score=1.0, bayes_every=3), 0)
    tried = [search.best]
    search.measured(0.0)
    while not search.done:
        tried.append(search.next())
        search.tell(tried[-1], 0.0)
    assert len(set(tried)) == 15
    assert len(tried) <= 16


def test_it_ends_by_score_by_patience_and_by_steps() -> None:
    first = overlap(first_set(LAYERS, COUNT))
    assert searched(SearchRules(stop_score=first)).steps == 0
    flat = searched(SearchRules(max_steps=50, patience=7, bayes_every=3), lambda skipped: 0.5)
    assert (flat.steps, flat.idle) == (7, 7)
    assert flat.best == first_set(LAYERS, COUNT)
    assert searched(SearchRules(stop_score=1.0, max_steps=5, patience=50)).steps == 5


def test_a_better_set_is_kept_and_begins_the_patience_anew() -> None:
    search = SkipSearch(LAYERS, COUNT, SearchRules(patience=3))
    search.measured(0.4)
    one, two, three = search.next(), search.next(), search.next()
    search.tell(one, 0.3)
    search.tell(two, 0.5)
    assert (search.best, search.score, search.idle) == (two, 0.5, 0)
    search.tell(three, 0.5)
    assert (search.best, search.idle, search.steps) == (two, 1, 3)


def test_another_kind_of_text_begins_the_search_again() -> None:
    search = searched(SearchRules(stop_score=1.0, max_steps=80, bayes_every=2))
    search.measured(0.95)
    assert search.begun == 1
    assert not search.done
    search.measured(0.5)
    assert (search.begun, search.steps, search.best, search.score) == (2, 0, PLANTED, 0.5)


def test_bounds_are_those_of_the_closed_form(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the textbook's formulas with an inverse; with another noise they differ (negative control)."""
    monkeypatch.setattr(swift, "LENGTHS", (2.0,))
    rng = np.random.default_rng(1)
    known, asked = (rng.integers(0, 2, (n, 9)).astype(float) for n in (12, 5))
    scores = rng.random(12)

    def kernel(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        x = np.sqrt(5.0) * np.sqrt(((a[:, None] - b[None]) ** 2).sum(-1)) / 2.0
        found: np.ndarray = (1 + x + x**2 / 3) * np.exp(-x)
        return found

    inverse = np.linalg.inv(kernel(known, known) + 0.01 * np.eye(12))
    across, y = kernel(asked, known), (scores - scores.mean()) / scores.std()
    mean = across @ inverse @ y
    deviation = np.sqrt(1 - np.einsum("ij,jk,ik->i", across, inverse, across))
    expected = scores.mean() + scores.std() * (mean + 2.5 * deviation)
    assert np.allclose(upper_bounds(known, scores, asked), expected)
    assert not np.allclose(upper_bounds(known, scores, asked, noise=0.5), expected)


def test_equal_scores_and_one_score_are_no_trouble() -> None:
    rows = np.eye(4)
    assert np.isfinite(upper_bounds(rows, np.full(4, 0.3), 1 - rows)).all()
    assert np.isfinite(upper_bounds(rows[:1], np.array([0.3]), rows)).all()
