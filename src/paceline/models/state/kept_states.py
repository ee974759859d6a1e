"""Copies of states of fixed size, those of mixers, in blocks of a model's arena: they lie beside keys and values, so
that one limit covers all, and their room is taken back likewise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    import torch

    from paceline.models.state.block_pool import BlockPool


class KeptState:
    """A copy of what a sequence's mixers knew behind so many of its tokens (`Arena.keep_state`).

    Args:
        pool: of the blocks.
        read: gives the bytes in some of them.
        size: bytes of the copy.

    Attributes:
        blocks: where it is; none once its room was given to others.
        window_blocks: none, as of all that only waits to be taken over (`models.state.block_pool.Holder`).
    """

    window_blocks: ClassVar[Sequence[int]] = ()
    __slots__ = ("__weakref__", "_pool", "_read", "_size", "blocks")

    def __init__(self, pool: BlockPool, read: Callable[[Sequence[int]], torch.Tensor], size: int) -> None:
        self._pool, self._read, self._size = pool, read, size
        self.blocks: Sequence[int] = ()
        pool.holders.add(self)

    def __del__(self) -> None:
        if getattr(self, "blocks", ()):
            self.blocks = ()
            self._pool.stale = True

    @property
    def present(self) -> bool:
        """Whether it can be read."""
        return bool(self.blocks)

    def read(self) -> torch.Tensor:
        """(size,) uint8, as it was given; the state must be present."""
        return self._read(self.blocks)[: self._size]

    def give_up(self) -> Sequence[int]:
        """Leave the room to others, within `Arena.change`; the blocks, which are free then."""
        blocks, self.blocks = self.blocks, ()
        self._pool.drop(blocks)
        return blocks
