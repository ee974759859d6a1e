"""Static shapes: the best of every size by brute force, what they promise comes true, and the size that pays."""

from __future__ import annotations

from itertools import combinations, product
from typing import Any

import numpy as np
import pytest

from paceline.drafters.lookup.token_recycling import grow_tree
from paceline.errors import ConfigError
from paceline.tree import PRIOR, RankAcceptance, Shape, best_shapes, choose_shape, from_paths, parse_paths
from paceline.tree.static_shapes import monotone

Ranks = tuple[int, ...]
CHANCES = np.array([[0.6, 0.2, 0.1], [0.5, 0.3, 0.05], [0.7, 0.1, 0.1]])
FLAT, STEEP = [0.0, *[1.0] * 64], [0.0, *(1.0 + rows for rows in range(64))]


def gain(paths: Any) -> float:
    return sum(float(np.prod([CHANCES[d, rank] for d, rank in enumerate(path)])) for path in paths)


def test_every_front_part_is_the_best_tree_of_its_size() -> None:
    """Against all ancestor-closed sets of nodes."""
    every = [path for depth in (1, 2, 3) for path in product(range(3), repeat=depth)]
    likely = sorted(every, key=lambda path: -gain([path]))[:14]
    shape = best_shapes(CHANCES, 6, max_depth=3)
    for size in range(1, 7):
        closed = [s for s in combinations(likely, size) if all(len(p) == 1 or p[:-1] in s for p in s)]
        found = shape.cut(size, 3)
        assert gain(found.paths()) == pytest.approx(max(map(gain, closed)))
        assert float(found.reach_n.sum()) == pytest.approx(gain(found.paths()))


def test_a_cut_is_the_best_tree_of_its_depth() -> None:
    shape = best_shapes(CHANCES, 30, max_depth=3)
    for depth, nodes in product((1, 2, 3), (0, 1, 3, 5)):
        cut, made = shape.cut(nodes, depth), best_shapes(CHANCES, nodes, max_depth=depth)
        assert set(cut.paths()) == set(made.paths())
        assert all(parent < i for i, parent in enumerate(cut.parents_n.tolist()))
    assert len(best_shapes([], 5)) == len(best_shapes([0.0, 0.0], 5)) == len(best_shapes([0.5], 0)) == 0
    assert best_shapes([1.0], 5).paths() == [(0,) * n for n in range(1, 6)]


def test_the_expected_length_is_the_measured_one_where_ranks_are_all_that_counts() -> None:
    shape, rng = best_shapes(CHANCES, 9), np.random.default_rng(0)
    known, taken, turns = set(shape.paths()), 0, 20_000
    for _ in range(turns):
        path: Ranks = ()
        while path == () or path in known:
            row = CHANCES[min(len(path), 2)]
            taken += path != ()
            path = (*path, int(rng.choice(4, p=[*row, 1 - row.sum()])))
    deviation = 3 / np.sqrt(turns)
    assert taken / turns == pytest.approx(shape.reach_n.sum(), abs=4 * deviation)
    wrong = best_shapes(CHANCES * 0.8, 9)
    assert abs(taken / turns - wrong.reach_n.sum()) > 4 * deviation, "the check sees chances that are a fifth too low"


def test_the_size_follows_the_cost_of_rows() -> None:
    shape = best_shapes(PRIOR, 32, max_depth=8)
    assert choose_shape(shape, FLAT).nodes == 32
    assert choose_shape(shape, STEEP) == (0, 0, 1.0, 1.0), "plain decoding is fastest"
    sizes = [
        choose_shape(shape, [0.0, *(1.0 + slope * rows for rows in range(64))]).nodes
        for slope in (0.3, 0.1, 0.03, 0.01, 0.001)
    ]
    assert sizes == sorted(sizes)
    assert 0 < sizes[1] < sizes[3] < 32


def test_the_choice_is_the_best_of_all_sizes_and_depths() -> None:
    shape = best_shapes(CHANCES, 12, max_depth=5)
    seconds = [0.0, *(1.0 + 0.06 * rows for rows in range(40))]
    level_seconds = [0.0, 0.1, 0.2, 0.5, 0.9, 1.4]
    for size in (1, 3):
        rates = {}
        for nodes, depth in product(range(1, 13), range(1, 6)):
            cut = shape.cut(nodes, depth)
            spent = seconds[min(size * (1 + len(cut)), 39)] + level_seconds[int(cut.depths_n.max())]
            rates[len(cut), int(cut.depths_n.max())] = size * (1 + cut.reach_n.sum()) / spent
        found = choose_shape(shape, seconds, level_seconds=level_seconds, size=size)
        assert found.rate == pytest.approx(max(rates.values()))
        assert rates[found.nodes, found.depth] == pytest.approx(found.rate)
        assert found.plain == pytest.approx(size / seconds[size])


def test_slow_drafting_makes_flat_trees() -> None:
    shape = best_shapes(CHANCES, 16)
    dear = [0.0, *(0.5 * depth for depth in range(1, 17))]
    assert choose_shape(shape, FLAT, level_seconds=dear).depth < choose_shape(shape, FLAT).depth


def test_chances_are_made_to_fall_with_the_rank_and_to_sum_to_one() -> None:
    assert monotone([0.3, 0.5, 0.1]).tolist() == [[0.3, 0.3, 0.1]]
    assert monotone([0.9, 0.9, 0.2]).tolist()[0] == pytest.approx([0.45, 0.45, 0.1])


def test_acceptance_is_learned_by_depth_and_rank() -> None:
    learned, rng = RankAcceptance(3, 3), np.random.default_rng(1)
    assert learned.chances().tolist() == [list(PRIOR[:3])] * 3
    for _ in range(6000):
        depth = int(rng.integers(1, 4))
        rank = int(rng.choice(4, p=[*CHANCES[depth - 1], 1 - CHANCES[depth - 1].sum()]))
        learned.learn(depth, 3, rank if rank < 3 else None)
    assert np.abs(learned.chances() - CHANCES).max() < 0.12
    assert np.abs(learned.chances() - np.array(PRIOR[:3])).max() > 0.1
    learned.learn(9, 50, 40)  # beyond what is counted


def test_shapes_fill_the_table_of_token_recycling() -> None:
    """They have the layout of its template."""
    candidates_vk = np.arange(40, dtype=np.int32).reshape(5, 8) % 5
    columns_cn = np.empty((4, 9), np.int32)
    shape = best_shapes([0.5, 0.2, 0.1], 9)
    n = grow_tree(candidates_vk, 1, shape.columns(), (9, 8), columns_cn)
    assert n == 9
    assert columns_cn[3].tolist() == shape.ranks_n.tolist()
    assert columns_cn[1].tolist() == shape.parents_n.tolist()


def test_paths_of_vllm_become_shapes() -> None:
    paths = [(0,), (1,), (0, 0), (1, 0), (0, 0, 9)]
    for given in (str(paths), paths, [list(path) for path in paths]):
        shape = from_paths(parse_paths(given, max_rank=9))
        assert isinstance(shape, Shape)
        assert set(shape.paths()) == set(paths)
        assert (np.diff(shape.reach_n) <= 0).all()


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ("[(0,), (1, 0)]", r"hold \(1,\), the beginning of \(1, 0\)"),
        (str([(0,) * 99]), r"hold \((0, )+0,\.\.\., the beginning of"),
        ("[(0,), (0,)]", "name every path once"),
        ("[]", "be a list of paths"),
        ("[()]", "be a list of paths"),
        ("[(0,), (10,)]", "ranks in 0..9"),
        ("[(0,), (-1,)]", "ranks in 0..9"),
        ("[(True,)]", "ranks in 0..9"),
        ("[0, 1]", "be a list of paths"),
        ("__import__('os')", "be a list of paths"),
        ("[(0,)", "be a list of paths"),
        ("(" * 5000, "be a list of paths"),
        ([(0.0,)], "ranks in 0..9"),
        (7, "be a list of paths"),
        ([(0,)] * 2000, "be a list of paths"),
    ],
)
def test_other_paths_are_rejected(given: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        from_paths(parse_paths(given, max_rank=9))
