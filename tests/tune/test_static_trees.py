"""The static tree that is found is the best there is, in a world whose chances and times are known; and what is found
with a real drafter is used and exact.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import combinations, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser import FOUND, look
from controllers.steps import granted, outcome

from benchmarks.stand_ins import random_head
from paceline import LLM, SamplingParams
from paceline.controllers import StepTimes
from paceline.controllers.auto import Costs
from paceline.errors import ConfigError
from paceline.llm import BUNDLED
from paceline.tree import EMPTY_TREE, PRIOR, TokenTree, Verdict, best_shapes
from paceline.tune import TREE_MARK, TreeTuning, drafter_of, tree_html, tune_tree
from paceline.tune.static_trees import Calibration, static_methods

Ranks = tuple[int, ...]
CHANCES = np.array([[0.6, 0.22, 0.06], [0.5, 0.25, 0.05], [0.55, 0.1, 0.05]])
"""By depth and rank; the heads end with depth 3."""

LEVEL, ROW = 0.05, 0.06
DRAFT = {"method": "draft_model", "model": str(BUNDLED / "draft")}


def step(controller: Calibration, rng: np.random.Generator) -> None:
    """A pass takes 1 and ROW for every row but the first, a level LEVEL, or in large trees and at first ten LEVELs."""
    budget = granted(controller)
    tree, path = EMPTY_TREE, list[int]()
    if budget.shape is not None:
        shape = budget.shape.cut(len(budget.shape), len(CHANCES))
        tree = TokenTree.build(shape.ranks_n, shape.parents_n)
    for chances in CHANCES:
        rank = int(rng.choice(4, p=[*chances, 1 - chances.sum()]))
        children = {int(tree.tokens[node]): node for node in tree.children(path[-1] if path else -1)}
        if rank not in children:
            break
        path.append(children[rank])
    (tree,) = controller.select([tree])
    draft = LEVEL * tree.max_depth * (1 if len(tree) <= 3 * tree.max_depth and controller.steps > 40 else 10)
    verdict = Verdict(tuple(path), tuple(int(tree.tokens[node]) for node in path), 99)
    times = StepTimes((draft,), seconds(1 + len(tree)), 0.0, 0.0, 1 + len(tree))
    controller.observe(outcome([tree], [verdict], times))


def seconds(rows: int) -> float:
    return 1.0 + ROW * (rows - 1)


def gain(paths: Iterable[Ranks]) -> float:
    """Accepted tokens a pass."""
    known = (path for path in paths if max(path) < CHANCES.shape[1])  # others are never right
    return sum(float(np.prod([CHANCES[d, rank] for d, rank in enumerate(path)])) for path in known)


def rate(paths: Iterable[Ranks]) -> float:
    """Tokens per second."""
    nodes = list(paths)
    return (1 + gain(nodes)) / (seconds(1 + len(nodes)) + LEVEL * max(map(len, nodes)))


def every_tree(size: int) -> list[tuple[Ranks, ...]]:
    every = [path for depth in (1, 2, 3) for path in product(range(3), repeat=depth)]
    likely = sorted(every, key=lambda path: -gain([path]))[:12]
    return [one for one in combinations(likely, size) if all(len(path) == 1 or path[:-1] in one for path in one)]


@pytest.fixture(scope="module")
def counted() -> Calibration:
    controller = Calibration(Costs(probe=lambda counts, context: map(seconds, counts)))
    rng = np.random.default_rng(0)
    for _ in range(3000):
        step(controller, rng)
    return controller


def test_trees_of_every_size_are_the_best_by_brute_force(counted: Calibration) -> None:
    found = best_shapes(counted.acceptance.chances(), 6, max_depth=counted.deepest)
    uncounted = best_shapes(PRIOR, 6, max_depth=3)
    worse = []
    for size in range(1, 7):
        best = max(map(gain, every_tree(size)))
        assert gain(found.cut(size, 3).paths()) == pytest.approx(best)
        worse += [size] if gain(uncounted.cut(size, 3).paths()) < best - 0.01 else []
    assert worse, "the check sees trees of other chances"


def test_the_size_is_the_fastest_by_brute_force(counted: Calibration) -> None:
    assert counted.deepest == len(CHANCES), "the heads say how deep they get"
    first, *others = counted.trees(1)
    best = max(rate(tree) for size in range(1, 7) for tree in every_tree(size))
    assert rate(first.shape.paths()) == pytest.approx(best)
    assert first.expected_gain == pytest.approx(best, rel=0.03)  # plain decoding has a rate of 1
    assert first.expected_tokens == pytest.approx(1 + gain(first.shape.paths()), rel=0.03)
    assert others
    assert all(rate(tree.shape.paths()) < best for tree in others)


def test_times_are_those_of_usual_trees(counted: Calibration) -> None:
    """Large ones, and the first ones, take ten times as long to draft here."""
    table, drafting = counted.costs(1, 10)
    assert drafting[1:4] == pytest.approx([LEVEL, 2 * LEVEL, 3 * LEVEL], rel=0.05)
    assert table[1:9] == pytest.approx([seconds(rows) for rows in range(1, 9)], rel=0.05)


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ("null", "the method whose tree is searched for must be a method that drafts static trees, draft_model, "),
        ("ngram", "got 'ngram'"),
        ("auto", "got 'auto'"),
        ("[\"medusa\", \"ngram\"]", "must be a method that drafts static trees"),
        ('{"method": "medusa", "model": "x", "tree_width": 3}', "tree_width must be left out, since it follows from"),
        ('{"method": "medusa", "model": "x", "num_speculative_tokens": 3, "controller": "auto"}', "tokens, controller"),
    ],
)  # fmt: skip
def test_what_has_no_tree_to_find_is_rejected(given: str, line: str) -> None:
    with pytest.raises(ConfigError) as error:
        drafter_of(given)
    assert line in str(error.value)


def test_heads_have_static_trees() -> None:
    assert {"medusa", "hydra", "hydra++", "mlp_speculator", "eagle", "draft_model"} <= set(static_methods())
    kept = {"method": "hydra++", "model": "x", "draft_context": 64}
    assert drafter_of(json.dumps(kept)) == kept


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(dtype="float32", speculative_config=None)


def tuned(llm: LLM, drafter: dict[str, Any], **more: Any) -> TreeTuning:
    prompts = ["One day, a little girl named Lily", "def add(a, b):\n    return"]
    return tune_tree(llm, BUNDLED / "target", prompts, drafter, budget=1.0, max_tokens=24, **more)


def test_the_configuration_drafts_the_tree_and_the_output_is_that_of_plain_decoding(llm: LLM, tmp_path: Path) -> None:
    seen: list[str] = []
    found = tuned(llm, DRAFT, progress=lambda what, _: seen.append(what))
    assert not found.tuning.rejected
    assert found.tuning.near_ties == 0
    assert seen[0].startswith("counting")
    assert found.chances[0][0] > 0.3
    raced = [tree for tree in found.trees if tree.pairs]
    assert found.best in raced
    assert all(1 <= tree.tokens_per_pass <= 1 + tree.levels for tree in raced if tree.tokens_per_pass is not None)
    drafting, params = (
        llm.with_speculative_config(found.speculative_config),
        SamplingParams(temperature=0, max_tokens=24),
    )
    (out,), (plain,) = (one.generate(["One day, a little girl"], params) for one in (drafting, llm))
    assert list(out.outputs[0].token_ids) == list(plain.outputs[0].token_ids)
    assert out.metrics.num_draft_tokens > 0
    page = tree_html(found)
    assert TREE_MARK in page
    if FOUND is not None:
        drawn = look(page, tmp_path)
        assert (drawn.faults, drawn.loaded) == ([], [])
        assert drawn.dom.count('class="node scored"') == len(found.best.shape)


def test_heads_that_are_never_right_give_no_profile(llm: LLM) -> None:
    head = random_head("medusa", llm.runner.info.hidden_size, llm.runner.info.vocab_size)
    found = tuned(llm, {"method": "medusa", "model": head})
    assert len(found.chances) == 3  # as many as there are heads
    assert found.chances[0][0] < 0.3
    assert found.tuning.profile is None
    json.dumps(found.to_dict())
