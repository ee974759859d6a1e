"""Fairness between the owners of requests: whose request begins next, and who takes part in a step.

Whoever sends many requests waits for their own, not others for them. A step of many sequences takes longer than one of
few, so that an owner with many would slow the others down by it in every step; each gets at least its share of the
engine's time instead, and whoever has had less goes on alone until that is made up. The shares are equal, but smaller
for who floods the engine: the work around it, and steps under way, cost the others time as well. Long prompts are read
in short pieces, so that turns come soon. With a single owner nothing is counted. Which sequences share a step changes
none of their tokens."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from itertools import chain
from time import perf_counter
from typing import Final, Generic, NamedTuple, TypeVar

T = TypeVar("T")

MOST_DUE: Final = 10.0
"""Seconds of a debt to an owner, at most: after a step that compiled something, nobody waits for a minute."""

BURST: Final = 0.25
"""Seconds that an owner is owed who has asked for nothing for a while."""

FLOOD: Final = 4
"""Sequences of an owner, to one of who has the fewest, from which on it floods the engine."""

SMALLER: Final = 0.3
"""Share of who does, where others have 1."""

QUOTA_SECONDS: Final = 0.01
"""That reading an owner's prompts may take in a step, about, while another waits, or may come at any moment."""

QUOTA_STEPS: Final = 4
"""As many decoding steps may it take at most, which is less for a small model: who waits for it decodes soon again."""

FIRST_SECONDS: Final = 0.05
"""The same of an owner that waits for its first token, whose prompt is read at one go if it is short."""

RECENT: Final = 60.0
"""Seconds for which somebody else may come at any moment, after there were several owners."""

LEAST_QUOTA: Final = 16
"""Tokens of prompts that a step reads at least, which a pass reads as one."""

LOAN: Final = 0.1
"""Seconds of others that an owner may take ahead, so that its first token comes soon."""

SHORTER, LONGER = 0.2, 0.05
"""Weights of the last time in a running mean, which soon forgets a step that compiled something."""


class FairQueue(Generic[T]):
    """Things that wait: of an owner the lowest priority number first, and first come first served among equals. Owners
    take turns.

    An exception that cuts in anywhere loses nothing, and other threads may look at any time.
    """

    def __init__(self) -> None:
        # with their priorities; none is empty; who has had a turn goes to the end
        self._lines: dict[str, deque[tuple[int, T]]] = {}

    def __len__(self) -> int:
        return sum(map(len, list(self._lines.values())))

    def __bool__(self) -> bool:
        return bool(self._lines)

    def __iter__(self) -> Iterator[T]:
        """All as they are now, by owner."""
        return chain.from_iterable([[item for _, item in list(line)] for line in list(self._lines.values())])

    @property
    def owners(self) -> list[str]:
        """Those who wait, whose turn is next first."""
        return list(self._lines)

    def append(self, owner: str, item: T, priority: int = 0) -> None:
        """Stand in the owner's line, behind all whose priority number is as low or lower."""
        line = self._lines.get(owner)
        if line is None:
            self._lines[owner] = deque([(priority, item)])
        elif line[-1][0] <= priority:
            line.append((priority, item))
        else:
            line.insert(bisect_right(line, priority, key=_priority), (priority, item))

    def first(self, owner: str) -> T:
        """Whose turn is next of the owner's."""
        return self._lines[owner][0][1]

    def pop(self, owner: str) -> T:
        """Take the first of the owner's; the owner's next turn is behind all others'."""
        line, item = self._lines[owner], self.first(owner)
        others = {other: waiting for other, waiting in self._lines.items() if other != owner}
        if len(line) == 1:
            self._lines = others
        else:
            self._lines = {**others, owner: line}
            line.popleft()
        return item

    def remove(self, owner: str, item: T) -> None:
        """Take one that waits out of its line, if it is there."""
        left = deque(waiting for waiting in self._lines.get(owner, ()) if waiting[1] is not item)
        lines = {name: left if name == owner else line for name, line in self._lines.items()}
        self._lines = {name: line for name, line in lines.items() if line}


def _priority(waiting: tuple[int, object]) -> int:
    return waiting[0]


class Decoded(NamedTuple):
    """What an owner had of a step."""

    sequences: int
    tokens: int


class Shares:
    """Times of the owners whose sequences run.

    Attributes:
        several: whether there is more than one.
    """

    def __init__(self) -> None:
        self.several = False
        self._shared = -RECENT  # when there were several last
        self._quota_seconds = QUOTA_SECONDS
        self._reading = 0.0  # about the seconds that a token of a prompt takes
        self._decoding = 0.0  # about the seconds of a decoding step
        self._new: set[str] = set()  # owners who have come and have no token yet
        self._due: dict[str, float] = {}  # seconds by which each has had less than its share, also who has gone
        self._here: dict[str, float] = {}  # weights of the shares of those whose sequences run
        self._alone: dict[int, float] = {}  # about the seconds of a token, of so many sequences of one owner

    def turn(self, sizes: Mapping[str, int]) -> Collection[str]:
        """Who goes on in the next step: those who have had less than their share, or everybody.

        Args:
            sizes: how many sequences each owner has that run or are read. Who is new among them goes on at once, and
                alone until it has its first token, for which it waits later.
        """
        owners = sizes.keys()
        self.several = len(owners) > 1
        if self.several:
            self._shared = perf_counter()
        for owner in owners:
            if not self.several:
                self._due[owner] = 0.0
            elif owner not in self._here:
                self._due.setdefault(owner, BURST)
                self._new.add(owner)
        self._quota_seconds = min(QUOTA_SECONDS, QUOTA_STEPS * self._decoding or QUOTA_SECONDS)
        fewest = min(sizes.values(), default=0)
        self._here = {owner: SMALLER if size >= FLOOD * fewest else 1.0 for owner, size in sizes.items()}
        if not owners:
            self._due.clear()
        if not self.several:
            self._new.clear()
            return owners
        self._new &= owners
        new = [owner for owner in owners if owner in self._new and self._due[owner] > -LOAN]
        if new:
            self._quota_seconds = FIRST_SECONDS
            return new
        due = [owner for owner in owners if self._due[owner] > 0.0]
        if due:
            return due
        self._due.update(dict.fromkeys(owners, 0.0))
        return owners

    def prefill_quota(self, most: int) -> int:
        """Tokens of an owner's prompts that are read in a step.

        Args:
            most: of them, where nobody waits or is about to come.
        """
        if not self._reading or perf_counter() > self._shared + RECENT:
            return most
        return max(min(int(self._quota_seconds / self._reading), most // len(self._here)), min(LEAST_QUOTA, most))

    def count(self, read: Mapping[str, int], reading: float, decoded: Mapping[str, Decoded], decoding: float) -> None:
        """A step has been made. What an owner had of one with others is counted as what it takes the owner alone.

        Args:
            read: tokens of prompts by owner, and seconds `reading` took.
            decoded: by owner, and seconds of the decoding step.
        """
        self._new -= decoded.keys()
        if decoded:
            self._decoding = mean(self._decoding, decoding)
        if len(decoded) == 1:
            self._learn(next(iter(decoded.values())), decoding)
        tokens, share = sum(read.values()), (reading + decoding) / (sum(self._here.values()) or 1.0)
        if tokens:
            self._reading = mean(self._reading, reading / tokens)
        for owner in self._due.keys() - self._here.keys():
            self._due[owner] += share
            if self._due[owner] >= BURST:
                del self._due[owner]
        if not self.several:
            return
        sequences = sum(part.sequences for part in decoded.values())
        for owner, weight in self._here.items():
            seconds = self._due[owner]
            taken = reading * read.get(owner, 0) / tokens if tokens else 0.0
            if (part := decoded.get(owner)) is not None:
                taken += decoding if len(decoded) == 1 else self._price(part, decoding, sequences)
            self._due[owner] = min(seconds + weight * share - taken, MOST_DUE)

    def _price(self, part: Decoded, decoding: float, sequences: int) -> float:
        known = self._alone.get(part.sequences)
        return min(decoding, decoding * part.sequences / sequences if known is None else known * part.tokens)

    def _learn(self, part: Decoded, decoding: float) -> None:
        self._alone[part.sequences] = mean(self._alone.get(part.sequences, 0.0), decoding / max(part.tokens, 1))


def mean(before: float, seconds: float) -> float:
    """A running mean of times; 0 is none yet."""
    return before + (SHORTER if seconds < before else LONGER) * (seconds - before) if before else seconds
