"""Functions that a search calls, by themselves or by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import isfinite
from typing import Any, TypeVar

from paceline.errors import ConfigError
from paceline.utils import need, resolve_name

F = TypeVar("F", bound=Callable[..., Any])

Scorer = Callable[[Sequence[str]], Sequence[float]]
"""Of texts, a number each."""


def named(option: str, value: F | str | None, default: F | None = None) -> F:
    """The function given, or the one that "module:function" names.

    Raises:
        ConfigError: it cannot be imported, is no function, or is needed and missing.
    """
    if value is None:
        need(default is not None, option, 'be a function, or its name as "module:function"', value)
        assert default is not None
        return default
    if isinstance(value, str):
        try:
            function = resolve_name(value)
        except Exception as error:  # a module of a user's may raise anything
            raise ConfigError(f"{option}: cannot import {value!r}: {error}; give module:function") from error
    else:
        function = value
    need(callable(function), option, 'be a function, or its name as "module:function"', value)
    return function  # type: ignore[no-any-return]


def numbers(option: str, values: Iterable[Any], count: int, *, high: float | None = None) -> list[float]:
    """What a function of a user's, or a model, made of so many texts: a finite number for each.

    Args:
        high: they lie in 0..`high`; None is no limit.
    Raises:
        ConfigError: they are not. Strings are no numbers, whatever they say.
    """
    try:
        checked = [float(number) for number in values if not isinstance(number, str | bytes)]
    except (TypeError, ValueError, OverflowError, RuntimeError):  # the last one, of a tensor of several numbers
        checked = []
    fine = len(checked) == count and all(
        isfinite(number) and (high is None or 0.0 <= number <= high) for number in checked
    )
    what = "a finite number" if high is None else f"a number in 0..{high:g}"
    need(fine, option, f"give {what} for each of {count} texts", values)
    return checked


def rewards(scorer: Scorer, texts: Sequence[str]) -> list[float]:
    """What a reward makes of texts, numbers in 0..1; see `numbers`."""
    return numbers("reward", scorer(texts), len(texts), high=1.0)
