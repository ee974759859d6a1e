"""The memory of a key-value cache: one tensor of slots for all sequences of a model, cut into counted blocks.

`BlockPool` counts who holds which block. An exception may come between any two operations (Ctrl-C, an error while
memory grows), and a handle may be lost on its way to whoever asked for it. So counts are only a summary: every change
is made within `Arena.change`, and where the last change did not reach its end, or a holder died with blocks, the
counts are made anew from the holders' own lists.

`PrefixIndex` keeps the blocks of ended sequences and finds them again by their tokens. A block is known by its own
tokens and by the entry of the block before it, so an entry stands for the whole text up to its end; the first block of
a text hangs on its owner's key. Entries are looked up by hash and compared token by token: equal hashes of other tokens
cannot meet. Using an entry makes those before it younger still, so the oldest entry is always the last one of its
chain.

`Arena` is the tensor; layers with a sliding window may be elsewhere (models.state.window_slots). Source:
PagedAttention and automatic prefix caching of vLLM (arXiv:2309.06180).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Final, Protocol
from weakref import WeakSet

import numpy as np
import torch

from paceline.models.state.window_slots import BLOCK, WindowSlots, zeros

CHANGES: Final = count()


class Holder(Protocol):
    """A sequence, or an index of kept ones: the blocks it holds, one entry for each time."""

    @property
    def blocks(self) -> Sequence[int]:
        """Their numbers."""

    @property
    def window_blocks(self) -> Sequence[int]:
        """Those whose keys and values must remain in layers with a sliding window."""


def blocks_for(slots: int) -> int:
    """Blocks that hold this many slots."""
    return -(-slots // BLOCK)


def adjacent(blocks: Sequence[int]) -> bool:
    """Whether the blocks follow each other without a gap."""
    return all(block == blocks[0] + i for i, block in enumerate(blocks))


class BlockPool:
    """Reference counts of blocks; finds free runs. Knows nothing of tensors.

    Args:
        blocks: how many there are.
        reserved: so many first blocks are never free.

    Attributes:
        holders: all sequences, as long as they live; what they hold is what counts.
        cut_short: a change began and did not end.
        stale: a holder died with blocks.
        changes: another number whenever blocks have changed hands.
    """

    def __init__(self, blocks: int, reserved: int = 0) -> None:
        self.counts = np.zeros(blocks, np.int32)
        self.counts[:reserved] = 1
        self.used_before = np.zeros(blocks, np.bool_)
        self.reserved = reserved
        self.holders: WeakSet[Holder] = WeakSet()
        self.cut_short = self.stale = False
        self.changes = next(CHANGES)

    def begin(self) -> None:
        """A change of counts and holders begins."""
        self.recount()
        self.cut_short = True

    def end(self) -> None:
        """The change is whole."""
        self.changes = next(CHANGES)
        self.cut_short = False

    def recount(self) -> None:
        """Make the counts anew from the holders, if they may be wrong."""
        if not (self.cut_short or self.stale):
            return
        self.cut_short, self.stale = True, False
        counts = np.zeros_like(self.counts)
        counts[: self.reserved] = 1
        holders = list(self.holders)  # none of them dies before the return
        for holder in holders:
            np.add.at(counts, np.asarray(holder.blocks, np.int64), 1)
        self.used_before |= self.counts > counts
        self.counts = counts
        self.cut_short = False

    @property
    def free(self) -> int:
        """Number of blocks that nobody holds; for the thread that changes them."""
        self.recount()
        return self.unheld

    @property
    def unheld(self) -> int:
        """`free`, inside a change; to another thread, about as many."""
        return int((self.counts == 0).sum())

    def find(self, count: int) -> int | None:
        """First block of the first free run of `count` blocks, or None."""
        start = (self.counts == 0).tobytes().find(b"\x01" * count)
        return None if start < 0 else start

    def is_free(self, start: int, count: int) -> bool:
        """Whether the blocks start .. start + count - 1 exist and nobody holds them."""
        return start + count <= len(self.counts) and not self.counts[start : start + count].any()

    def add_reference(self, blocks: Sequence[int]) -> None:
        """Count these blocks once more."""
        if isinstance(blocks, range):
            self.counts[blocks.start : blocks.stop] += 1
        else:
            self.counts[list(blocks)] += 1

    def drop(self, blocks: Sequence[int]) -> None:
        """Count these blocks once less."""
        index = list(blocks)
        self.used_before[index] = True
        self.counts[index] -= 1

    def shrink(self, blocks: int) -> None:
        """Drop the free blocks beyond this number."""
        self.counts, self.used_before = self.counts[:blocks].copy(), self.used_before[:blocks].copy()

    def grow(self, blocks: int) -> None:
        """Add free blocks up to this number."""
        self.counts = np.concatenate([self.counts, np.zeros(blocks - len(self.counts), np.int32)])
        self.used_before = np.concatenate([self.used_before, np.zeros(blocks - len(self.used_before), np.bool_)])


Key = tuple[str | int, bytes]
"""The owner's key, or the serial number of the entry before; tokens of the block."""


@dataclass(frozen=True, slots=True)
class KeptBlock:
    """A kept block: its number in the arena, and a serial number that no other entry ever has."""

    block: int
    serial: int


def pieces_of(tokens: Sequence[int]) -> list[bytes]:
    """The full blocks of a text, each as the bytes of its tokens."""
    full = len(tokens) // BLOCK
    size = BLOCK * np.dtype(np.int32).itemsize
    whole = np.asarray(tokens[: full * BLOCK], np.int32).tobytes()
    return [whole[i * size : (i + 1) * size] for i in range(full)]


class PrefixIndex:
    """Finds the blocks of ended sequences by their tokens, and holds them until their room is needed.

    What was added under one owner's key is found under no other (`engine.request.Request.prefix_key`). Changes happen
    within `Arena.change`; one that was cut short leaves entries that nobody finds at worst, and they go like all
    others.

    Args:
        pool: where the blocks are counted.
        windowed: which of them layers with a window can still read; None where they can all.

    Attributes:
        most: most blocks to keep; None for no limit.
        window_blocks: none; what a sequence takes over is the sequence's.
    """

    window_blocks: Sequence[int] = ()

    def __init__(self, pool: BlockPool, windowed: WindowSlots | None = None) -> None:
        self.pool, self._windowed = pool, windowed
        self.most: int | None = None
        self._entries: OrderedDict[Key, KeptBlock] = OrderedDict()
        self._serials = count()
        pool.holders.add(self)

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def blocks(self) -> list[int]:
        """The blocks that are kept."""
        return [entry.block for entry in self._entries.values()]

    def find(self, owner_key: str, pieces: Sequence[bytes]) -> list[int]:
        """Blocks of the longest beginning that a sequence can go on from; all that are known count as used."""
        keys = self._path(owner_key, pieces)
        for key in reversed(keys):
            self._entries.move_to_end(key)
        return self._usable(keys)

    def known(self, owner_key: str, pieces: Sequence[bytes]) -> int:
        """How many blocks `find` would give."""
        return len(self._usable(self._path(owner_key, pieces)))

    def _usable(self, keys: Sequence[Key]) -> list[int]:
        blocks = [self._entries[key].block for key in keys]
        return blocks if self._windowed is None else blocks[: self._windowed.usable(blocks)]

    def _path(self, owner_key: str, pieces: Sequence[bytes]) -> list[Key]:
        before: str | int = owner_key
        keys: list[Key] = []
        for piece in pieces:
            entry = self._entries.get((before, piece))
            if entry is None:
                break
            keys.append((before, piece))
            before = entry.serial
        return keys

    def add(self, owner_key: str, pieces: Sequence[bytes], blocks: Sequence[int]) -> None:
        """Keep the blocks of a text; where a block of the same text is known, that one stays, unless layers with a
        window have lost it.
        """
        before: str | int = owner_key
        keys: list[Key] = []
        for piece, block in zip(pieces, blocks, strict=False):
            key = (before, piece)
            entry = self._entries.get(key)
            if entry is None:
                entry = KeptBlock(block, next(self._serials))
                self.pool.add_reference([block])
                self._entries[key] = entry
            elif self._windowed is not None and self._windowed.has([block, entry.block]).tolist() == [True, False]:
                self.pool.add_reference([block])
                self.pool.drop([entry.block])
                entry = self._entries[key] = KeptBlock(block, entry.serial)
            keys.append(key)
            before = entry.serial
        for key in reversed(keys):
            self._entries.move_to_end(key)
        if self.most is not None:
            self._drop(len(self._entries) - self.most)

    def evict(self, wanted: int) -> None:
        """Give up the least recently used entries until `wanted` blocks have become free, or none is left."""
        while wanted > 0 and self._entries:
            wanted -= self._drop(1)

    def clear(self) -> None:
        """Give up everything."""
        self._drop(len(self._entries))

    def _drop(self, number: int) -> int:
        """Give up the oldest entries; how many blocks became free."""
        freed = 0
        for _ in range(number):
            _, entry = self._entries.popitem(last=False)
            self.pool.drop([entry.block])
            freed += int(self.pool.counts[entry.block] == 0)
        return freed


class Arena:
    """Keys and values of all sequences of a model.

    One tensor (layers, slots, 2 * kv heads, head dim), keys before values, of all layers but those in `windowed`.

    Block 0 belongs to nobody: fixed-shape steps write their padding rows there. Grows by doubling; `version` counts the
    times, since views into the old tensor are then stale.

    Args:
        windows: per layer its sliding window or None, where layers shall give back what is behind it.
        without_keys: layers that keep no keys and values.

    Attributes:
        windowed: keys and values of the layers with a window; None where there are none.
        limit: most blocks, block 0 included; None for no limit. A step that needs more gets them all the same: it is
            for the engine to see that none does (engine.cache_room).
        single_blocks: room is short: take the blocks that are needed and no more.
        widest: most slots that one step of a sequence has taken: its root and nodes.
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
        windows: Sequence[int | None] = (),
        without_keys: Collection[int] = (),
    ) -> None:
        self.kv_heads, self.copy_limit, self.version = kv_heads, copy_limit, 0
        blocks = max(blocks_for(slots), 2)
        self.limit: int | None = None
        self.single_blocks, self.masked, self.widest = False, True, 1
        self.pool = BlockPool(blocks, reserved=1)
        window_of = {layer: window for layer, window in enumerate(windows) if window is not None}
        self._windowed_layers, self.windowed = list(window_of), None
        kept = set(range(layers)) - {*window_of, *without_keys}
        self._whole_layers, self._without_keys = sorted(kept), sorted(without_keys)
        if window_of:
            self.windowed = WindowSlots(
                len(window_of),
                max(window_of.values()),
                2 * kv_heads,
                head_dim,
                blocks=blocks,
                dtype=dtype,
                device=device,
            )
        self.prefixes = PrefixIndex(self.pool, self.windowed)
        self._adopt(zeros((len(kept), blocks * BLOCK, 2 * kv_heads, head_dim), dtype, device))

    def _adopt(self, kv: torch.Tensor) -> None:
        self.kv = kv
        layers = dict(zip(self._whole_layers, kv.unbind(0), strict=True))
        layers |= dict.fromkeys(self._without_keys, kv.new_empty(0))
        if self.windowed is not None:
            layers |= zip(self._windowed_layers, self.windowed.kv.unbind(0), strict=True)
        self.layers = [layers[index] for index in sorted(layers)]
        by_head = dict(zip(self._whole_layers, kv.transpose(1, 2).unsqueeze(1).unbind(0), strict=True))
        self.keys = {index: layer[:, : self.kv_heads] for index, layer in by_head.items()}
        self.values = {index: layer[:, self.kv_heads :] for index, layer in by_head.items()}

    @property
    def slots(self) -> int:
        return self.kv.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes that are allocated."""
        return self.kv.nbytes + (0 if self.windowed is None else self.windowed.kv.nbytes)

    @contextmanager
    def change(self) -> Iterator[None]:
        """A change of who holds which blocks; what an earlier one left half done is put right first.

        There is no `finally`: a change that an exception cuts short must stay marked as such, so that the next one
        counts anew. Changes do not nest.
        """
        if self.pool.cut_short:
            self._adopt(self.kv)
            self.pool.grow(self.slots // BLOCK)
            self._follow()
        self.pool.begin()
        yield
        self.pool.end()

    def _follow(self) -> None:
        """Everything that depends on the size is stale."""
        if self.windowed is not None:
            self.windowed.follow(len(self.pool.counts))
        self.version += 1

    @torch.inference_mode()
    def allocate(self, count: int, at: int | None = None) -> Sequence[int]:
        """Take `count` blocks (from block `at` on, if they are free).

        Adjacent ones, unless the limit leaves no such run.

        Within `change`, and the blocks must be in a sequence's list before it ends.
        """
        start = at if at is not None and self.pool.is_free(at, count) else self._run(count)
        blocks = self._single(count) if start is None else range(start, start + count)
        self.pool.add_reference(blocks)
        if (
            self.masked and self.pool.used_before[list(blocks)].any()
        ):  # stale NaN of a past sequence would leak through masks
            self.kv[:, self._slots(blocks)] = 0
        if self.windowed is not None:
            self.windowed.drop(blocks)
        return blocks

    @torch.inference_mode()
    def prepare(self, windowed: WindowSlots, blocks: Sequence[int]) -> None:
        """Give blocks that will be written to a place in the layers with a window."""
        lacking = windowed.lacking(blocks, self._window_blocks())
        if lacking > 0:
            with self.change():
                self._grow_windowed(windowed, lacking)
        windowed.give(blocks, clear=self.masked)

    def _window_blocks(self) -> list[Sequence[int]]:
        return [holder.window_blocks for holder in list(self.pool.holders)]

    def _grow_windowed(self, windowed: WindowSlots, places: int) -> None:
        windowed.grow(places)
        self._adopt(self.kv)
        self.version += 1

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
        if self.pool.free < len(self.pool.counts) - self.pool.reserved:
            return
        if self.windowed is not None:
            self.windowed.shrink()
        if len(self.pool.counts) > blocks:
            self._adopt(self.kv[:, : blocks * BLOCK].clone())
            self.pool.shrink(blocks)
        else:
            self._adopt(self.kv)
        self._follow()

    def _grow(self, blocks: int) -> None:
        layers, slots, width, head_dim = self.kv.shape
        kv = zeros((layers, blocks * BLOCK, width, head_dim), self.kv.dtype, self.kv.device)
        kv[:, :slots] = self.kv
        self._adopt(kv)
        self.pool.grow(blocks)
        self._follow()

    @torch.inference_mode()
    def copy(self, source: Sequence[int], target: Sequence[int]) -> None:
        """Copy whole blocks to as many others."""
        if source:
            self.kv[:, self._slots(target)] = self.kv[:, self._slots(source)]

    @torch.inference_mode()
    def copy_windowed(self, windowed: WindowSlots, source: Sequence[int], target: Sequence[int]) -> None:
        """The same in the layers with a window, inside a change; what has no place there has none afterwards."""
        pairs = [pair for pair, has in zip(zip(source, target, strict=True), windowed.has(source), strict=True) if has]
        if pairs:
            filled, new = zip(*pairs, strict=True)
            if (lacking := windowed.lacking(new, self._window_blocks())) > 0:
                self._grow_windowed(windowed, lacking)
            windowed.give(new, clear=False)
            windowed.copy(filled, new)

    @torch.inference_mode()
    def move(self, source: Sequence[int], target: Sequence[int]) -> None:
        """Copy single slots, all layers at once; sources may overlap targets."""
        device = self.kv.device
        self.kv[:, torch.tensor(target, device=device)] = self.kv[:, torch.tensor(source, device=device)]
        if self.windowed is not None:
            self.windowed.move(source, target)

    def _slots(self, blocks: Sequence[int]) -> slice | torch.Tensor:
        if blocks[-1] - blocks[0] == len(blocks) - 1 and adjacent(blocks):
            return slice(blocks[0] * BLOCK, (blocks[-1] + 1) * BLOCK)
        index = np.asarray(blocks)[:, None] * BLOCK + np.arange(BLOCK)
        return torch.from_numpy(index.reshape(-1)).to(self.kv.device)
