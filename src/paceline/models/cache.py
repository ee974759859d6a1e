"""The key-value cache: one arena per model, cut into reference-counted blocks; a sequence is a list of blocks.

In: lengths to make room for, forks, paths to keep. Out: slot numbers, and key and value *views* of the arena, so that scoring a
sequence copies nothing. Not here: what is written (models.decoder), who may see what (models.attention).

A sequence's committed tokens fill its first `length` slots; the root and tree nodes of a step use the slots right behind them as
scratch. A sequence that shares nothing stays physically contiguous: it grows in place, or moves to a free run of twice its size
(amortised). Sequences that share a prefix after `fork` part where the first of them writes: the last, partial block is copied
(copy-on-write), or the whole sequence if it is at most `copy_limit` tokens long, which makes it contiguous again. A change that an
exception cuts short (Ctrl-C) leaks nothing: the next one starts from what the sequences say they hold (models.blocks).
Source: PagedAttention (arXiv:2309.06180).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from paceline.errors import ConfigError
from paceline.models.blocks import BLOCK, BlockPool, adjacent, blocks_for

__all__ = ["BLOCK", "Arena", "BlockPool", "NativeCache", "adjacent", "blocks_for"]

Views = list[tuple[torch.Tensor, torch.Tensor]]


class Arena:
    """Keys and values of all sequences of a model: one tensor (layers, slots, 2 * kv heads, head dim), keys before values.

    Block 0 belongs to nobody: fixed-shape steps write their padding rows there. Grows by doubling; `version` counts the times,
    since views into the old tensor are then stale.
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
        self.pool = BlockPool(blocks, reserved=1)
        self._adopt(torch.zeros(layers, blocks * BLOCK, 2 * kv_heads, head_dim, dtype=dtype, device=device))

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
    def allocate(self, count: int, at: int | None = None) -> int:
        """Take a run of `count` blocks (at block `at`, if that is free) and return its first block; grows the arena if need be.

        Between `begin` and `pool.end`, and the blocks must be in a sequence's list before that end.
        """
        start = at if at is not None and self.pool.is_free(at, count) else self.pool.find(count)
        while start is None:
            self._grow(count)
            start = self.pool.find(count)
        self.pool.take(start, count)
        if self.pool.used_before[start : start + count].any():  # stale NaN of a past sequence would leak through masks
            self.kv[:, start * BLOCK : (start + count) * BLOCK].zero_()
        return start

    def _grow(self, count: int) -> None:
        blocks = max(2 * len(self.pool.counts), len(self.pool.counts) + count)
        layers, slots, width, head_dim = self.kv.shape
        kv = self.kv.new_zeros(layers, blocks * BLOCK, width, head_dim)
        kv[:, :slots] = self.kv
        self._adopt(kv)
        self.pool.grow(blocks)
        self.version += 1

    @torch.inference_mode()
    def copy(self, source: Sequence[int], start: int) -> None:
        """Copy whole blocks to the run that begins at block `start`."""
        if source:
            self.kv[:, start * BLOCK : (start + len(source)) * BLOCK] = self.kv[:, self._slots(source)]

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


class NativeCache:
    """The handle of one sequence: its blocks, its committed length, and what the last step left in scratch slots.

    Attributes:
        blocks: physical blocks in order; empty after release.
        scratch: inputs (root and nodes) of the last step that await `commit`.
        base: physical slot of position 0 if the blocks are adjacent, else -1.
    """

    __slots__ = ("__weakref__", "_views", "_views_of", "arena", "base", "blocks", "length", "released", "scratch")

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self.blocks: list[int] = []
        self.length, self.scratch, self.base = 0, 0, 0
        self.released = False
        self._views: dict[tuple[int, int], Views] = {}
        self._views_of = (0, 0)
        arena.pool.holders.add(self)

    def __del__(self) -> None:
        if getattr(self, "blocks", None):
            self.blocks = []
            self.arena.pool.stale = True

    def reserve(self, inputs: int) -> None:
        """Make room for `inputs` tokens behind the committed ones, in slots that nobody else reads.

        Raises:
            ConfigError: the cache was released.
        """
        if self.released:
            raise ConfigError("this sequence's cache was released; open a new one with runner.open()")
        first, need = self.length // BLOCK, blocks_for(self.length + inputs)
        private = first >= len(self.blocks) or bool(self.arena.pool.counts[self.blocks[first]] == 1)
        if need <= len(self.blocks) and private:
            return
        if not (private and self._extend_in_place(need)):
            self._relocate(need, first if not private else len(self.blocks))
        self._settle()

    def _settle(self) -> None:
        self.base = (self.blocks[0] * BLOCK if adjacent(self.blocks) else -1) if self.blocks else 0

    def _extend_in_place(self, need: int) -> bool:
        if not self.blocks:
            return False
        count, at = need - len(self.blocks), self.blocks[-1] + 1
        if not self.arena.pool.is_free(at, count):
            return False
        self.arena.begin()
        self.arena.allocate(count, at)
        self.blocks.extend(range(at, at + count))
        self.arena.pool.end()
        return True

    def _relocate(self, need: int, shared: int) -> None:
        """Move to a run of twice the size: everything, or, for a long sequence with a shared prefix, all behind block `shared`."""
        self.arena.begin()
        private = bool((self.arena.pool.counts[self.blocks] == 1).all())
        keep = 0 if private or self.length <= self.arena.copy_limit else shared
        count = 2 * (need - keep)
        start = self.arena.allocate(count)
        old = self.blocks[keep:]
        self.arena.copy(self.blocks[keep : blocks_for(self.length)], start)
        self.arena.pool.drop(old)
        self.blocks[keep:] = range(start, start + count)
        self.arena.pool.end()

    def slot_index(self, start: int, stop: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """(stop - start,) int64 physical slots of the positions start .. stop - 1."""
        positions = np.arange(start, stop)
        return np.asarray(self.blocks, np.int64)[positions // BLOCK] * BLOCK + positions % BLOCK

    def views(self, start: int, stop: int) -> Views:
        """Per layer the keys and values of positions start .. stop - 1, each (1, kv heads, stop - start, head dim): views of the
        arena, remembered until the sequence or the arena moves. Only for a contiguous sequence (`base` >= 0)."""
        current = (self.arena.version, self.base)
        if current != self._views_of or len(self._views) > 8:
            self._views.clear()
            self._views_of = current
        found = self._views.get((start, stop))
        if found is None:
            at, count = self.base + start, stop - start
            pairs = zip(self.arena.keys, self.arena.values, strict=True)
            found = self._views[start, stop] = [(k.narrow(2, at, count), v.narrow(2, at, count)) for k, v in pairs]
        return found

    def keep(self, path: Sequence[int]) -> None:
        """Commit the root and the nodes of `path` out of the scratch slots; the rest of the scratch is forgotten.

        Raises:
            ConfigError: nothing is scored, or a node was not part of the tree last scored, or the path does not go downwards.
        """
        if not self.scratch or any(not 0 <= node < self.scratch - 1 for node in path):
            raise ConfigError(f"commit: path {list(path)} does not lie in the {self.scratch} inputs last scored; score first")
        first = next((i for i, node in enumerate(path) if node != i), len(path))
        if first < len(path):
            at = self.length + 1
            slots = self.slot_index(0, self.length + self.scratch)
            source = [int(slots[at + node]) for node in path[first:]]
            self.arena.move(source, [int(slots[at + i]) for i in range(first, len(path))])
        self.length += 1 + len(path)
        self.scratch = 0

    def truncate(self, length: int) -> None:
        """Forget all but the first `length` committed tokens and the scratch; shared blocks behind them are given back.

        Raises:
            ConfigError: `length` lies outside 0 .. the committed length.
        """
        if not 0 <= length <= self.length:
            raise ConfigError(f"truncate: length must lie in 0..{self.length}, got {length}")
        self.length, self.scratch = length, 0
        rest = self.blocks[blocks_for(length) :]
        if rest and (self.arena.pool.counts[rest] > 1).any():
            self.arena.begin()
            self.arena.pool.drop(rest)
            del self.blocks[blocks_for(length) :]
            self.arena.pool.end()
            self._settle()

    def fork(self) -> NativeCache:
        """A second sequence that shares the committed blocks; nothing is copied."""
        other, blocks = type(self)(self.arena), self.blocks[: blocks_for(self.length)]
        other.length = self.length
        self.arena.begin()
        self.arena.pool.share(blocks)
        other.blocks = blocks
        self.arena.pool.end()
        other._settle()
        return other

    def release(self) -> None:
        """Give all blocks back; a second call does nothing."""
        self.arena.begin()
        self.arena.pool.drop(self.blocks)
        self.blocks, self.length, self.scratch, self.released = [], 0, 0, True
        self.arena.pool.end()
        self._views.clear()
