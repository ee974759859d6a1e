"""Ranking and cutting nodes."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
import torch

from paceline.controllers.pick import best_count, choose, cut, fixed_shape, order_by_reach
from paceline.tree.token_tree import PROBE, TokenTree, Trial


def test_parents_come_before_children_and_forced_nodes_first() -> None:
    order, forced = order_by_reach([(0, [0.9, 0.9, 0.2], ()), (1, [0.1, 0.05], (0,))])
    assert forced == 1
    assert [(tree, node) for _, tree, node in order] == [(1, 0), (0, 0), (0, 1), (0, 2), (1, 1)]


def test_the_best_count_is_the_best_of_all_counts_also_across_a_jump() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        reach = sorted(rng.random(10).tolist(), reverse=True)
        table = np.cumsum(rng.random(12) * (rng.random(12) < 0.5)).tolist()
        rate = float(rng.random() * 2)
        worth = [sum(reach[:n]) - rate * (table[1 + n] - table[1]) for n in range(11)]
        assert worth[best_count(reach, 0, table, 1, rate)] == pytest.approx(max(worth))
        assert best_count(reach, 4, table, 1, rate) >= 4


def test_greedy_order_is_the_best_subtree_of_its_size() -> None:
    tree = TokenTree.build([1, 2, 3, 4, 5], [-1, -1, 0, 0, 1], confidence=[0.6, 0.3, 0.5, 0.4, 0.9])
    reach = tree.reach().tolist()
    order, _ = order_by_reach([(0, reach, ())])
    parents = tree.parents.tolist()
    for size in range(1, 6):
        closed = [s for s in combinations(range(5), size) if all(parents[n] < 0 or parents[n] in s for n in s)]
        best = max(sum(reach[n] for n in s) for s in closed)
        assert sum(r for r, _, _ in order[:size]) == pytest.approx(best)


def test_a_chain_is_chosen_from_as_any_tree() -> None:
    table = [0.0, 1.0, 1.2, 1.4, 1.6, 1.8, 2.0]
    chain, other = [0.9, 0.6, 0.3, 0.1], [0.05]
    assert list(choose([(0, chain, ())], table, 1, 1.0)[0]) == [0, 1, 2]
    assert choose([(0, chain, ()), (1, other, ())], table, 1, 1.0) == {0: [0, 1, 2], 1: []}
    assert choose([(0, chain, (0, 1, 2, 3))], table, 1, 1.0) == {0: [0, 1, 2, 3]}
    assert choose([(0, [0.1, 0.9], ())], table, 1, 1.0) == {0: [1]}


def test_cutting_keeps_columns_and_parents_in_line() -> None:
    tree = TokenTree.build([1, 2, 3, 4, 5], [-1, -1, 0, 1, 3], sources=[0, 1, 0, 1, 1])
    some = cut(tree, [0, 1, 3, 4], 5)
    some.check_structure()
    assert some.tokens.tolist() == [1, 2, 4, 5]
    assert some.parents.tolist() == [-1, -1, 1, 2]
    assert some.sources.tolist() == [0, 1, 1, 1]
    assert cut(tree, [0, 1, 2], 5).parents.tolist() == [-1, -1, 0]
    assert cut(tree, range(5), 5) is tree
    assert len(cut(tree, [], 5)) == 0


def test_drawn_trials_and_probes_fix_the_shape() -> None:
    row = torch.tensor([0.5, 0.5])
    assert fixed_shape(TokenTree.build([1], [-1], trials={-1: [Trial(0, row)]}))
    assert fixed_shape(TokenTree.build([1], [-1], kinds=[PROBE]))
    assert not fixed_shape(TokenTree.chain([1, 2]))
