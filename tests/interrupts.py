"""KeyboardInterrupt at any bytecode of the package's own code."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any


class Bomb:
    """Counts the bytecodes that run in some files and raises KeyboardInterrupt at number `at` (never, if None).

    Attributes:
        count: bytecodes so far.
        where: function and line of the interrupt.
    """

    def __init__(self, files: Sequence[str], at: int | None = None) -> None:
        self.files, self.at, self.count, self.where = tuple(files), at, 0, ""

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "call":
            if not frame.f_code.co_filename.endswith(self.files):
                return None
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
        elif event == "opcode":
            self.count += 1
            if self.count == self.at:
                self.where = f"{frame.f_code.co_qualname}:{frame.f_lineno}"
                sys.settrace(None)
                raise KeyboardInterrupt
        return self

    @contextmanager
    def armed(self) -> Any:
        before = sys.gettrace()
        sys.settrace(self)
        try:
            yield
        finally:
            sys.settrace(before)


def bytecodes(work: Callable[[], Any], files: Sequence[str]) -> int:
    """How many bytecodes `work` runs in these files."""
    bomb = Bomb(files)
    with bomb.armed():
        work()
    return bomb.count


def interrupt(work: Callable[[], Any], files: Sequence[str], at: int) -> str:
    """Run `work` and interrupt it at a bytecode; where that was, or "" if it ended before."""
    bomb = Bomb(files, at)
    try:
        with bomb.armed():
            work()
    except KeyboardInterrupt:
        pass
    return bomb.where
