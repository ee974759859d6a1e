"""Functions that a search calls, by themselves or by name."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from typing import Any, TypeVar

from paceline.errors import ConfigError
from paceline.utils import need

F = TypeVar("F", bound=Callable[..., Any])


def named(option: str, given: F | str | None, default: F | None = None) -> F:
    """The function given, or the one that "module:function" names.

    Raises:
        ConfigError: it cannot be imported, is no function, or is needed and missing.
    """
    if given is None:
        need(default is not None, option, 'be a function, or its name as "module:function"', given)
        assert default is not None
        return default
    if isinstance(given, str):
        try:
            found = pkgutil.resolve_name(given)
        except Exception as error:  # a module of a user's may raise anything
            raise ConfigError(f"{option}: cannot import {given!r}: {error}; give module:function") from error
    else:
        found = given
    need(callable(found), option, 'be a function, or its name as "module:function"', given)
    return found  # type: ignore[no-any-return]
