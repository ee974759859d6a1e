"""Half a file: what is written beside a datastore, or tables, until it is complete and takes its place. What killed
writers left is cleared away by the next one.

A part has a name of its own, so that builds of one datastore do not meet. Its writer holds a lock on it, which the
system drops with the process: a part that can be locked by another has no writer any more. Where files cannot be locked
so, the system keeps files in use from being deleted (Windows), or nothing is cleared.
"""

from __future__ import annotations

import os
import re
import secrets
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


class PartFile:
    """Writes one such file, and holds a lock on it meanwhile.

    Args:
        path: of the datastore.

    Attributes:
        path: of the part.
    """

    def __init__(self, path: Path) -> None:
        self._stem, self._held = path.name[:80], -1
        self.path = path.with_name(f"{self._stem}.{secrets.token_hex(4)}.part")

    def open(self) -> BinaryIO:
        """Begin, after a look at what killed builds have left.

        Raises:
            OSError: the file cannot be made.
            ValueError: its name is none.
        """
        self._clear()
        while True:
            file = self.path.open("wb")
            if fcntl is None:
                return file
            self._held = os.dup(file.fileno())  # the lock stays until this one is closed too
            with suppress(OSError):  # file systems without locks
                fcntl.flock(self._held, fcntl.LOCK_EX)
            if os.fstat(self._held).st_nlink:
                return file
            file.close()  # another build has cleared it away before it was held
            self.release()

    def release(self) -> None:
        """It has its final name, or is gone."""
        if self._held >= 0:
            os.close(self._held)
            self._held = -1

    def _clear(self) -> None:
        """Delete parts of this datastore that nobody writes any more."""
        ours = re.compile(re.escape(self._stem) + r"\.[0-9a-f]{8}\.part")
        with suppress(OSError), os.scandir(self.path.parent) as entries:
            for entry in entries:
                if ours.fullmatch(entry.name):
                    with suppress(OSError):
                        _delete_unless_held(Path(entry.path))


def _delete_unless_held(path: Path) -> None:
    """Raises OSError where somebody writes it, or nobody can tell."""
    if fcntl is None:
        path.unlink()
        return
    with path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink()
