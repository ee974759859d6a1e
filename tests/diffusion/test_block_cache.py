"""Exact block cache: nothing but cost differs from decoding without a cache."""

import numpy as np
import pytest
import torch

from paceline.diffusion import Canvas, ConfiguredMethod
from paceline.models.denoiser import Call
from tests.diffusion.decoding import PlannedBlocks, Watched, complete, fill, same
from tests.diffusion.toys_t4 import t4


@pytest.mark.parametrize("merge", [True, False])
def test_calls_and_slots_follow_the_formula(merge: bool) -> None:
    # Blocks of 4: the prompt fills one and a half, decoding the next half and two more: 2 + 4 + 4 rounds.
    toy = PlannedBlocks([0.5] * 10, prompt=6)
    config = {"method": "static", "cache": "block", "merge_writes": merge}
    outcome = fill(toy, config, 10, (1, 2, 3, 4, 5, 1))
    rounds, stored = 2 + 4 + 4, 3
    assert outcome.trajectory.calls == rounds + (0 if merge else stored)
    assert outcome.trajectory.slots_computed == rounds * 4 + stored * 4
    without = fill(toy, "static", 10, (1, 2, 3, 4, 5, 1))
    assert without.trajectory.slots_computed == 2 * 8 + 4 * 12 + 4 * 16


@pytest.mark.parametrize("merge", [True, False])
@pytest.mark.parametrize("block_length", [None, 2])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_canvas_is_that_of_no_cache(merge: bool, block_length: int | None, dtype: torch.dtype) -> None:
    toy = t4("block", dtype=dtype)
    base = {"method": "threshold", "confidence_threshold": 0.4, "block_length": block_length}
    plain = fill(toy, base, 13)
    ours = fill(toy, {**base, "cache": "block", "merge_writes": merge}, 13)
    assert same(plain, ours)
    assert np.array_equal(plain.canvas.confidence, ours.canvas.confidence, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_logits_are_those_of_no_cache_to_the_bit(dtype: torch.dtype) -> None:
    toy = Watched(t4("block", dtype=dtype))
    fill(toy, {"method": "static", "cache": "block"}, 13)
    plain = Watched(t4("block", dtype=dtype))
    fill(plain, "static", 13)
    for ([ours], [got]), ([theirs], [expected]) in zip(toy.passes, plain.passes, strict=True):
        rows = np.searchsorted(theirs.slots, ours.slots)
        assert np.array_equal(theirs.ids[rows], ours.ids)
        assert np.array_equal(ours.slots[ours.wanted], theirs.slots[theirs.wanted])
        assert torch.equal(got, expected)


def test_reading_a_half_masked_block_would_be_noticed() -> None:
    toy = t4("block")
    cache, half = toy.new_cache(16), np.array([3, 4, 5, 23])
    toy.forward([Call(half, np.arange(4), cache, None, True)])
    now = np.full(4, 23)
    [wrong] = toy.forward([Call(now, np.arange(4, 8), cache, np.arange(4))])
    [right] = toy.forward([Call(np.array([3, 4, 5, 6, *now]), np.arange(8))])
    assert (wrong[:, :-1] - right[4:, :-1]).abs().max() > 1e-3


def test_what_is_finished_is_stored_once_and_nothing_masked_is_read() -> None:
    toy = Watched(PlannedBlocks([0.5] * 8, prompt=4))
    fill(toy, {"method": "static", "cache": "block", "merge_writes": False}, 8, (1, 2, 3, 4))
    [first] = toy.passes[0][0]
    assert first.write
    assert first.slots.tolist() == [0, 1, 2, 3]
    for [call], _ in toy.passes:
        assert call.write == bool((call.ids != toy.mask_token_id).all())
        stored = call.slots[-1] // 4 * 4
        assert call.read.tolist() == list(range(stored))


def test_a_rewritten_block_is_stored_again_with_those_after_it() -> None:
    toy = PlannedBlocks([0.5] * 16)
    canvas = Canvas.of((), 16, mask_token_id=toy.mask_token_id)
    parts = ConfiguredMethod({"method": "static", "cache": "block"}).parts(toy, canvas)
    done = np.arange(12)
    canvas.write(done, done % 3, np.ones(12))
    assert parts.cache.plans(canvas, range(12, 16))[0].slots.tolist() == list(range(16))
    assert parts.cache.plans(canvas, range(12, 16))[0].slots.tolist() == list(range(12, 16))
    canvas.edit(np.array([6]), np.array([5]), np.ones(1))
    assert parts.cache.ahead(canvas, range(12, 16)) is None
    [plan] = parts.cache.plans(canvas, range(12, 16))
    assert plan.write
    assert plan.slots.tolist() == list(range(4, 16))
    assert plan.read.tolist() == list(range(4))
    canvas.truncate(10)
    [plan] = parts.cache.plans(canvas, range(8, 10))
    assert plan.slots.tolist() == [8, 9]
    assert not plan.write


def test_regions_of_a_template_are_filled_as_without_cache() -> None:
    toy = t4("block")
    template = [3, 23, 23, 6, 7, 23, 8, 9, 10, 11, 12, 13, 23, 23, 5, 23]
    run = [
        complete(toy, Canvas.infill(template, mask_token_id=23), {"method": "static", "cache": c})
        for c in ("none", "block")
    ]
    assert same(*run)


def test_blocks_ahead_cost_slots_and_change_nothing() -> None:
    toy = t4("block")
    near, far = (fill(toy, {"method": "static", "cache": "block", "blocks_ahead": n}, 13) for n in (0, 1))
    assert same(near, far)
    assert far.trajectory.slots_computed == near.trajectory.slots_computed + 4 * (1 + 4 + 4)


@pytest.mark.parametrize("method", ["static", "threshold", "freedave"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_shifted_logits_change_nothing(method: str, dtype: torch.dtype) -> None:
    """The first slot of a block has its logits from the last one of the block before it, which is stored."""
    for seed in range(3):
        toy = t4("shifted block", seed=seed, dtype=dtype)
        plain, ours = fill(toy, method, 13), fill(toy, {"method": method, "cache": "block"}, 13)
        assert same(plain, ours)
        assert ours.trajectory.slots_computed < plain.trajectory.slots_computed
        assert not same(ours, fill(t4("block", seed=seed, dtype=dtype), method, 13))
