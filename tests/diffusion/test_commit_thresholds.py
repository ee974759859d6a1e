"""Commit rules by thresholds: Fast-dLLM's, dParallel's, BACD, LocalLeap, explore-then-exploit."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from paceline.diffusion import BitsToRounds, Canvas, ConfiguredMethod, Predictions, decode, part
from paceline.diffusion.base import Step
from paceline.errors import ConfigError
from tests.diffusion.decoding import PlannedBlocks, fill, same
from tests.diffusion.toys import Independent, Joint, Scripted, Toy, modes, t4

BoundedCommit = part("commit", "bounded")


def chosen(confidence: list[float], config: dict[str, Any]) -> list[int]:
    """Slots that a rule writes where the model is sure of its tokens to exactly these degrees."""
    n, toy = len(confidence), Independent(confidence)
    canvas, slots, c = Canvas.of((), n, mask_token_id=toy.mask_token_id), np.arange(n), np.asarray(confidence)
    predictions = Predictions(slots, slots % 3, c, 1 - c, c, c, torch.zeros(n, toy.vocab_size))
    found = (
        ConfiguredMethod(config)
        .parts(toy, canvas)
        .transition.commit.choose(Step(canvas, predictions, slots, c, range(n)))
    )
    return sorted(found.tolist())


INCLUSIVE: list[dict[str, Any]] = [
    {"method": "threshold", "confidence_threshold": 0.75},
    {"method": "local_leap", "confidence_threshold": 0.75, "anchor_radius": 0},
    {"method": "ete", "confidence_threshold": 0.75},
    {"method": "bacd", "confidence_low": 0.75, "confidence_high": 0.75},
    {"method": "cad", "confidence_threshold": 0.75},
]


@pytest.mark.parametrize("config", INCLUSIVE, ids=lambda config: config["method"])
def test_a_slot_on_the_bar_is_written(config: dict[str, Any]) -> None:
    assert chosen([0.75, 0.25, 0.875, np.nextafter(0.75, 0)], config) == [0, 2]


def test_confident_decoding_asks_for_more_than_its_bar() -> None:
    assert chosen([0.75, 0.25, 0.875, 0.5], {"method": "dimple", "confidence_threshold": 0.75}) == [2]


def largest(confidence: list[float], factor: float) -> int:
    ranked = sorted(confidence, reverse=True)
    return max([1, *(n for n in range(1, len(ranked) + 1) if (n + 1) * (1 - ranked[n - 1]) < factor)])


def test_the_factor_rule_writes_the_largest_number_that_its_bound_allows() -> None:
    rng = np.random.default_rng(0)
    seen = set()
    for _ in range(200):
        c, factor = (1 - rng.random(7) ** 3).tolist(), float(rng.uniform(0.3, 2.5))
        found = chosen(c, {"method": "factor", "factor": factor})
        assert found == sorted(np.argsort(-np.asarray(c))[: largest(c, factor)].tolist())
        seen.add(len(found))
    assert seen == set(range(1, 8))
    assert chosen([0.5, 0.75], {"method": "factor", "factor": 0.75}) == [1]  # 3 x 0.5 and 2 x 0.25 lie below, or not
    assert chosen([0.75, 0.75], {"method": "factor", "factor": 0.75}) == [0]  # 3 x 0.25 is the bound, not below it
    assert chosen([0.75, 0.75], {"method": "factor", "factor": 0.76}) == [0, 1]


PARALLEL: list[dict[str, Any]] = [
    {"method": "threshold", "confidence_threshold": 0.6},
    {"method": "factor", "factor": 1.5},
    {"method": "dparallel", "entropy_threshold": 0.9},
    {"method": "local_leap", "confidence_threshold": 0.7, "relaxed_threshold": 0.4},
    {"method": "ete", "confidence_threshold": 0.6},
    {"method": "ete_tokens", "confidence_threshold": 0.6},
    {"method": "bacd", "confidence_low": 0.4, "confidence_high": 0.6},
    {"method": "cad", "confidence_threshold": 0.6},
    {"method": "dimple", "confidence_threshold": 0.6},
    {"method": "prophet", "gap_thresholds": (2.0, 1.0, 0.5)},
    {"method": "freedave++", "confidence_threshold": 0.6},
]


@pytest.mark.parametrize("config", PARALLEL, ids=lambda config: config["method"])
def test_never_more_calls_than_slots_and_fewer_in_all(config: dict[str, Any]) -> None:
    """A call for each round, and the round of each slot is the most there can be."""
    joints: list[Callable[[], Any]] = [
        lambda seed=seed: Joint(np.random.default_rng(seed).dirichlet(np.full(256, 0.1)).reshape((2,) * 8))
        for seed in range(3)
    ]
    calls = [fill(toy(), {**config, "block_length": 4}, 8, ()).trajectory.calls for toy in joints]
    calls += [fill(t4(seed=seed), {**config, "block_length": 4}, 8).trajectory.calls for seed in range(3)]
    assert max(calls) <= 8
    assert sum(calls) < 6 * 8


NATS = [float(np.log(2)), float(np.log(4)), 0.0, float(np.log(3))]


class Even(Toy):
    """Slot i is torn evenly between as many tokens as its entropy says."""

    def rows(self, ids: np.ndarray, slots: np.ndarray) -> np.ndarray:
        with np.errstate(divide="ignore"):
            return np.log(
                [[float(token < round(np.exp(NATS[slot]))) for token in range(self.vocab_size)] for slot in slots]
            )


@pytest.mark.parametrize(("bar", "first"), [(0.5, [2]), (0.7, [0, 2]), (1.1, [0, 2, 3]), (1.4, [0, 1, 2, 3])])
def test_slots_below_the_bar_are_written_together(bar: float, first: list[int]) -> None:
    rounds = fill(Even(5), {"method": "dparallel", "entropy_threshold": bar}, 4, ()).trajectory.rounds
    assert sorted(rounds[0].slots.tolist()) == first


def test_where_none_is_the_lowest_is_written_alone() -> None:
    order = fill(Even(5), {"method": "dparallel", "entropy_threshold": -1.0}, 4, ()).trajectory
    assert [r.slots.tolist() for r in order.rounds] == [[2], [0], [3], [1]]


def test_the_bar_is_half_a_nat_of_the_clean_distribution() -> None:
    toy = t4()
    assert same(fill(toy, "dparallel"), fill(toy, {"method": "dparallel", "entropy_threshold": 0.5}))
    cold = ConfiguredMethod({"method": "dparallel", "temperature": 0.01}).parts(
        Even(5), Canvas.of((), 4, mask_token_id=4)
    )
    assert cold.transition.commit.threshold == 0.5
    rounds = fill(Even(5), {"method": "dparallel", "temperature": 0.01}, 4, ()).trajectory.rounds
    assert [r.slots.size for r in rounds] == [1, 1, 1, 1]


CARD = [0.7, 0.65, 0.5, 0.95]


def test_the_trace_of_the_card(monkeypatch: pytest.MonkeyPatch) -> None:
    bars: list[float] = []
    threshold = BoundedCommit.threshold

    def noting(self: BoundedCommit, step: Step) -> float:
        bars.append(threshold(self, step))
        return bars[-1]

    monkeypatch.setattr(BoundedCommit, "threshold", noting)
    outcome = fill(Independent(CARD), "bacd", 4, ())
    assert [r.slots.tolist() for r in outcome.trajectory.rounds] == [[3], [0], [1], [2]]
    assert bars == pytest.approx([0.9, 0.9, 0.825, (0.95 + 0.7 + 0.65) / 3])


def test_the_bar_falls_with_what_was_written() -> None:
    """A block that starts unsure takes at 0.7 what one that starts sure does not."""

    def script(first: float) -> Scripted:
        return Scripted(lambda filled, slot: (1, 0.7 if filled else first - 0.001 * slot))

    unsure = fill(script(0.65), "bacd", 4, ())
    assert [r.slots.size for r in unsure.trajectory.rounds] == [1, 3]
    sure = fill(script(0.899), "bacd", 4, ())
    assert [r.slots.size for r in sure.trajectory.rounds] == [1, 1, 1, 1]
    kept_up = fill(script(0.65), {"method": "bacd", "confidence_low": 0.75}, 4, ())
    assert [r.slots.size for r in kept_up.trajectory.rounds] == [1, 1, 1, 1]


@pytest.mark.parametrize("threshold", [0.5, 0.7, 0.9])
def test_equal_bounds_are_the_threshold_rule(threshold: float) -> None:
    toy = t4()
    ours = {"method": "bacd", "confidence_low": threshold, "confidence_high": threshold, "block_length": 6}
    theirs = {"method": "threshold", "confidence_threshold": threshold, "block_length": 6}
    assert same(fill(toy, ours), fill(toy, theirs))


def test_history_ends_with_the_block() -> None:
    """An unsure first block does not lower the bar of the second: 0.9 alone passes there first."""
    toy = Independent([0.62, 0.61, 0.7, 0.9])
    rounds = fill(toy, {"method": "bacd", "block_length": 2}, 4, ()).trajectory.rounds
    assert [r.slots.tolist() for r in rounds] == [[0], [1], [3], [2]]
    one = fill(toy, "bacd", 4, ()).trajectory.rounds
    assert one[0].slots.tolist() == [3]


def test_history_is_of_one_text() -> None:
    toys = Independent([0.9, 0.7, 0.65, 0.66])
    canvases = [Canvas.of((), 4, mask_token_id=7), Canvas.of((), 4, mask_token_id=7, priors={0: 1, 1: 1})]
    method = ConfiguredMethod("bacd")
    together = decode(canvases, toys, [method.parts(toys, canvas) for canvas in canvases])
    for canvas, outcome in zip(canvases, together, strict=True):
        [alone] = decode([canvas], toys, [method.parts(toys, canvas)])
        assert same(outcome, alone)
    assert not np.array_equal(together[0].trajectory.order, together[1].trajectory.order)


def test_blocks_grow() -> None:
    toy = Independent(np.linspace(0.9, 0.1, 14))
    config = {"method": "static", "schedule": "progressive", "block_lengths": (2, 3, 4), "score": "random"}
    order = fill(toy, config, 14, ()).trajectory.order
    edges = [0, 2, 5, 9, 13, 14]
    for low, high in pairwise(edges):
        assert set(order[low:high].tolist()) == set(range(low, high))


def test_blocks_stay_within_those_of_the_model() -> None:
    toy = PlannedBlocks([0.5] * 8, block_length=4)
    assert (
        fill(
            toy, {"method": "static", "schedule": "progressive", "block_lengths": (1, 1, 2, 4)}, 8, ()
        ).trajectory.calls
        == 8
    )
    with pytest.raises(ConfigError, match="not cross the model's, of 4 slots each"):
        fill(toy, {"method": "static", "schedule": "progressive", "block_lengths": (3, 4)}, 8, ())


LOCAL_LEAP_CARD = [0.95, 0.8, 0.8, 0.6, 0.8, 0.8, 0.8, 0.8]


def first_round(confidence: list[float], **options: float) -> set[int]:
    outcome = fill(Independent(confidence), {"method": "local_leap", **options}, len(confidence), ())
    return set(outcome.trajectory.rounds[0].slots.tolist())


def test_the_trace_of_the_card_near_anchors() -> None:
    outcome = fill(Independent(LOCAL_LEAP_CARD), "local_leap", 8, ())
    first, second = (set(one.slots.tolist()) for one in outcome.trajectory.rounds[:2])
    assert first == {0, 1, 2, 4}
    assert len(second) == 1
    assert second < {5, 6, 7}  # equally sure: which one is the surest is a matter of rounding


@pytest.mark.parametrize("options", [{"relaxed_threshold": 0.8}, {"anchor_radius": 0}])
def test_no_relaxation_is_the_threshold_rule(options: dict[str, float]) -> None:
    toy = Independent([0.85, 0.9, 0.3, 0.79, 0.6, 0.95])
    ours = fill(toy, {"method": "local_leap", "confidence_threshold": 0.8, **options}, 6, ())
    theirs = fill(toy, {"method": "threshold", "confidence_threshold": 0.8}, 6, ())
    assert same(ours, theirs)
    assert not same(fill(toy, {"method": "local_leap", "confidence_threshold": 0.8}, 6, ()), theirs)


def test_more_radius_and_a_lower_bar_write_more() -> None:
    confidence = np.random.default_rng(3).uniform(0.5, 1, 16).tolist()
    by_radius = [first_round(confidence, anchor_radius=r) for r in range(6)]
    by_bar = [first_round(confidence, relaxed_threshold=t) for t in (0.9, 0.8, 0.7, 0.6, 0.5)]
    for sets in (by_radius, by_bar):
        assert all(a <= b for a, b in pairwise(sets))
        assert sets[0] < sets[-1]


def test_a_neighbourhood_ends_with_its_block() -> None:
    outcome = fill(Independent(LOCAL_LEAP_CARD), {"method": "local_leap", "block_length": 4}, 8, ())
    assert sorted(outcome.trajectory.rounds[0].slots.tolist()) == [0, 1, 2]


def test_without_either_it_is_the_threshold_rule() -> None:
    toy = Joint(np.random.default_rng(5).dirichlet(np.full(64, 0.1)).reshape((2,) * 6))
    options = {"block_length": 3, "confidence_threshold": 0.8}
    ours = fill(toy, {"method": "ete", "look_ahead": 0, "explore_blocks": 0, **options}, 6, ())
    assert same(ours, fill(toy, {"method": "threshold", **options}, 6, ()))


def test_sure_slots_of_later_blocks_are_written() -> None:
    toy = Independent([0.5, 0.95, 0.95, 0.3, 0.95, 0.95])
    rounds = fill(toy, {"method": "ete", "block_length": 2, "look_ahead": 1}, 6, ()).trajectory.rounds
    assert sorted(rounds[0].slots.tolist()) == [1, 2]
    rounds = fill(toy, {"method": "ete", "block_length": 2, "look_ahead": 2}, 6, ()).trajectory.rounds
    assert sorted(rounds[0].slots.tolist()) == [1, 2, 4, 5]


def test_two_modes_take_two_rounds() -> None:
    toy = Joint(modes(1, 4))
    assert fill(toy, "ete", 4, ()).trajectory.calls == 2
    assert fill(toy, {"method": "threshold"}, 4, ()).trajectory.calls == 2


def test_copies_explored_together_take_two_rounds_still() -> None:
    toy = Joint(modes(3, 2))
    options = {"block_length": 2, "look_ahead": 2, "explore_blocks": 3}
    ours = fill(toy, {"method": "ete", **options}, 6, ())
    assert ours.trajectory.calls == 2
    assert fill(toy, "threshold", 6, ()).trajectory.calls == 6
    text = ours.canvas.tokens.reshape(3, 2)
    assert (text[:, 0] == text[:, 1]).all()


def test_the_least_certain_of_the_leftmost_slots_is_explored() -> None:
    toy = Independent([0.6, 0.4, 0.5, 0.2])
    rounds = fill(toy, {"method": "ete", "explore_window": 3}, 4, ()).trajectory.rounds
    assert rounds[0].slots.tolist() == [1]
    best_first = fill(toy, {"method": "ete", "explore_blocks": 0}, 4, ()).trajectory.rounds
    assert best_first[0].slots.tolist() == [0]


def test_a_round_with_little_information_explores_besides() -> None:
    toy = Independent([0.99, 0.4, 0.5, 0.2])
    rounds = fill(toy, {"method": "ete", "min_information": 0.5}, 4, ()).trajectory.rounds
    assert sorted(rounds[0].slots.tolist()) == [0, 3]


@pytest.mark.parametrize("seed", range(12))
def test_rounds_never_fall_below_the_bound(seed: int) -> None:
    """Of the path on any run, of the text itself where a round writes what depends on nothing else in it."""
    weights = np.random.default_rng(seed).dirichlet(np.full(81, 0.3)).reshape((3,) * 4)
    outcome = fill(Joint(weights), {"method": "ete", "confidence_threshold": 0.9, "block_length": 2}, 4, ())
    measured = BitsToRounds.of(outcome.trajectory)
    assert measured.rounds >= measured.bound(-np.log(weights[tuple(outcome.canvas.tokens)]))
    assert measured.rounds >= measured.bound() > 0


def test_the_bound_of_the_text_fails_where_a_round_contradicts_itself() -> None:
    weights = np.array([[0.01, 0.49], [0.49, 0.01]])
    outcome = fill(Joint(weights), {"method": "static", "denoising_steps": 1}, 2, ())
    measured = BitsToRounds.of(outcome.trajectory)
    assert measured.rounds < measured.bound(-np.log(weights[tuple(outcome.canvas.tokens)]))


def test_trying_tokens_keeps_the_one_that_makes_most_certain() -> None:
    """The first slot is most often 0, after which nothing is known; after 1 everything is."""
    weights = np.zeros((2, 2, 2, 2))
    weights[0] = 0.55 / 8
    weights[1, 1, 0, 1] = 0.45
    plain = fill(Joint(weights), {"method": "ete", "explore_window": 1}, 4, ())
    tried = fill(Joint(weights), {"method": "ete_tokens", "explore_window": 1}, 4, ())
    assert plain.trajectory.calls > 2
    assert tried.canvas.tokens.tolist() == [1, 1, 0, 1]
    assert tried.trajectory.calls == 2
    assert same(fill(Joint(weights), {"method": "ete_tokens", "explore_tokens": 1, "explore_window": 1}, 4, ()), plain)
