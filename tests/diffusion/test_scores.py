"""Measures and draws: numbers keyed by seed, round and slot."""

from collections import Counter

import numpy as np
import pytest
import torch
from scipy import stats

from paceline.diffusion import Canvas, Predictions, RandomScore, Setting, uniform
from tests.diffusion.decoding import fill
from tests.diffusion.toys import Independent, Toy

LARGE = 2**63 + 12345


def drawn(seed: int, round_: int) -> tuple[float, ...]:
    toy, canvas = Independent([0.5] * 4), Canvas.of((), 4, mask_token_id=7)
    canvas.round = round_
    predictions = Predictions.of(torch.zeros(4, 8), np.arange(4))
    return tuple(RandomScore(Setting(canvas, toy, seed)).score(predictions, canvas))


def test_random_scores_differ_by_round_and_seed() -> None:
    keys = [(seed, round_) for seed in (0, 1, LARGE, LARGE + 1) for round_ in range(3)]
    assert len({drawn(*key) for key in keys}) == len(keys)
    assert drawn(1, 2) == drawn(1, 2)


def test_uniform_draws_differ_by_round_seed_and_purpose() -> None:
    keys = [(s, r, p) for s in (0, LARGE, LARGE + 1) for r in range(3) for p in (2, 3, 5)]
    assert len({tuple(uniform(s, r, 4, p)) for s, r, p in keys}) == len(keys)


def test_sampled_tokens_differ_by_large_seeds() -> None:
    logits = torch.zeros(16, 64)
    texts = [tuple(Predictions.of(logits, np.arange(16), temperature=1.0, seed=LARGE + i).tokens) for i in range(3)]
    assert len(set(texts)) == 3


class Four(Toy):
    """Three slots between four tokens: no two measures rank them alike."""

    def rows(self, ids: np.ndarray, slots: np.ndarray) -> np.ndarray:
        p = np.array([[0.5, 0.25, 0.25, 0], [0.6, 0.4, 0, 0], [0.58, 0.14, 0.14, 0.14]])
        with np.errstate(divide="ignore"):
            return np.log(np.c_[p, np.ones(3)])[slots]


@pytest.mark.parametrize(
    ("method", "order"), [("static", [1, 2, 0]), ("margin", [2, 0, 1]), ("entropy", [1, 0, 2]), ("leftmost", [0, 1, 2])]
)
def test_each_measure_has_its_order(method: str, order: list[int]) -> None:
    assert fill(Four(5), method, 3, ()).trajectory.order.tolist() == order


def test_measures_are_those_of_the_definition() -> None:
    found = Predictions.of(torch.from_numpy(Four(5).rows(np.zeros(0), np.arange(3))[:, :4]), np.arange(3))
    assert found.confidence == pytest.approx([0.5, 0.6, 0.58])
    assert found.margin == pytest.approx([0.25, 0.2, 0.44])
    nats = [-sum(p * np.log(p) for p in row) for row in ([0.5, 0.25, 0.25], [0.6, 0.4], [0.58, 0.14, 0.14, 0.14])]
    assert found.entropy == pytest.approx(nats)
    assert found.gap == pytest.approx([np.log(2), np.log(1.5), np.log(58 / 14)])


def test_a_random_order_is_even_and_blind_to_what_the_model_says() -> None:
    toy, canvas = Independent([0.05, 0.3, 0.6, 0.95]), Canvas.of((), 4, mask_token_id=7)
    said = Predictions.of(torch.from_numpy(toy.table), np.arange(4))
    firsts = Counter(int(np.argmax(RandomScore(Setting(canvas, toy, seed)).score(said, canvas))) for seed in range(400))
    seen = [firsts[i] for i in range(4)]
    assert stats.chisquare(seen).pvalue > 1e-3
    assert stats.chisquare(seen, 400 * said.confidence / said.confidence.sum()).pvalue < 1e-6
