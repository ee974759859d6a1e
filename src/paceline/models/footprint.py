"""How much memory a sequence takes in a runner's cache.

In: a runner, a number of tokens. Out: bytes. Not here: limits (models.decoder.cache_memory, controllers.limited).
"""

from __future__ import annotations

from paceline.models.base import Runner, memory_of


def cache_bytes(runner: Runner, tokens: int) -> int | None:
    """What a sequence of so many tokens holds, in whole blocks; None for a runner whose caches are not counted."""
    memory = memory_of(runner)
    return None if memory is None else memory.block_bytes * memory.blocks_for(tokens)


def slot_bytes(runner: Runner) -> int | None:
    """Keys and values of one token, all layers; None as above."""
    memory = memory_of(runner)
    return None if memory is None else memory.block_bytes // memory.block_size


def save_memory(runner: Runner) -> None:
    """Let sequences take single blocks instead of runs in which they could grow."""
    if (memory := memory_of(runner)) is not None:
        memory.save(lean=True)
