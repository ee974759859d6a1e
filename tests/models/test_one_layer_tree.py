"""Rows and trees in compiled code are those of the NumPy steps and of the Python policies, up to the rounding of their dtype."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from models.test_one_layer_chain import CLOSE, CONTEXT, TEXTS, VOCAB, checkpoint, load

from paceline.errors import ConfigError, DrafterError
from paceline.models.kernels.program import ROWS
from paceline.models.one_layer_tables import MOST_DEPTH
from paceline.models.one_layer_tree import MOST_NODES
from paceline.models.tree_plan import BEST_PATHS, STATIC, THRESHOLD, GrownTree, TreePlan, TreeRunner
from paceline.tree.static_shapes import from_paths
from paceline.tree.token_tree import EMPTY_TREE, TokenTree

TREES = [
    TokenTree.build([4, 5, 6, 7, 8, 9], [-1, -1, 0, 1, 3, 0]),
    EMPTY_TREE,
    TokenTree.chain([3, 2, 1]),
    TokenTree.build([(5 * i) % VOCAB for i in range(20)], [-1, 0, 1, 2, *range(3, 19)]),
]
SHAPE = from_paths([(0,), (2,), (0, 0), (0, 1), (2, 0), (0, 0, 3)])
PLANS = {
    "levels": TreePlan(BEST_PATHS, 12, 5, 3, 3),
    "dyspec": TreePlan(BEST_PATHS, 60, 5, 60, 8, levelwise=False),
    "threshold": TreePlan(THRESHOLD, 60, 5, 60, 60, least=0.01),
    "static": TreePlan(STATIC, 6, 3, 1, 6, shape=SHAPE),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("tree"))


def numpy_only(runner: Any) -> Any:
    runner.chains = runner.grown = None
    return runner


def rows_of(runner: Any) -> list[torch.Tensor]:
    """Rows of four sequences with trees, of what grows further, after a commit, and of texts of several lengths."""
    caches = [runner.open() for _ in TEXTS]
    found = [runner.extend(caches, TEXTS).logits, runner.score(caches, [1, 2, 3, 4], TREES).logits]
    grown = TokenTree.build([*TREES[0].tokens.tolist(), 11, 12], [*TREES[0].parents.tolist(), 4, 5])
    found.append(runner.score(caches[:1], [1], [grown], computed=[7]).logits)
    runner.commit(caches, [[1, 3, 4], [], [0], [0, 1, 2]])
    return [*found, runner.extend(caches, [[7], [8, 9], [1, 2, 3], [5]]).logits]


def differs(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor], close: float) -> bool:
    pairs = zip(a, b, strict=True)
    return any(float((x.softmax(-1) - y.softmax(-1)).abs().max()) > close for x, y in pairs)


@pytest.mark.parametrize(("dtype", "in_bytes"), [("float32", None), ("bfloat16", True), ("bfloat16", False)])
def test_rows_are_the_numpy_steps(folder: Path, dtype: str, in_bytes: bool | None) -> None:
    mine, other = rows_of(load(folder, dtype, in_bytes)), rows_of(numpy_only(load(folder, dtype)))
    assert [one.shape for one in mine] == [one.shape for one in other]
    assert not differs(mine, other, CLOSE[dtype] / 3)


@pytest.mark.parametrize("wrong", ["paths", "rotations"])
def test_the_comparison_catches(folder: Path, wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative controls: rows that see their siblings instead of their ancestors, and rotations of the position before."""
    runner = load(folder, "float32")
    if wrong == "paths":
        real = runner.grown._lay

        def lay(length: int, tokens: list[int], parents: list[int], done: int, first: int) -> None:
            real(length, tokens, [i - 1 for i in range(len(parents))], done, first)

        monkeypatch.setattr(runner.grown, "_lay", lay)
    else:
        runner.grown.tables.arrays[3] = np.roll(runner.cos, 1, 0)
        runner.grown.tables.fill()
    assert differs(rows_of(runner), rows_of(numpy_only(load(folder, "float32"))), 1e-3)


def paths(grown: GrownTree) -> dict[tuple[int, ...], float]:
    """Path -> confidence of its last node."""
    found: list[tuple[int, ...]] = []
    tokens, parents, depths = grown.columns_3n.tolist()
    for token, parent, depth in zip(tokens, parents, depths, strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), token))
        assert len(found[-1]) == depth
    assert len(set(found)) == len(found)
    return dict(zip(found, grown.confidence_n.tolist(), strict=True))


def row_after(runner: Any, text: Sequence[int], path: Sequence[int]) -> torch.Tensor:
    """(v,) probabilities by a NumPy step from scratch."""
    row: torch.Tensor = runner.extend([runner.open()], [[*text, *path]]).logits[0].softmax(-1)
    return row


def grow(runner: Any, text: Sequence[int], plan: TreePlan, stop: Any = None) -> tuple[Any, GrownTree]:
    able = isinstance(runner, TreeRunner)
    assert able
    assert runner.grows(plan)
    cache = runner.open()
    (grown,) = runner.draft_trees([cache], [text], [plan], [stop])
    return cache, grown


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("text", TEXTS[:3], ids=len)
def test_confidences_are_the_chances_that_numpy_steps_give(folder: Path, plan: TreePlan, text: list[int]) -> None:
    runner, oracle = load(folder, "float32"), numpy_only(load(folder, "float32"))
    _, grown = grow(runner, text, plan)
    found = paths(grown)
    assert 2 < len(found) <= plan.nodes
    for path, confidence in found.items():
        assert confidence == pytest.approx(float(row_after(oracle, text, path[:-1])[path[-1]]), rel=1e-3)


def test_the_likeliest_paths_by_brute_force(folder: Path) -> None:
    runner, oracle = load(folder, "float32"), numpy_only(load(folder, "float32"))
    reach: dict[tuple[int, ...], float] = {}
    first = row_after(oracle, TEXTS[0], ())
    for a in first.topk(12).indices.tolist():
        reach[(a,)] = float(first[a])
        row = row_after(oracle, TEXTS[0], (a,))
        reach |= {(a, b): float(first[a] * row[b]) for b in row.topk(12).indices.tolist()}
    best = set(sorted(reach, key=lambda path: -reach[path])[:12])
    for plan in (TreePlan(BEST_PATHS, 12, 2, 12, 8, levelwise=False), TreePlan(BEST_PATHS, 12, 2, 12, 12)):
        _, grown = grow(runner, TEXTS[0], plan)
        assert set(paths(grown)) == best


def test_static_trees_take_the_ranks_of_their_shape(folder: Path) -> None:
    runner, oracle = load(folder, "float32"), numpy_only(load(folder, "float32"))
    _, grown = grow(runner, TEXTS[0], PLANS["static"])
    ranks = set()
    for path in paths(grown):
        orders = [row_after(oracle, TEXTS[0], path[:i]).argsort(descending=True).tolist() for i in range(len(path))]
        ranks.add(tuple(order.index(token) for order, token in zip(orders, path, strict=True)))
    assert ranks == set(SHAPE.paths())


def test_thresholds_leave_nothing_out_and_nothing_in(folder: Path) -> None:
    runner, oracle, least = load(folder, "float32"), numpy_only(load(folder, "float32")), 0.02
    _, grown = grow(runner, TEXTS[0], TreePlan(THRESHOLD, 60, 2, 60, 60, least=least))
    first = row_after(oracle, TEXTS[0], ())
    wanted: set[tuple[int, ...]] = {(token,) for token in (first >= least).nonzero().flatten().tolist()}
    for token in [path[0] for path in wanted]:
        row = first[token] * row_after(oracle, TEXTS[0], (token,))
        wanted |= {(token, below) for below in (row >= least).nonzero().flatten().tolist()}
    assert len(wanted) > 2
    assert set(paths(grown)) == wanted


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_caches_hold_the_text_and_what_was_fed(folder: Path, plan: TreePlan) -> None:
    """A committed path leaves the keys and values of a text that was fed plainly."""
    runner, oracle = load(folder, "float32"), numpy_only(load(folder, "float32"))
    longest = 0
    for text in TEXTS:
        cache, grown = grow(runner, text, plan)
        assert cache.length == len(text) - 1
        assert grown.fed_tokens[0] == text[-1]
        fed: list[list[int]] = [[]]
        for place, parent in enumerate(grown.fed_parents[1:], 1):
            fed.append([*fed[parent], place])
        path = max(fed, key=len)
        longest = max(longest, len(path))
        runner.commit([cache], [[place - 1 for place in path]])
        plain = oracle.open()
        oracle.extend([plain], [[*text, *(grown.fed_tokens[place] for place in path)]])
        assert cache.length == plain.length
        for a, b in ((cache.keys, plain.keys), (cache.values, plain.values)):
            assert np.allclose(a[:, : cache.length], b[:, : cache.length], atol=1e-5)
    assert longest > 1


def test_a_batch_is_its_sequences_one_by_one_and_full_caches_grow(folder: Path) -> None:
    runner = load(folder, "float32")
    texts = [[(i * j + 1) % VOCAB for j in range(1, 3 + (17 * i) % 130)] for i in range(29)] + [TEXTS[2][:60]]
    plans = [list(PLANS.values())[i % 4]._replace(depth=3 + i % 3) for i in range(29)] + [TreePlan(BEST_PATHS, 200, 30, 60, 60)]
    caches = [runner.open() for _ in texts]
    together = runner.draft_trees(caches, texts, plans, [None] * len(texts))
    assert len(together[-1].fed_tokens) > 68, "more than the first slots"
    assert caches[-1].keys.shape[1] > 128
    for text, plan, mine in zip(texts, plans, together, strict=True):
        _, alone = grow(runner, text, plan)
        assert set(paths(mine)) == set(paths(alone))
        assert mine.fed_tokens == alone.fed_tokens


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_stop_is_asked_once_a_level(folder: Path, plan: TreePlan) -> None:
    runner = load(folder, "float32")
    asked: list[tuple[int, float]] = []
    text = max(TEXTS, key=lambda text: int(grow(runner, text, plan)[1].columns_3n[2].max()))
    _, free = grow(runner, text, plan)
    last = int(free.columns_3n[2].max())
    assert last > 1

    def stop(depth: int, reach: float) -> bool:
        asked.append((depth, reach))
        return depth == last

    _, grown = grow(runner, text, plan, stop)
    assert [depth for depth, _ in asked] == list(range(2, last + 1))
    best = max(confidence for path, confidence in paths(free).items() if len(path) == 1)
    assert asked[0][1] == pytest.approx(best, rel=1e-5)
    assert int(grown.columns_3n[2].max()) == last - 1


def test_what_does_not_fit_is_refused(folder: Path) -> None:
    runner, plan = load(folder, "float32"), PLANS["levels"]
    wide = from_paths([(i,) for i in range(ROWS)] + [(0, 0)])
    wrong = plan._replace(nodes=MOST_NODES + 1), plan._replace(depth=MOST_DEPTH + 1), plan._replace(rows=ROWS + 1)
    for other in (*wrong, plan._replace(kind=STATIC), plan._replace(kind=THRESHOLD)):
        assert not runner.grows(other)
    assert not runner.grows(TreePlan(STATIC, 200, 2, 1, 65, shape=wide))
    assert not numpy_only(load(folder, "float32")).grows(plan)
    cache = runner.open()
    runner.extend([cache], [[1] * (CONTEXT - 2)])
    with pytest.raises(ConfigError, match="outside the context of 640"):
        runner.draft_trees([cache], [[1]], [plan], [None])
    with pytest.raises(ConfigError, match="outside the context of 640"):
        runner.extend([cache], [[1, 2, 3]])
    with pytest.raises(ConfigError, match="outside the context of 640"):
        runner.score([cache], [1], [TREES[2]])


def test_more_rows_than_the_tables_hold_are_numpy_steps(folder: Path) -> None:
    runner, oracle = load(folder, "float32"), numpy_only(load(folder, "float32"))
    tree = TokenTree.build([i % VOCAB for i in range(ROWS)], [-1] * ROWS)
    rows = [one.score([one.open()], [5], [tree]).logits for one in (runner, oracle)]
    assert torch.allclose(*rows)


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_nan_is_an_error(folder: Path, plan: TreePlan) -> None:
    runner = load(folder, "float32")
    runner.table[7] = np.nan
    with pytest.raises(DrafterError, match="NaN"):
        runner.draft_trees([runner.open()], [[1, 7]], [plan], [None])


@pytest.fixture
def kept_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("kept_threads")
def test_any_number_of_threads_gives_the_same_trees(folder: Path) -> None:
    runner, found = load(folder, "float32"), []
    plans = [*PLANS.values()]
    for threads in (2, 1, 3):
        torch.set_num_threads(threads)
        found.append([paths(one) for one in runner.draft_trees([runner.open() for _ in TEXTS], TEXTS, plans, [None] * 4)])
    for other in found[1:]:
        for mine, expected in zip(other, found[0], strict=True):
            assert set(mine) == set(expected)
            assert all(mine[path] == pytest.approx(expected[path], rel=1e-4) for path in mine)
