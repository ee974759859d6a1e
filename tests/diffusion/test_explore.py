"""Explore-then-exploit: past the block wall, and on purpose where nothing is sure."""

import numpy as np
import pytest

from paceline.diffusion import BitsToRounds
from paceline.errors import ConfigError
from tests.diffusion.decoding import fill, same
from tests.diffusion.toys import Independent, Joint
from tests.diffusion.toys_scripted import modes


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


def test_tokens_are_tried_only_where_a_rule_explores() -> None:
    with pytest.raises(ConfigError, match="commit must be 'explore'"):
        fill(Independent([0.5] * 4), {"method": "threshold", "verification": "explore_tokens"}, 4, ())
