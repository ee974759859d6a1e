"""Ctrl-C and SIGTERM while something is trained: they wait until it is on the disk."""

from __future__ import annotations

import signal
from threading import current_thread, main_thread
from types import FrameType
from typing import Any, Final, Self

SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


class Deferred:
    """In this block Ctrl-C and SIGTERM wait for `deliver`, or the block's end, and then do what they did before it. A
    second one does not wait. What is ignored stays ignored, and threads other than the main one get no signals.

    Attributes:
        came: number of the signal that waits; 0 for none.
    """

    def __init__(self) -> None:
        self.came = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if current_thread() is main_thread():
            for number in SIGNALS:
                if signal.getsignal(number) not in (signal.SIG_IGN, None):
                    self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, error: object, *more: object) -> None:
        self._restore()
        if error is None:
            self._act()

    def deliver(self) -> None:
        """Let the signal that waits, if there is one, do what it does outside the block."""
        if self.came:
            self._restore()
            self._act()
            self.__enter__()

    def _note(self, number: int, frame: FrameType | None) -> None:
        second, self.came = self.came, number
        if second:
            self._restore()
            self._act()

    def _restore(self) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)

    def _act(self) -> None:
        number, self.came = self.came, 0
        before = self._before.get(number, signal.SIG_DFL)
        if callable(before):
            before(number, None)
        elif number:
            signal.raise_signal(signal.Signals(number))
