"""Ctrl-C while modules are imported or a model is loaded: the process ends at once, with at most one line.

In: a block of code. Out: nothing, or the end of the process with exit code 130. Not here: Ctrl-C while text is written
(`cli.app`).

A KeyboardInterrupt inside an import can surface as another error or as a traceback of the interpreter's own, or be
swallowed; and nothing was written that would have to be kept. This file imports next to nothing, since it must stand
before everything else.
"""

from __future__ import annotations

import os
import signal

INTERRUPTED = 130


class AtOnce:
    """In this block Ctrl-C ends the process at once, unless the program around us handles or ignores it.

    Args:
        silent: say nothing about it.
    """

    def __init__(self, *, silent: bool = False) -> None:
        self._silent, self._active = silent, False

    def __enter__(self) -> None:
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

    def _leave(self, *arguments: object) -> None:
        try:
            if not self._silent:
                os.write(2, b"paceline: interrupted\n")
        finally:
            os._exit(INTERRUPTED)
