"""Long waits: those at first use are logged, and a program with a screen can show them; requests have a bar."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from threading import Event, Thread
from time import perf_counter
from typing import Any

from paceline.utils.validation import need

Move = Callable[[float], object]
"""Shows which share is done."""

Show = Callable[[str], AbstractContextManager[Move | None]]
"""From what is waited for, as in "compiling the CPU kernels", to a context that lasts as long as the wait; it gives a
way to show how much of it is over, where it shows anything.
"""

PATIENCE, EVERY, REFRESH = 2.0, 10.0, 0.2
"""Seconds until work in parts is shown; between lines in the log; between two looks at a bar."""

log = logging.getLogger("paceline")


def _not_at_all(what: str) -> AbstractContextManager[Move | None]:
    return nullcontext()


_shows: list[Show] = [_not_at_all]


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
    """Say, while the block runs, that it takes long.

    Args:
        what: is waited for.
        hint: how long that takes, or when it is over; it follows `what` and a comma in the log.
        level: of the log record; where that is not wanted, nothing is shown either.
    """
    show = _shows[-1] if log.isEnabledFor(level) else _not_at_all
    log.log(level, "%s, %s", what, hint)
    with show(what):
        yield


@contextmanager
def parts_of(
    total: int, what: str, *, patience: float | None = None, every: float = EVERY
) -> Iterator[Callable[[int], None]]:
    """The block does work in parts, and calls what it gets with the size of each part that is done.

    What takes less than `patience` seconds is not mentioned. From then on the share is shown by whoever can show it,
    and else logged, every so many seconds.

    Args:
        total: of all parts, in any unit. what: is done. patience: None is PATIENCE.
    """
    done, over = [0], Event()

    def tell() -> None:
        start = perf_counter()
        if over.wait(PATIENCE if patience is None else patience):
            return
        if not log.isEnabledFor(logging.WARNING):
            return
        with _shows[-1](what) as move:
            while True:
                share = min(1.0, sum(done) / total)
                if move is None:
                    log.warning("%s: %.0f %% after %.0f s", what, 100 * share, perf_counter() - start)
                else:
                    move(share)
                if over.wait(every if move is None else REFRESH):
                    return

    teller = Thread(target=tell, name="paceline-progress", daemon=True)
    teller.start()
    try:
        yield done.append
    finally:
        over.set()
        teller.join()


Advance = Callable[[int, int], None]
"""From how many requests are done, and how many tokens are generated, to a bar that shows it."""


def check_bar(wanted: object) -> None:
    """Whether `use_tqdm` is what `request_bar` takes.

    Raises:
        ConfigError: it is not.
    """
    fine = wanted is None or isinstance(wanted, bool) or callable(wanted)
    need(fine, "use_tqdm", "be True, False, None or what takes the place of tqdm", wanted)


@contextmanager
def request_bar(total: int, wanted: bool | Callable[..., Any] | None) -> Iterator[Advance | None]:
    """A bar of tqdm on standard error in this block, or None.

    Args:
        wanted: a bar or none; None is one for several requests where standard error is a terminal that no program
            uses otherwise. A class or function is called in the place of tqdm.
    """
    if wanted is None:
        wanted = total > 1 and len(_shows) == 1 and sys.stderr is not None and sys.stderr.isatty()
    if not wanted:
        yield None
        return
    from tqdm.auto import tqdm

    make, start = wanted if callable(wanted) else tqdm, perf_counter()
    with make(total=total, desc="requests", dynamic_ncols=True) as bar:

        def advance(done: int, tokens: int) -> None:
            bar.set_postfix_str(f"{tokens / (perf_counter() - start):.0f} tokens/s", refresh=False)
            bar.update(done - bar.n)

        yield advance
