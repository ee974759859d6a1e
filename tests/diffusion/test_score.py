"""Scores and what modifies them: measures, draws keyed by seed, round and slot, factors and bars on ends of text."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from scipy import stats

from paceline.diffusion import Canvas, ConfiguredMethod, Predictions, Setting, part
from paceline.diffusion.predictions import uniform
from tests.diffusion.decoding import fill
from tests.diffusion.toys import Independent, Toy, with_ends

RandomScore = part("score", "random")
EndRamp = part("modifier", "eoser")

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
    predictions = Predictions.of(torch.from_numpy(toy.table), np.arange(4))
    firsts = Counter(
        int(np.argmax(RandomScore(Setting(canvas, toy, seed)).score(predictions, canvas))) for seed in range(400)
    )
    seen = [firsts[i] for i in range(4)]
    assert stats.chisquare(seen).pvalue > 1e-3
    assert stats.chisquare(seen, 400 * predictions.confidence / predictions.confidence.sum()).pvalue < 1e-6


END = 6


def factors(length: int, **options: object) -> list[float]:
    toy = Independent([0.5] * length)
    canvas = Canvas.of((), length, mask_token_id=toy.mask_token_id)
    parts = ConfiguredMethod({"method": "eoser", **options}).parts(toy, canvas)
    [modifier] = parts.transition.modifiers
    assert isinstance(modifier, EndRamp)
    return [modifier.factor(s) for s in range(modifier.rounds)]


def test_the_ramp_ends_at_its_last_value() -> None:
    assert factors(4) == pytest.approx([0.4, 0.6, 0.8, 1.0])
    assert factors(8, block_length=4, denoising_steps=2) == pytest.approx([0.4, 0.6, 0.8, 1.0])
    expected = [0.01 + 0.99 * (2 ** (s + 1) - 1) / 8 for s in range(3)]
    assert factors(8, eos_ramp="exponential", eos_factor_min=0.01) == pytest.approx(expected)


def test_the_factor_moves_ends_back() -> None:
    toy = with_ends([0.6, 0.95, 0.5, 0.7], [0, END, 0, 0], END)
    assert fill(toy, "static", 4, ()).trajectory.order.tolist() == [1, 3, 0, 2]
    assert fill(toy, "eoser", 4, ()).trajectory.order.tolist() == [3, 0, 1, 2]


def test_scores_below_zero_are_lowered_too() -> None:
    toy = with_ends([0.9, 0.85, 0.5, 0.7], [END, 0, 0, 0], END)
    assert fill(toy, {"method": "entropy"}, 4, ()).trajectory.order[0] == 0
    assert fill(toy, {"method": "entropy", "modifiers": ("eoser",)}, 4, ()).trajectory.order[0] == 1


def test_no_end_before_its_time() -> None:
    toy = with_ends([0.99, 0.6, 0.98, 0.96, 0.5], [END, 0, END, 0, 0], END)
    config = {"method": "cad", "eos_bar": 0.6, "max_tokens_per_round": 32}
    order = fill(toy, config, 5, ()).trajectory.order.tolist()
    assert order == [3, 1, 4, 0, 2]
    assert fill(toy, {**config, "eos_bar": 0.0}, 5, ()).trajectory.order.tolist()[:2] == [0, 2]


def test_the_bar_does_not_write_more_than_the_quota_asks_and_allows() -> None:
    """A quota of two with one slot free of the bar writes that one."""
    toy = with_ends([0.99, 0.6, 0.98, 0.97], [END, 0, END, END], END)
    rounds = fill(toy, {"method": "static", "modifiers": ("eos_bar",), "denoising_steps": 2}, 4, ()).trajectory.rounds
    assert rounds[0].slots.tolist() == [1]


def test_where_everything_ends_decoding_goes_on_a_slot_a_round() -> None:
    toy = with_ends([0.99, 0.98, 0.97, 0.96], [END] * 4, END)
    outcome = fill(toy, {"method": "cad", "eos_bar": 1.0}, 4, ())
    assert outcome.trajectory.calls == 4
    assert (outcome.canvas.tokens == END).all()


@pytest.mark.parametrize("cap", [1, 2, 3])
def test_no_round_writes_more_than_the_cap(cap: int) -> None:
    outcome = fill(Independent([0.99] * 7), {"method": "cad", "max_tokens_per_round": cap}, 7, ())
    assert [r.slots.size for r in outcome.trajectory.rounds] == [cap] * (7 // cap) + [7 % cap] * (7 % cap > 0)


def test_a_block_never_takes_more_rounds_than_slots() -> None:
    toy = with_ends([0.3, 0.2, 0.4, 0.1, 0.3, 0.2], [END, 0, END, 0, END, END], END)
    assert fill(toy, {"method": "cad", "block_length": 3, "eos_bar": 0.9}, 6, ()).trajectory.calls <= 6
