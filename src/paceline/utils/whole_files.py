"""Files that are replaced as a whole: after a kill, or a loss of power, there is the old one or the new one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from paceline.errors import ConfigError


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path to write to in this block; in its end what was written is put on the disk and takes the place of `path`.

    Nothing is left of it where the block raises.

    Raises:
        ConfigError: it cannot be written, as on a full disk.
    """
    fresh = path.with_name(f"{path.name}.new")
    try:
        yield fresh
        with fresh.open("rb+") as stream:
            os.fsync(stream.fileno())
        fresh.replace(path)
        sync_folder(path.parent)
    except OSError as error:
        what = f"{str(path)!r} cannot be written ({error.strerror or error})"
        raise ConfigError(f"{what}; make room and run the same command again") from None
    finally:
        fresh.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Put names of files on the disk, where a system can."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
