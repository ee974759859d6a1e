"""Objects of a user's own modules, by their names."""

from __future__ import annotations

import os
import pkgutil
import sys
from typing import Any


def resolve_name(name: str) -> Any:
    """What "module:object" names; the module may lie in the current folder.

    Raises:
        Exception: whatever its import raises.
    """
    if os.getcwd() not in sys.path:  # where `paceline` is a script, it is not there
        sys.path.append(os.getcwd())  # the last one: it hides no installed package
    return pkgutil.resolve_name(name)
