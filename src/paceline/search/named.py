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


def numbers(option: str, what: str, fits: Callable[[float], bool], scorer: Scorer, texts: Sequence[str]) -> list[float]:
    """What a function of a user's makes of texts.

    Raises:
        ConfigError: not a number that fits for each.
    """
    given = scorer(texts)
    try:
        found = [float(one) for one in given]
    except (TypeError, ValueError):
        found = []
    need(
        len(found) == len(texts) and all(map(fits, found)), option, f"give {what} for each of {len(texts)} texts", given
    )
    return found


def rewards(scorer: Scorer, texts: Sequence[str]) -> list[float]:
    """What a reward makes of texts; see `numbers`."""
    return numbers("reward", "a number in 0..1", lambda one: 0.0 <= one <= 1.0, scorer, texts)


def values(scorer: Scorer, texts: Sequence[str]) -> list[float]:
    """What a value makes of texts; see `numbers`."""
    return numbers("value", "a finite number", isfinite, scorer, texts)
