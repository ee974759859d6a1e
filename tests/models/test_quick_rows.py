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
    kept, rng, found = live.quick, np.random.default_rng(seed), []
    live.quick = kept if quick else None
    caches = [live.open() for _ in range(3)]
    live.extend(caches, [tokens(20), tokens(33)[13:], tokens(7)])
    for nodes in ((0, 1, 2), (6, 3, 9), (20, 0, 12), (15, 15, 15)):
        trees = [some_tree(rng, count) for count in nodes]
        found.append(live.score(caches, [3, 4, 5], trees).logits.clone())
        live.commit(caches, [tree.path(int(rng.integers(-1, len(tree)))) for tree in trees])
    live.quick = kept
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

    def wrong(self: QuickRows, tree: TokenTree, row: int, base: int, length: int, listed: int) -> int:
        end = right(self, tree, row, base, length, listed)
        self._listed[end - 1] -= 1
        return end

    full = decoded(live, False, 0)
    monkeypatch.setattr(QuickRows, "_part", wrong)
    assert not all(torch.equal(mine, one) for mine, one in zip(decoded(live, True, 0), full, strict=True))


def test_the_widest_lists_fit() -> None:
    live, nodes = runner(), 63
    cache = live.open()
    live.extend([cache], [tokens(9)])
    deepest = TokenTree.build([1, 2, *range(3, nodes + 1)], [-1, -1, *range(1, nodes - 1)])
    kept, live.quick = live.quick, None
    full = live.score([cache], [3], [deepest]).logits.clone()
    live.quick = kept
    assert torch.equal(live.score([cache], [3], [deepest]).logits, full)
    assert 1 + sum(1 + depth for depth in deepest.depths.tolist()) <= LISTED
