"""Trees draft in a few microseconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from paceline.tree import COLUMNS, EMPTY_TREE, TokenTree, Trial, chain_columns, chain_sources

if TYPE_CHECKING:
    import torch

Ints = npt.NDArray[np.int32]
Chances = npt.NDArray[np.float32]
Trials = Mapping[int, tuple[Trial, ...]]

_NOTHING: Final[Mapping[int, Any]] = MappingProxyType({})


class _Draft:
    """A `TokenTree` to be: setting a frozen one's columns takes a call for each, four times as long in all."""

    __slots__ = (*COLUMNS, "also", "trials")


def chain_tree(
    tokens: Sequence[int], confidence: Sequence[float], source: int, rows: Sequence[torch.Tensor | None] = ()
) -> TokenTree:
    """Make a chain as `TokenTree.chain` does, without its checks.

    Columns that follow from the length are shared among all chains of that length.

    Args:
        rows: (v,) probabilities that each token was drawn from, None for points; none at all where all are.
    """
    if not tokens:
        return EMPTY_TREE
    chances = np.array(
        confidence if max(confidence) <= 1.0 else [min(chance, 1.0) for chance in confidence], np.float32
    )
    trials = {node - 1: (Trial(node, row),) for node, row in enumerate(rows) if row is not None}
    return chain_of(np.array(tokens, np.int32), chances, source, trials or _NOTHING)


def chain_of(tokens: Ints, confidence: Chances, source: int, trials: Trials = _NOTHING) -> TokenTree:
    """The same of (n,) int32 tokens and (n,) float32 chances in 0..1, which the tree keeps."""
    draft: Any = _Draft()
    draft.parents, draft.depths, draft.kinds = chain_columns(count := len(tokens))
    draft.tokens, draft.sources, draft.confidence = tokens, chain_sources(count, source), confidence
    draft.trials, draft.also = trials, _NOTHING
    draft.__class__ = TokenTree
    tree: TokenTree = draft
    return tree


def tree_of(links: Ints, chances: Chances, source: int) -> TokenTree:
    """A tree of points from (n, 3) int32 tokens, parents and depths, and (n,) float32 chances."""
    n = len(links)
    tokens, parents, depths = (np.ascontiguousarray(links[:, column]) for column in range(3))
    chain = chain_columns(n)
    if np.array_equal(parents, chain.parents):
        return chain_tree(tokens.tolist(), chances.tolist(), source)
    return TokenTree(tokens, parents, depths, chain_sources(n, source), np.minimum(chances, 1.0), chain.kinds)
