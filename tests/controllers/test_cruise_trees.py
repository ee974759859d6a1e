"""Trees with branches between two plans: as many nodes as were worth their rows, cut by confidence, learned from now and then."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from controllers.test_cruise import PLAIN, cruising, draft, signals
from controllers.worlds import World, informed

from paceline.controllers.base import StepTimes
from paceline.controllers.course import Course
from paceline.controllers.outcomes import ALL, TAUGHT
from paceline.controllers.pick import path_products
from paceline.tree.token_tree import EMPTY_TREE, TokenTree, Trial
from paceline.tree.types import Budget, Verdict

SURE, UNSURE = 0.95, 0.02


def bushy(chances: list[float]) -> TokenTree:
    """Two children of the root, two of the first of them."""
    return TokenTree.build([1, 2, 3, 4], [-1, -1, 0, 0], confidence=chances)


@pytest.fixture
def controller() -> Any:
    return cruising(World([draft(informed(0.2, 0.95), 0.1)], lambda rows: PLAIN * (0.9 + 0.1 * rows)))


def test_nodes_go_whose_path_is_not_worth_a_row_and_never_without_their_children(controller: Any) -> None:
    controller.plan(signals(0))
    assert controller.cruising
    assert controller.budget(0, 0, EMPTY_TREE).nodes > 0
    (cut,) = controller.select([bushy([SURE, UNSURE, SURE, UNSURE])])
    assert cut.tokens.tolist() == [1, 3]
    (cut,) = controller.select([bushy([SURE, UNSURE, UNSURE, SURE])])
    assert cut.tokens.tolist() == [1, 4]


def test_a_child_goes_with_its_parent_where_deeper_nodes_are_cheaper(controller: Any) -> None:
    """Calibration may find deep nodes likelier than they say, so that floors fall faster than products."""
    controller.plan(signals(0))
    controller.cruise._courses = [[[Course(Budget(9, 9), [0.0, 0.5, 0.5, 0.01]), None]]]
    side = TokenTree.build([1, 5, 2, 3, 4], [-1, -1, 0, 2, 3], confidence=[SURE, SURE, 0.1, 1.0, 1.0])
    assert path_products(side)[-1] > 0.01, "worth its row by itself"
    assert controller.select([side])[0].tokens.tolist() == [1, 5]


def test_products_run_along_the_paths() -> None:
    assert path_products(bushy([0.5, 0.25, 0.5, 0.1])) == pytest.approx([0.5, 0.25, 0.25, 0.05])
    assert path_products(EMPTY_TREE) == []


def test_all_are_counted_and_a_part_of_them_teach(controller: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    taught: list[int] = []
    observe = controller.acceptance.observe
    monkeypatch.setattr(controller.acceptance, "observe", lambda *given: (taught.append(1), observe(*given))[1])
    controller.cruise.take(controller.acceptance)
    many, tree, verdict = ALL + 10 * TAUGHT, bushy([SURE] * 4), Verdict((0, 2), (1, 3), 9)
    for _ in range(many):
        controller.cruise.count([tree], [verdict], StepTimes((1e-5,), PLAIN, 0.0, 0.0, 5))
    counts = controller.cruise.take(controller.acceptance)
    assert counts.mixed == {(0, 0, 4, 2): many}
    assert (counts.steps, counts.tokens) == (many, 3 * many)
    assert len(taught) == ALL + 10


def test_a_drafter_of_trees_is_asked_for_as_many_nodes_as_were_kept(controller: Any) -> None:
    """Not for as many as a chain of twice the best depth would have."""
    one = controller.batch[0]
    one.depths[0] = 6
    tree = bushy([SURE, UNSURE, UNSURE, UNSURE])
    controller.drafts = [tree], [tree.replace(**{name: getattr(tree, name)[:1] for name in COLUMNS})]
    assert controller.cruise._makes.course(controller, 0, 0).budget.nodes == 1
    controller.drafts = [TokenTree.chain([1, 3])], [TokenTree.chain([1, 3])]
    assert controller.cruise._makes.course(controller, 0, 0).budget.nodes > 1


COLUMNS = ("tokens", "parents", "depths", "sources", "confidence", "slots", "kinds")


def test_planned_questions_are_for_little_more_than_was_kept(controller: Any) -> None:
    one = controller.batch[0]
    one.note_kept(bushy([SURE] * 4))
    assert one.nodes == [4]
    assert controller._nodes(one, 0, 32, 3) == 10
    assert controller._nodes(one, 0, 32, 12) == 12, "a chain may be as long as its depth"
    controller.cruises = False
    assert controller._nodes(one, 0, 32, 3) == 32, "a slow model waits for nobody"
    assert np.isfinite(controller.now.rate)


def test_levels_of_drawn_trees_count_though_they_stay_whole(controller: Any) -> None:
    controller.plan(signals(0))
    controller.cruise.counts.levels.clear()
    row = torch.tensor([0.5, 0.5])
    drawn = TokenTree.build([0, 1], [-1, 0], confidence=[0.01, 0.01], trials={-1: [Trial(0, row)], 0: [Trial(1, row)]})
    assert controller.select([drawn]) == [drawn]
    assert controller.cruise.counts.levels == {0: 2}
