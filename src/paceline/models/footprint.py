"""How much memory a sequence takes in a runner's cache.

In: a runner, a number of tokens. Out: bytes. Not here: limits (models.cache_memory, controllers.limited).
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.models.base import CacheMemory, Runner, memory_of
from paceline.models.layer_parallel import LayerParallelRunner


def cache_bytes(runner: Runner, tokens: int) -> int | None:
    """What a sequence of so many tokens holds, in whole blocks; None for a runner whose caches are not counted."""
    memories = memories_of(runner)
    return sum(memory.block_bytes * memory.blocks_for(tokens) for memory in memories) if memories else None


def slot_bytes(runner: Runner) -> int | None:
    """Keys and values of one token, all layers; None as above."""
    memories = memories_of(runner)
    return sum(memory.block_bytes // memory.block_size for memory in memories) if memories else None


def save_memory(runner: Runner) -> None:
    """Let sequences take single blocks instead of runs in which they could grow."""
    for memory in memories_of(runner):
        memory.save(lean=True)


def memories_of(runner: Runner) -> Sequence[CacheMemory]:
    """Where a runner's caches lie, part by part; none where they are not counted."""
    if isinstance(runner, LayerParallelRunner):
        return runner.memories
    memory = memory_of(runner)
    return () if memory is None else (memory,)
