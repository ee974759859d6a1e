"""What a sequence keeps, as parts that share a life: opened, forked, committed, taken back and released together.

Keys and values are one part (models.state.cache). Of most models they are all that there is: then that part is the
sequence's state, with nothing around it. Where a model keeps more (a recurrent state, what its encoder has read), the
state is a `CompositeState`, which passes every operation on to all of its parts. What a sequence can do is what all of
them can.

A `StatePart` is the half of a part that all kinds have in common: what becomes of tokens that were read. How they are
read is between a runner and its own kind of part, since each needs something else. All parts count the same committed
tokens, without the pending root (models.base).

Models of transformers know one history in place of parts (runners.fallback.transformers_cache.History): `mark` before
drafts are read and `rewind` behind the accepted ones are what `commit` does here; `rewind` to less is `truncate`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, Protocol, Self, TypeVar

from paceline.models.base import PartAbilities
from paceline.models.state.cache import NativeCache
from paceline.models.state.cross_memory import CrossMemory, SourcePart
from paceline.models.state.recurrent import RecurrentPart


class StatePart(Protocol):
    """One part of what a sequence keeps."""

    @property
    def abilities(self) -> PartAbilities:
        """What can be done with it; the same for all parts of a kind."""

    def commit(self, path: Sequence[int]) -> None:
        """Commit the root and the nodes of `path` out of what was scored last; the rest is forgotten.

        A part that has moved on with every scored input goes back to where it stood before these, or to what it noted
        on the way, and reads the accepted ones again.
        """

    def check_truncate(self, length: int) -> None:
        """Say whether `truncate` would do it; changes nothing.

        Raises:
            ConfigError: it cannot go back to this length.
        """

    def truncate(self, length: int) -> None:
        """Forget all but the first `length` committed tokens, and what was scored last."""

    def fork(self) -> Self:
        """A second one with the same committed tokens."""

    def release(self) -> None:
        """Give everything back; a second call does nothing."""


class CompositeState:
    """The state of a sequence that keeps more than keys and values.

    Args:
        cache: keys and values of the layers with attention.
        others: the other parts. All have seen the same committed tokens.

    Attributes:
        abilities: what all parts can do.
    """

    __slots__ = ("__weakref__", "abilities", "cache", "others")

    def __init__(self, cache: NativeCache, others: Sequence[StatePart]) -> None:
        self.cache, self.others = cache, tuple(others)
        self.abilities = PartAbilities.common([part.abilities for part in self.parts])

    @property
    def parts(self) -> tuple[StatePart, ...]:
        """All of them."""
        return (self.cache, *self.others)

    @property
    def length(self) -> int:
        """Number of committed tokens, the pending root not among them."""
        return self.cache.length

    def commit(self, path: Sequence[int]) -> None:
        """See `StatePart.commit`."""
        for part in self.parts:
            part.commit(path)

    def check_truncate(self, length: int) -> None:
        """See `StatePart.check_truncate`."""
        for part in self.parts:
            part.check_truncate(length)

    def truncate(self, length: int) -> None:
        """See `StatePart.truncate`; all parts go back, or none.

        Raises:
            ConfigError: a part cannot.
        """
        self.check_truncate(length)
        for part in self.parts:
            part.truncate(length)

    def fork(self) -> CompositeState:
        """See `StatePart.fork`."""
        return CompositeState(self.cache.fork(), [part.fork() for part in self.others])

    def release(self) -> None:
        """See `StatePart.release`."""
        for part in self.parts:
            part.release()


State = NativeCache | CompositeState
"""Of a sequence of a native runner."""

S = TypeVar("S", bound=StatePart)


def keys_of(state: State) -> NativeCache:
    """The keys and values of a sequence."""
    return state.cache if isinstance(state, CompositeState) else state


def memory_of_source(state: State) -> CrossMemory | None:
    """What a sequence sees of its source, where it has one.

    Raises:
        ConfigError: the encoder was not run.
    """
    if not isinstance(state, CompositeState):
        return None
    return next((part.read() for part in state.others if isinstance(part, SourcePart)), None)


def states_of(state: State) -> RecurrentPart | None:
    """The states of a sequence's mixers, where it has some."""
    if not isinstance(state, CompositeState):
        return None
    return next((part for part in state.others if isinstance(part, RecurrentPart)), None)


class StateOperations(Generic[S]):
    """The operations of a runner that are its sequences' own affair."""

    def commit(self, caches: Sequence[S], paths: Sequence[Sequence[int]]) -> None:
        """See `Runner.commit`."""
        for cache, path in zip(caches, paths, strict=True):
            cache.commit(path)

    def truncate(self, cache: S, length: int) -> None:
        """See `Runner.truncate`.

        Raises:
            ConfigError: a part of its state cannot go back to this length.
        """
        cache.truncate(length)

    def fork(self, cache: S) -> S:
        """See `Runner.fork`."""
        return cache.fork()

    def release(self, cache: S) -> None:
        """See `Runner.release`; a second release does nothing."""
        cache.release()
