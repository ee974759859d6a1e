"""What is wrong with a body, in a line for whoever sent it: which field, what it must be, what came. The words of the
library that checks bodies, and its names, are not told.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from paceline.serving.fields import INSIDE
from paceline.utils import shortened

Json = dict[str, Any]
Path = tuple[str | int, ...]

KINDS: Final[Mapping[str, str]] = {
    "string_type": "a text",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
    "literal_error": "",
}
"""Errors of a value that is none of a field's kinds, each of which is an error of its own -> the kind."""

UNSUPPORTED: Final = ("extra_forbidden", "none_required")
"""Errors of a field that must not be given."""

TEXTS: Final[Mapping[str, str]] = {
    "missing": "is missing",
    "string_unicode": "holds half of a surrogate pair, which is no character",
    "string_too_long": "may have at most {max_length} characters",
    "string_too_short": "must have at least {min_length} characters",
    "string_pattern_mismatch": "must match the regular expression {pattern}",
    "too_long": "may hold at most {max_length} {items}, got {actual_length}",
    "too_short": "must hold at least {min_length} {items}, got {actual_length}",
    "greater_than_equal": "must be at least {ge}, got {got}",
    "less_than_equal": "must be at most {le}, got {got}",
    "finite_number": "must be a finite number, got {got}",
}

ITEMS: Final[Mapping[str, str]] = {
    "stop": "texts",
    "bad_words": "texts",
    "stop_sequences": "texts",
    "messages": "messages",
    "tools": "tools",
}
"""What lists hold, where there is a better word than items."""

MOST_LETTERS: Final = 100
"""So many letters of a field's name are told in a message."""


def explained(errors: Sequence[Any], body: Any) -> tuple[str, str | None, str | None]:
    """Return the message, the field and the code of the error that tells most.

    Args:
        errors: of pydantic, with places that begin with "body".
        body: that was checked; names of alternatives in those places are told from fields by it.
    """
    path, here = _telling([(path_of(error, body), error) for error in errors])
    first = here[0]
    param = ".".join(map(str, path)) or None
    at = "the body" if param is None else param if len(param) <= MOST_LETTERS else f"{param[:MOST_LETTERS]}..."
    why = INSIDE.get(".".join(part for part in path if isinstance(part, str) and not part.isdecimal()))
    because = f" ({why})" if why else ""
    if first["type"] in UNSUPPORTED or first.get("ctx") == {"expected": "False"}:
        return f"{at} is not supported{because}; leave it out", param, "unsupported_field"
    if first["type"] in KINDS:
        kinds = dict.fromkeys(KINDS[error["type"]] or _listed(error["ctx"]["expected"]) for error in here)
        return f"{at} must be {' or '.join(kinds)}, got {_got(first)}{because}", param, None
    context = first.get("ctx", {})
    if first["type"] in ("too_short", "string_too_short") and context["min_length"] == 1:
        return f"{at} must not be empty", param, None
    if first["type"] in TEXTS:
        more: Json = {"items": ITEMS.get(str(path[-1]) if path else "", "items"), "got": _got(first)}
        if isinstance(first["input"], dict | list):  # which pydantic does not count to the end
            more["actual_length"] = len(first["input"])
        return f"{at} {TEXTS[first['type']].format(**(context | more))}", param, None
    return f"{at}: {first['msg']}", param, None


def path_of(error: Any, body: Any) -> Path:
    """Return the way of an error through a body, without the names of a union's alternatives."""
    at, path = body, list[str | int]()
    parts = error["loc"][1:]
    for number, part in enumerate(parts):
        inside = part in at if isinstance(at, dict) else isinstance(at, list) and part in range(len(at))
        if inside:
            at = at[part]
        if inside or (error["type"] == "missing" and number == len(parts) - 1):
            path.append(part)
    return tuple(path)


def _telling(placed: Sequence[tuple[Path, Any]]) -> tuple[Path, list[Any]]:
    """Return a place and the errors there. An alternative that a value was not meant to be is of no interest where
    another one got further.
    """

    def further(path: Path) -> bool:
        return any(
            other[: len(path)] == path and (len(other) > len(path) or error["type"] not in KINDS)
            for other, error in placed
        )

    kept = [(path, error) for path, error in placed if error["type"] not in KINDS or not further(path)]
    first = kept[0][0]
    return first, [error for path, error in kept if path == first]


def _listed(expected: str) -> str:
    """Write values that pydantic lists as JSON has them."""
    return re.sub(r"\b(True|False|None)\b", lambda match: {"None": "null"}.get(match[1], match[1].lower()), expected)


def _got(error: Any) -> str:
    """Describe what came, in few letters; texts are repeated only where they should have been one of a few."""
    value = error["input"]
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else f"a list of {len(value)}"
    if isinstance(value, str) and error["type"] != "literal_error":
        return "a text"
    return shortened(value, MOST_LETTERS)
