"""Trees through the quick tables against the full ones: the same bits, for trees of any form, alone and beside each other.

Negative control: a node that sees another branch.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny_llama import runner_of, tiny_llama, tokens

from paceline.models.kernels.quick import LISTED, QuickRows
from paceline.models.native import NativeRunner
from paceline.tree.token_tree import EMPTY_TREE, TokenTree

WIDE = {"hidden_size": 64, "head_dim": 32, "intermediate_size": 96, "vocab_size": 72}
BRANCHED = TokenTree.build([5, 6, 7, 8, 9, 5], [-1, -1, 0, 1, 2, 3])


def runner(dtype: torch.dtype = torch.bfloat16) -> NativeRunner:
    return runner_of(tiny_llama(**WIDE).to(dtype), cache_slots=64)


def some_tree(rng: np.random.Generator, nodes: int) -> TokenTree:
    """Any tree without two like siblings."""
    parents = [int(rng.integers(-1, i)) for i in range(nodes)]
    return TokenTree.build([i + 1 for i in range(nodes)], parents) if nodes else EMPTY_TREE


def decoded(live: NativeRunner, quick: bool, seed: int) -> list[torch.Tensor]:
    """Logits of steps of three sequences over trees, each committed to the end of some path."""
    kept, full, rng, found = live.quick, live._score, np.random.default_rng(seed), []
    live.quick, live._score = (kept, None) if quick else (None, full)
    caches = [live.open() for _ in range(3)]
    live.extend(caches, [tokens(20), tokens(33)[13:], tokens(7)])
    for nodes in ((0, 1, 2), (6, 3, 9), (20, 20, 21), (15, 15, 15)):
        if nodes[0] == 15:  # the arena grows and moves
            live.extend([live.open() for _ in range(4)], [tokens(60)] * 4)
        trees = [some_tree(rng, count) for count in nodes]
        found.append(live.score(caches, [3, 4, 5], trees).logits.clone())
        live.commit(caches, [tree.path(int(rng.integers(-1, len(tree)))) for tree in trees])
    live.quick, live._score = kept, full
    for cache in caches:
        live.release(cache)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", range(4))
def test_the_bits_of_the_full_tables(dtype: torch.dtype, seed: int) -> None:
    live = runner(dtype)
    assert all(torch.equal(mine, full) for mine, full in zip(decoded(live, True, seed), decoded(live, False, seed), strict=True))


def test_branches_do_take_the_quick_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    live = runner()
    cache = live.open()
    live.extend([cache], [tokens(9)])
    monkeypatch.setattr(live, "_score", None)
    assert len(live.score([cache], [3], [BRANCHED]).logits) == 7


def test_a_node_that_sees_another_branch_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    live, right = runner(), QuickRows._part
    cache = live.open()
    live.extend([cache], [tokens(9)])

    def wrong(self: QuickRows, tree: TokenTree, row: int, base: int, length: int, listed: int) -> int:
        end = right(self, tree, row, base, length, listed)
        assert self._listed[end - 4 : end].tolist() == [base + length + i for i in (0, 2, 4, 6)]
        self._listed[end - 3] = base + length + 1
        return end

    full = live._score([cache], [3], [BRANCHED], (), None).logits.clone()
    assert torch.equal(live.score([cache], [3], [BRANCHED]).logits, full)
    monkeypatch.setattr(QuickRows, "_part", wrong)
    shown = live.score([cache], [3], [BRANCHED]).logits
    assert torch.equal(shown[:-1], full[:-1])
    assert not torch.equal(shown[-1], full[-1])


def test_the_widest_lists_fit() -> None:
    live = runner()
    cache = live.open()
    live.extend([cache], [tokens(9)])
    widest = TokenTree.build([*range(1, 63), 70], [*range(-1, 61), 60])
    assert 1 + sum(1 + depth for depth in widest.depths.tolist()) == LISTED - 1
    full = live._score([cache], [3], [widest], (), None).logits.clone()
    assert torch.equal(live.score([cache], [3], [widest]).logits, full)
