"""Calibration: it converges to the true chances, reads only reached parents, and follows changes."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.controllers.acceptance import DEPTH_BUCKET, RIVAL, Acceptance, Own
from paceline.tree.token_tree import TokenTree

CLAIMED = (0.3, 0.6, 0.9)
TRUE = (0.1, 0.4, 0.95)


def calibrated(*, below_rejections: bool = False) -> list[float]:
    """Chances learned from chains of three whose drafter is miscalibrated; the control also counts nodes below a rejected one."""
    rng, acceptance, own = np.random.default_rng(0), Acceptance(1), Own(1)
    for _ in range(3000):
        kinds = rng.integers(0, 3, 3)
        tree = TokenTree.chain([1, 1, 1], confidence=[CLAIMED[k] for k in kinds])
        path: list[int] = []
        for node, kind in enumerate(kinds):
            if rng.random() >= TRUE[kind]:
                break
            path.append(node)
        acceptance.observe(own, tree, path)
        if below_rejections:
            for node in range(len(path) + 1, 3):
                acceptance.observe(own, TokenTree.chain([1], confidence=[CLAIMED[kinds[node]]]), [])
    return [float(np.mean([acceptance.node(own, 0, DEPTH_BUCKET[d], claimed) for d in (1, 2)])) for claimed in CLAIMED]


def test_it_converges_to_the_true_chances_of_a_miscalibrated_drafter() -> None:
    assert calibrated() == pytest.approx(TRUE, abs=0.09)


def test_counting_nodes_below_a_rejected_one_fails_the_check() -> None:
    assert calibrated(below_rejections=True) != pytest.approx(TRUE, abs=0.09)


def test_siblings_of_the_accepted_child_are_failures_and_deeper_nodes_are_not_evidence() -> None:
    acceptance, own = Acceptance(1), Own(1)
    tree = TokenTree.build([1, 2, 3, 4], [-1, -1, 1, 0], confidence=[0.3, 0.3, 0.9, 0.6])
    assert acceptance.observe(own, tree, [0, 3]) == [2]
    tallies = [(tally.hits, tally.tries) for tally in acceptance.sources[0].bins if tally.tries]
    assert tallies == [(pytest.approx(0.995), pytest.approx(1.995)), (1.0, 1.0)]


def test_reach_is_the_product_along_the_path() -> None:
    acceptance, own = Acceptance(1), Own(1)
    tree = TokenTree.build([1, 2, 3], [-1, 0, -1], confidence=[0.6, 0.9, 0.2])
    reach = acceptance.reach(own, tree)
    assert reach[1] == pytest.approx(reach[0] * acceptance.node(own, 0, DEPTH_BUCKET[2], 0.9))
    assert reach[2] < reach[0]


def test_a_node_beside_an_earlier_drafters_is_counted_apart() -> None:
    acceptance, own = Acceptance(2), Own(2)
    tree = TokenTree.build([1, 2], [-1, -1], confidence=[0.5, 0.5], sources=[0, 1])
    for _ in range(200):
        acceptance.observe(own, tree, [0])
    later = acceptance.sources[1]
    assert later.level[RIVAL] < 0.1
    assert later.level[1] > 0.4


def test_a_change_of_the_text_is_followed_within_tens_of_steps() -> None:
    acceptance, own = Acceptance(1), Own(1)
    tree = TokenTree.chain([1, 1, 1], confidence=[0.6] * 3)
    for _ in range(500):
        acceptance.observe(own, tree, [])
    assert acceptance.level(own, 0, 1) < 0.05
    for _ in range(30):
        acceptance.observe(own, tree, [0, 1, 2])
    assert acceptance.level(own, 0, 1) > 0.5


def test_a_sequence_unlike_the_others_gets_its_own_odds() -> None:
    acceptance, easy, hard = Acceptance(1), Own(1), Own(1)
    tree = TokenTree.chain([1], confidence=[0.6])
    for _ in range(100):
        acceptance.observe(easy, tree, [0])
        acceptance.observe(hard, tree, [])
    assert acceptance.node(easy, 0, 1, 0.6) > 0.75
    assert acceptance.node(hard, 0, 1, 0.6) < 0.25
    assert acceptance.node(Own(1), 0, 1, 0.6) == pytest.approx(0.5, abs=0.1)
