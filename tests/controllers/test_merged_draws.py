"""Two drafters that draw, cut to what one may have: the output distribution is the target's under every controller, by
enumeration.

Where draws of both fall on the same token the merged tree is smaller. A controller that cuts only trees which are too
large then lets the second drafter's draw be tried only if it fell on the first one's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from controllers.steps import plan
from tools.enumerate_draws import Choices, distance, output_distribution, target_distribution
from tools.random_drafts import random_target

from paceline.controllers import Controller, Footprint, LimitedController
from paceline.controllers.auto import AutoController, Costs
from paceline.controllers.policies import FixedController, PPDController
from paceline.controllers.policies.heuristic import HeuristicController
from paceline.controllers.policies.kangaroo import KangarooController
from paceline.tree import TokenTree, Trial, merge
from paceline.verifiers import RecursiveRejection

ROWS = np.array([[0.6, 0.3, 0.1], [0.2, 0.3, 0.5]])
NAMES = ("draft_model", "layer_skip")
EXACT, WRONG = 1e-9, 1e-3


def costs() -> Costs:
    return Costs(probe=lambda counts, context: [1.0] * len(counts))


class Whole(Controller):
    """Leaves every tree as it is."""

    name = "whole"


def limited(most: int) -> LimitedController:
    return LimitedController(Whole(), Footprint(slot=1, row=0, drawn=0, caches=lambda tokens: 0), most)


MADE: dict[str, Callable[[int], Any]] = {
    "fixed": lambda most: FixedController(most, drafters=NAMES),
    "heuristic": lambda most: HeuristicController(num_speculative_tokens=most),
    "kangaroo": lambda most: KangarooController(num_speculative_tokens=most),
    "ppd": lambda most: PPDController(costs(), NAMES, max_nodes=most),
    "limited": limited,
    "auto": lambda most: AutoController(costs(), NAMES, max_nodes=most),
}


def chain(choices: Choices, source: int, depth: int) -> TokenTree:
    """Drawn from the drafter's row at every level."""
    row = ROWS[source]
    tokens = [choices.choose(list(row)) for _ in range(depth)]
    trials = {level - 1: [Trial(level, torch.from_numpy(row))] for level in range(depth)}
    confidence = [float(row[token]) for token in tokens]
    return TokenTree.build(tokens, range(-1, depth - 1), confidence=confidence, sources=source, trials=trials)


def error(select: Callable[[Sequence[TokenTree]], Sequence[TokenTree]], depth: int) -> float:
    def propose(choices: Choices) -> TokenTree:
        (tree,) = select([merge([chain(choices, source, depth) for source in range(2)])])
        return tree

    target = random_target(5, 3)
    return distance(
        output_distribution(RecursiveRejection(), propose, target, depth + 1), target_distribution(target, depth + 1)
    )


def under(name: str, most: int) -> Any:
    controller = MADE[name](most)
    controller.drafters = 2
    return plan(controller)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("name", MADE)
def test_the_distribution_stays(name: str, depth: int) -> None:
    controller = under(name, depth)
    assert error(controller.select, depth) < EXACT


@pytest.mark.parametrize("depth", [1, 2])
def test_leaving_small_trees_whole_breaks_it(depth: int) -> None:
    controller = under("fixed", depth)
    assert (
        error(lambda trees: [one if len(one) <= depth else controller.select([one])[0] for one in trees], depth) > WRONG
    )
