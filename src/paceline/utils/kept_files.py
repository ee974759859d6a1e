"""Large files that are kept because making them takes long: a folder with a limit, from which those go first that were
used longest ago. Whoever uses one sets its time (`touch`).
"""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path
from time import time
from typing import Final

import psutil

from paceline.errors import ConfigError

log = logging.getLogger("paceline")

MOST_BYTES: Final = 10 * 10**9
SHARE: Final = 0.1
"""Of the disk, where that is less."""

LIMIT: Final = "PACELINE_CACHE_GB"
UNFINISHED: Final = ".new"
"""What the names of files end with that are being written, behind the id of the process."""

ABANDONED: Final = 3600.0
"""Seconds after which an unfinished file is one of a process that is gone, whoever has its id now."""


def limit(folder: Path) -> int:
    """Most bytes of all files in a folder, which need not exist.

    Raises:
        ConfigError: the variable is no number of 0 or more.
    """
    if text := os.environ.get(LIMIT):
        try:
            wanted = float(text)
        except ValueError:
            wanted = -1.0
        if not 0 <= wanted < float("inf"):
            raise ConfigError(f"{LIMIT} must be a number of gigabytes, got {text!r}; 0 keeps nothing")
        return int(wanted * 10**9)
    return min(MOST_BYTES, int(SHARE * shutil.disk_usage(_existing(folder)).total))


def _existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists."""
    return next((parent for parent in (folder, *folder.parents) if parent.is_dir()), Path())


def make_room(folder: Path, size: int) -> bool:
    """Remove what was used longest ago until a file of `size` bytes may be added; False where it may not, as on a disk
    that it would fill by half of what is free.

    A file that cannot be removed counts as it is.

    Raises:
        OSError: the folder cannot be read.
        ConfigError: see `limit`.
    """
    most = limit(folder)
    if size > most or 2 * size > shutil.disk_usage(_existing(folder)).free:
        return False
    files = []
    for path in folder.iterdir() if folder.is_dir() else ():
        state = path.stat()
        files.append((not _is_abandoned(path, state.st_mtime), state.st_mtime, state.st_size, path))
    held = sum(file_size for _, _, file_size, _ in files)
    for wanted, _, file_size, path in sorted(files):
        if wanted and held + size <= most:
            break
        try:
            path.unlink()
        except OSError as error:
            log.debug("%s cannot be removed (%s)", path, error)
        else:
            held -= file_size
    return held + size <= most


def _is_abandoned(path: Path, written: float) -> bool:
    """Whether nobody finishes a file any more that was last written to at a time."""
    if not path.name.endswith(UNFINISHED):
        return False
    process = path.name.removesuffix(UNFINISHED).rpartition(".")[2]
    return written < time() - ABANDONED or (process.isdecimal() and not psutil.pid_exists(int(process)))


def touch(path: Path) -> None:
    """Say that a file is used now, where that may be written."""
    try:
        os.utime(path)
    except OSError as error:
        log.debug("%s: its time cannot be set (%s)", path, error)
