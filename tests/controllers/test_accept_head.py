"""The head that foretells acceptance: calibrated where the drafter is not, whatever weight rejections have."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from paceline.controllers.policies import AcceptHead, Features, features_of

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
