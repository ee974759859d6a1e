"""PPD's controller in worlds where acceptance depends on rank alone and time is a formula."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from controllers.steps import granted, outcome, plan, planned
from controllers.test_lengths import PROMPT, VOCAB, drafts, p_value
from engine.harness import engine, run, tokens
from tools.gtest import ERROR
from toys import ToyRunner

from paceline import ConfigError
from paceline.config import SamplingParams
from paceline.controllers import StepTimes
from paceline.controllers.auto import Costs
from paceline.controllers.policies import CHOICE_STEPS, PPDController
from paceline.controllers.policies.ppd import EARLY_CHOICE_STEPS, EARLY_STEPS
from paceline.tree import EMPTY_TREE, NO_BUDGET, TokenTree, Verdict, best_shapes, choose_shape, merge

GOOD, BAD = (0.6, 0.2, 0.08, 0.04), (0.02, 0.01, 0.005)
LEVEL = 0.05
Seconds = Callable[[int], float]


def flat(rows: int) -> float:
    return 1.0


def rising(rows: int) -> float:
    return 1.0 + 0.08 * (rows - 1)


def made(seconds: Seconds = rising, **options: Any) -> PPDController:
    return PPDController(Costs(probe=lambda counts, context: map(seconds, counts)), ["draft"], **options)


def drawn_ranks(chances: npt.ArrayLike, rng: np.random.Generator, depth: int) -> list[int]:
    """The rank that the target takes at each depth; the last row of chances holds for all deeper ones."""
    rows = np.atleast_2d(np.asarray(chances))
    each = [rows[min(i, len(rows) - 1)] for i in range(depth)]
    return [int(rng.choice(len(row) + 1, p=[*row, 1 - sum(row)])) for row in each]


def step(
    controller: PPDController, chances: npt.ArrayLike, seconds: Seconds, rng: np.random.Generator
) -> tuple[int, float]:
    """One step of one sequence; tokens and seconds."""
    budget = granted(controller)
    tree, path = EMPTY_TREE, []
    if budget.nodes:
        assert budget.shape is not None
        tree = TokenTree.build(budget.shape.ranks_n, budget.shape.parents_n)
        assert len(tree) <= budget.nodes
        for rank in drawn_ranks(chances, rng, tree.max_depth + 1):
            children = {int(tree.tokens[node]): node for node in tree.children(path[-1] if path else -1)}
            if rank not in children:
                break
            path.append(children[rank])
    (tree,) = controller.select([tree])
    draft, score = LEVEL * tree.max_depth, seconds(1 + len(tree))
    verdict = Verdict(tuple(path), tuple(int(tree.tokens[node]) for node in path), 99)
    controller.observe(outcome([tree], [verdict], StepTimes((draft,), score, 0.0, 0.0, 1 + len(tree))))
    return len(path) + 1, draft + score


def rate(controller: PPDController, chances: npt.ArrayLike, seconds: Seconds, steps: int) -> float:
    """Tokens per second."""
    rng = np.random.default_rng(0)
    counts, times = zip(*(step(controller, chances, seconds, rng) for _ in range(steps)), strict=True)
    return sum(counts) / sum(times)


@pytest.mark.parametrize("seconds", [flat, rising])
def test_it_comes_near_the_best_static_tree_of_the_world(seconds: Seconds) -> None:
    controller = made(seconds)
    rate(controller, GOOD, seconds, 600)
    shape = best_shapes(GOOD, 32, max_depth=8)
    table = [0.0, *(seconds(rows) for rows in range(1, 34))]
    ideal = choose_shape(shape, table, level_seconds=[LEVEL * depth for depth in range(9)])
    assert rate(controller, GOOD, seconds, 1500) > 0.95 * ideal.rate


def test_dear_rows_make_small_trees() -> None:
    sizes = []
    for slope in (0.01, 0.08, 0.2):
        controller = made(lambda rows, slope=slope: 1.0 + slope * (rows - 1))
        rate(controller, GOOD, lambda rows, slope=slope: 1.0 + slope * (rows - 1), 400)
        sizes.append(controller.choice.nodes)
    assert sizes[0] > sizes[1] > sizes[2] > 0


def test_rows_that_a_drafter_adds_make_small_trees() -> None:
    """What they cost counts, but for plain decoding, which has none."""
    sizes, plain = [], []
    for beside in (None, lambda inputs: 3 * inputs):
        costs = Costs(probe=lambda counts, context: map(rising, counts), beside=beside)
        controller = PPDController(costs, ["draft"])
        choice, _, _ = controller.choose(1, 100)
        sizes.append(choice.nodes)
        plain.append(choice.plain)
    assert sizes[0] > sizes[1] > 0
    assert plain[0] == pytest.approx(plain[1])


def test_where_drafts_never_stand_it_decodes_plainly_and_seldom_tries() -> None:
    controller = made()
    assert rate(controller, BAD, rising, 4000) > 0.97
    assert "Nothing would pay" in plan(controller).explain(0)


def test_where_not_even_perfect_drafts_would_pay_it_hardly_ever_tries() -> None:
    """Rows that cost as much as steps, and a slow drafter."""

    def dear(rows: int) -> float:
        return float(rows)

    controller = made(dear)
    assert rate(controller, (0.99,), dear, 4000) > 0.995
    assert controller.hopeless


def test_levels_below_the_chosen_ones_are_looked_at() -> None:
    """Where the first draft is a toss-up and those behind an accepted one are nearly sure, after a time without."""
    controller = made()
    rate(controller, [[0.5], [0.0]], rising, 300)
    assert controller.choice.depth == 1
    rate(controller, [[0.5], [0.9]], rising, 600)
    assert controller.choice.depth > 2


def test_it_wakes_when_drafts_begin_to_stand() -> None:
    controller = made()
    rate(controller, BAD, rising, 500)
    assert rate(controller, GOOD, rising, 2000) > 1.15


def test_the_learned_chances_are_the_worlds_and_nothing_is_learned_of_what_was_not_reached() -> None:
    controller = made(flat)
    rate(controller, GOOD, flat, 1500)
    assert controller.acceptance.chances()[0, :4] == pytest.approx(GOOD, abs=0.08)
    controller = made(flat)
    tree = TokenTree.build([5, 6, 7], [-1, -1, 0])
    plan(controller)
    controller.observe(outcome([tree], [Verdict((1,), (6,), 9)], StepTimes((0.0,), 1.0, 0.0, 0.0, 4)))
    assert controller.acceptance.tries_dr[0, :3].tolist() == [1, 1, 0]
    assert controller.acceptance.hits_dr[0, :3].tolist() == [0, 1, 0]
    assert not controller.acceptance.tries_dr[1:].any(), "below a rejected node, and below one without children"


def test_limits() -> None:
    controller = made(flat, max_nodes=6, max_depth=2, disable_by_batch_size=3)
    budget = granted(controller)
    assert (budget.nodes, budget.depth) == (6, 2)
    assert granted(controller, remaining=2).depth == 1
    assert granted(controller, remaining=1) is NO_BUDGET
    assert controller.explain(0) == "Nothing is drafted: this is the last token."
    assert not planned(controller, size=3).drafts
    assert controller.explain().startswith("ppd: ")
    assert "A static tree of up to 6 nodes and 2 levels" in plan(controller).explain(0)
    for name in ("max_nodes", "max_depth"):
        with pytest.raises(ConfigError, match=name):
            made(**{name: 0})


def test_a_batch_that_no_drafts_could_help_decides_nothing_for_a_single_sequence() -> None:
    def seconds(rows: int) -> float:
        return 1.0 + 0.7 * (rows - 1) if rows < 10 else rows

    controller = made(seconds)
    assert sum(bool(planned(controller, size=16).drafts) for _ in range(200)) < 20
    assert controller.hopeless
    assert any(granted(controller).nodes for _ in range(20))
    assert not controller.hopeless


def test_what_it_says_is_what_it_grants() -> None:
    controller, seen = made(flat, max_nodes=12), set()
    for remaining in range(60, 1, -1):
        budget = granted(controller, remaining=remaining)
        said = re.search(r"static tree of up to (\d+) nodes? and (\d+) levels?(, to learn)?", controller.explain(0))
        assert said is not None
        assert (int(said[1]), int(said[2])) == (len(budget.shape or ()), budget.depth)
        seen.add(bool(said[3]))
    assert seen == {False, True}


def test_a_merged_tree_is_cut_to_the_size_of_the_shape() -> None:
    controller = PPDController(Costs(probe=lambda counts, context: [1.0] * len(counts)), ["a", "b"], max_nodes=4)
    first, second = planned(controller).budgets[0]
    assert first.nodes == second.nodes == 4
    (kept,) = controller.select([merge([TokenTree.chain([1, 2, 3, 4]), TokenTree.chain([5, 6, 7, 8], source=1)])])
    assert len(kept) == 4


def test_a_large_batch_drafts_less() -> None:
    controller = made()
    sizes = [len(granted(controller, size=size).shape or ()) for size in (1, 4)]
    assert sizes[0] > sizes[1]


def test_choices_are_made_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    controller, made_at = made(flat), []
    real = controller.choose
    monkeypatch.setattr(controller, "choose", lambda *args: made_at.append(controller.steps) or real(*args))
    for _ in range(EARLY_STEPS + 2 * CHOICE_STEPS):
        plan(controller)
    assert made_at[:2] == [1, 1 + EARLY_CHOICE_STEPS]
    assert made_at[-1] - made_at[-2] == CHOICE_STEPS


class Fixed(Costs):
    """Costs that real time does not change."""

    def observe(self, *args: Any, **kwargs: Any) -> None:
        pass


def steady() -> PPDController:
    return PPDController(Fixed(probe=lambda counts, context: [1.0] * len(counts)), ["draft"])


@pytest.mark.parametrize("policy", ["dyspec", "ppd"])
def test_outputs_follow_the_target(policy: str) -> None:
    """What this check catches: `test_lengths`."""
    assert p_value(steady(), tree_policy=policy) > ERROR


def test_greedy_text_is_the_targets() -> None:
    target = ToyRunner(VOCAB, order=2, sharpness=1.0)
    live = engine(target, [drafts(target, tree_policy="ppd")], controller=steady())
    requests = run(live, [PROMPT, [1, 5, 2]], SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True))
    assert tokens(requests) == [[target.greedy(PROMPT, 40)], [target.greedy([1, 5, 2], 40)]]
    assert all(request.metrics.num_accepted_tokens for request in requests)
