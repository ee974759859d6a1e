"""The suffix tree against brute force: counts of all substrings, exact removal, bounds, what is kept on disk."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
import pytest

from paceline.drafters import DrafterArgs
from paceline.drafters.suffix import SuffixDrafter
from paceline.drafters.suffix import tree as suffix_tree
from paceline.drafters.suffix.drafter import ABOVE, CHANCE, LEVELS, NODES, TOKEN, arrays_of, step
from paceline.drafters.suffix.nodes import (
    CHAIN,
    CHILD,
    COUNT,
    EDGE,
    FREE,
    LIVE,
    NEXT,
    PARENT,
    POS,
    USED,
    child_of,
    record_of,
)
from paceline.drafters.suffix.tree import SuffixCache, SuffixTree
from paceline.utils import compiled

Counts = dict[tuple[int, ...], int]


def counts(tree: SuffixTree) -> Counts:
    """Substring -> count, for all paths; on the way, that the arrays are sound."""
    text, nodes, heads, meta, _ = tree.arrays
    found: Counts = {}

    def walk(node: int, path: tuple[int, ...]) -> None:
        child, total = int(nodes[node, CHILD]), 0
        while child >= 0:
            pos, length = int(nodes[child, POS]), int(nodes[child, EDGE]) & 255
            label = tuple(text[pos : min(pos + length, tree.size)].tolist())
            assert nodes[child, PARENT] == node
            assert label[0] == nodes[child, EDGE] >> 8
            assert child_of(nodes, heads, node, label[0]) == child
            found.update({path + label[: i + 1]: int(nodes[child, COUNT]) for i in range(len(label))})
            total += int(nodes[child, COUNT])
            walk(child, path + label)
            child = int(nodes[child, NEXT])
        assert total <= nodes[node, COUNT]

    walk(0, ())
    used, free, at = int(meta[USED]), 0, int(meta[FREE])
    while at >= 0:
        free, at = free + 1, int(nodes[at, CHAIN])
    assert int((nodes[:used, COUNT] >= 0).sum()) == meta[LIVE] == used - free
    return found


def by_force(texts: Iterable[Sequence[int]], depth: int) -> Counts:
    return Counter(
        tuple(text[i:j])
        for text in texts
        for i in range(len(text))
        for j in range(i + 1, min(i + depth, len(text)) + 1)
    )


def ints(tokens: Sequence[int]) -> np.ndarray:
    return np.array(tokens, np.int32)


def test_counts_are_those_of_brute_force_while_old_texts_are_forgotten() -> None:
    rng = np.random.default_rng(0)
    for _ in range(60):
        depth, vocab = int(rng.integers(1, 9)), int(rng.integers(1, 5))
        cache, texts = SuffixCache(depth, 5, 60, 10), []
        for _ in range(10):
            texts.append(rng.integers(0, vocab, int(rng.integers(1, 25))).tolist())
            cache.add(ints(texts[-1]))
            texts = texts[-len(cache.lengths) :]
            assert counts(cache.tree) == by_force(texts, depth)
            assert cache.tree.count == cache.tokens == sum(map(len, texts))
        while cache.lengths:
            cache.forget()
        assert cache.tree.arrays.meta[LIVE] == 1
        assert (cache.tree.arrays.heads == -1).all()


@pytest.mark.parametrize("depth", [2, 5, 24])
def test_an_open_tree_counts_what_entered_each_edge(depth: int) -> None:
    """Suffixes that still run along an edge have been counted on all of it; where edges begin, counts are exact."""
    rng = np.random.default_rng(1)
    for length in (1, 7, 40, 150):
        text = rng.integers(0, 3, length).tolist()
        tree = SuffixTree(depth)
        for start in range(0, length, 9):
            tree.grow(ints(text[start : start + 9]))
        found, expected = counts(tree), by_force([text], depth)
        assert found.keys() == expected.keys()
        assert all(found[part] >= count for part, count in expected.items())
        assert all(found[part] == count for part, count in expected.items() if len(part) == 1)
        assert tree.count == length


def test_a_tree_with_room_for_its_text_grows_in_place() -> None:
    """Two nodes a token suffice; one token more than there is room for has the arrays replaced."""
    text = np.random.default_rng(2).integers(0, 4, 401).tolist()
    tree = SuffixTree(24, room=400 + 24)
    arrays = tree.arrays
    for token in text[:400]:
        tree.grow(ints([token]))
    assert tree.arrays is arrays
    assert len(arrays.nodes) == 2 * len(arrays.text)
    small = SuffixTree(24, room=399)
    small.grow(ints(text[:400]))
    assert len(small.arrays.text) > 399
    assert counts(small) == counts(tree)


def test_removal_restores_the_tree_before_the_text_came() -> None:
    first, second = [1, 2, 3, 1, 2, 4, 1, 2, 3], [1, 2, 3, 1, 2, 3, 9, 9]
    tree, alone = SuffixTree(6), SuffixTree(6)
    span = tree.insert(ints(first))
    tree.insert(ints(second))
    assert counts(tree) != by_force([second], 6)
    tree.remove(*span)
    alone.insert(ints(second))
    assert counts(tree) == counts(alone) == by_force([second], 6)


def test_a_careless_removal_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: leaving the last suffix of a text in the tree."""
    remove = suffix_tree.remove
    monkeypatch.setattr(suffix_tree, "remove", lambda tree, start, stop, depth: remove(tree, start, stop - 1, depth))
    tree = SuffixTree(3)
    span = tree.insert(ints([1, 2, 1, 2, 5]))
    tree.insert(ints([1, 2, 7]))
    tree.remove(*span)
    with pytest.raises(AssertionError):
        assert counts(tree) == by_force([[1, 2, 7]], 3)


def test_children_are_in_order_of_their_counts() -> None:
    tree = SuffixTree(2)
    for token, times in ((5, 1), (6, 4), (7, 2), (8, 3)):
        for _ in range(times):
            tree.insert(ints([1, token]))
    nodes = tree.arrays.nodes
    node = child_of(nodes, tree.arrays.heads, 0, 1)
    child, order = int(nodes[node, CHILD]), []
    while child >= 0:
        order.append(int(nodes[child, EDGE]) >> 8)
        child = int(nodes[child, NEXT])
    assert order == [6, 8, 7, 5]


def test_memory_is_bounded_by_the_tokens_kept() -> None:
    rng = np.random.default_rng(2)
    cache, sizes = SuffixCache(24, 10_000, 20_000, 6144), []
    for turn in range(60):
        for _ in range(10):
            cache.add(ints((rng.zipf(1.3, 200) % 6144).tolist()))
        assert cache.tokens <= 20_000
        sizes.append(cache.tree.nbytes if turn >= 30 else 0)
    assert max(sizes) == sizes[-1] == sizes[30] < 150 * 20_000


def test_the_end_of_a_text_longer_than_the_bound_is_kept() -> None:
    cache = SuffixCache(4, 3, 6, 100)
    cache.add(ints(range(10)))
    assert counts(cache.tree) == by_force([list(range(4, 10))], 4)
    for refuses in (SuffixCache(4, 0, 6, 100), SuffixCache(4, 3, 0, 100)):
        refuses.add(ints([1, 2]))
        assert refuses.tokens == 0


def test_a_copy_is_independent() -> None:
    tree = SuffixTree(5)
    tree.grow(ints([1, 2, 3, 1, 2]))
    before, twin = counts(tree), tree.copy()
    twin.grow(ints([4, 5]))
    assert counts(tree) == before != counts(twin)


def test_tables_are_read_again_and_bad_ones_rejected() -> None:
    cache, again = SuffixCache(6, 9, 999, 10), SuffixCache(6, 9, 999, 10)
    for text in ([1, 2, 3], [4, 5], [1, 2, 9, 9, 9]):
        cache.add(ints(text))
    cache.forget()
    again.read_arrays(cache.to_arrays())
    assert counts(again.tree) == counts(cache.tree) == by_force([[4, 5], [1, 2, 9, 9, 9]], 6)
    assert list(again.lengths) == [2, 5]
    tokens, lengths = ints([1, 2, 3]), np.array([1, 2], np.int64)
    for bad, why in (
        ({"tokens": tokens, "lengths": lengths[:1]}, "add up"),
        ({"tokens": tokens, "lengths": np.array([4, -1], np.int64)}, "add up"),
        ({"tokens": tokens + 8, "lengths": lengths}, "token ids"),
        ({"tokens": tokens - 2, "lengths": lengths}, "token ids"),
        ({"tokens": tokens.astype(np.float32), "lengths": lengths}, "float32"),
        ({"tokens": tokens.reshape(3, 1), "lengths": lengths}, "shape"),
        ({"tokens": tokens, "lengths": lengths.astype(np.int32)}, "int64"),
    ):
        with pytest.raises(ValueError, match=why):
            SuffixCache(6, 9, 999, 10).read_arrays(bad)


@pytest.mark.parametrize("depth", [0, 256])
def test_a_depth_outside_its_range_is_rejected(depth: int) -> None:
    with pytest.raises(ValueError, match="depth"):
        SuffixTree(depth)


def test_a_tree_that_is_written_and_stepped_is_the_one_that_grows() -> None:
    rng, drafter = np.random.default_rng(3), SuffixDrafter(DrafterArgs(vocab_size=8, index=0, max_context=1000))
    grown, stepped, past = SuffixTree(24), SuffixTree(24), SuffixTree(24)
    workspace, drafts = drafter.workspace, 0
    workspace.limits[NODES], workspace.limits[LEVELS] = 8, 8
    for count in rng.integers(0, 9, 200).tolist():
        tokens = rng.integers(0, 3, count).tolist()
        grown.grow(ints(tokens))
        size = grown.size
        expected = step(grown.record, size, size, past.record, 0, drafter.record, 8, 8), workspace.best.copy()
        made = step(stepped.record, stepped.write(tokens), stepped.size, past.record, 0, drafter.record, 8, 8)
        assert made == expected[0]
        assert np.array_equal(workspace.best[1 : made + 1], expected[1][1 : made + 1])
        assert np.array_equal(workspace.tokens[:made], workspace.best[1 : made + 1, TOKEN])
        assert np.array_equal(workspace.parents[:made], workspace.best[1 : made + 1, ABOVE] - 1)
        assert np.array_equal(workspace.chances[:made], workspace.best_f[1 : made + 1, CHANCE].astype(np.float32))
        drafts += made
        assert stepped.size == grown.size
    assert counts(stepped) == counts(grown)
    assert drafts > 100


def test_compiled_code_sees_the_arrays_of_a_record() -> None:
    tree = SuffixTree(6)
    tree.grow(np.array([1, 2, 1, 2, 3], np.int32))
    found = compiled(arrays_of)(tree.record)
    for name, array in tree.arrays._asdict().items():
        read = getattr(found, name)
        assert read.shape == array.shape
        assert read.dtype == array.dtype
        assert read.ctypes.data == array.ctypes.data
    assert found.text.ctypes.data != tree.copy().arrays.text.ctypes.data


def test_a_tree_that_moves_has_another_record() -> None:
    tree = SuffixTree(6, 8)
    before = tree.record
    tree.grow(np.arange(100, dtype=np.int32))
    assert not np.array_equal(tree.record, before)
    assert np.array_equal(tree.record, record_of(tree.arrays))


def test_arrays_with_gaps_are_rejected() -> None:
    with pytest.raises(ValueError, match="contiguous"):
        record_of([np.zeros((4, 4), np.int32)[:, 0]])
