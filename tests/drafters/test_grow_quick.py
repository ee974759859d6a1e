"""Trees that the runner grows by itself are those of the Python policies, and the states go on from them alike."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from drafters.test_draft_model import begin, confident, observe, propose
from models.test_one_layer_chain import VOCAB, checkpoint, load

from paceline.drafters import grow_quick
from paceline.drafters.base import DrafterArgs
from paceline.drafters.draft_model import DraftModelDrafter
from paceline.drafters.tree_policies import TreePolicy
from paceline.models.tree_plan import TreePlan
from paceline.tree.chain_columns import chain_columns
from paceline.tree.token_tree import TokenTree
from paceline.tree.types import always_go_on

OPTIONS: dict[str, dict[str, Any]] = {
    "levels": {"tree_width": 4},
    "eagle2": {"tree_policy": "eagle2", "tree_width": 6},
    "dyspec": {"tree_policy": "dyspec"},
    "dyspec_threshold": {"tree_policy": "dyspec_threshold", "tree_threshold": 0.02},
    "static": {"tree_policy": "static", "speculative_token_tree": [(0,), (2,), (0, 0), (0, 1), (2, 0), (0, 0, 3)]},
    "ppd": {"tree_policy": "ppd"},
}
STEPS, NODES = 6, 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("quick"))


def drafter_of(runner: Any, **options: Any) -> DraftModelDrafter:
    args = DrafterArgs(vocab_size=VOCAB, index=3, max_context=4096, load_runner=lambda name: runner)
    return DraftModelDrafter(args, model="random", **options)


def paths(tree: TokenTree) -> dict[tuple[int, ...], float]:
    return {tuple(int(tree.tokens[j]) for j in tree.path(i)): float(tree.confidence[i]) for i in range(len(tree))}


def life(drafter: DraftModelDrafter, go_on: Any) -> list[dict[tuple[int, ...], float]]:
    """The trees of some steps; what stands of each is decided by their paths alone."""
    state, found = begin(drafter, [(7 * i) % VOCAB for i in range(30)]), []
    for step in range(STEPS):
        tree = propose(drafter, state, NODES, 5, go_on)
        tree.check(VOCAB, NODES)
        assert set(tree.sources.tolist()) == {3}
        found.append(paths(tree))
        best = max(range(len(tree)), key=lambda i: (int(tree.depths[i]), tuple(int(tree.tokens[j]) for j in tree.path(i))))
        observe(drafter, state, tree, tree.path(best)[: step % 4], 11 + step)
        fresh = propose(drafter, begin(drafter, state.context.tokens), NODES, 5, go_on)
        again = paths(propose(drafter, state, NODES, 5, go_on))
        assert again == pytest.approx(paths(fresh), rel=1e-3), "what the cache kept is what a fresh one would hold"
    return found


def differ(a: list[dict[tuple[int, ...], float]], b: list[dict[tuple[int, ...], float]]) -> bool:
    return any(set(x) != set(y) or x != pytest.approx(y, rel=1e-3) for x, y in zip(a, b, strict=True))


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of sequences of each call that took the short way."""
    calls: list[int] = []
    real = grow_quick.quick_trees

    def quick(runner: Any, states: Any, *rest: Any) -> list[TokenTree]:
        calls.append(len(states))
        return real(runner, states, *rest)

    monkeypatch.setattr("paceline.drafters.draft_model.quick_trees", quick)
    return calls


@pytest.mark.parametrize("go_on", [always_go_on, confident], ids=["always", "confident"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_the_short_way_is_the_long_way(folder: Path, options: Any, go_on: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = counted(monkeypatch)
    runner = load(folder, "float32")
    quick, slow = drafter_of(runner, **options), drafter_of(runner, **options)
    slow._quick = False
    expected = life(slow, go_on)
    assert not calls
    assert any(len(path) > 1 for tree in expected for path in tree) or go_on is confident
    assert not differ(life(quick, go_on), expected)
    assert len(calls) == 3 * STEPS


@pytest.mark.parametrize(
    "wrong",
    [
        lambda plan: plan._replace(children=3),
        lambda plan: plan._replace(nodes=plan.nodes - 1),
        lambda plan: plan._replace(depth=2),
        lambda plan: plan._replace(rows=1),
    ],
    ids=["children", "nodes", "depth", "rows"],
)
def test_the_comparison_catches_another_plan(
    folder: Path, wrong: Callable[[TreePlan], TreePlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = load(folder, "float32")
    slow = drafter_of(runner, **OPTIONS["levels"])
    slow._quick = False
    expected = life(slow, always_go_on)
    real = TreePolicy.plan

    def other(policy: TreePolicy, budget: Any, depth: int) -> TreePlan | None:
        plan = real(policy, budget, depth)
        return None if plan is None else wrong(plan)

    monkeypatch.setattr(TreePolicy, "plan", other)
    assert differ(life(drafter_of(runner, **OPTIONS["levels"]), always_go_on), expected)


def test_sampling_and_rules_take_the_long_way(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, runner = counted(monkeypatch), load(folder, "float32")
    drafter = drafter_of(runner, tree_policy="eagle2")
    for fields in ({"temperature": 1.0}, {"shape": lambda rows, paths: rows.float()}):
        assert len(propose(drafter, begin(drafter, [1, 2, 3], **fields), 8)) == 8
    assert not calls
    assert len(propose(drafter, begin(drafter, [1, 2, 3]), 8)) == 8
    assert calls == [1]
    assert len(propose(drafter, begin(drafter, [1, 2, 3]), 1000, 2)) > 8, "a budget beyond the runner's tables"
    assert calls == [1]


def test_long_texts_are_caught_up_first_and_a_chain_has_a_chains_columns(folder: Path) -> None:
    runner = load(folder, "float32")
    text = [(3 * i) % VOCAB for i in range(600)]
    drafter = drafter_of(runner, tree_policy="eagle2", tree_width=1)
    tree = propose(drafter, begin(drafter, text), 5)
    slow = drafter_of(runner, tree_policy="eagle2", tree_width=1)
    slow._quick = False
    assert paths(tree) == pytest.approx(paths(propose(slow, begin(slow, text), 5)), rel=1e-3)
    assert tree.parents is chain_columns(5).parents
    assert tree.is_chain
