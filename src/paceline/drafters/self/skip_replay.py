"""The last tokens of a text once more, in one pass over part of the layers.

The tokens see the target's own keys and values of the text before them, and among each other those of the plan's
layers, as drafted tokens do. All this happens in a copy that shares the text's beginning, so that the sequence itself
is not touched.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from paceline.models import memory_of
from paceline.tree import TokenTree

if TYPE_CHECKING:
    from paceline.models import LayerPlan, Runner, RunsLayers, SequenceCache

CHUNK = 512
"""Tokens of a pass."""


def replayed(
    runner: RunsLayers, cache: SequenceCache, start: int, tokens: Sequence[int], *, plan: LayerPlan
) -> torch.Tensor:
    """The states behind the planned layers after each of a text's tokens.

    Args:
        cache: of the text; it holds at least the first `start` tokens.
        start: position of the first of `tokens`.
    Returns:
        (len(tokens), hidden), in the model's dtype.
    """
    copy = runner.fork(cache)
    try:
        runner.truncate(copy, start)
        return torch.cat([_passed(runner, copy, tokens[i : i + CHUNK], plan) for i in range(0, len(tokens), CHUNK)])
    finally:
        runner.release(copy)


def _passed(runner: RunsLayers, copy: SequenceCache, tokens: Sequence[int], plan: LayerPlan) -> torch.Tensor:
    """States of one pass over the next tokens of a copy, which then holds them."""
    result = runner.run_layers([copy], [tokens[0]], [TokenTree.chain(tokens[1:])], plan=plan)
    runner.commit([copy], [tuple(range(len(tokens) - 1))])
    return result.states


def has_room(runner: Runner, tokens: int) -> bool:
    """Whether a copy of a text of so many tokens takes nothing from others.

    The copy moves to a run of up to twice its size.
    """
    memory = memory_of(runner)
    return memory is None or 3 * memory.blocks_for(tokens) <= memory.spare()
