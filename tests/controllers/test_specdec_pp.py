"""SpecDec++: the checks of its description."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from controllers.steps import asked, outcome, step
from controllers.worlds import Guesser, World, informed, steady

from paceline import ConfigError
from paceline.controllers.policies import AcceptHead, Features, FixedController, SpecDecPPController
from paceline.tree import TokenTree, Verdict

SURE = [0.97] * 40


class Oracle(AcceptHead):
    """Knows the true chance, which the worlds' drafters give as their confidence."""

    def chance(self, features: Features) -> float:
        return 1 / (1 + math.exp(-features[1]))


class Liar(Oracle):
    """Knows it and says the opposite."""

    def chance(self, features: Features) -> float:
        return 1 - super().chance(features)


def with_head(head: AcceptHead | None = None, **options: Any) -> SpecDecPPController:
    controller = SpecDecPPController(**options)
    if head is not None:
        controller.heads = {True: head, False: head}
    return controller


def test_the_ends_of_the_threshold_are_the_bounds() -> None:
    for confidence in (0.999, 0.5, 0.01):
        assert asked(SpecDecPPController(stop_threshold=1.0), [confidence] * 40)[1] == 20
        assert asked(SpecDecPPController(stop_threshold=0.0), [confidence] * 40)[1] == 2
    assert asked(SpecDecPPController(stop_threshold=1.0, bound=[3, 7]), SURE)[1] == 7
    assert asked(SpecDecPPController(stop_threshold=0.0, bound=[3, 7]), SURE)[1] == 3


def test_the_token_that_crosses_the_threshold_is_the_last_one() -> None:
    """0.9 ** 3 = 0.729 is a chance of rejection of 0.271, 0.9 ** 4 = 0.656 one of 0.344."""
    assert asked(with_head(Oracle(), stop_threshold=0.3), [0.9] * 40)[1] == 4
    assert step(with_head(Oracle(), stop_threshold=0.3), [0.9] * 20, 0, sequential=False) == 4


WORLD = World([Guesser("a", informed(0.3, 0.99), per_level=0.15)], lambda rows: 1.0, jitter=0.0, outliers=0.0)


def speed(controller: Any) -> float:
    """Tokens per second where a verification takes a second and a draft step 0.15."""
    return WORLD.run(controller, 800)


def test_an_oracle_for_the_head_beats_every_fixed_length() -> None:
    best = max(speed(FixedController(number)) for number in range(12))  # falls from 4 on
    assert speed(with_head(Oracle(), bound=(1, 20))) > 1.08 * best
    assert speed(with_head(Liar(), bound=(1, 20))) < best


def test_the_learned_head_comes_close_to_the_oracle() -> None:
    learned, oracle = (speed(with_head(head, bound=(1, 20))) for head in (None, Oracle()))
    assert learned > 0.97 * oracle


def test_it_learns_what_a_vain_drafter_is_worth() -> None:
    vain = World([Guesser("a", lambda step, rng: (0.6, 0.99))], lambda rows: 1.0)
    controller = SpecDecPPController()
    assert asked(controller, [0.99] * 40)[1] == 20
    vain.run(controller, 600)
    assert asked(controller, [0.99] * 40)[1] == 2
    head = controller.heads[True]
    assert np.mean(
        [head.chance((1.0, math.log(99), math.log(0.99), 0.0, x, 0.0, 0.0, 0.0)) for x in (0.05, 0.1)]
    ) == pytest.approx(0.6, abs=0.1)


def test_evidence_ends_with_the_first_rejection() -> None:
    controller = SpecDecPPController(stop_threshold=1.0)
    for _ in range(8):
        step(controller, SURE, 3)
    assert controller.heads[True].seen == 8 * 4


def test_one_head_for_greedy_and_one_for_sampled_text() -> None:
    controller = SpecDecPPController()
    for _ in range(60):
        step(controller, SURE, 0, key=0, temperature=1.0)
    assert asked(controller, SURE, key=1, temperature=1.0)[1] == 2
    assert asked(controller, SURE, key=2, temperature=0.0)[1] > 5


def test_what_a_drafter_passes_beside_its_confidence_counts() -> None:
    """Equal confidence, but the entropy tells good tokens from bad ones."""
    controller = SpecDecPPController(bound=(1, 20))
    rng = np.random.default_rng(0)
    for _ in range(500):
        bad = bool(rng.random() < 0.5)
        features = [{"entropy": 2.0 if bad else 0.1, "margin": 0.0}] * 3
        drafted = asked(controller, [0.8] * 3, features)[1]
        tree = TokenTree.chain([1] * drafted, confidence=[0.8] * drafted)
        (tree,) = controller.select([tree])
        controller.observe(outcome([tree], [Verdict(() if bad else tuple(range(len(tree))), (), 0)]))
    assert asked(controller, [0.8] * 9, [{"entropy": 2.0, "margin": 0.0}] * 9)[1] == 1
    assert asked(controller, [0.8] * 9, [{"entropy": 0.1, "margin": 0.0}] * 9)[1] > 4


def test_a_hopeless_drafter_costs_two_tokens_a_step() -> None:
    controller = SpecDecPPController()
    World([Guesser("a", steady(0.02))], lambda rows: 1.0).run(controller, 200)
    assert asked(controller, [0.02] * 9)[1] == 2


@pytest.mark.parametrize(
    "wrong",
    [
        {"stop_threshold": 2},
        {"bound": 3},
        {"bound": [0, 5]},
        {"bound": [6, 5]},
        {"bound": [1, 2, 3]},
        {"weight_mismatch": 0},
    ],
)
def test_wrong_options_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        SpecDecPPController(**wrong)
