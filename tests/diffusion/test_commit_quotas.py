"""Commit rules by numbers of slots: the time grid, confident decoding, the ascending step schedule; priors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from paceline.diffusion import Canvas
from paceline.diffusion.commit.quotas import grid
from paceline.models import Call
from tests.diffusion.decoding import complete, fill, same
from tests.diffusion.toys import Independent, Joint, t4

CONFIDENCE = np.random.default_rng(2).uniform(0.3, 0.9, 16)


def expected_sizes(length: int, steps: int) -> list[int]:
    levels, left, sizes = grid(steps), length, []
    for i in range(steps):
        size = left if i == steps - 1 else max(1, int(left * (1 - levels[i + 1] / levels[i])))
        sizes.append(size)
        left -= size
    return sizes


@pytest.mark.parametrize("steps", [1, 2, 3, 5, 16])
def test_numbers_follow_the_grid(steps: int) -> None:
    outcome = fill(Independent(CONFIDENCE), {"method": "dream", "denoising_steps": steps}, 16, ())
    assert [r.slots.size for r in outcome.trajectory.rounds] == expected_sizes(16, steps)


def test_each_block_has_its_grid() -> None:
    outcome = fill(Independent(CONFIDENCE), {"method": "dream", "denoising_steps": 3, "block_length": 8}, 16, ())
    assert [r.slots.size for r in outcome.trajectory.rounds] == 2 * expected_sizes(8, 3)


def test_order_noise_draws_without_replacement_from_the_softmax() -> None:
    toy, temperature = Independent([0.3, 0.5, 0.8]), 0.5
    config = {"method": "static", "modifiers": ("order_noise",), "alg_temp": temperature}
    first = Counter(int(fill(toy, config, 3, (), seed).trajectory.order[0]) for seed in range(300))
    weights = np.exp(np.array([0.3, 0.5, 0.8]) / temperature)
    assert stats.chisquare([first[i] for i in range(3)], 300 * weights / weights.sum()).pvalue > 1e-3
    assert stats.chisquare([first[i] for i in range(3)], [100] * 3).pvalue < 1e-3


def test_no_order_noise_is_the_ranking() -> None:
    toy = Independent(CONFIDENCE)
    config = {"method": "static", "modifiers": ("order_noise",)}
    assert same(fill(toy, config, 16, ()), fill(toy, "static", 16, ()))
    assert not same(fill(toy, {**config, "alg_temp": 1.0}, 16, ()), fill(toy, "static", 16, ()))


def test_independent_slots_are_written_at_the_rate_of_the_grid() -> None:
    steps, length, runs = 4, 24, 30
    toy = Independent([0.5] * length)
    masked = np.zeros(steps)
    for seed in range(runs):
        outcome = fill(toy, {"method": "dream_origin", "denoising_steps": steps}, length, (), seed)
        assert outcome.trajectory.calls == len(outcome.trajectory.rounds) <= steps
        for i in range(steps - 1):
            masked[i] += (outcome.canvas.born > i).sum()
    for i, level in enumerate(grid(steps)[1:-1]):
        assert stats.binomtest(int(masked[i]), runs * length, level).pvalue > 1e-3
        assert stats.binomtest(int(masked[i]), runs * length, 0.6 * level).pvalue < 1e-3


BASES = ["confidence", "margin", "entropy", "random", "leftmost"]


def dimple(base: str, threshold: float, steps: int | None = None) -> dict[str, object]:
    return {"method": "dimple", "score": base, "confidence_threshold": threshold, "denoising_steps": steps}


def walked(length: int, steps: int) -> list[int]:
    """The grid walked from the share that is masked, until it asks for a slot; everything in the last round."""
    left, sizes, levels = length, [], np.linspace(1, 1e-3, steps + 1)
    while left:
        after = [i for i in range(len(sizes) + 1, steps + 1) if levels[i] < left / length]
        wanted = [int(left * (1 - levels[i] / (left / length))) if i < steps else left for i in after]
        sizes.append(left if len(sizes) == steps - 1 else next(w for w in wanted if w >= 1))
        left -= sizes[-1]
    return sizes


@pytest.mark.parametrize("base", ["confidence", "margin", "entropy", "leftmost"])
@pytest.mark.parametrize("steps", [1, 2, 4, 7, 16])
def test_above_one_it_is_the_scheduled_sampler(base: str, steps: int) -> None:
    toy = Independent(CONFIDENCE)
    ours = fill(toy, dimple(base, 1.1, steps), 16, ()).trajectory
    order = fill(toy, {"method": "static", "score": base}, 16, ()).trajectory.order
    assert [r.slots.size for r in ours.rounds] == walked(16, steps)
    edges = np.cumsum([0, *walked(16, steps)])
    for round_, low, high in zip(ours.rounds, edges[:-1], edges[1:], strict=True):
        assert set(round_.slots) == set(order[low:high])


def test_below_it_sure_slots_are_written_together() -> None:
    for base in BASES:
        rounds = fill(Independent(CONFIDENCE), dimple(base, 0.7, 8), 16, ()).trajectory.rounds
        assert set(rounds[0].slots) == set(np.flatnonzero(CONFIDENCE > 0.7))


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("steps", [1, 3, 8, None])
@pytest.mark.parametrize("threshold", [0.2, 0.6, 0.95])
def test_never_more_rounds_than_steps(base: str, steps: int | None, threshold: float) -> None:
    assert fill(t4(), dimple(base, threshold, steps), 8).trajectory.calls <= (steps or 8)


def test_confidence_is_the_clean_one() -> None:
    """A hot sampler does not make the model sure: slots pass by probabilities before temperature."""
    toy = Independent([0.97, 0.6, 0.96, 0.5])
    rounds = fill(toy, {"method": "dimple", "temperature": 1e-6, "score": "leftmost"}, 4, ()).trajectory.rounds
    assert sorted(rounds[0].slots.tolist()) == [0, 2]


class Fenced:
    """A denoiser in which a prompt of so many slots sees nothing but itself."""

    def __init__(self, inner: Any, prompt: int) -> None:
        self.inner, self.prompt = inner, prompt

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def forward(self, calls: Sequence[Call]) -> list[torch.Tensor]:
        return self.inner.forward([replace(call, mask=self.seen(call)) for call in calls])

    def seen(self, call: Call) -> np.ndarray:
        keys = call.slots if call.read is None else np.concatenate([call.read, call.slots])
        return (call.slots[:, None] >= self.prompt) | (keys[None, :] < self.prompt)


@pytest.mark.parametrize("kind", ["full", "shifted"])
def test_a_prefilled_prompt_is_exact_where_it_does_not_see_the_answer(kind: Any) -> None:
    """With shifted logits its last token is computed again; a prompt that sees the masks makes prefilling
    approximate.
    """
    config, open_ = {"method": "dimple", "confidence_threshold": 0.7}, []
    for seed in range(2):
        toy = t4(kind, seed=seed)
        for one, runs in ((Fenced(toy, 3), None), (toy, open_)):
            plain, stored = (fill(one, {**config, "cache": cache}) for cache in ("none", "prefix"))
            passes = plain.trajectory.calls
            if runs is None:
                assert same(plain, stored)
                assert np.allclose(plain.canvas.confidence, stored.canvas.confidence, atol=1e-9, equal_nan=True)
                assert stored.trajectory.slots_computed == 15 + (passes - 1) * (12 + (kind == "shifted"))
            else:
                runs.append(np.allclose(plain.canvas.confidence, stored.canvas.confidence, atol=1e-6, equal_nan=True))
    assert not all(open_)


def test_priors_never_change_and_count_in_no_quota() -> None:
    weights = np.random.default_rng(3).dirichlet(np.full(64, 0.3)).reshape((2,) * 6)
    toy = Joint(weights)
    canvas = Canvas.of((), 6, mask_token_id=2, priors={1: 1, 4: 0})
    seen = []
    for method in ("dimple", "dream", "static", "ass", "mask_predict", "remdm", "llada2.1_s", "ccd_ds"):
        outcome = complete(toy, canvas, {"method": method, "temperature": 0.7})
        assert outcome.canvas.tokens[[1, 4]].tolist() == [1, 0]
        assert not {1, 4} & set(outcome.trajectory.order.tolist())
        seen.append(outcome.canvas.tokens.tolist())
    assert len({tuple(text) for text in seen}) > 1
    sizes = [r.slots.size for r in complete(toy, canvas, {"method": "static", "denoising_steps": 2}).trajectory.rounds]
    assert sizes == [2, 2]


def toy_of(length: int) -> Independent:
    return Independent(np.random.default_rng(length).uniform(0.2, 0.9, length))


@pytest.mark.parametrize("power", [1, 2, 3, 4, 5, 6, 7])
@pytest.mark.parametrize("method", ["ass", "eoser_ass"])
def test_quotas_double_and_sum_to_the_length(method: str, power: int) -> None:
    length = 2**power
    outcome = fill(toy_of(length), method, length, ())
    sizes = [r.slots.size for r in outcome.trajectory.rounds]
    assert sizes == [*(2**s for s in range(power - 1)), 2 ** (power - 1) + 1]
    assert outcome.trajectory.calls == power
    assert np.unique(outcome.trajectory.order).size == length


@pytest.mark.parametrize(("length", "sizes"), [(1, [1]), (3, [3]), (100, [1, 2, 4, 8, 16, 69])])
def test_other_lengths_leave_the_rest_to_the_last_round(length: int, sizes: list[int]) -> None:
    assert [r.slots.size for r in fill(toy_of(length), "ass", length, ()).trajectory.rounds] == sizes


@pytest.mark.parametrize("blocks", [1, 2, 4, 7])
def test_blocks_take_a_large_power_each(blocks: int) -> None:
    outcome = fill(toy_of(128), {"method": "ass_blocks", "ascending_blocks": blocks}, 128, ())
    sizes = [r.slots.size for r in outcome.trajectory.rounds]
    assert sizes == [1, 2, 4, 8, 16, 32, 65]
    first = 7 - blocks + 1
    start = 2**first - 1
    if blocks > 1:
        assert max(outcome.trajectory.rounds[first - 1].slots) < start
        for s in range(first, 7):
            slots = np.sort(outcome.trajectory.rounds[s].slots)
            assert slots.tolist() == list(range(start, start + sizes[s]))
            start += sizes[s]


def test_slots_given_in_advance_count_in_no_quota() -> None:
    toy = toy_of(10)
    canvas = Canvas.of((), 10, mask_token_id=toy.mask_token_id, priors={0: 2, 5: 2})
    outcome = complete(toy, canvas, {"method": "ass_blocks", "ascending_blocks": 2})
    assert [r.slots.size for r in outcome.trajectory.rounds] == [1, 2, 5]
    assert outcome.canvas.tokens[[0, 5]].tolist() == [2, 2]
