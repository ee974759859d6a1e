"""Where things are kept between runs of one user."""

from __future__ import annotations

import os
from pathlib import Path

from paceline.errors import ConfigError


def user_cache(part: str, variable: str = "PACELINE_CACHE_DIR") -> Path:
    """The folder for `part`: within what the variable names, else XDG_CACHE_HOME/paceline, else ~/.cache/paceline.

    A relative XDG_CACHE_HOME does not count, as its specification says.

    Raises:
        ConfigError: the variable begins with the home of somebody unknown.
    """
    if folder := os.environ.get(variable):
        try:
            return Path(folder).expanduser() / part
        except RuntimeError as error:
            raise ConfigError(f"{variable} is {folder!r}: {error} Give a path that exists or can be made") from error
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else Path.home() / ".cache") / "paceline" / part
