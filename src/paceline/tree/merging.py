"""Joining and cutting token trees.

What makes a merged tree exact: nothing about a drawn trial is decided by its token. Trials are therefore only ever
concatenated, earlier trees first; when a drawn token is already a node, its trial joins that node and stays in the
list, since a trial that fails changes the residual that later trials and the final draw meet.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from dataclasses import replace as with_fields

import numpy as np
import numpy.typing as npt

from paceline.errors import DrafterError
from paceline.tree.token_tree import CANDIDATE, COLUMNS, EMPTY_TREE, PROBE, ROOT, TokenTree, Trial


@dataclass(slots=True)
class _Columns:
    """A tree under construction."""

    at: dict[tuple[int, int], int] = field(default_factory=dict)
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    sources: list[int] = field(default_factory=list)
    confidence: list[float] = field(default_factory=list)
    kinds: list[int] = field(default_factory=list)
    also: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def add(self, tree: TokenTree) -> list[int]:
        """Join one tree; returns the merged index of each of its nodes."""
        where: list[int] = []
        columns = (tree.tokens, tree.parents, tree.sources, tree.confidence, tree.kinds)
        rows = zip(*(column.tolist() for column in columns), strict=True)
        for node, (token, parent, source, confidence, kind) in enumerate(rows):
            above = ROOT if parent < 0 else where[parent]
            found = self.at.setdefault((above, token), len(self.tokens))
            where.append(found)
            if found == len(self.tokens):
                self.tokens.append(token)
                self.parents.append(above)
                self.depths.append(1 if above < 0 else self.depths[above] + 1)
                self.sources.append(source)
                self.confidence.append(confidence)
                self.kinds.append(kind)
            else:
                self.confidence[found] = max(self.confidence[found], confidence)
                self.kinds[found] = PROBE if kind == self.kinds[found] == PROBE else CANDIDATE
                self._credit(found, source)
            for other in tree.also.get(node, ()):
                self._credit(found, other)
        return where

    def _credit(self, node: int, source: int) -> None:
        if source != self.sources[node] and source not in self.also.get(node, ()):
            self.also[node] = (*self.also.get(node, ()), source)

    def build(self, trials: Mapping[int, Sequence[Trial]]) -> TokenTree:
        """The tree, its siblings' confidences scaled down where they exceed 1 in sum."""
        parents_n, kinds_n = np.asarray(self.parents, np.int32), np.asarray(self.kinds, np.int32)
        confidence_n = np.asarray(self.confidence, np.float32)
        sums = np.bincount(parents_n + 1, weights=np.where(kinds_n == CANDIDATE, confidence_n, 0.0))
        confidence_n = (confidence_n / np.maximum(sums, 1.0)[parents_n + 1]).astype(np.float32)
        return TokenTree(
            tokens=np.asarray(self.tokens, np.int32),
            parents=parents_n,
            depths=np.asarray(self.depths, np.int32),
            sources=np.asarray(self.sources, np.int32),
            confidence=confidence_n,
            kinds=kinds_n,
            trials={parent: tuple(found) for parent, found in trials.items()},
            also=dict(self.also),
        )


def merge(trees: Sequence[TokenTree]) -> TokenTree:
    """The union of `trees` by (parent path, token).

    A shared node keeps the source of its first proposer (the others are recorded in `also`) and the highest of the
    confidences; siblings are scaled down where they then exceed 1 in sum. The trials at a parent are those of the trees
    one after the other, in the order given, so that point and drawn trials may share a node.

    Args:
        trees: in the order in which they were drafted: a later one may have been chosen by looking at an earlier one,
            never the other way round.
    """
    trees = [tree for tree in trees if len(tree)]
    if len(trees) <= 1:
        return trees[0] if trees else EMPTY_TREE
    columns = _Columns()
    positions = [columns.add(tree) for tree in trees]
    return columns.build(_joined_trials(trees, positions) if any(tree.trials for tree in trees) else {})


def _joined_trials(trees: Sequence[TokenTree], positions: Sequence[Sequence[int]]) -> dict[int, list[Trial]]:
    """The trials at every merged parent that has a drawn one, with `order` counting on from tree to tree."""
    joined: dict[int, list[Trial]] = {
        _position(where, parent): [] for tree, where in zip(trees, positions, strict=True) for parent in tree.trials
    }
    start = 0
    for tree, where in zip(trees, positions, strict=True):
        highest = max((trial.order for trials in tree.trials.values() for trial in trials), default=0)
        for parent in (ROOT, *range(len(tree))):
            into = joined.get(_position(where, parent))
            if into is not None:
                points = {trial.node for trial in into if not trial.drawn}
                for trial in tree.trials_of(parent):
                    node = where[trial.node]
                    if trial.drawn or node not in points:
                        into.append(with_fields(trial, node=node, order=start + trial.order))
        start += highest + 1
    return joined


def _position(where: Sequence[int], parent: int) -> int:
    return ROOT if parent < 0 else where[parent]


def prune(
    tree: TokenTree, keep: Sequence[int] | npt.NDArray[np.bool_], trials: Mapping[int, Sequence[Trial]] | None = None
) -> TokenTree:
    """The nodes in `keep` only, in their order.

    This decides nothing: to cut drawn trials without harm to the output distribution, see `tree.select_nodes`.

    Args:
        keep: node indices, or (n,) bool. With a node goes its parent.
        trials: by old indices, what remains tried at parents with drawn trials; by default the old trials of the kept
            nodes.
    Raises:
        DrafterError: a kept node without its parent.
    """
    mask_n = np.zeros(len(tree), np.bool_)
    mask_n[np.asarray(keep, dtype=None if len(keep) else np.int64)] = True
    if bool(mask_n.all()) and trials is None:
        return tree
    kept = np.flatnonzero(mask_n)
    if not len(kept):
        return EMPTY_TREE
    parents_k = tree.parents[kept]
    if not bool(mask_n[parents_k[parents_k >= 0]].all()):
        raise DrafterError("a tree can only be cut below: a node was kept without its parent; keep its ancestors too")
    index_n = np.full(len(tree) + 1, ROOT, np.int32)  # the last entry is where ROOT, -1, finds itself
    index_n[kept] = np.arange(len(kept))
    left = tree.trials if trials is None else trials
    new = index_n.tolist()
    trials_left = {parent: [t for t in ts if mask_n[t.node]] for parent, ts in left.items()}
    columns = {name: getattr(tree, name)[kept] for name in COLUMNS}
    return TokenTree(
        **columns | {"parents": index_n[parents_k]},
        trials={  # parents left with point trials only lose their list, whose order says nothing
            new[parent]: tuple(with_fields(trial, node=new[trial.node]) for trial in ts)
            for parent, ts in trials_left.items()
            if any(trial.drawn for trial in ts)
        },
        also={new[node]: others for node, others in tree.also.items() if new[node] >= 0},
    )
