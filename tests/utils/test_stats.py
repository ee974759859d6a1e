"""Intervals cover what they should, ratios are paired, failures stay in."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.utils import stats


def speeds(rng: np.random.Generator, factor: float, prompts: int = 12, repeats: int = 4) -> tuple[np.ndarray, ...]:
    """Tokens and seconds of a baseline and of a setting that is `factor` times as fast, on a machine whose speed
    drifts.
    """
    drift = rng.lognormal(0.0, 0.5, (prompts, repeats))
    own = rng.lognormal(0.0, 0.2, (prompts, 1))
    noise = [rng.lognormal(0.0, 0.03, (prompts, repeats)) for _ in range(2)]
    tokens = np.full((prompts, repeats), 64.0)
    return tokens, own * drift * noise[0], tokens, own * drift * noise[1] / factor


def test_the_interval_covers_the_truth_and_pairing_cancels_drift() -> None:
    """40 runs at 95 %: fewer than 32 hits have a probability below 1e-3 even if the true coverage is only 0.9."""
    hits, widths = 0, []
    for seed in range(40):
        found = stats.speedup(*speeds(np.random.default_rng(seed), 1.3), draws=400)
        assert found is not None
        hits += found.low <= 1.3 <= found.high
        widths.append(found.high - found.low)
    assert hits >= 32
    assert np.median(widths) < 0.1


def test_unpaired_ratios_would_be_much_wider() -> None:
    """Negative control: with the repeats of one side shuffled the drift stays in."""
    rng = np.random.default_rng(0)
    base_tokens, base, tokens, own = speeds(rng, 1.3)
    shuffled = rng.permuted(own.ravel()).reshape(own.shape)
    paired, unpaired = stats.speedup(base_tokens, base, tokens, own), stats.speedup(base_tokens, base, tokens, shuffled)
    assert paired is not None
    assert unpaired is not None
    assert unpaired.high - unpaired.low > 4 * (paired.high - paired.low)


def test_a_failure_counts_as_a_ratio_of_0_and_as_time_without_tokens() -> None:
    tokens, seconds = np.full((3, 2), 10.0), np.ones((3, 2))
    broken = tokens.copy()
    broken[:2] = 0.0
    assert stats.paired_ratios(tokens, seconds, broken, seconds).tolist() == [[0.0, 0.0], [0.0, 0.0], [1.0, 1.0]]
    found = stats.speedup(tokens, seconds, broken, seconds)
    assert found is not None
    assert found.value == 0.0
    rate = stats.tokens_per_second(broken, seconds)
    assert rate is not None
    assert rate.value == pytest.approx(10 / 3)
    base = stats.paired_ratios(broken, seconds, tokens, seconds)
    assert base.shape == (1, 2)


def test_totals_and_single_prompts() -> None:
    tokens, slow, fast = np.array([[10.0], [30.0]]), np.array([[1.0], [1.0]]), np.array([[0.5], [1.0]])
    total = stats.speedup_total(tokens, slow, tokens, fast)
    assert total is not None
    assert total.value == pytest.approx(2 / 1.5)
    one = stats.speedup(tokens[:1], slow[:1], tokens[:1], fast[:1])
    assert one is not None
    assert (one.value, one.low, one.high, one.n) == (2.0, 2.0, 2.0, 1)
    empty = np.zeros((0, 0))
    assert stats.speedup(empty, empty, empty, empty) is None


def false_alarms(prompts: int, repeats: int = 3, worlds: int = 200) -> float:
    """How often a ratio of 1 with noise is called a difference."""
    rng, alarms = np.random.default_rng(0), 0
    for _ in range(worlds):
        ratios = np.exp(0.1 * rng.standard_normal((prompts, repeats)) + 0.05 * rng.standard_normal((prompts, 1)))
        found = stats.bootstrap([ratios], stats.median_ratio, draws=300)
        assert found is not None
        alarms += stats.rates_differ(**found.to_dict())
    return alarms / worlds


def test_differences_are_seldom_seen_where_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert all(false_alarms(prompts) <= 0.05 for prompts in (1, 2, 3, stats.ENOUGH))
    monkeypatch.setattr(stats, "ENOUGH", 1)
    assert false_alarms(1) > 0.2
    assert false_alarms(2) > 0.07


def test_a_difference_is_seen() -> None:
    found = stats.bootstrap([np.full((stats.ENOUGH, 2), 1.3)], stats.median_ratio)
    assert found is not None
    assert stats.rates_differ(**found.to_dict())


def test_intervals_of_shares() -> None:
    found = stats.wilson(8, 10)
    assert found["low"] == pytest.approx(0.4901625, abs=1e-6)
    assert found["high"] == pytest.approx(0.9433178, abs=1e-6)
    assert stats.wilson(0, 10)["low"] == pytest.approx(0.0, abs=1e-12)
    assert stats.wilson(0, 10)["high"] > 0.2
