"""Prefix and dual cache: what they compute, what they cost, where they are exact."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from paceline.diffusion import Canvas, ConfiguredMethod, Ending, Step, Stop, decode
from paceline.errors import ConfigError
from paceline.models.denoiser import Call
from tests.diffusion.decoding import Planned, Watched, complete, fill, same
from tests.diffusion.toys_t4 import t4

CONFIDENCE = [0.5, 0.9, 0.3, 0.7, 0.6, 0.4, 0.8, 0.2]


@pytest.mark.parametrize(
    ("cache", "slots"),
    [("none", 8 * 10), ("prefix", 2 * 10 + 3 * 8 + 3 * 4), ("dual", 2 * 10 + 6 * 4)],
)
def test_calls_and_slots_follow_the_formula(cache: str, slots: int) -> None:
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
