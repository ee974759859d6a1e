"""Window-Diffusion: what is computed, read and left out; where it is the baseline."""

import numpy as np
import pytest
import torch

from paceline.diffusion import Canvas, ConfiguredMethod
from paceline.errors import ConfigError
from paceline.models.denoiser import Call
from tests.diffusion.decoding import Planned, Watched, complete, fill, same
from tests.diffusion.toys_t4 import t4

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


def test_positions_are_those_of_the_canvas() -> None:
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
def test_wrong_use_is_one_clear_line(change, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        fill(t4(), {**SMALL, **change})
