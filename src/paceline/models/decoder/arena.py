"""The memory of a key-value cache: one tensor of slots for all sequences of a model, cut into blocks.

In: how many blocks somebody needs. Out: block numbers; layers, keys and values as views. Not here: which sequence holds
which block and how it moves (models.decoder.cache), reference counts (models.decoder.blocks), which blocks outlive
their sequence (models.decoder.prefixes).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from paceline.models.cpu import pages
from paceline.models.decoder.blocks import BLOCK, BlockPool, adjacent, blocks_for
from paceline.models.decoder.prefixes import PrefixIndex


class Arena:
    """Keys and values of all sequences of a model: one tensor (layers, slots, 2 * kv heads, head dim), keys before
    values.

    Block 0 belongs to nobody: fixed-shape steps write their padding rows there. Grows by doubling; `version` counts the
    times, since views into the old tensor are then stale.

    Attributes:
        limit: most blocks, block 0 included; None for no limit. A step that needs more gets them all the same: it is
            for the engine to see that none does (engine.room).
        lean: room is short: take the blocks that are needed and no more.
        widest: most inputs that one step of a sequence has had.
        masked: passes read slots that nobody sees, through masks, so that these must hold numbers; False where they do
        not.
        prefixes: blocks of ended sequences, kept until their room is needed.
    """

    def __init__(
        self,
        layers: int,
        kv_heads: int,
        head_dim: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        slots: int = 2048,
        copy_limit: int = 1024,
    ) -> None:
        self.kv_heads, self.copy_limit, self.version = kv_heads, copy_limit, 0
        blocks = max(blocks_for(slots), 2)
        self.limit: int | None = None
        self.lean, self.masked, self.widest = False, True, 1
        self.pool = BlockPool(blocks, reserved=1)
        self.prefixes = PrefixIndex(self.pool)
        self._adopt(_zeros((layers, blocks * BLOCK, 2 * kv_heads, head_dim), dtype, device))

    def _adopt(self, kv: torch.Tensor) -> None:
        self.kv = kv
        self.layers = list(kv.unbind(0))
        by_head = kv.transpose(1, 2).unsqueeze(1).unbind(0)
        self.keys = [layer[:, : self.kv_heads] for layer in by_head]
        self.values = [layer[:, self.kv_heads :] for layer in by_head]

    @property
    def slots(self) -> int:
        return self.kv.shape[1]

    def begin(self) -> None:
        """A change of who holds what begins; what an earlier one left half done is put right."""
        if self.pool.cut_short:
            self._adopt(self.kv)
            self.pool.grow(self.slots // BLOCK)
            self.version += 1
        self.pool.begin()

    @torch.inference_mode()
    def allocate(self, count: int, at: int | None = None) -> Sequence[int]:
        """Take `count` blocks (from block `at` on, if they are free); adjacent ones, unless the limit leaves no such
        run.

        Between `begin` and `pool.end`, and the blocks must be in a sequence's list before that end.
        """
        start = at if at is not None and self.pool.is_free(at, count) else self._run(count)
        blocks = self._single(count) if start is None else range(start, start + count)
        self.pool.share(blocks)
        if (
            self.masked and self.pool.used_before[list(blocks)].any()
        ):  # stale NaN of a past sequence would leak through masks
            self.kv[:, self._slots(blocks)] = 0
        return blocks

    def _run(self, count: int) -> int | None:
        """First of `count` adjacent free blocks; grows the arena within its limit."""
        start = self.pool.find(count)
        while start is None:
            size = len(self.pool.counts)
            wanted = max(2 * size, size + count)
            wanted = wanted if self.limit is None else min(wanted, self.limit)
            if wanted <= size:
                return None
            self._grow(wanted)
            start = self.pool.find(count)
        return start

    def _single(self, count: int) -> Sequence[int]:
        """`count` free blocks from anywhere, at the cost of kept prefixes, and last of the limit."""
        self.prefixes.evict(count - self.pool.unheld)
        start = self.pool.find(count)
        if start is not None:
            return range(start, start + count)
        if (short := count - self.pool.unheld) > 0:
            self._grow(len(self.pool.counts) + short)
        return np.flatnonzero(self.pool.counts == 0)[:count].tolist()  # type: ignore[no-any-return]  # numpy types tolist as Any

    def shrink(self, blocks: int) -> None:
        """Drop what is allocated beyond a limit, if nobody holds anything."""
        if len(self.pool.counts) > blocks and self.pool.free == len(self.pool.counts) - self.pool.reserved:
            self._adopt(self.kv[:, : blocks * BLOCK].clone())
            self.pool.shrink(blocks)
            self.version += 1

    def _grow(self, blocks: int) -> None:
        layers, slots, width, head_dim = self.kv.shape
        kv = _zeros((layers, blocks * BLOCK, width, head_dim), self.kv.dtype, self.kv.device)
        kv[:, :slots] = self.kv
        self._adopt(kv)
        self.pool.grow(blocks)
        self.version += 1

    @torch.inference_mode()
    def copy(self, source: Sequence[int], target: Sequence[int]) -> None:
        """Copy whole blocks to as many others."""
        if source:
            self.kv[:, self._slots(target)] = self.kv[:, self._slots(source)]

    @torch.inference_mode()
    def move(self, source: Sequence[int], target: Sequence[int]) -> None:
        """Copy single slots, all layers at once; sources may overlap targets."""
        device = self.kv.device
        self.kv[:, torch.tensor(target, device=device)] = self.kv[:, torch.tensor(source, device=device)]

    def _slots(self, blocks: Sequence[int]) -> slice | torch.Tensor:
        if blocks[-1] - blocks[0] == len(blocks) - 1 and adjacent(blocks):
            return slice(blocks[0] * BLOCK, (blocks[-1] + 1) * BLOCK)
        index = np.asarray(blocks)[:, None] * BLOCK + np.arange(BLOCK)
        return torch.from_numpy(index.reshape(-1)).to(self.kv.device)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return pages.zeros(shape, dtype) if device.type == "cpu" else torch.zeros(shape, dtype=dtype, device=device)
