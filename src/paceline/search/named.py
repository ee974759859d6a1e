"""Functions that a search calls, by themselves or by name."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Sequence
from math import isfinite
from typing import Any, TypeVar

from paceline.errors import ConfigError
from paceline.utils import need

F = TypeVar("F", bound=Callable[..., Any])

Scorer = Callable[[Sequence[str]], Sequence[float]]
"""Of texts, a number each."""


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


def rewards(scorer: Scorer, texts: Sequence[str]) -> list[float]:
    """What a reward makes of texts.

    Raises:
        ConfigError: not a number in 0..1 for each.
    """
    found = [float(one) for one in scorer(texts)]
    if len(found) != len(texts) or not all(0.0 <= one <= 1.0 for one in found):
        raise ConfigError(f"reward must give a number in 0..1 for each of {len(texts)} texts, got {found[:4]}")
    return found


def values(scorer: Scorer, texts: Sequence[str]) -> list[float]:
    """What a value makes of texts.

    Raises:
        ConfigError: not a finite number for each.
    """
    found = [float(one) for one in scorer(texts)]
    if len(found) != len(texts) or not all(map(isfinite, found)):
        raise ConfigError(f"value must give a finite number for each of {len(texts)} texts, got {found[:4]}")
    return found
