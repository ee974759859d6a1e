"""What a long phase shows: a bar on a terminal, and elsewhere, as in a log file, a line every ten seconds."""

from __future__ import annotations

import sys
from time import perf_counter
from typing import Any, Final, Self

from tqdm.auto import tqdm

EVERY: Final = 10.0
"""Seconds between two lines."""


class Shown:
    """A phase, on standard error while its block lasts.

    Args:
        what: it is called. total: of what is to be done; done: so much was done before.
        quiet: show nothing. bar: further arguments of tqdm's.
    """

    def __init__(self, what: str, total: float, *, done: float = 0.0, quiet: bool = False, **bar: Any) -> None:
        self.total, self._what, self._first = total, what, done
        self._bar = tqdm(total=total, initial=done, desc=what, disable=True if quiet else None, **bar)
        self._lines = self._bar.disable and not quiet
        self._start = self._told = perf_counter()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.close()

    def update(self, done: float, words: str = "") -> None:
        """So much is done now; `words` say more."""
        if not self._bar.disable:
            self._bar.set_postfix_str(words, refresh=False)
            self._bar.update(done - self._bar.n)
        elif self._lines and perf_counter() - self._told >= EVERY:
            self._told = perf_counter()
            tqdm.write(self._line(done, words), file=sys.stderr)

    def _line(self, done: float, words: str) -> str:
        share, since = done / self.total, done - self._first
        seconds = (self._told - self._start) * (self.total - done) / since if since > 0 else None
        left = [] if seconds is None else [f"{max(0.0, seconds):.0f} s left"]
        return f"{self._what}: " + ", ".join([f"{min(1.0, share):.0%}", *filter(None, [words]), *left])
