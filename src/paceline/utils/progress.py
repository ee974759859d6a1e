"""Long waits at first use: they are logged, and a program with a screen can show them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

Show = Callable[[str], AbstractContextManager[object]]
"""From what is waited for, as in "compiling the CPU kernels", to a context that lasts as long as the wait."""

log = logging.getLogger("paceline")
_shows: list[Show] = [nullcontext]


@contextmanager
def shown_by(show: Show) -> Iterator[None]:
    """In this block, in all threads, `show` is called at the beginning of every wait, after the log record."""
    _shows.append(show)
    try:
        yield
    finally:
        _shows.remove(show)


@contextmanager
def waiting(what: str, hint: str, level: int = logging.WARNING) -> Iterator[None]:
    """The block takes long.

    Args:
        what: is waited for.
        hint: how long that takes, or when it is over; it follows `what` and a comma in the log.
        level: of the log record; where that is not wanted, nothing is shown either.
    """
    show = _shows[-1] if log.isEnabledFor(level) else nullcontext
    log.log(level, "%s, %s", what, hint)
    with show(what):
        yield
