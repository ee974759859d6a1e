"""Equal or reject: what the greedy verifier writes is plain argmax decoding, whatever the tree."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from paceline.errors import NumericsError
from paceline.tree import EMPTY_TREE, PROBE, ROOT, TokenTree, Trial, Verdict
from paceline.verifiers import GreedyVerifier

VOCABULARY = 7
GREEDY = GreedyVerifier()


def toy_logits(text: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Logits of few values, so that ties are common."""
    rng = np.random.default_rng([3, *text[-2:]])
    return torch.from_numpy(rng.integers(-2, 3, VOCABULARY).astype(np.float32)).to(dtype)


def random_tree(rng: np.random.Generator, nodes: int) -> TokenTree:
    """Any structure: chains, branches, probes, drawn trials that name a node twice."""
    tokens, parents, kinds, known = [], [], [], set()
    for _ in range(nodes):
        inner = [ROOT, *(i for i, kind in enumerate(kinds) if kind != PROBE)]
        parent, token = int(rng.choice(inner)), int(rng.integers(VOCABULARY))
        if (parent, token) not in known:
            known.add((parent, token))
            tokens.append(token)
            parents.append(parent)
            kinds.append(PROBE if rng.random() < 0.1 else 0)
    tree = TokenTree.build(tokens, parents, kinds=kinds)
    row = torch.full((VOCABULARY,), 1 / VOCABULARY)
    children = tree.children(ROOT)
    return (
        TokenTree.build(tokens, parents, kinds=kinds, trials={ROOT: [Trial(i, row) for i in children * 2]})
        if children
        else tree
    )


def rows_of(text: tuple[int, ...], tree: TokenTree, dtype: torch.dtype) -> torch.Tensor:
    paths = [[int(tree.tokens[i]) for i in tree.path(node)] for node in range(-1, len(tree))]
    return torch.stack([toy_logits((*text, *path), dtype) for path in paths])


def decode(verifier, length: int, seed: int, nodes: int, dtype: torch.dtype) -> list[int]:
    text, rng = (1, 2), np.random.default_rng(seed)
    while len(text) < length:
        tree = random_tree(rng, nodes) if nodes else EMPTY_TREE
        (verdict,) = verifier([tree], rows_of(text, tree, dtype))
        assert isinstance(verdict, Verdict)
        assert [int(token) for token in tree.tokens[list(verdict.path)]] == list(verdict.accepted)
        assert tree.path(verdict.path[-1] if verdict.path else ROOT) == verdict.path
        text += verdict.tokens
    return list(text[:length])


def stacked(trees, rows):
    return GREEDY.verify_stacked(trees, rows, (0, len(rows)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("nodes", [1, 5, 30])
def test_any_tree_gives_plain_decoding(nodes, dtype):
    plain = [1, 2]
    while len(plain) < 200:
        plain.append(int(toy_logits(tuple(plain), dtype).float().numpy().argmax()))
    assert decode(stacked, 200, 0, 0, dtype) == plain
    assert decode(stacked, 200, 1, nodes, dtype) == plain
    assert decode(lambda trees, rows: GREEDY.verify(trees, [rows]), 200, 2, nodes, dtype) == plain


def test_the_check_catches_a_tie_that_falls_the_other_way():
    def last_of_ties(trees, rows):
        return GREEDY.verify_stacked(trees, rows - torch.arange(VOCABULARY) * -1e-3, (0, len(rows)))

    assert decode(last_of_ties, 200, 1, 5, torch.float32) != decode(stacked, 200, 0, 0, torch.float32)


def test_the_longest_matching_path_is_found_among_branches():
    tree = TokenTree.build([4, 2, 5, 3, 6], [ROOT, ROOT, 0, 1, 3])
    logits = torch.zeros(6, VOCABULARY)
    for row, token in enumerate([2, 5, 3, 0, 6, 1]):
        logits[row, token] = 1.0
    assert stacked([tree], logits) == [Verdict((1, 3, 4), (2, 3, 6), 1)]


def test_a_probe_never_stands():
    tree = TokenTree.build([2, 2], [ROOT, 0], kinds=[PROBE, PROBE])
    logits = torch.zeros(3, VOCABULARY)
    logits[:, 2] = 1.0
    assert stacked([tree], logits) == [Verdict((), (), 2)]


def test_the_lowest_of_equal_logits_wins():
    assert stacked([EMPTY_TREE], torch.tensor([[0.0, 1.0, 1.0]])) == [Verdict((), (), 1)]


def test_a_batch_is_its_sequences():
    rng = np.random.default_rng(5)
    trees = [random_tree(rng, nodes) for nodes in (0, 3, 9, 0, 20)]
    rows = [rows_of((1, i), tree, torch.float32) for i, tree in enumerate(trees)]
    one_by_one = [GREEDY.verify([tree], [row])[0] for tree, row in zip(trees, rows, strict=True)]
    offsets = np.concatenate([[0], np.cumsum([len(row) for row in rows])]).tolist()
    assert GREEDY.verify(trees, rows) == one_by_one
    assert GREEDY.verify_stacked(trees, torch.cat(rows), offsets) == one_by_one
    assert GREEDY.verify([], []) == []


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_bad_row_ends_its_own_sequence_alone(bad, dtype):
    logits = torch.zeros(3, VOCABULARY, dtype=dtype)
    logits[1] = -torch.inf
    logits[1, 3] = bad
    first, second, third = GREEDY.verify_stacked([EMPTY_TREE] * 3, logits, (0, 1, 2, 3))
    assert first == third == Verdict((), (), 0)
    assert isinstance(second, NumericsError)
    assert ("NaN" in str(second)) == math.isnan(bad)


def test_a_bad_row_counts_only_on_the_accepted_path():
    tree = TokenTree.build([1, 2], [ROOT, ROOT])
    logits = torch.zeros(3, VOCABULARY)
    logits[0, 1] = 1.0
    logits[2] = torch.nan
    assert stacked([tree], logits) == [Verdict((0,), (1,), 0)]
    logits[1, 4] = torch.nan
    assert stacked([tree], logits) == [Verdict((), (), 1)]  # the accepted token stands; the next step meets the bad row
