"""The rule of SpecDec++ with a predictor that learns while decoding: the checks of its description; the predictor
learns, and gives true probabilities.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from controllers.steps import outcome, requested, step
from controllers.worlds import Guesser, World, informed, steady

from paceline import ConfigError
from paceline.controllers.policies import FixedController
from paceline.controllers.policies.online_acceptance import (
    AcceptHead,
    Features,
    OnlineAcceptanceController,
    features_of,
)
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


def with_head(head: AcceptHead | None = None, **options: Any) -> OnlineAcceptanceController:
    controller = OnlineAcceptanceController(**options)
    if head is not None:
        controller.heads = {True: head, False: head}
    return controller


def test_the_ends_of_the_threshold_are_the_bounds() -> None:
    for confidence in (0.999, 0.5, 0.01):
        assert requested(OnlineAcceptanceController(stop_threshold=1.0), [confidence] * 40)[1] == 20
        assert requested(OnlineAcceptanceController(stop_threshold=0.0), [confidence] * 40)[1] == 2
    assert requested(OnlineAcceptanceController(stop_threshold=1.0, bound=[3, 7]), SURE)[1] == 7
    assert requested(OnlineAcceptanceController(stop_threshold=0.0, bound=[3, 7]), SURE)[1] == 3


def test_the_token_that_crosses_the_threshold_is_the_last_one() -> None:
    """0.9 ** 3 = 0.729 is a chance of rejection of 0.271, 0.9 ** 4 = 0.656 one of 0.344."""
    assert requested(with_head(Oracle(), stop_threshold=0.3), [0.9] * 40)[1] == 4
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
    controller = OnlineAcceptanceController()
    assert requested(controller, [0.99] * 40)[1] == 20
    vain.run(controller, 600)
    assert requested(controller, [0.99] * 40)[1] == 2
    head = controller.heads[True]
    assert np.mean(
        [head.chance((1.0, math.log(99), math.log(0.99), 0.0, x, 0.0, 0.0, 0.0)) for x in (0.05, 0.1)]
    ) == pytest.approx(0.6, abs=0.1)


def test_evidence_ends_with_the_first_rejection() -> None:
    controller = OnlineAcceptanceController(stop_threshold=1.0)
    for _ in range(8):
        step(controller, SURE, 3)
    assert controller.heads[True].seen == 8 * 4


def test_one_head_for_greedy_and_one_for_sampled_text() -> None:
    controller = OnlineAcceptanceController()
    for _ in range(60):
        step(controller, SURE, 0, key=0, temperature=1.0)
    assert requested(controller, SURE, key=1, temperature=1.0)[1] == 2
    assert requested(controller, SURE, key=2, temperature=0.0)[1] > 5


def test_what_a_drafter_passes_beside_its_confidence_counts() -> None:
    """Equal confidence, but the entropy tells good tokens from bad ones."""
    controller = OnlineAcceptanceController(bound=(1, 20))
    rng = np.random.default_rng(0)
    for _ in range(500):
        bad = bool(rng.random() < 0.5)
        features = [{"entropy": 2.0 if bad else 0.1, "margin": 0.0}] * 3
        drafted = requested(controller, [0.8] * 3, features)[1]
        tree = TokenTree.chain([1] * drafted, confidence=[0.8] * drafted)
        (tree,) = controller.select([tree])
        controller.observe(outcome([tree], [Verdict(() if bad else tuple(range(len(tree))), (), 0)]))
    assert requested(controller, [0.8] * 9, [{"entropy": 2.0, "margin": 0.0}] * 9)[1] == 1
    assert requested(controller, [0.8] * 9, [{"entropy": 0.1, "margin": 0.0}] * 9)[1] > 4


def test_a_hopeless_drafter_costs_two_tokens_a_step() -> None:
    controller = OnlineAcceptanceController()
    World([Guesser("a", steady(0.02))], lambda rows: 1.0).run(controller, 200)
    assert requested(controller, [0.02] * 9)[1] == 2


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
def test_wrong_options_are_rejected(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        OnlineAcceptanceController(**wrong)


Floats = npt.NDArray[np.float64]


def logit(chance: float) -> float:
    return float(np.log(chance / (1 - chance)))


class Vain:
    """A drafter that claims more than it reaches, the more so the deeper it drafts, and that knows its entropy."""

    def __init__(self, seed: int = 0) -> None:
        self.rng = np.random.default_rng(seed)

    def token(self) -> tuple[Features, float]:
        """What the head sees, and the true chance."""
        depth, claimed = int(self.rng.integers(1, 12)), float(self.rng.uniform(0.3, 0.995))
        entropy = float(self.rng.uniform(0.0, 2.0))
        score = 0.6 * logit(claimed) - 0.5 * np.log(depth) - 0.7 * entropy + 1.0
        seen = features_of(depth, claimed, claimed**depth, 0.5, {"entropy": entropy})
        return seen, float(1 / (1 + np.exp(-score)))


def trained(weight: float, tokens: int = 6000) -> AcceptHead:
    head, world = AcceptHead(weight), Vain()
    for _ in range(tokens):
        seen, true = world.token()
        head.learn(seen, bool(world.rng.random() < true))
    return head


def worst_bin(foretold: Floats, stood: Floats, bins: int = 8) -> float:
    """Largest distance between the mean prediction and the empirical acceptance of equally filled bins, beyond three
    times its standard error.
    """
    found = []
    for part in np.array_split(np.argsort(foretold), bins):
        mean, share = foretold[part].mean(), stood[part].mean()
        found.append(abs(mean - share) - 3 * np.sqrt(max(share * (1 - share), 0.01) / len(part)))
    return float(max(found))


def judge(head: AcceptHead, tokens: int = 8000) -> tuple[float, float, float]:
    """`worst_bin` of the head, of its weighted prediction, and of the drafter's own confidence, on new tokens."""
    world, rows = Vain(seed=1), []
    for _ in range(tokens):
        seen, true = world.token()
        own = 1 / (1 + np.exp(-seen[1]))
        rows.append((head.chance(seen), head.raw(seen), own, float(world.rng.random() < true)))
    chance, raw, own_n, stood = np.array(rows).T
    return worst_bin(chance, stood), worst_bin(raw, stood), worst_bin(own_n, stood)


@pytest.mark.parametrize("weight", [1.0, 6.0])
def test_binned_predictions_equal_acceptance(weight: float) -> None:
    assert judge(trained(weight))[0] < 0.02


def test_the_check_catches_the_weighted_prediction_and_the_drafters_own_confidence() -> None:
    _, raw, own = judge(trained(6.0))
    assert raw > 0.1
    assert own > 0.1


def surprise(head: AcceptHead, tokens: int = 4000) -> float:
    """Mean log loss on new tokens beyond that of the true chances."""
    world, total = Vain(seed=2), 0.0
    for _ in range(tokens):
        seen, true = world.token()
        foretold = head.chance(seen)
        total += true * np.log(true / foretold) + (1 - true) * np.log((1 - true) / (1 - foretold))
    return float(total / tokens)


def test_it_tells_good_tokens_from_bad_ones() -> None:
    assert surprise(trained(6.0)) < 0.01


def test_that_check_catches_a_head_whose_tokens_are_shifted_by_one() -> None:
    head, world, before = AcceptHead(), Vain(), Vain(7).token()[0]
    for _ in range(6000):
        seen, true = world.token()
        head.learn(before, bool(world.rng.random() < true))
        before = seen
    assert surprise(head) > 0.05


def test_it_begins_as_the_drafters_confidence() -> None:
    for confidence in (0.1, 0.5, 0.93):
        assert AcceptHead().chance(features_of(3, confidence, 0.2, 0.5, None)) == pytest.approx(confidence)


def test_it_is_never_certain_and_never_breaks() -> None:
    head = AcceptHead()
    for _ in range(400):
        head.learn(features_of(1, 1.0, 1.0, 1.0, None), True)
        head.learn(features_of(20, 0.0, 0.0, 0.0, None), False)
    sure, hopeless = (head.chance(features_of(d, c, c, c, None)) for d, c in ((1, 1.0), (20, 0.0)))
    assert 0.99 < sure < 1.0
    assert 0.0 < hopeless < 0.01


def test_it_follows_a_change() -> None:
    head, seen = trained(6.0), features_of(2, 0.9, 0.8, 0.5, {"entropy": 0.3})
    rng = np.random.default_rng(3)
    for _ in range(6000):
        head.learn(seen, bool(rng.random() < 0.2))
    assert head.chance(seen) == pytest.approx(0.2, abs=0.06)
