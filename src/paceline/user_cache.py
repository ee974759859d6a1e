"""Where things are kept between runs of one user.

In: the environment. Out: a folder, which need not exist. Not here: what is kept there.
"""

from __future__ import annotations

import os
from pathlib import Path


def user_cache(part: str, variable: str = "PACELINE_CACHE_DIR") -> Path:
    """The folder for `part`: within what the variable names, else XDG_CACHE_HOME/paceline, else ~/.cache/paceline."""
    if own := os.environ.get(variable):
        return Path(own).expanduser() / part
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base).expanduser() if base else Path.home() / ".cache") / "paceline" / part
