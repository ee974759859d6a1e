"""Ctrl-C: the process ends at once, until a command has something to keep; from then on it is a KeyboardInterrupt, and
SIGTERM is too for commands that say so.

A KeyboardInterrupt inside an import, or inside code that is called from C, can surface as another error or as a
traceback of the interpreter's own, or be swallowed. So none is raised while modules are imported, arguments are read
and a model is loaded; and of one that is raised later it is kept that it came, whatever error arrives in its place.
This module imports next to nothing, since it must be there before everything else.
"""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType

INTERRUPTED, TERMINATED = 130, 143
_raised: list[int] = []
"""Exit codes of the signals by which a KeyboardInterrupt was raised."""


class AtOnce:
    """In this block Ctrl-C ends the process at once, unless the program around us handles or ignores it.

    Args:
        silent: say nothing about it.
    """

    def __init__(self, *, silent: bool = False) -> None:
        self._silent, self._active = silent, False

    def __enter__(self) -> None:
        _raised.clear()
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            try:
                signal.signal(signal.SIGINT, self._leave)
            except ValueError:  # not in the main thread, which gets no signals
                return
            self._active = True

    def __exit__(self, *error: object) -> None:
        if self._active:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            self._active = False

    def _leave(self, number: int, frame: FrameType | None) -> None:
        try:
            if not self._silent:
                os.write(2, b"paceline: interrupted\n")
        finally:
            os._exit(INTERRUPTED)


def raise_from_now_on() -> None:
    """Within a block of AtOnce: there is something to keep now, so that Ctrl-C raises KeyboardInterrupt."""
    handler = signal.getsignal(signal.SIGINT)
    if isinstance(getattr(handler, "__self__", None), AtOnce):
        signal.signal(signal.SIGINT, _raise)


class GoesOn:
    """In this block Ctrl-C is a KeyboardInterrupt after which the command goes on; whoever opens it catches that.

    It is not kept that it came, and behind the block Ctrl-C does what it did before.
    """

    def __enter__(self) -> None:
        self._before = signal.getsignal(signal.SIGINT)
        ours = self._before is _raise or isinstance(getattr(self._before, "__self__", None), AtOnce)
        self._active = ours and threading.current_thread() is threading.main_thread()
        if self._active:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def __exit__(self, *error: object) -> None:
        if self._active:
            signal.signal(signal.SIGINT, self._before)


class TerminatedToo:
    """In this block SIGTERM raises KeyboardInterrupt too, unless the program around us handles or ignores it."""

    def __enter__(self) -> None:
        self._active = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        if self._active:
            try:
                signal.signal(signal.SIGTERM, _raise)
            except ValueError:  # not in the main thread
                self._active = False

    def __exit__(self, *error: object) -> None:
        if self._active:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def came() -> int:
    """The exit code of the signal that raised a KeyboardInterrupt since the last block of AtOnce began; 0 for none."""
    return _raised[0] if _raised else 0


def _raise(number: int, frame: FrameType | None) -> None:
    _raised.append(128 + number)
    raise KeyboardInterrupt
