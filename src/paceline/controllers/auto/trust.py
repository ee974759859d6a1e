"""Whether a drafter, or drafting at all, pays at a batch size, by what it brought; and what may be spent to find out.

`Trust` judges by outcomes alone, so that a wrong estimate of costs or acceptance cannot make decoding slower for long.
`Ledger` is the one account of everything that is done to learn: tries of drafters that are not trusted, drafts that
nobody scores, plain steps that are timed, passes that are probed.
"""

from __future__ import annotations

from enum import Enum
from typing import Final

SHARE: Final = 0.02
"""Of decoding time, what learning may cost."""

FIRST_BALANCE: Final = 4.0
"""Plain steps that may be spent before anything was earned."""

MAX_BALANCE: Final = 64.0
"""Plain steps that are saved up at most."""

DEBT: Final = 16.0
"""Plain steps that are owed at most: something that took far longer than foreseen, such as compiling at its first use,
ends learning for a while and not for ever.
"""

TRY, LONGEST_TRY = 8, 32
"""Drafted steps after which a try that has lost nothing ends well, and after which it ends in any case."""

FIRST_WAIT, LONGEST_WAIT = 32, 2048
"""Steps from a failed try to the next one, doubled with every failure."""

LOSS: Final = 4.0
"""Plain steps that a drafter may lose before it is off."""

CREDIT: Final = 16.0
"""Plain steps saved that count in its favour at most."""

MAX_UNUSED: Final = 64
"""Steps in a row that a trusted drafter may seem not worth using before it is off: what is known of it grows old."""


class State(Enum):
    """What is thought of a drafter."""

    TRIED = "tried"
    ON = "on"
    OFF = "off"


class Trust:
    """One drafter at one batch size, or drafting at all.

    Attributes:
        state: as of now. wait: steps until an untrusted one is tried again.
        saved: plain steps that it saved lately, below 0 what it cost.
    """

    __slots__ = ("_drafted", "_failures", "_unused", "saved", "state", "wait")

    def __init__(self) -> None:
        self.state = State.TRIED
        self.saved, self.wait = 0.0, 0
        self._drafted = self._failures = self._unused = 0

    def record(self, saved: float, steps: int) -> None:
        """So many drafted steps saved so many plain steps."""
        self._unused = 0
        self._drafted += steps
        self.saved = min(self.saved + max(saved, -float(steps)), CREDIT)
        tried = self.state is State.TRIED
        if tried and self._drafted >= TRY and self.saved >= 0.0:
            self.state, self._failures = State.ON, 0
        elif self.state is not State.OFF and (self.saved < -LOSS or (tried and self._drafted >= LONGEST_TRY)):
            self._switch_off()

    def skip(self, steps: int, *, known: bool = False) -> None:
        """So many steps were made without it; `known`: what is thought of it did not grow older meanwhile."""
        if self.state is State.OFF:
            self.wait -= steps
            if self.wait <= 0:
                self.state, self.saved, self.wait, self._drafted = State.TRIED, 0.0, 0, 0
        elif self.state is State.ON and not known:
            self._unused += steps
            if self._unused >= MAX_UNUSED:
                self._switch_off()

    def _switch_off(self) -> None:
        self.state, self._unused = State.OFF, 0
        self.wait = min(FIRST_WAIT << self._failures, LONGEST_WAIT)
        self._failures = min(self._failures + 1, 16)


class Ledger:
    """What decoding earns and learning spends.

    Attributes:
        balance: what is left, in plain steps, so that a wrong first price of one lends nothing. spent: seconds of
            learning so far.
    """

    __slots__ = ("_plain", "balance", "spent")

    def __init__(self) -> None:
        self.balance, self.spent, self._plain = FIRST_BALANCE, 0.0, 0.0

    def earn(self, seconds: float, plain: float) -> None:
        """Decoding took so long; `plain` is what a step without drafts takes."""
        self._plain = plain
        self.balance = min(self.balance + SHARE * seconds / plain, MAX_BALANCE)

    def affords(self, seconds: float) -> bool:
        """Whether so much may be spent now; nothing before the first step."""
        return seconds <= self.balance * self._plain

    def spend(self, seconds: float) -> None:
        """What learning took."""
        if self._plain:
            self.balance = max(self.balance - seconds / self._plain, -DEBT)
        self.spent += seconds
