"""The blocks of a runner's caches, as the engine sees them: how many there may be, who needs more, which are kept."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, runtime_checkable

from paceline.models.base import Runner, SequenceCache
from paceline.models.inputs import Inputs


class CacheMemory(Protocol):
    """The blocks of all caches of a runner.

    How many there may be, who needs more, and which beginnings of texts are kept.

    Keys and values are kept and shared by whole blocks. A text's *pieces* are its full blocks in a form that can be
    looked up.
    """

    block_size: int
    """Tokens of a block."""

    @property
    def block_bytes(self) -> int:
        """Keys and values of one block, all layers."""

    @property
    def can_share_prefixes(self) -> bool:
        """Whether a sequence can begin with what another has, or has left: all parts of its state agree to that."""

    @property
    def capacity(self) -> int:
        """Most blocks that sequences may hold together."""

    @property
    def changes(self) -> int:
        """A number that changes whenever blocks change hands."""

    @property
    def widest(self) -> int:
        """Most slots that a step of one sequence has taken so far: its root and nodes."""

    def set_limit(self, size: int | None, sequences: int = 1, chunk: int = 0) -> None:
        """Limit the blocks to `size` bytes; None takes a share of the free memory.

        A step that needs more gets it all the same.

        Args:
            sequences, chunk: so many run at once, and so many tokens of prompts are fed in a step: how much the layers
                with a sliding window can need.
        """

    @property
    def used(self) -> int:
        """Blocks that somebody holds, kept prefixes included. A report: other threads may ask while blocks change
        hands, unlike for all else here.
        """

    def spare(self) -> int:
        """Blocks that can be taken at no cost: free ones, those by which the cache may grow."""

    def left(self) -> int:
        """Blocks that can be taken: spare ones and those of kept prefixes."""

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold this many tokens."""

    def forget_behind_windows(self, cache: SequenceCache) -> None:
        """Layers with a sliding window may forget what is behind that of a sequence's committed tokens: none of these
        will be taken back.
        """

    @property
    def has_windows(self) -> bool:
        """Whether there are layers with a sliding window that give back what is behind it."""

    def blocks_to_come(self, inputs: Inputs) -> int:
        """What a request with these inputs adds beside its text, counted in blocks.

        That is what an encoder makes of its source, unless another sequence has the same.
        """

    def blocks_present(self, cache: SequenceCache, blocks: int) -> int:
        """With how many of the first blocks of a sequence another one can begin."""

    def sequences_fit(self, lengths: Iterable[int]) -> bool:
        """Whether there is room for sequences of so many tokens side by side beside their blocks: for what layers with
        a sliding window keep, and mixers.
        """

    @property
    def state_bytes(self) -> int:
        """What a sequence of any length holds beside its blocks: the states of its mixers."""

    @property
    def state_interval(self) -> int:
        """Blocks of a prompt behind which states of mixers are to be kept, since texts can begin only there; 0 where
        there are no mixers.
        """

    def follow_borders(self, cache: SequenceCache) -> None:
        """While it decodes, a sequence with mixers is to remember their states behind its last whole block, for
        `retain`.
        """

    def keep_state(self, cache: SequenceCache) -> None:
        """Keep a copy of what a sequence's mixers know now, as far as there is room for it; it counts as kept
        prefixes do.
        """

    def need(self, cache: SequenceCache, slots: int) -> int:
        """Blocks that a sequence must take for `slots` more tokens."""

    def trim(self, cache: SequenceCache, slots: int) -> None:
        """Give back what a sequence holds beyond its next `slots` tokens."""

    def allocate_single_blocks(self, single: bool) -> None:
        """Whether sequences take single blocks from now on, or runs in which they can grow."""

    def pieces(self, tokens: Sequence[int]) -> list[bytes]:
        """The full blocks of a text, to be looked up."""

    def known(self, key: str, pieces: Sequence[bytes]) -> int:
        """With how many kept blocks of a text's beginning a sequence can begin.

        Args:
            key: of those who share: only what was kept under the same one is found.
        """

    def matching(self, key: str, pieces: Sequence[bytes]) -> int:
        """How many blocks of a text's beginning are kept, whether or not a sequence can begin with them."""

    def adopt(self, key: str, pieces: Sequence[bytes], fresh: SequenceCache) -> None:
        """Let a sequence begin with the kept blocks of this text, and forget behind windows as above.

        Args:
            fresh: it was just opened and is empty.
        """

    def share(self, source: SequenceCache, blocks: int, fresh: SequenceCache) -> None:
        """The same with the first blocks of another sequence, so many of which are present."""

    def retain(self, cache: SequenceCache, key: str, pieces: Sequence[bytes]) -> None:
        """Keep the blocks of a sequence whose text this is, as far as they are full, for texts to come."""

    def forget(self) -> None:
        """Give up all kept prefixes."""


@runtime_checkable
class HasMemory(Protocol):
    """A runner whose caches are made of blocks that can be counted."""

    @property
    def memory(self) -> CacheMemory:
        """Where these are counted."""


def memory_of(runner: Runner) -> CacheMemory | None:
    """The blocks of a runner's caches; None for a runner whose caches are not counted."""
    return runner.memory if isinstance(runner, HasMemory) else None


def cache_bytes(runner: Runner, tokens: int) -> int | None:
    """What a sequence of so many tokens holds, in whole blocks and states; None for a runner whose caches are not
    counted.
    """
    memory = memory_of(runner)
    return None if memory is None else memory.block_bytes * memory.blocks_for(tokens) + memory.state_bytes


def slot_bytes(runner: Runner) -> int | None:
    """Keys and values of one token, all layers; None as above."""
    memory = memory_of(runner)
    return None if memory is None else memory.block_bytes // memory.block_size


def save_memory(runner: Runner) -> None:
    """Let sequences take single blocks instead of runs in which they could grow."""
    if (memory := memory_of(runner)) is not None:
        memory.allocate_single_blocks(True)
