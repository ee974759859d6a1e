"""Random merged trees with confidences that know the drawn tokens, for exact enumeration of what cutting does to the
output distribution.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from tools.enumerate_draws import Choices, Target, distance, output_distribution, paths_of, target_distribution
from tools.random_drafts import RandomDrafter

from paceline.tree import TokenTree, merge
from paceline.verifiers import RecursiveRejection

Propose = Callable[[Choices], TokenTree]

TOLERANCE = 1e-9
WRONG = 1e-3
"""Wrong variants are off by more than this, right ones by less than TOLERANCE."""


def telling(tree: TokenTree, seed: int) -> TokenTree:
    """The tree with confidences that are a function of each node's path, token included, as a draft model's are."""
    raw = np.array([np.random.default_rng([seed, 3, *path]).random() for path in paths_of(tree)[1:]])
    sums = np.bincount(tree.parents + 1, weights=raw, minlength=1) if len(tree) else np.ones(1)
    return tree.replace(confidence=(raw / np.maximum(sums, 1.0)[tree.parents + 1]).astype(np.float32))


def merged(seed: int, vocabulary: int, *, depth: int = 2, draws: int = 2) -> Propose:
    """Two drafters' trees, merged; both draw and both have points."""
    first = RandomDrafter(seed, vocabulary, depth=depth, draws=draws, nodes=5)
    second = RandomDrafter(seed + 1000, vocabulary, depth=depth, draws=draws, nodes=5)
    return lambda choices: merge([telling(first(choices), seed), telling(second(choices), seed + 1)])


def distribution_error(propose: Propose, target: Target, length: int) -> float:
    """Distance of the output distribution of verified trees from the target's."""
    return distance(
        output_distribution(RecursiveRejection(), propose, target, length), target_distribution(target, length)
    )
