"""DySpec: v never grows, a sure token makes a chain, equal ones breadth, a node's reach is the product of raw q, the
distribution stands.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from drafters.test_draft_model import PROMPT, VOCAB, begin, confident, drafter_of, enumerable, propose
from tools.enumerate_draws import Choices
from tools.random_drafts import random_target
from tools.random_trees import WRONG, distribution_error
from toys import ToyRunner

from paceline.drafters.growth import dyspec
from paceline.drafters.growth.base import grow, model_scores
from paceline.drafters.growth.dyspec import DySpecDraft, DySpecPoints
from paceline.errors import ConfigError
from paceline.tree import ROOT, TokenTree, always_go_on, merge, select_nodes

CLOSE = 1e-5


class OneRow(ToyRunner):
    """Every row is the same."""

    def __init__(self, row: Sequence[float]) -> None:
        super().__init__(len(row))
        self.row = torch.tensor(row)

    def logits(self, text: Sequence[int]) -> torch.Tensor:
        return self.row


def grown(runner: ToyRunner, nodes: int, *, drawn: bool, depth: int = 99, seed: int = 3) -> tuple[Any, TokenTree]:
    drafter = drafter_of(runner, runner.vocab_size, tree_policy="dyspec")
    state = begin(drafter, PROMPT[:2], temperature=1.0 if drawn else 0.0, seed=seed)
    draft = (DySpecDraft if drawn else DySpecPoints)(state, nodes, min(depth, nodes), always_go_on, drawn)
    (tree,) = grow(model_scores(runner, [draft], runner.vocab_size), [draft], 0)
    return draft, tree


def paths(tree: TokenTree) -> set[tuple[int, ...]]:
    return {tuple(int(tree.tokens[j]) for j in tree.path(i)) for i in range(len(tree))}


@pytest.mark.parametrize("seed", range(4))
def test_the_places_are_used_in_the_order_of_their_worth(seed: int) -> None:
    draft, tree = grown(ToyRunner(VOCAB, order=None), 20, drawn=True, seed=seed)
    assert len(tree) == len(draft.popped) == 20
    assert all(a >= b - CLOSE for a, b in zip(draft.popped, draft.popped[1:], strict=False))


@pytest.mark.parametrize("drawn", [False, True])
def test_one_sure_token_makes_a_chain_and_equal_ones_breadth(drawn: bool) -> None:
    _, sure = grown(OneRow([0.0, 60.0, 0.0, 0.0]), 7, drawn=drawn)
    assert sure.is_chain
    assert sure.tokens.tolist() == [1] * 7
    _, equal = grown(OneRow([0.0, 0.0, 0.0, 0.0]), 20, drawn=drawn)
    assert equal.depths.tolist() == [1] * 4 + [2] * 16
    assert all(len(equal.children(parent)) == 4 for parent in (ROOT, 0, 1, 2, 3))


def test_a_nodes_reach_is_its_residual_times_v_which_is_the_product_of_raw_q() -> None:
    """v goes on by the residual that each sibling was drawn from, as in the paper; the raw rows give the same."""
    runner = ToyRunner(VOCAB, order=None)
    draft, tree = grown(runner, 24, drawn=True)
    reach_n = tree.reach()
    for parent, trials in tree.trials.items():
        v, path = 1.0 if parent == ROOT else float(reach_n[parent]), [int(tree.tokens[i]) for i in tree.path(parent)]
        raw = runner.logits([*PROMPT[:2], *path]).softmax(0)
        tokens = [int(tree.tokens[trial.node]) for trial in trials]
        for i, trial in enumerate(trials):
            assert trial.row is not None
            assert torch.allclose(trial.row, raw)
            assert (trial.removed, trial.order) == (tuple(tokens[:i]), trial.node)
            residual = raw.clone()
            residual[list(trial.removed)] = 0.0
            share = float(residual[tokens[i]] / residual.sum())
            assert draft.popped[trial.node] == pytest.approx(v, abs=CLOSE)
            assert reach_n[trial.node] == pytest.approx(v * share, abs=CLOSE)
            v *= 1 - share


def test_points_are_the_drafts_most_likely_paths() -> None:
    """By brute force over three levels."""
    runner = ToyRunner(5, order=None)
    _, tree = grown(runner, 9, drawn=False, depth=3)
    chances: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        for path in [path for path in chances if len(path) == max(map(len, chances))]:
            row = runner.logits([*PROMPT[:2], *path]).softmax(0)
            chances.update({(*path, token): chances[path] * float(row[token]) for token in range(5)})
    best = sorted(list(chances)[1:], key=lambda path: -chances[path])[:9]
    assert paths(tree) == set(best)


@pytest.mark.parametrize("drawn", [False, True])
def test_rows_fetched_ahead_change_nothing_but_the_number_of_passes(
    drawn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead = ToyRunner(VOCAB, order=None)
    _, expected = grown(ahead, 24, drawn=drawn)
    monkeypatch.setattr(dyspec, "ROWS", 1)
    single = ToyRunner(VOCAB, order=None)
    _, tree = grown(single, 24, drawn=drawn)
    assert paths(tree) == paths(expected)
    assert not drawn or tree.tokens.tolist() == expected.tokens.tolist()
    assert ahead.calls < single.calls


def test_requests_with_a_seed_get_points_and_others_draws() -> None:
    drafter = drafter_of(ToyRunner(VOCAB, order=None), tree_policy="dyspec")
    assert not propose(drafter, begin(drafter, temperature=1.0, seeded=True), 12).trials
    assert propose(drafter, begin(drafter, temperature=1.0), 12).trials


def programs(monkeypatch: pytest.MonkeyPatch, policy: str, nodes: int, depth: int, go_on: Any = always_go_on) -> Any:
    drafter = drafter_of(ToyRunner(3, order=None, sharpness=1.0), 3, tree_policy=policy)
    return enumerable(monkeypatch, drafter, nodes, depth, go_on)


@pytest.mark.parametrize("policy", ["dyspec", "dyspec_threshold"])
@pytest.mark.parametrize(("nodes", "depth", "go_on"), [(3, 3, always_go_on), (4, 2, always_go_on), (4, 2, confident)])
def test_drawn_trees_keep_the_output_distribution(
    monkeypatch: pytest.MonkeyPatch, policy: str, nodes: int, depth: int, go_on: Any
) -> None:
    """Alone, cut afterwards, and merged behind a point drafter and cut: exact by enumeration."""
    program, target = programs(monkeypatch, policy, nodes, depth, go_on), random_target(nodes, 3)
    points = TokenTree.build([1, 0, 2], [ROOT, 0, 0], confidence=[0.4, 0.3, 0.3])
    assert distribution_error(program, target, depth + 1) < 1e-6, "float32 rows"
    assert distribution_error(lambda c: select_nodes(program(c), 2), target, depth + 1) < 1e-6
    assert distribution_error(lambda c: select_nodes(merge([points, program(c)]), 3), target, depth + 1) < 1e-6


@pytest.mark.parametrize("policy", ["dyspec", "dyspec_threshold"])
def test_the_distribution_check_catches_raw_rows_instead_of_residuals(
    monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    """Wrong: every trial says that it was drawn from the whole row."""
    program = programs(monkeypatch, policy, 4, 2)

    def forgetful(choices: Choices) -> TokenTree:
        tree = program(choices)
        return tree.replace(trials={p: tuple(replace(t, removed=()) for t in ts) for p, ts in tree.trials.items()})

    assert any(distribution_error(forgetful, random_target(seed, 3), 3) > WRONG for seed in range(3))


def test_the_distribution_check_catches_a_drawn_tree_cut_by_what_came_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong: the nodes with the highest reach of a drawn tree are kept, as EAGLE-2 ranks points again."""
    program = programs(monkeypatch, "dyspec", 4, 2)

    def ranked_again(choices: Choices) -> TokenTree:
        tree = program(choices)
        kept = sorted(np.argsort(-tree.reach(), kind="stable")[:2].tolist())
        position = {ROOT: ROOT} | {node: i for i, node in enumerate(kept)}
        trials = {
            position[parent]: [replace(t, node=position[t.node]) for t in ts if t.node in position]
            for parent, ts in tree.trials.items()
            if parent in position
        }
        columns = [tree.tokens[kept], [position[int(tree.parents[node])] for node in kept]]
        return TokenTree.build(*columns, trials={parent: ts for parent, ts in trials.items() if ts})

    assert any(distribution_error(ranked_again, random_target(seed, 3), 3) > WRONG for seed in range(5))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_place_worth_the_threshold_has_a_child_and_no_other(temperature: float) -> None:
    """v of a place that got a child: reach times what was left (drawn) or times the child's share (points)."""
    runner, least = ToyRunner(VOCAB, order=None), 0.05
    drafter = drafter_of(runner, tree_policy="dyspec_threshold", tree_threshold=least)
    tree = propose(drafter, begin(drafter, temperature=temperature), 500, 4)
    reach_n = tree.reach()
    assert bool(tree.trials) == (temperature > 0)
    for parent in [-1, *(i for i in range(len(tree)) if tree.depths[i] < 4)]:
        above, left = 1.0 if parent < 0 else float(reach_n[parent]), 1.0
        row = runner.logits([*PROMPT, *(int(tree.tokens[i]) for i in tree.path(parent))]).softmax(0)
        ranked = sorted(row.tolist(), reverse=True)
        children = tree.children(parent)
        for i, node in enumerate(children):
            assert above * (left if temperature else ranked[i]) >= least - 1e-6
            left -= float(row[int(tree.tokens[node])])
        following = left if temperature else ranked[len(children)]
        assert above * following < least + 1e-6


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_one_pass_a_level(temperature: float) -> None:
    runner = ToyRunner(VOCAB, order=None)
    drafter = drafter_of(runner, tree_policy="dyspec_threshold")
    tree = propose(drafter, begin(drafter, temperature=temperature), 24, 5)
    assert tree.max_depth <= runner.calls <= tree.max_depth + 1
    assert 8 <= len(tree) <= 24


def test_a_lower_threshold_gives_more_nodes_and_the_first_child_always_comes() -> None:
    sizes = []
    for least in (1.0, 0.1, 0.03):
        drafter = drafter_of(ToyRunner(VOCAB, order=None), tree_policy="dyspec_threshold", tree_threshold=least)
        sizes.append(len(propose(drafter, begin(drafter), 200, 4)))
    assert sizes[0] == 1
    assert sizes == sorted(set(sizes))


@pytest.mark.parametrize("wrong", [0.0, -0.1, 1.5, "small", True])
def test_a_wrong_threshold_is_rejected(wrong: object) -> None:
    with pytest.raises(ConfigError, match="tree_threshold must be above 0"):
        drafter_of(ToyRunner(VOCAB), tree_policy="dyspec_threshold", tree_threshold=wrong)
