"""Integers between bounds, as they are written.

In: bounds. Out: an expression of decimal numbers without leading zeros. Not here: fractions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from paceline.errors import ConfigError, UnsatisfiableError
from paceline.grammar.expression import NEVER, Chars, Expr, alternatives, literal, optional, repeat, sequence

DIGIT: Final = Chars(((48, 57),))
FIRST: Final = Chars(((49, 57),))


def integers(schema: Mapping[str, Any]) -> Expr:
    """Integers from `minimum` to `maximum` (or beyond `exclusiveMinimum`, below `exclusiveMaximum`), none of which need
    be given.

    Raises:
        UnsatisfiableError: no integer lies between. ConfigError: an infinite bound, or NaN.
    """
    rounded = {
        "minimum": math.ceil,
        "maximum": math.floor,
        "exclusiveMinimum": lambda bound: math.floor(bound) + 1,
        "exclusiveMaximum": lambda bound: math.ceil(bound) - 1,
    }
    for word in rounded:
        if not math.isfinite(schema.get(word, 0)):
            raise ConfigError(
                f"json_schema: {word} must be a finite number, got {schema[word]!r}; leave it out for no bound"
            )
    bounds = {word: make(schema[word]) for word, make in rounded.items() if word in schema}
    lows, highs = ([value for word, value in bounds.items() if end in word.lower()] for end in ("minimum", "maximum"))
    low, high = max(lows, default=None), min(highs, default=None)
    if low is not None and high is not None and low > high:
        raise UnsatisfiableError(f"json_schema wants an integer from {low} to {high}; there is none")
    if low is None and high is None:
        return sequence(optional(literal("-")), _from(0, None))
    positive = NEVER if high is not None and high < 0 else _from(max(low or 0, 0), high)
    negative = (
        NEVER
        if low is not None and low >= 0
        else _from(max(-(high if high is not None else -1), 1), None if low is None else -low)
    )
    return alternatives(positive, sequence(literal("-"), negative)) if negative != NEVER else positive


def _from(low: int, high: int | None) -> Expr:
    """Integers from `low`, 0 or more, to `high`, or without end."""
    if high is None:
        size = len(str(low))
        return alternatives(_from(low, 10**size - 1), sequence(FIRST, repeat(DIGIT, size, None)))
    parts = []
    for size in range(len(str(low)), len(str(high)) + 1):
        least, most = max(low, 10 ** (size - 1) if size > 1 else 0), min(high, 10**size - 1)
        if least <= most:
            parts.append(_between(str(least), str(most)))
    return alternatives(*parts)


def _between(low: str, high: str) -> Expr:
    """Digit strings of one length, in order."""
    if not low:
        return sequence()
    if low[0] == high[0]:
        return sequence(literal(low[0]), _between(low[1:], high[1:]))
    rest = len(low) - 1
    parts = [
        sequence(literal(low[0]), _between(low[1:], "9" * rest)),
        sequence(literal(high[0]), _between("0" * rest, high[1:])),
    ]
    if int(high[0]) - int(low[0]) > 1:
        parts.append(sequence(Chars(((ord(low[0]) + 1, ord(high[0]) - 1),)), repeat(DIGIT, rest, rest)))
    return alternatives(*parts)
