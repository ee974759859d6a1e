"""How much memory a sequence takes in a runner's cache.

In: a runner, a number of tokens. Out: bytes. Not here: limits (models.cache_memory, controllers.limited).
"""

from __future__ import annotations

from paceline.models.base import Runner, memory_of
from paceline.models.one_layer import OneLayerRunner
from paceline.models.one_layer_cache import OneLayerCache


def cache_bytes(runner: Runner, tokens: int) -> int | None:
    """What a sequence of so many tokens holds; None for a runner whose caches are not counted.

    Blocks count whole; a one-layer model's arrays double when they are full.
    """
    if isinstance(runner, OneLayerRunner):
        kv, _, dim = runner.cache_shape
        return 2 * kv * dim * 4 * OneLayerCache.capacity_for(tokens)
    memory = memory_of(runner)
    return None if memory is None else memory.block_bytes * memory.blocks_for(tokens)


def slot_bytes(runner: Runner) -> int | None:
    """Keys and values of one token, all layers; None as above."""
    memory = memory_of(runner)
    return None if memory is None else memory.block_bytes // memory.block_size


def save_memory(runner: Runner) -> None:
    """Let sequences take single blocks instead of runs in which they could grow."""
    memory = memory_of(runner)
    if memory is not None:
        memory.save(lean=True)
