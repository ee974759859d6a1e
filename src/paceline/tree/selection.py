"""Cutting a tree down to the nodes that are worth verifying, without touching the output distribution.

What may be cut:

* **Point nodes** at a parent without drawn trials: freely, by anything. A verifier draws its own token there and looks
  whether it is a child, so the distribution of that token does not depend on which children there are.
* **Drawn trials**: only as if the drafter had stopped earlier. They are taken in the order in which they were drawn
  (`Trial.order`, then level by level, parents in node order, trials in order) until the first that might not fit, and
  all that were drawn later go too. Whether a trial fits is decided before its token is looked at: it counts as a new
  node even where it fell on an old one. Any rule that looks at the token (its confidence, whether it is new, what grew
  below it) breaks the distribution.
* What a kept drawn trial rests on stays with it: its parent's ancestors, and the point trials tried before it at its
  parent. Dropping these by what was drawn later would break the distribution as well.

So drawn trials come first, and what is left of the budget goes to free point nodes by their estimated chance of being
reached.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.tree.merging import prune
from paceline.tree.token_tree import EMPTY_TREE, PROBE, ROOT, TokenTree, Trial


def select_nodes(
    tree: TokenTree, nodes: int, *, drawn_nodes: int | None = None, reach_n: npt.NDArray[np.float64] | None = None
) -> TokenTree:
    """The part of `tree` to verify: at most `nodes` candidates, ancestors first.

    Probes are inputs that a drafter needs: they stay with their parents and are not counted.

    Args:
        drawn_nodes: most nodes to spend on drawn trials and what they rest on; None is `nodes`. It must be chosen
            without looking at this tree's drawn tokens, and so must `nodes`.
        reach_n: (n,) chance that a node is accepted, never above its parent's; None: the product of confidences along
            its path.
    """
    if nodes <= 0:
        return EMPTY_TREE
    if not tree.trials and len(tree) <= nodes:
        return tree
    chosen = _Choice(tree, nodes)
    if tree.trials:
        chosen.take_drawn(nodes if drawn_nodes is None else min(nodes, drawn_nodes))
    chosen.take_free(tree.reach() if reach_n is None else reach_n)
    chosen.take_probes()
    return prune(tree, chosen.keep_n, chosen.trials()) if tree.trials else prune(tree, chosen.keep_n)


class _Choice:
    """Which nodes and drawn trials of one tree stay."""

    def __init__(self, tree: TokenTree, nodes: int) -> None:
        self.tree, self.nodes = tree, nodes
        self.parents: list[int] = tree.parents.tolist()
        self.keep_n = np.zeros(len(tree), np.bool_)
        self.count = 0
        self.drawn_kept: dict[int, int] = {}
        """parent -> number of its leading trials up to and with the last drawn one that stays"""

    def take_drawn(self, nodes: int) -> None:
        """Keep drawn trials as a prefix of the order in which they were drawn."""
        for parent, index in _drawing_order(self.tree):
            needed = self._needed_by(parent, index)
            if self.count + len(needed) + 1 > nodes:
                return
            needed.add(self.tree.trials[parent][index].node)
            for node in needed:
                self._keep(node)
            self.drawn_kept[parent] = index + 1

    def _needed_by(self, parent: int, index: int) -> set[int]:
        """The nodes that the trial at `index` of `parent` rests on and that are not kept yet; its own node is not
        looked at.
        """
        needed = {
            trial.node for trial in self.tree.trials[parent][:index] if not trial.drawn and not self.keep_n[trial.node]
        }
        while parent != ROOT and not self.keep_n[parent]:
            needed.add(parent)
            parent = self.parents[parent]
        return needed

    def _keep(self, node: int) -> None:
        if not self.keep_n[node]:
            self.keep_n[node] = True
            self.count += int(self.tree.kinds[node] != PROBE)

    def take_free(self, reach_n: npt.NDArray[np.floating[Any]]) -> None:
        """Fill up with point nodes, most likely reached first; a child is never more likely than its parent."""
        allowed_n = self.tree.kinds != PROBE
        allowed_n[list(self._only_drawn())] = False
        for node in np.argsort(-reach_n, kind="stable").tolist():
            if self.count >= self.nodes:
                return
            parent = self.parents[node]
            if allowed_n[node] and (parent == ROOT or self.keep_n[parent] or self.tree.kinds[parent] == PROBE):
                self._keep(node)

    def _only_drawn(self) -> set[int]:
        """Nodes that no point trial names: they stay with a drawn trial or go."""
        everywhere = [trial for trials in self.tree.trials.values() for trial in trials]
        return {trial.node for trial in everywhere if trial.drawn} - {
            trial.node for trial in everywhere if not trial.drawn
        }

    def take_probes(self) -> None:
        """Probes stay with their parents."""
        for node in np.flatnonzero(self.tree.kinds == PROBE).tolist():
            parent = self.parents[node]
            self.keep_n[node] = parent == ROOT or self.keep_n[parent]

    def trials(self) -> dict[int, list[Trial]]:
        """The trials that remain at parents with drawn ones: drawn ones that were kept, point ones whose node was."""
        return {
            parent: [
                t for i, t in enumerate(ts) if (i < self.drawn_kept.get(parent, 0) if t.drawn else self.keep_n[t.node])
            ]
            for parent, ts in self.tree.trials.items()
        }


def _drawing_order(tree: TokenTree) -> Iterator[tuple[int, int]]:
    """(parent, position in its trials) of every drawn trial, as they were drawn."""
    keys = []
    for parent, trials in tree.trials.items():
        depth = 0 if parent == ROOT else int(tree.depths[parent])
        keys += [(trial.order, depth, parent, index) for index, trial in enumerate(trials) if trial.drawn]
    for _, _, parent, index in sorted(keys):
        yield parent, index
