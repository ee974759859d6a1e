"""Which of the servers that share a file still run."""

from __future__ import annotations

import secrets
from pathlib import Path

from filelock import FileLock, Timeout


class RunningServers:
    """Tells whether servers that share a file still run, however they ended: each holds a lock on a file of its own
    beside it, which the system lets go of with the process.

    Marks of servers that have ended are removed at the start of another one. Two servers must not start at the same
    time: the caller sees to that.

    Args:
        file: what they share; marks are called FILE-server-NAME.
    Attributes:
        own: the name of this server, which no other has.
    Raises:
        OSError: no file can be made there.
    """

    def __init__(self, file: Path) -> None:
        self._file, self.own = file, secrets.token_hex(8)
        for mark in file.parent.glob(f"{file.name}-server-*"):
            self.runs(mark.name.removeprefix(f"{file.name}-server-"))
        self._lock = self._lock_of(self.own)
        self._lock.acquire()

    def _mark(self, name: str) -> Path:
        return self._file.with_name(f"{self._file.name}-server-{name}")

    def _lock_of(self, name: str) -> FileLock:
        return FileLock(self._mark(name), mode=0o600, blocking=False, thread_local=False)

    def runs(self, name: str) -> bool:
        """Tell whether a server still runs; the mark of one that has ended is removed."""
        if not self._mark(name).exists():
            return False
        lock = self._lock_of(name)
        try:
            lock.acquire()
        except Timeout:
            return True
        lock.release()
        self._mark(name).unlink(missing_ok=True)
        return False

    def close(self) -> None:
        """Let this server count as ended."""
        self._lock.release()
        self._mark(self.own).unlink(missing_ok=True)
