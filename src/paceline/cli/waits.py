"""Long waits on a terminal: a spinner with the time so far, on standard error.

In: what is waited for. Out: a context around the wait. Not here: the log line before it, which is all where standard
error is no terminal (`paceline.utils.progress`).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def spinner(what: str) -> Iterator[None]:
    """Show what is waited for, on a terminal that no other display moves on at the time; it leaves no trace."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console
    from rich.file_proxy import FileProxy
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    if isinstance(sys.stderr, FileProxy):  # put there by the display that is on
        yield
        return
    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, redirect_stdout=False) as bar:
        bar.add_task(what, total=None)
        console.show_cursor()  # an interrupt may end the process from here
        yield
