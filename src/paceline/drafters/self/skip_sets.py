"""Sets of sub-layers to leave out of a decoder, and the plans that they make.

Sub-layer 2 i is the attention of layer i, 2 i + 1 its MLP. The first and the last layer always stay.

Sources: SWIFT: On-the-Fly Self-Speculative Decoding for LLM Inference Acceleration (arXiv:2410.06916); Accelerating
Inference in Large Language Models with a Unified Layer Skipping Strategy (arXiv:2404.06954).
"""

from __future__ import annotations

import math

import numpy as np

from paceline.models import LayerPlan
from paceline.models.runners import unified_layers

SubLayers = frozenset[int]
"""Numbers of sub-layers that are left out."""
ROUNDING = 1e-9
"""Products such as 100 * 0.29 lie just below the number that is meant."""


def choices(layers: int) -> range:
    """The sub-layers that may be left out of so many layers."""
    return range(2, 2 * (layers - 1))


def count_of(layers: int, ratio: float) -> int:
    """How many sub-layers a share `ratio` of those that may be left out is, rounded down."""
    return math.floor(len(choices(layers)) * ratio + ROUNDING)


def first_set(layers: int, count: int) -> SubLayers:
    """`count` sub-layers of every second layer, from layer 1 on; then of the layers between them."""
    order = [*range(1, layers - 1, 2), *range(2, layers - 1, 2)]
    return frozenset([part for layer in order for part in (2 * layer, 2 * layer + 1)][:count])


def random_set(layers: int, count: int, rng: np.random.Generator) -> SubLayers:
    """Draw `count` sub-layers, all sets alike."""
    return frozenset(rng.choice(choices(layers), count, replace=False).tolist())


def plan_of(skipped: SubLayers) -> LayerPlan:
    """Make the pass that leaves these out."""
    return LayerPlan(
        skip_attention=frozenset(part // 2 for part in skipped if part % 2 == 0),
        skip_mlp=frozenset(part // 2 for part in skipped if part % 2),
    )


def unified_plan(layers: int, speedup: float) -> LayerPlan:
    """Make the pass over `unified_layers` alone."""
    skipped = frozenset(range(layers)).difference(unified_layers(layers, speedup))
    return LayerPlan(skip_attention=skipped, skip_mlp=skipped)
