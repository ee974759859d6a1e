"""Greedy chains by part of a model's layers, level by level, as self-drafters draft them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from paceline.models import LayerPlan


def layer_chains(
    drafts: Any, caches: Sequence[Any], roots: Sequence[int], steps: Sequence[int], plan: LayerPlan
) -> tuple[list[list[int]], list[torch.Tensor]]:
    """Up to `steps` tokens behind each root, and (steps, hidden) the states of the inputs that were fed for them."""
    inputs, states = [[root] for root in roots], [list[torch.Tensor]() for _ in roots]
    for level in range(max(steps)):
        active = [i for i, most in enumerate(steps) if level < most]
        result = drafts.step([caches[i] for i in active], [inputs[i] for i in active], plan, states=True)
        for i, row, state in zip(active, result.logits, result.states.split(1), strict=True):
            inputs[i].append(int(row.argmax()))
            states[i].append(state)
    return [own[1:] for own in inputs], [torch.cat(own) for own in states]
