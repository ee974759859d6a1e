"""How many prompt tokens stand behind each input of a tree: those that are most likely to be of use.

The prompt tokens behind an input draft the next step's tree if that input is the last one that is accepted; the k-th of
them makes level k of that tree. So it is worth the chance that the input is the last one times what level k adds. Of
all of them the least worth are left out until no more than wanted are there.

Source: the dynamic sparse tree of Hardware-Aware Parallel Prompt Decoding (arXiv:2405.18628).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.tree.token_tree import TokenTree

Floats = npt.NDArray[np.float64]


def last_accepted(tree: TokenTree) -> Floats:
    """(1 + n,) chances that the root, or a node, is the last input that is accepted, by the confidence in the nodes:
    that it is reached, and none of its children.
    """
    reached = np.ones(1 + len(tree))
    for node, (parent, chance) in enumerate(zip(tree.parents.tolist(), tree.confidence.tolist(), strict=True)):
        reached[1 + node] = reached[1 + parent] * chance
    last = reached.copy()
    np.subtract.at(last, tree.parents + 1, reached[1:])
    return np.maximum(last, 0.0)


def prompt_counts(last: Floats, gains: Sequence[float], most: int) -> list[int]:
    """(n,) prompt tokens behind each input, `most` in all.

    Args:
        last: (n,) as of `last_accepted`. gains: (k,) tokens that each level adds, never more than the one before.
    """
    worth = np.outer(last, gains)
    kept = np.argsort(-worth, axis=None, kind="stable")[: max(most, 0)]
    counts: Any = np.bincount(kept // max(len(gains), 1), minlength=len(last))
    return [int(count) for count in counts]
