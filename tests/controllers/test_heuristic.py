"""The schedule of assisted generation."""

from __future__ import annotations

from typing import Any

import pytest
from controllers.steps import granted, requested, step
from controllers.worlds import Guesser, World, steady

from paceline import ConfigError
from paceline.controllers.policies.heuristic import HeuristicController

SURE = [0.9] * 100


def lengths(accepted: list[int], **options: Any) -> list[int]:
    controller = HeuristicController(**options)
    return [step(controller, SURE, stands) for stands in accepted]


def test_two_more_after_full_acceptance_one_fewer_after_a_rejection() -> None:
    assert lengths([9, 9, 2, 0, 9, 9]) == [5, 7, 9, 8, 7, 9]


def test_never_below_one_nor_above_the_limit() -> None:
    assert lengths([0] * 7) == [5, 4, 3, 2, 1, 1, 1]
    assert lengths([100] * 40)[-1] == 64
    assert lengths([100] * 6, num_speculative_tokens=8) == [5, 7, 8, 8, 8, 8]


def test_a_short_proposal_that_stands_whole_counts_as_full_and_no_proposal_as_nothing() -> None:
    controller = HeuristicController()
    step(controller, SURE[:2], 2)
    assert requested(controller, SURE)[0].depth == 7
    step(controller, [], 0)
    assert requested(controller, SURE)[0].depth == 7


def test_what_a_new_sequence_begins_with() -> None:
    for schedule, first in (("heuristic", 7), ("heuristic_transient", 5), ("constant", 5)):
        controller = HeuristicController(num_assistant_tokens_schedule=schedule)  # type: ignore[arg-type]
        step(controller, SURE, 9, key=0)
        assert granted(controller, key=1).depth == first
    assert lengths([9, 9, 0], num_assistant_tokens_schedule="constant", num_assistant_tokens=3) == [3, 3, 3]


def test_it_settles_where_two_steps_down_balance_one_up() -> None:
    """At full acceptance with chance 1/3 the length stands still: c ** n = 1/3, so n = 4.9 at c = 0.8."""
    controller = HeuristicController(num_assistant_tokens=30)
    world = World([Guesser("a", steady(0.8))], lambda rows: 1.0)
    world.run(controller, 200)
    seen = []
    for start in range(200, 1200):
        world.run(controller, 1, seed=start, start=start)
        seen.append(controller.batch[0].length)
    assert 4.0 < sum(seen) / len(seen) < 6.0


@pytest.mark.parametrize("wrong", [{"num_assistant_tokens": 0}, {"num_assistant_tokens_schedule": "linear"}])
def test_wrong_options_are_rejected(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        HeuristicController(**wrong)
