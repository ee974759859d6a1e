"""The calibration of drafters: what teaches, what does not, and what an earlier process may say."""

from __future__ import annotations

import json

import numpy as np
import pytest

from paceline.controllers.auto.acceptance import Acceptance, SequenceOdds, Source
from paceline.tree import TokenTree, merge


def taught(chance: float, confidence: float, count: int = 400) -> tuple[Acceptance, SequenceOdds]:
    """A drafter of single tokens that is right with a chance and says another."""
    acceptance, own, rng = Acceptance(1), SequenceOdds(1), np.random.default_rng(0)
    for _ in range(count):
        right = rng.random() < chance
        acceptance.observe(own, TokenTree.chain([1], confidence=[confidence]), [1 if right else 2], [], drawn=False)
    return acceptance, own


@pytest.mark.parametrize("chance", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("confidence", [0.05, 0.5, 0.97])
def test_the_estimate_is_what_happened_and_not_what_the_drafter_says(chance: float, confidence: float) -> None:
    acceptance, own = taught(chance, confidence)
    (found,) = acceptance.reach(own, TokenTree.chain([1], confidence=[confidence]))
    assert found == pytest.approx(chance, abs=0.1)
    assert acceptance.level(own, 0, 1) == pytest.approx(chance, abs=0.1)


def test_without_evidence_the_estimate_is_the_prior() -> None:
    """The negative control of the test above."""
    acceptance, own = taught(0.1, 0.97, 0)
    assert acceptance.reach(own, TokenTree.chain([1], confidence=[0.97]))[0] > 0.5


def test_nodes_that_were_not_scored_teach_as_far_as_the_text_shows() -> None:
    acceptance, own = Acceptance(1), SequenceOdds(1)
    before = acceptance.level(own, 0, 2)
    for _ in range(100):
        acceptance.observe(own, TokenTree.chain([1, 2, 3], confidence=[0.5] * 3), [1], [], drawn=False)
    assert acceptance.level(own, 0, 1) > 0.9
    assert acceptance.sources[0].levels[2].tries == 0.0, "one token says nothing of the second level"
    assert acceptance.level(own, 0, 2) >= before


def test_below_a_rejected_node_nothing_is_learned() -> None:
    acceptance, own = Acceptance(1), SequenceOdds(1)
    acceptance.observe(own, TokenTree.chain([1, 2], confidence=[0.5] * 2), [7, 2], [], drawn=False)
    assert acceptance.sources[0].levels[1].tries == 1.0
    assert acceptance.sources[0].levels[2].tries == 0.0


def test_drawn_trials_teach_by_what_was_accepted() -> None:
    """The committed token may be one that a rejected trial drew too: it is no success of that trial."""
    acceptance, own = Acceptance(1), SequenceOdds(1)
    for _ in range(50):
        acceptance.observe(own, TokenTree.chain([1], confidence=[0.5]), [1], [], drawn=True)
    assert acceptance.level(own, 0, 1) < 0.1


def two(first: int, second: int) -> TokenTree:
    """A token each of two drafters."""
    return merge([TokenTree.chain([t], confidence=[0.5], source=i) for i, t in enumerate((first, second))])


def test_a_later_drafter_that_says_the_same_adds_nothing_beside_the_first() -> None:
    acceptance, own = Acceptance(2), SequenceOdds(2)
    for _ in range(50):
        acceptance.observe(own, two(1, 1), [2], [], drawn=False)
    assert acceptance.level(own, 0, 1) < 0.1
    assert acceptance.level(own, 1, 0) < 0.05


def test_a_later_drafter_is_judged_where_the_first_fails() -> None:
    acceptance, own = Acceptance(2), SequenceOdds(2)
    for _ in range(100):
        acceptance.observe(own, two(1, 3), [1], [], drawn=False)
    assert acceptance.sources[1].levels[0].tries == 0.0
    for _ in range(100):
        acceptance.observe(own, two(1, 3), [3], [], drawn=False)
    assert acceptance.level(own, 1, 0) > 0.9
    first, second = acceptance.reach(own, two(1, 3))
    assert second == pytest.approx((1.0 - first) * acceptance.sources[1].chance(0, 0.5), abs=0.02)
    assert acceptance.reach(own, two(1, 3), {0}) == pytest.approx([0.0, second / (1.0 - first)], abs=0.02)
    assert acceptance.covered(own, two(1, 3), 1, set()) == pytest.approx(first)
    assert acceptance.covered(own, two(1, 3), 1, {0}) == 0.0
    assert acceptance.covered(own, two(1, 3), 0, set()) is None


def test_a_sequence_unlike_the_others_gets_odds_of_its_own() -> None:
    acceptance, own = taught(0.8, 0.5)
    strange = SequenceOdds(1)
    for _ in range(60):
        acceptance.observe(strange, TokenTree.chain([1], confidence=[0.5]), [2], [], drawn=False)
        acceptance.observe(own, TokenTree.chain([1], confidence=[0.5]), [1], [], drawn=False)
    assert acceptance.level(strange, 0, 1) < 0.6 * acceptance.level(own, 0, 1)


def test_what_was_learned_survives_a_process_and_weighs_less() -> None:
    acceptance, own = taught(0.1, 0.97)
    again = Source.restore(json.loads(json.dumps(acceptance.sources[0].to_list())))
    assert again.level(1) == pytest.approx(acceptance.level(own, 0, 1), abs=0.1)
    assert again.levels[1].tries <= 40.0 < acceptance.sources[0].levels[1].tries
    for broken in ([], [[], [], [], 1.0, 1.0], [*acceptance.sources[0].to_list()[:3], float("nan"), 1.0]):
        with pytest.raises((ValueError, TypeError)):
            Source.restore(broken)
