"""The memory of a key-value cache: one tensor of slots for all sequences of a model, cut into counted blocks.

`PrefixIndex` keeps the blocks of ended sequences and finds them again by their tokens. A block is known by its own
tokens and by the entry of the block before it, so an entry stands for the whole text up to its end; the first block of
a text hangs on its owner's key. Entries are looked up by hash and compared token by token: equal hashes of other tokens
cannot meet. Using an entry makes those before it younger still, so the oldest entry is always the last one of its
chain. Where a model has mixers, some entries have the states behind their block (models.state.kept_states): only there
can a text go on, and they go with their block.

`Arena` is the tensor; layers with a sliding window may be elsewhere (models.state.window_slots). Source:
PagedAttention and automatic prefix caching of vLLM (arXiv:2309.06180).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count
from typing import Final
from weakref import WeakValueDictionary

import numpy as np
import torch

from paceline.models.state.block_pool import BlockPool
from paceline.models.state.kept_states import KeptState
from paceline.models.state.window_slots import BLOCK, WindowSlots, zeros


def blocks_for(slots: int) -> int:
    """Blocks that hold this many slots."""
    return -(-slots // BLOCK)


def adjacent(blocks: Sequence[int]) -> bool:
    """Whether the blocks follow each other without a gap."""
    return all(block == blocks[0] + i for i, block in enumerate(blocks))


Key = tuple[str | int, bytes]
"""The owner's key, or the serial number of the entry before; tokens of the block."""


@dataclass(frozen=True, slots=True)
class KeptBlock:
    """A kept block: its number in the arena, a serial number that no other entry ever has, and the states of mixers
    behind it, None where there are none.
    """

    block: int
    serial: int
    state: KeptState | None = None

    @property
    def has_state(self) -> bool:
        """Whether a text with mixers can go on from here."""
        return self.state is not None and self.state.present


NO_STATES: Final[Mapping[int, KeptState]] = {}


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
        most: most blocks to keep, those of states included; None for no limit.
        needs_states: texts go on only from blocks that have the states of mixers.
        states: all of them, by age: those of entries, and those that sequences that live have for themselves.
        window_blocks: none; what a sequence takes over is the sequence's.
    """

    window_blocks: Sequence[int] = ()

    def __init__(self, pool: BlockPool, windowed: WindowSlots | None = None) -> None:
        self.pool, self._windowed = pool, windowed
        self.most: int | None = None
        self.needs_states = False
        self.states: WeakValueDictionary[int, KeptState] = WeakValueDictionary()
        self._entries: OrderedDict[Key, KeptBlock] = OrderedDict()
        self._serials = count()
        pool.holders.add(self)

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def blocks(self) -> list[int]:
        """The blocks that are kept."""
        return [entry.block for entry in self._entries.values()]

    @property
    def evictable(self) -> list[int]:
        """All blocks that can be given up: those that are kept, and those of states."""
        return [*self.blocks, *(block for state in list(self.states.values()) for block in state.blocks)]

    def note(self, state: KeptState) -> None:
        """Count a state among what can be given up."""
        self.states[next(self._serials)] = state

    def find(self, owner_key: str, pieces: Sequence[bytes]) -> list[int]:
        """Blocks of the longest beginning that a sequence can go on from; all that are known count as used."""
        keys = self._path(owner_key, pieces)
        for key in reversed(keys):
            self._entries.move_to_end(key)
        return [entry.block for entry in self._usable(keys)]

    def state_behind(self, owner_key: str, pieces: Sequence[bytes]) -> KeptState | None:
        """The states of mixers behind the blocks that `find` would give; None where there are none."""
        entries = self._usable(self._path(owner_key, pieces))
        return entries[-1].state if entries else None

    def known(self, owner_key: str, pieces: Sequence[bytes]) -> int:
        """How many blocks `find` would give."""
        return len(self._usable(self._path(owner_key, pieces)))

    def matching(self, owner_key: str, pieces: Sequence[bytes]) -> int:
        """How many blocks of a beginning are kept, whether or not a sequence can go on from them."""
        return len(self._path(owner_key, pieces))

    def _usable(self, keys: Sequence[Key]) -> list[KeptBlock]:
        entries, count = [self._entries[key] for key in keys], -1
        while count != len(entries):
            while self.needs_states and entries and not entries[-1].has_state:
                entries.pop()
            count = len(entries)
            if self._windowed is not None:
                entries = entries[: self._windowed.usable([entry.block for entry in entries])]
        return entries

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

    def add(
        self,
        owner_key: str,
        pieces: Sequence[bytes],
        blocks: Sequence[int],
        states: Mapping[int, KeptState] = NO_STATES,
    ) -> None:
        """Keep the blocks of a text; where a block of the same text is known, that one stays, unless layers with a
        window have lost it, and so do the states behind it.

        Args:
            states: by the number of blocks that they stand behind.
        """
        before: str | int = owner_key
        keys: list[Key] = []
        for behind, (piece, block) in enumerate(zip(pieces, blocks, strict=False), 1):
            key = (before, piece)
            entry = self._entries.get(key)
            if entry is None:
                entry = KeptBlock(block, next(self._serials))
                self.pool.add_reference([block])
            elif self._windowed is not None and self._windowed.has([block, entry.block]).tolist() == [True, False]:
                self.pool.add_reference([block])
                self.pool.drop([entry.block])
                entry = replace(entry, block=block)
            if behind in states and not entry.has_state:
                entry = replace(entry, state=states[behind])
            self._entries[key] = entry
            keys.append(key)
            before = entry.serial
        for key in reversed(keys):
            self._entries.move_to_end(key)
        if self.most is not None:
            excess = len(self._entries) + self._blocks_of_states() - self.most
            while excess > 0:
                excess -= len(self._drop())

    def _blocks_of_states(self) -> int:
        if not self.needs_states:
            return 0
        return sum(len(entry.state.blocks) for entry in self._entries.values() if entry.state is not None)

    def evict(self, wanted: int) -> None:
        """Give up the least recently used entries until `wanted` blocks have become free, or none is left, and then
        states that sequences that live have for themselves, the oldest first.
        """
        while wanted > 0 and self._entries:
            wanted -= sum(int(self.pool.counts[block] == 0) for block in self._drop())
        for state in list(self.states.values()):
            if wanted > 0:
                wanted -= len(state.give_up())

    def clear(self) -> None:
        """Give up everything."""
        while self._entries:
            self._drop()

    def _drop(self) -> list[int]:
        """Give up the oldest entry; the blocks that it had."""
        _, entry = self._entries.popitem(last=False)
        self.pool.drop([entry.block])
        return [entry.block] if entry.state is None else [entry.block, *entry.state.give_up()]


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
            slots, filled = self._slots(target), self.kv[:, self._slots(source)]
            self.kv[:, slots] = filled if isinstance(slots, slice) else filled.clone()  # no views go to scattered slots

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

    @property
    def block_bytes(self) -> int:
        """Keys and values of one block, in the layers that keep all."""
        return self.kv.nbytes // (self.slots // BLOCK)

    @torch.inference_mode()
    def keep_state(self, data: torch.Tensor) -> KeptState:
        """Keep a copy of (size,) uint8, at the cost of what is kept of texts where room is short."""
        state, count = KeptState(self.pool, self.bytes_in, len(data)), -(-len(data) // self.block_bytes)
        with self.change():
            state.blocks = self.allocate(count)
        self.prefixes.note(state)
        layers, _, width, head_dim = self.kv.shape
        padded = torch.nn.functional.pad(data, (0, count * self.block_bytes - len(data)))
        by_slot = padded.reshape(layers, count * BLOCK, width, head_dim * self.kv.itemsize)
        self.kv.view(torch.uint8)[:, self._slots(state.blocks)] = by_slot
        return state

    @torch.inference_mode()
    def bytes_in(self, blocks: Sequence[int]) -> torch.Tensor:
        """What blocks hold, as `keep_state` lays it out."""
        return self.kv.view(torch.uint8)[:, self._slots(blocks)].reshape(-1)

    def _slots(self, blocks: Sequence[int]) -> slice | torch.Tensor:
        if blocks[-1] - blocks[0] == len(blocks) - 1 and adjacent(blocks):
            return slice(blocks[0] * BLOCK, (blocks[-1] + 1) * BLOCK)
        index = np.asarray(blocks)[:, None] * BLOCK + np.arange(BLOCK)
        return torch.from_numpy(index.reshape(-1)).to(self.kv.device)
