"""Cache policies: the exact block cache, refreshed ones, ReCAP, Window-Diffusion."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from lab.diffusion import deviation, pooled
from paceline.diffusion import Canvas, ConfiguredMethod, decode
from paceline.diffusion.base import Ending, Step, Stop
from paceline.errors import ConfigError
from paceline.models import Call
from tests.diffusion.decoding import Planned, PlannedBlocks, Watched, complete, fill, same
from tests.diffusion.toys import t4


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


CONFIDENCE = [0.5, 0.9, 0.3, 0.7, 0.6, 0.4, 0.8, 0.2]


@pytest.mark.parametrize(
    ("cache", "slots"),
    [("none", 8 * 10), ("prefix", 2 * 10 + 3 * 8 + 3 * 4), ("dual", 2 * 10 + 6 * 4)],
)
def test_calls_and_slots_of_refreshed_policies_follow_the_formula(cache: str, slots: int) -> None:
    # Two blocks of 4 after a prompt of 2: a pass over all 10 slots at the start of each block, 3 smaller ones after it.
    toy = Planned(CONFIDENCE, prompt=2)
    outcome = fill(toy, {"method": "static", "cache": cache, "block_length": 4}, 8, (1, 2))
    assert outcome.trajectory.calls == 8
    assert outcome.trajectory.slots_computed == slots


def test_rounds_of_a_parallel_rule_count_as_calls_with_the_first_of_each_block() -> None:
    toy = Planned([0.95, 0.92, 0.95, 0.92, 0.95, 0.3, 0.95, 0.4], prompt=2)
    plain = fill(toy, {"method": "threshold", "block_length": 4}, 8, (1, 2))
    dual = fill(toy, {"method": "fast_dllm_dual", "block_length": 4}, 8, (1, 2))
    assert dual.trajectory.calls == plain.trajectory.calls == len(dual.trajectory.rounds) == 1 + 3
    assert dual.trajectory.slots_computed == (10) + (10 + 4 + 4)


def test_recap_computes_what_was_masked_at_the_last_full_step() -> None:
    toy = Watched(Planned(CONFIDENCE[:4], prompt=2))
    config = {"method": "recap", "denoising_steps": 4, "refresh_period": 2}
    fill(toy, config, 4, (1, 2))
    assert [calls[0] for calls in toy.computed] == [list(range(6)), [2, 3, 4, 5], list(range(6)), [2, 4]]


@pytest.mark.parametrize("kind", ["full", "shifted"])
@pytest.mark.parametrize("cache", ["prefix", "dual"])
def test_a_cache_refreshed_every_round_is_none(kind: str, cache: str) -> None:
    toy = t4(kind)
    base = {"method": "static", "block_length": 6}
    plain, often = fill(toy, base), fill(toy, {**base, "cache": cache, "refresh_period": 1})
    assert same(plain, often)
    assert often.trajectory.slots_computed == plain.trajectory.slots_computed


def test_a_cache_refreshed_at_blocks_only_is_not_none() -> None:
    base = {"method": "static", "block_length": 6}
    assert any(not same(fill(t4(seed=s), base), fill(t4(seed=s), {**base, "cache": "dual"})) for s in range(3))


@pytest.mark.parametrize("cache", ["prefix", "dual"])
def test_the_first_pass_of_a_block_is_a_full_one_and_leaves_its_keys(cache: str) -> None:
    toy = Watched(t4())
    canvas = Canvas.of((3, 4, 5), 12, mask_token_id=toy.mask_token_id)
    parts = ConfiguredMethod({"method": "static", "block_length": 6, "cache": cache}).parts(toy, canvas)
    [plan] = parts.cache.plans(canvas, range(3, 9))
    call = Call(canvas.tokens[plan.slots], plan.slots, parts.store, plan.read, plan.write)
    [ours] = toy.forward([call])
    full = toy.new_cache(15)
    [theirs] = toy.forward([Call(canvas.tokens, np.arange(15), full, None, True)])
    assert torch.equal(ours, theirs)
    assert parts.store.stored.tolist() == list(range(15))
    assert torch.equal(parts.store.keys, full.keys)
    assert torch.equal(parts.store.values, full.values)


def test_nothing_written_since_a_refresh_means_nothing_approximate() -> None:
    # Right after a refresh the small passes say what the full one says.
    for kind in ("full", "shifted"):
        toy = t4(kind)
        canvas = Canvas.of((3, 4, 5), 12, mask_token_id=toy.mask_token_id)
        [full] = toy.forward([Call(canvas.tokens, np.arange(15))])
        for cache in ("prefix", "dual"):
            parts = ConfiguredMethod({"method": "static", "block_length": 6, "cache": cache}).parts(toy, canvas)
            for _ in range(2):
                [plan] = parts.cache.plans(canvas, range(9, 15))
                [ours] = toy.forward([Call(canvas.tokens[plan.slots], plan.slots, parts.store, plan.read, plan.write)])
            known = ~torch.isnan(ours[:, 0])
            assert known.sum() == 6
            assert (ours[known][:, :-1] - full[9:15, :-1]).abs().max() < 1e-9


def test_shifted_models_compute_the_left_neighbour_and_do_not_write_it() -> None:
    toy = Watched(t4("shifted"))
    outcome = fill(toy, {"method": "static", "block_length": 6, "cache": "dual"})
    assert toy.computed[1] == [list(range(2, 9))]
    assert toy.computed[7] == [list(range(8, 15))]
    assert (np.sort(outcome.trajectory.order) == np.arange(3, 15)).all()


def test_positions_are_those_of_the_canvas() -> None:
    # The same window at other positions says something else, so equality above would not hold with compacted positions.
    toy = t4()
    ids = np.array([3, toy.mask_token_id, 7, toy.mask_token_id])
    [there] = toy.forward([Call(ids, np.array([3, 5, 8, 9]))])
    [compact] = toy.forward([Call(ids, np.arange(4))])
    assert (there[:, :-1] - compact[:, :-1]).abs().max() > 1e-3


def test_a_template_of_several_regions_is_filled() -> None:
    toy = t4()
    template = [3, 4, 23, 23, 6, 7, 23, 8, 23, 23, 23, 9]
    for cache in ("none", "prefix", "dual"):
        canvas = Canvas.infill(template, mask_token_id=23)
        outcome = complete(toy, canvas, {"method": "static", "cache": cache, "block_length": 5})
        assert outcome.trajectory.calls == 6
        assert outcome.canvas.tokens[[4, 5, 7, 11]].tolist() == [6, 7, 8, 9]


def test_a_shorter_text_is_refreshed() -> None:
    toy = Planned([0.5] * 8, prompt=2)
    canvas = Canvas.of((1, 2), 8, mask_token_id=toy.mask_token_id)
    parts = ConfiguredMethod({"method": "static", "cache": "dual", "block_length": 4}).parts(toy, canvas)
    block = range(2, 6)
    assert parts.cache.plans(canvas, block)[0].write
    assert not parts.cache.plans(canvas, block)[0].write
    canvas.truncate(8)
    assert parts.cache.ahead(canvas, block) is None
    [plan] = parts.cache.plans(canvas, block)
    assert plan.write
    assert plan.slots.tolist() == list(range(8))


def test_nothing_is_computed_beside_a_refresh_or_beyond_the_next() -> None:
    toy = Planned([0.5] * 8, prompt=2)
    canvas = Canvas.of((1, 2), 8, mask_token_id=toy.mask_token_id)
    parts = ConfiguredMethod({"method": "static", "cache": "dual", "refresh_period": 2, "block_length": 4}).parts(
        toy, canvas
    )
    later, last = canvas.copy(), canvas.copy()
    later.round, last.round = 1, 2
    parts.cache.plans(canvas, range(2, 6))
    assert parts.cache.ahead(later, range(2, 6)) is None
    parts.cache.plans(later, range(2, 6))
    assert parts.cache.ahead(later, range(2, 6)).slots.tolist() == [2, 3, 4, 5]
    assert parts.cache.ahead(later, range(6, 10)) is None
    assert parts.cache.ahead(last, range(2, 6)) is None


@dataclass
class FillFrom(Stop):
    """Wants the rest of the text written from a round on."""

    round: int

    def ending(self, step: Step, chosen: np.ndarray) -> Ending | None:
        return Ending(fill=True) if step.canvas.round >= self.round else None


@pytest.mark.parametrize(
    ("cache", "first", "sizes"), [("none", 0, [8]), ("dual", 0, [8]), ("prefix", 1, [1, 7]), ("dual", 1, [1, 3, 4])]
)
def test_a_stop_rule_fills_what_has_been_computed(cache: str, first: int, sizes: list[int]) -> None:
    # A small pass knows the block only: that is filled, and the next block's first pass knows the rest.
    toy = Planned(CONFIDENCE, prompt=2)
    canvas = Canvas.of((1, 2), 8, mask_token_id=toy.mask_token_id)
    parts = ConfiguredMethod({"method": "static", "block_length": 4, "cache": cache}).parts(toy, canvas)
    parts.transition.stop = FillFrom(first)
    [outcome] = decode([canvas], toy, [parts])
    assert outcome.error is None
    assert [r.slots.size for r in outcome.trajectory.rounds] == sizes
    assert outcome.trajectory.calls == len(sizes)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"cache": "dual"}, "block-causal"),
        ({"cache": "window", "schedule": "sliding"}, "block-causal"),
    ],
)
def test_approximate_caches_refuse_block_causal_models(config, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        fill(t4("block"), {"method": "static", **config}, 13)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"cache": "block"}, "cache must be none, prefix, dual or window"),
        ({"cache": "dual", "refresh_period": 0}, "refresh_period must be at least 1"),
        ({"cache": "dual", "recompute": "all"}, "recompute must be block or masked"),
        ({"cache": "prefix", "recompute": "masked"}, "no option 'recompute'"),
    ],
)
def test_wrong_use_is_one_clear_line(config, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        fill(t4(), {"method": "static", **config})


SEEDS = range(4)

PERIODS = (2, 4, 6)


class Fenced:
    """A denoiser in which the context of a group of rounds, the slots written when it began, sees nothing that was
    masked then.
    """

    def __init__(self, inner: Any, period: int) -> None:
        self.inner, self.period, self.rounds = inner, period, 0
        self.context = np.zeros(0, np.int64)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def forward(self, calls: Sequence[Call]) -> list[torch.Tensor]:
        [call] = calls
        if self.rounds % self.period == 0:
            self.context = call.slots[call.ids != self.inner.mask_token_id]
        self.rounds += 1
        keys = call.slots if call.read is None else np.concatenate([call.read, call.slots])
        fence = np.isin(call.slots, self.context)[:, None] & ~np.isin(keys, self.context)[None, :]
        return self.inner.forward([replace(call, mask=~fence)])


@pytest.mark.parametrize("period", PERIODS)
@pytest.mark.parametrize("kind", ["full", "shifted"])
def test_local_steps_are_exact_where_the_context_sees_nothing_masked(kind: str, period: int) -> None:
    for seed in SEEDS:
        toy = t4(kind, seed=seed)
        plain = fill(Fenced(toy, period), {"method": "static"})
        local = fill(Fenced(toy, period), {"method": "recap", "refresh_period": period})
        assert same(plain, local), seed
        assert local.trajectory.slots_computed < plain.trajectory.slots_computed


def test_they_are_not_where_it_does() -> None:
    pairs = [
        (fill(t4(seed=s), {"method": "static"}), fill(t4(seed=s), {"method": "recap", "refresh_period": 4}))
        for s in SEEDS
    ]
    assert any(not same(plain, local) for plain, local in pairs)


def test_the_deviation_grows_with_the_length_of_a_group() -> None:
    def drift(period: int) -> float:
        config = {"method": "recap", "refresh_period": period}
        toys = [t4(seed=seed) for seed in range(12)]
        canvases = [Canvas.of((3, 4, 5), 12, mask_token_id=toy.mask_token_id) for toy in toys]
        return pooled([deviation(toy, canvas, config) for toy, canvas in zip(toys, canvases, strict=True)]).mean

    found = [drift(period) for period in (1, *PERIODS)]
    assert found[0] < 1e-9
    assert found == sorted(found)
    assert found[-1] > 2 * found[1] > 0


ALL = {"active_slots": None, "window_slots": None, "refresh_period": 1}

SMALL = {"method": "window_diffusion", "active_slots": 3, "window_slots": 5, "refresh_period": 4}


@pytest.mark.parametrize("kind", ["full", "shifted"])
@pytest.mark.parametrize("refresh", ["window", "canvas"])
def test_everything_open_and_refreshed_every_round_is_the_full_canvas(kind: str, refresh: str) -> None:
    toy = t4(kind)
    plain = fill(toy, "static")
    ours = fill(toy, {"method": "window_diffusion", **ALL, "refresh": refresh})
    assert same(plain, ours)
    assert np.array_equal(plain.canvas.confidence, ours.canvas.confidence, equal_nan=True)
    assert ours.trajectory.slots_computed == plain.trajectory.slots_computed


@pytest.mark.parametrize("change", [{"window_slots": 6, "active_slots": 6}, {"refresh_period": 4}])
def test_fewer_slots_or_refreshes_are_not(change) -> None:
    config = {"method": "window_diffusion", **ALL, **change}
    assert any(not same(fill(t4(seed=seed), "static"), fill(t4(seed=seed), config)) for seed in range(3))


def test_an_endless_window_gives_active_slots_the_logits_of_a_full_pass() -> None:
    toy = Watched(t4())
    fill(toy, {**SMALL, "window_slots": None, "refresh_period": 1})
    for [call], [logits] in toy.passes:
        [full] = toy.inner.forward([Call(call.ids, call.slots)])
        assert call.slots.size == 15
        assert (logits[:, :-1] - full[call.wanted, :-1]).abs().max() < 1e-9


@pytest.mark.parametrize("refresh", ["window", "canvas"])
def test_a_refresh_stores_the_keys_of_a_full_pass_over_the_window(refresh: str) -> None:
    toy = t4()
    canvas = Canvas.of((3, 4, 5), 12, mask_token_id=toy.mask_token_id)
    parts = ConfiguredMethod({**SMALL, "refresh": refresh}).parts(toy, canvas)
    [plan] = parts.cache.plans(canvas, range(3, 15))
    kept = np.arange(8)
    assert plan.slots.tolist() == (kept if refresh == "window" else np.arange(15)).tolist()
    toy.forward([Call(canvas.tokens[plan.slots], plan.slots, parts.store, plan.read, plan.write)])
    full = toy.new_cache(15)
    toy.forward([Call(canvas.tokens[plan.slots], plan.slots, full, None, True)])
    assert torch.equal(parts.store.keys[:, kept], full.keys[:, kept])
    canvas.write(np.array([4]), np.array([1]), np.array([0.5]))
    canvas.round += 1
    [plan] = parts.cache.plans(canvas, range(3, 15))
    assert plan.slots.tolist() == [3, 4, 5, 6]
    assert plan.read.tolist() == [0, 1, 2, 7]


def test_the_window_slides_and_computes_what_this_phase_has_written() -> None:
    toy = Watched(Planned([0.9, 0.8, 0.7, 0.6, 0.5, 0.4], prompt=1))
    outcome = fill(toy, {**SMALL, "active_slots": 2, "window_slots": 3, "refresh_period": 3}, 6, (1,))
    assert outcome.trajectory.order.tolist() == [1, 2, 3, 4, 5, 6]
    slots = [calls[0] for calls in toy.computed]
    assert slots == [[0, 1, 2, 3], [1, 2, 3], [1, 2, 3, 4], [0, 1, 2, 3, 4, 5, 6], [4, 5, 6], [4, 5, 6]]
    reads = [calls[0].read for calls, _ in toy.passes]
    assert [None if read is None else read.tolist() for read in reads] == [
        None,
        [0],
        [0],
        None,
        [0, 1, 2, 3],
        [0, 1, 2, 3],
    ]


def test_pruning_changes_only_the_order_where_slots_are_independent() -> None:
    toy = Planned([0.3, 0.9, 0.2, 0.8, 0.4, 0.7], prompt=1)
    plain, ours = fill(toy, "static", 6, (1,)), fill(toy, {**SMALL, "active_slots": 2}, 6, (1,))
    assert (plain.canvas.tokens == ours.canvas.tokens).all()
    assert plain.trajectory.order.tolist() == [2, 4, 6, 5, 1, 3]
    assert ours.trajectory.order.tolist() == [2, 1, 4, 5, 6, 3]


def test_only_active_slots_are_written_in_a_refresh_too() -> None:
    outcome = fill(Planned([0.3, 0.2, 0.9, 0.9], prompt=1), {**SMALL, "active_slots": 2, "refresh": "canvas"}, 4, (1,))
    assert outcome.trajectory.order[0] == 1


def test_positions_in_a_window_are_those_of_the_canvas() -> None:
    # A template with a written region far right: its keys are read at their own places.
    template = [3, 23, 23, 23, 23, 23, 23, 23, 23, 4, 5]
    toy = Watched(t4())
    complete(toy, Canvas.infill(template, mask_token_id=23), {**SMALL, "window_slots": 4})
    [call] = toy.passes[0][0]
    assert call.slots.tolist() == [0, 1, 2, 3, 4, 9, 10]
    mask = np.zeros((11, 11), np.bool_)
    mask[:, call.slots] = True
    [hidden] = toy.inner.forward([Call(np.array(template), np.arange(11), mask=mask)])
    assert (toy.passes[0][1][0][:, :-1] - hidden[call.slots[call.wanted], :-1]).abs().max() < 1e-9
    [compact] = toy.inner.forward([Call(call.ids, np.arange(7))])
    assert (compact[:, :-1] - hidden[call.slots, :-1]).abs().max() > 1e-3


def test_adaptive_length_cuts_after_the_end_of_the_text_and_refreshes() -> None:
    toy = Watched(Planned([0.3, 0.4, 0.9, 0.5, 0.5, 0.5], tokens=[1, 1, 6, 1, 1, 1], prompt=1))
    toy.inner.eos_token_ids = (6,)
    outcome = fill(toy, {**SMALL, "stop": "adaptive_length"}, 6, (1,))
    assert outcome.canvas.tokens.tolist() == [1, 1, 1, 6]
    assert [calls[0] for calls in toy.computed] == [[0, 1, 2, 3, 4, 5], [0, 1, 2, 3], [1, 2]]
    whole = fill(toy, SMALL, 6, (1,))
    assert whole.canvas.length == 7
    assert whole.trajectory.calls == 6


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"active_slots": 0}, "active_slots must be at least 1"),
        ({"window_slots": 2}, "window_slots must be at least active_slots"),
        ({"refresh": "all"}, "refresh must be window or canvas"),
        ({"block_length": 4}, "no option 'block_length'"),
    ],
)
def test_wrong_use_of_a_window_is_one_clear_line(change, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        fill(t4(), {**SMALL, **change})
