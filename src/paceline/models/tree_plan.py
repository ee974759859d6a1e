"""What a drafter asks of a runner that grows draft trees by itself, and what it gets.

In: nothing. Out: plans and grown trees, in numbers. Not here: growing
(models.kernels.draft_grow), policies (drafters.tree_policies).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from paceline.models.base import SequenceCache
from paceline.tree.static_shapes import Shape

Stop = Callable[[int, float], bool]

BEST_PATHS: Final = 0
"""The most likely paths: children enter while they are above the bar, which is the NODES-th largest reach so far, and the most
likely nodes above it are expanded; in the end the most likely nodes stay."""
THRESHOLD: Final = 1
"""Level by level, all that is likely enough, most likely first, until the nodes are used up."""
STATIC: Final = 2
"""The nodes of a shape, by rank."""


class TreePlan(NamedTuple):
    """How one tree of points grows.

    Attributes:
        kind: one of the above. nodes, depth: limits, at least 1.
        children: most of one node, of BEST_PATHS. rows: most nodes expanded in one pass.
        levelwise: expand nodes of the last level only.
        least: smallest reach of a node, of THRESHOLD; the first node may have any.
        shape: of STATIC, within the limits.
    """

    kind: int
    nodes: int
    depth: int
    children: int
    rows: int
    levelwise: bool = True
    least: float = 0.0
    shape: Shape | None = None


class GrownTree(NamedTuple):
    """A tree, and what the runner fed for it.

    Attributes:
        columns_3n: (3, n) int32 tokens, parents (-1: the root) and depths. confidence_n: (n,) float32 chances at the parent.
        fed_tokens, fed_parents: inputs that the cache holds behind its tokens, the root first; places of their parents, -1 for the
            root's.
    """

    columns_3n: npt.NDArray[np.int32]
    confidence_n: npt.NDArray[np.float32]
    fed_tokens: list[int]
    fed_parents: list[int]


@runtime_checkable
class TreeRunner(Protocol):
    """A runner with a shorter way to grow trees of points from its plain logits."""

    def grows(self, plan: TreePlan) -> bool:
        """Whether `draft_trees` takes such a plan."""

    def draft_trees(
        self,
        caches: Sequence[SequenceCache],
        feeds: Sequence[Sequence[int]],
        plans: Sequence[TreePlan],
        stops: Sequence[Stop | None],
    ) -> list[GrownTree]:
        """Append `feeds` and grow a tree behind each; its root, the last token fed, and the nodes fed are scored, not committed.

        `stop(depth, confidence)` is asked once before level `depth` (from 2 on) with the chance that its most likely parent is
        reached, where that level is to be drafted; None never stops.
        """
