"""Checks of options against the types that a constructor declares for them.

In: a class, options by name. Out: nothing, or a ConfigError. Not here: which options exist, checks of single values
(`checking`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, cast, get_args, get_origin

from paceline.utils.validation import MAX_COUNT, MAX_NUMBER, need

Ranges = Mapping[str, tuple[float, float]]

WORDS: Mapping[Any, str] = {
    int: "an integer",
    float: "a number",
    bool: "True or False",
    str: "a string",
    Path: "a path",
    Sequence: "a list",
    Mapping: "a dict",
    Callable: "a function",
}
"""The kinds of values that are checked; an option that may hold another one is left to its owner."""

PLURALS: Mapping[Any, str] = {int: "integers", float: "numbers", str: "strings"}


def check_types(factory: Any, options: Mapping[str, Any], ranges: Ranges | None = None) -> None:
    """Check the values of those options that a constructor takes.

    Args:
        ranges: least and most value of options that are numbers, or lists of them.
    Raises:
        ConfigError: one of another type than declared, or outside its range. The default is fine whatever its type.
    """
    for key, (hint, default) in declared(factory).items():
        if key in options and options[key] is not default:
            kinds = [kind for kind in _kinds(hint) if kind is not NoneType]
            bounded = ranges is not None and key in ranges
            low, high = ranges[key] if ranges is not None and bounded else (-MAX_NUMBER, MAX_NUMBER)
            words = " or ".join(dict.fromkeys(_words(kind) for kind in kinds)) + f" in {low:g}..{high:g}" * bounded
            need(any(_fits(options[key], kind, low, high) for kind in _kinds(hint)), key, f"be {words}", options[key])


@cache
def declared(factory: Any) -> dict[str, tuple[Any, Any]]:
    """Type and default of each keyword argument whose type consists of kinds that are checked."""
    is_class = isinstance(factory, type)
    function = inspect.unwrap(factory.__init__ if is_class else factory)
    found: dict[str, tuple[Any, Any]] = {}
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # one that is not written in Python
        return found
    for key, one in parameters.items():
        try:
            hint = eval(one.annotation, function.__globals__) if isinstance(one.annotation, str) else one.annotation
        except Exception:  # a name that is imported for type checkers only, or whatever a third party wrote
            continue
        if all(_checked(kind) for kind in _kinds(hint)):
            found[key] = (hint, one.default)
    return found


def _kinds(hint: Any) -> tuple[Any, ...]:
    """The alternatives of a union."""
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (NoneType,) if hint is None else (hint,)


def _checked(kind: Any) -> bool:
    origin = get_origin(kind)
    if origin is Sequence:
        return all(_checked(inner) for inner in get_args(kind))
    return kind is NoneType or origin is Literal or kind in WORDS or origin in WORDS


def _words(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(repr(name) for name in get_args(kind))
    inner = get_args(kind)[0] if get_origin(kind) is Sequence else None
    return f"a list of {PLURALS[inner]}" if inner in PLURALS else WORDS[get_origin(kind) or kind]


def _fits(value: object, kind: Any, low: float, high: float) -> bool:
    """Whether a value is of one kind, and where it is a number, in the range."""
    origin = get_origin(kind)
    if origin is Literal:
        return isinstance(value, str)  # its owner names those that it knows
    if origin is Sequence:
        (inner,) = get_args(kind)
        ways, listed = _kinds(inner), isinstance(value, Sequence) and not isinstance(value, str | bytes)
        return listed and all(
            any(_fits(one, way, low, high) for way in ways) for one in cast("Sequence[object]", value)
        )
    if origin is Callable:
        return callable(value)
    if kind in (int, float):
        if isinstance(value, bool) or not isinstance(value, int | kind) or not low <= value <= high:
            return False
        return isinstance(value, float) or abs(value) <= MAX_COUNT  # an integer
    return isinstance(value, origin or kind)
