"""Bodies are read as JSON and nothing else, with an error that says where they are not."""

from __future__ import annotations

import json
import re
from typing import Any, Final

from paceline.serving.api_errors import ApiError

MAX_DEPTH: Final = 128
"""So many lists and objects may be within each other."""

MAX_DIGITS: Final = 400
"""A whole number may have so many digits; the time that they take grows with their square."""

PIECE: Final = 2**18
"""So many bytes are looked through at once, so that others go on in between."""

DIGITS: Final = re.compile(rb"\d{%d}" % (MAX_DIGITS // 2))
CONSTANT: Final = object()
"""Stands for NaN and Infinity, until the field is found that they are in."""


def read_json(body: bytes) -> Any:
    """Return the value that a body holds; of keys that come twice, the last counts.

    Raises:
        ApiError: it is empty, not UTF-8, not JSON (NaN and Infinity are not), holds a number of too many digits, or
            nests too deeply.
    """
    if not body:
        raise _invalid("is missing")
    constants = list[str]()
    pieces = (body[start : start + PIECE] for start in range(0, len(body), PIECE))
    number = _whole_number if any(map(DIGITS.search, pieces)) else None

    def note(name: str) -> object:
        constants.append(name)
        return CONSTANT

    try:
        body_value = json.loads(body.decode("utf-8-sig"), parse_constant=note, parse_int=number)
    except UnicodeDecodeError as error:
        raise _invalid(f"is not UTF-8: byte 0x{body[error.start]:02x} at position {error.start}") from None
    except json.JSONDecodeError as error:
        raise _invalid(f"is not JSON: {error.msg} at line {error.lineno}, column {error.colno}") from None
    except RecursionError:
        raise _too_deep() from None
    except ValueError:
        raise _invalid("holds a number of too many digits") from None
    if _deeper(body_value, MAX_DEPTH):
        raise _too_deep()
    if constants:
        fields = body_value.items() if isinstance(body_value, dict) else ()
        param = next((name for name, value in fields if _holds_constant(value)), None)
        raise ApiError(f"{param or 'the body'} holds {constants[0]}, which is no number of JSON's", param=param)
    return body_value


def _whole_number(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise ValueError(text[:MAX_DIGITS])
    return int(text)


def _invalid(why: str) -> ApiError:
    return ApiError(f"the body {why}", code="invalid_json")


def _holds_constant(value: Any) -> bool:
    """Tell whether NaN or Infinity is anywhere in a value."""
    left = [value]
    while left:
        inner = left.pop()
        if inner is CONSTANT:
            return True
        if isinstance(inner, dict | list):
            left += inner.values() if isinstance(inner, dict) else inner
    return False


def _too_deep() -> ApiError:
    return _invalid(f"must nest at most {MAX_DEPTH} lists and objects within each other")


def _deeper(value: Any, most: int) -> bool:
    """Tell whether a value nests more than `most` lists and objects within each other."""
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(most):
        if not level:
            return False
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
    return bool(level)
