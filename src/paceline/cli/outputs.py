"""Files that a command writes: rejected before the work is done for them, named by their flag where writing fails."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile

from paceline.errors import ConfigError


@contextmanager
def writing(flag: str, path: Path) -> Iterator[None]:
    """Errors of the system within become one line that names the flag.

    Raises:
        ConfigError: instead of OSError.
    """
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"{flag} {str(path)!r} cannot be written ({error.strerror or error}); name another file"
        ) from None


def must_be_writable(flag: str, path: Path) -> None:
    """Reject a file that cannot be written; a file that is there stays as it is, and none is left where there was none.

    Raises:
        ConfigError: a folder, no folder around it, or a place that cannot be written.
    """
    with writing(flag, path):
        folder = path.parent
        if path.is_dir():
            raise ConfigError(f"{flag} must be a file, got the folder {str(path)!r}; name a file in it")
        if not folder.is_dir():
            raise ConfigError(
                f"{flag} must lie in a folder that exists, got {str(path)!r}; make the folder {str(folder)!r} first"
            )
        if not path.exists():
            TemporaryFile(dir=folder).close()
        elif not os.access(path, os.W_OK):
            raise ConfigError(f"{flag} {str(path)!r} may not be changed by you; name another file")


def must_be_own(flag: str, path: Path, *, mark: str, what: str) -> None:
    """Reject what `must_be_writable` rejects, and to destroy a file that holds something else than an earlier run's.

    Args:
        mark: text within the first 1000 bytes of every such file.
        what: such a file is, with its article.
    Raises:
        ConfigError: with what to do.
    """
    must_be_writable(flag, path)
    if path.is_file() and path.stat().st_size and not _marked(flag, path, mark):
        raise ConfigError(f"{flag} {str(path)!r} exists and is not {what}; name another file, or remove it first")


def _marked(flag: str, path: Path, mark: str) -> bool:
    with writing(flag, path), path.open("rb") as stream:
        return mark.encode() in stream.read(1000)


def must_be_page(flag: str, path: Path, *, mark: str, command: str, force: bool) -> None:
    """Reject what `must_be_writable` rejects, and a file that exists and is not a page of `paceline COMMAND`.

    Args:
        mark: text within the first 1000 bytes of such a page.
        force: any file may be replaced.
    Raises:
        ConfigError: with what to do.
    """
    must_be_writable(flag, path)
    if path.exists() and not force and not _marked(flag, path, mark):
        raise ConfigError(
            f"{str(path)!r} exists and is not a page of `paceline {command}`; add --force to overwrite it"
        )
